// `terrace_test_recording SCENE`: a process that hands out memory and tells the recorder.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "runtime/fault.hpp"
#include "runtime/trace/recorder.hpp"
#include "runtime/trace/recording_file.hpp"

namespace {

using namespace terrace;
using trace::describe_recording;
using trace::kUnknown;
using trace::Layer;
using trace::record_allocate;
using trace::record_free;

const void* at(std::uint64_t address) { return reinterpret_cast<const void*>(address); }

int simple() {
  describe_recording(Layer::kPool, "emulated");
  errno = ENOTTY;
  record_allocate(at(0x1000), 1_KiB, 7, Pool::kWeights);
  record_allocate(at(0x2000), 2_KiB, 7, kUnknown);
  record_free(at(0x1000), 8);
  record_free(at(0x1000), 8);                              // is not live any more
  record_free(at(0x9000), 8);                              // never was
  record_allocate(nullptr, 2_KiB, 7, kUnknown);            // is none
  record_allocate(at(0x5000), Bytes(~0ULL), 7, kUnknown);  // none that succeeded
  record_allocate(at(0x2000), 4_KiB, 7, kUnknown);
  static const struct Late {
    ~Late() { record_allocate(at(0x3000), 8_KiB, 7, kUnknown); }
  } late;
  return errno == ENOTTY ? 0 : 1;
}

void churn(std::uint64_t base, int count) {
  for (int i = 0; i < count; ++i) {
    const void* address = at(base + (static_cast<std::uint64_t>(i % 50) << 9));
    record_allocate(address, Bytes(base), 0, kUnknown);
    record_free(address, 0);
  }
}

int threads() {
  std::vector<std::thread> all;
  for (std::uint64_t t = 1; t <= 4; ++t) all.emplace_back([t] { churn(t << 20, 5000); });
  for (std::thread& thread : all) thread.join();
  return 0;
}

int forked() {
  record_allocate(at(0x1000), 1_KiB, 0, kUnknown);
  record_allocate(at(0x2000), 1_KiB, 0, kUnknown);
  record_free(at(0x2000), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    record_free(at(0x1000), 0);
    record_allocate(at(0x2000), 16_KiB, 0, kUnknown);
    record_free(at(0x2000), 0);
    return 0;
  }
  int status = -1;
  (void)::waitpid(child, &status, 0);
  record_allocate(at(0x2000), 2_KiB, 0, kUnknown);
  return status;
}

// The preload library's recorder and a program's are two; the file is what they have in common. Here a
// RecordingFile plays the other one.
int two_layers(Layer first) {
  const char* path = std::getenv("TERRACE_RECORD");
  trace::RecordingFile other;
  const Layer second = first == Layer::kPool ? Layer::kDriverCalls : Layer::kPool;
  describe_recording(second, "cuda");
  (void)other.open(path, first);
  std::array<std::byte, trace::kMostHeaderBytes> header;
  const auto event = std::string_view("\x71\x00\x01", 3);
  const std::size_t length = encode_header(header, first, "emulated", "p");
  (void)other.write(std::span<const std::byte>(header).first(length));
  record_allocate(at(0x1000), 1_KiB, 0, kUnknown);
  (void)other.write(std::as_bytes(std::span(event)));
  return 0;
}

// Closes every descriptor that it does not know, and opens a file of its own, as programs do that go to the
// background.
int closed() {
  record_allocate(at(0x1000), 1_KiB, 0, kUnknown);
  for (int fd = 3; fd < 64; ++fd) ::close(fd);
  const std::string own = std::string(std::getenv("TERRACE_RECORD")) + ".own";
  const int fd = ::open(own.c_str(), O_RDWR | O_CREAT, 0600);
  for (int i = 0; i < 20000; ++i) churn(1 << 20, 1);
  struct stat info {};
  return ::fstat(fd, &info) == 0 && info.st_size == 0 ? 0 : 1;
}

int faults() {
  const ScopedFaults failing(fail_call(FaultPoint::kFileWrite, 2));
  record_allocate(at(0x1000), 1_KiB, 0, kUnknown);
  churn(1 << 20, 40000);
  return failing.fired() && !trace::recording() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view scene = argc > 1 ? argv[1] : "";
  if (scene == "simple") return simple();
  if (scene == "threads") return threads();
  if (scene == "fork") return forked();
  if (scene == "driver-then-pool") return two_layers(Layer::kDriverCalls);
  if (scene == "pool-then-driver") return two_layers(Layer::kPool);
  if (scene == "closed") return closed();
  if (scene == "faults") return faults();
  if (scene == "killed") {
    churn(1 << 20, 40000);
    ::raise(SIGKILL);
  }
  return 97;
}
