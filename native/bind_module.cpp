#include "array.h"
#include "failure.h"
#include "kernels.h"

namespace bireme {
namespace {

const char* class_of(Code code) {
  switch (code) {
    case Code::usage:
      return "UsageError";
    case Code::mismatch:
      return "MismatchError";
    case Code::peer_lost:
      return "PeerLost";
    case Code::timeout:
      return "Timeout";
    case Code::aborted:
      return "Aborted";
    default:
      return "EngineError";
  }
}

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const Interrupted&) {
    // the Python error is set already
  } catch (const Failure& failure) {
    nb::object type = nb::module_::import_("bireme.errors").attr(class_of(failure.code));
    PyErr_SetString(type.ptr(), failure.what());
  }
}

template <size_t N>
nb::tuple names(const char* const (&table)[N]) {
  nb::list out;
  for (const char* name : table) out.append(name);
  return nb::tuple(out);
}

}  // namespace
}  // namespace bireme

NB_MODULE(_core, m) {
  using namespace bireme;
  nb::register_exception_translator(translate);
  nb::set_leak_warnings(false);
  m.doc() = "The shared-memory engine of bireme.";
  m.attr("DTYPES") = names(kDTypeNames);
  m.attr("REDUCTIONS") = names(kReductionNames);
  m.attr("KINDS") = names(kKindNames);
  m.attr("INLINE_BYTES") = kInlineBytes;
  m.attr("CHUNK_BYTES") = kChunkBytes;
  m.attr("PIPE_BYTES") = kPipeBytes * kPipeSlots;
  m.def("isa", &fold_isa);
  bind_control(m);
  bind_record(m);
  bind_stream(m);
  bind_heap(m);
  bind_channel(m);
  bind_array(m);
  bind_lane(m);
}
