#include "segment.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "failure.h"

namespace bireme {

int create_segment(const char* name, u64 bytes) {
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw Failure(Code::engine, std::string("memfd_create: ") + std::strerror(errno));
  if (fchmod(fd, 0600) != 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    const int error = errno;
    close(fd);
    throw Failure(Code::engine,
                  "shared segment of " + std::to_string(bytes) + " bytes: " + std::strerror(error));
  }
  return fd;
}

bool Mapping::one_per_process = false;

namespace {

// The mappings of one_per_process, by inode and offset. They stay until the process ends.
void* shared_mapping(ino_t inode, int fd, u64 offset, u64 bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<ino_t, u64>, void*> known;
  std::lock_guard lock(mutex);
  auto [at, fresh] = known.try_emplace({inode, offset}, nullptr);
  if (fresh)
    at->second = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd,
                      static_cast<off_t>(offset));
  return at->second;
}

}  // namespace

Mapping::Mapping(int fd, u64 offset, u64 bytes, bool reserve) : bytes_(bytes) {
  struct stat info;
  if (fstat(fd, &info) != 0 || (!reserve && static_cast<u64>(info.st_size) < offset + bytes))
    throw Failure(Code::engine, "a shared segment is smaller than announced: expected " +
                                    std::to_string(offset + bytes) + " bytes");
  if (one_per_process) {
    data_ = static_cast<u8*>(shared_mapping(info.st_ino, fd, offset, bytes));
    return;
  }
  void* at = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                  fd, static_cast<off_t>(offset));
  if (at == MAP_FAILED)
    throw Failure(Code::engine, "cannot map " + std::to_string(bytes) +
                                    " bytes of shared memory: " + std::strerror(errno) +
                                    "; BIREME_HEAP_BYTES limits what a heap reserves");
  data_ = static_cast<u8*>(at);
}

Mapping::~Mapping() {
  if (data_ && !one_per_process) munmap(data_, bytes_ ? bytes_ : 1);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace bireme
