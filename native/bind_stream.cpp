#include "bind.h"
#include "stream.h"

namespace bireme {

void bind_stream(nb::module_& m) {
  nb::class_<Work>(m, "Work")
      .def(
          "wait",
          [](Work& work, double timeout_s) {
            PythonCall python;
            nb::gil_scoped_release free;
            return work.wait(timeout_s);
          },
          nb::arg("timeout_s"))
      .def("wait_done",
           [](Work& work) {
             PythonCall python;
             nb::gil_scoped_release free;
             work.wait_done(-1);
           })
      .def("done", &Work::done)
      .def("failed", [](Work& work) { return work.error() != nullptr; });
  nb::class_<Stream>(m, "Stream")
      .def(nb::init<std::shared_ptr<Control>>(), nb::arg("control"))
      .def("pending", &Stream::pending)
      .def("last", &Stream::last)
      .def("stop", &Stream::stop, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace bireme
