#include "examples/moe_trainer/ops/cuda/op_call.hpp"

#include <stdexcept>
#include <string>

namespace terrace::trainer::cuda {
namespace {

// What cuBLAS recommends: below that its best products of a Hopper device are out of reach.
constexpr Bytes kHopperWorkspace = 32_MiB;
constexpr Bytes kWorkspace = 4_MiB;
constexpr std::int64_t kMaxGridX = 0x7fffffff;
constexpr std::int64_t kMaxGridYZ = 65535;

Bytes workspace_size(OpCall& call) {
  int device = 0, major = 0, minor = 0;
  call.check(cudaGetDevice(&device), "cudaGetDevice");
  call.check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  call.check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "cudaDeviceGetAttribute");
  return major == 9 && minor == 0 ? kHopperWorkspace : kWorkspace;
}

}  // namespace

BlasHandles::~BlasHandles() {
  for (auto& [id, entry] : entries_) cublasDestroy(entry.handle);
}

cublasHandle_t BlasHandles::on(OpCall& call, Stream stream) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[stream.id];
  if (entry.workspace == nullptr) {
    entry.workspace_size = workspace_size(call);
    entry.workspace = call.take_shared(entry.workspace_size, &entry.workspace_at);
  }
  const bool fresh = entry.handle == nullptr;
  if (fresh) {
    call.check(cublasCreate(&entry.handle), "cublasCreate");
    // True fp32: neither TF32 nor emulation.
    call.check(cublasSetMathMode(entry.handle, CUBLAS_PEDANTIC_MATH), "cublasSetMathMode");
    call.check(cublasSetAtomicsMode(entry.handle, CUBLAS_ATOMICS_NOT_ALLOWED), "cublasSetAtomicsMode");
  }
  if (fresh || entry.stream != call.stream()) {
    // The stream first: setting it puts the library's own workspace back.
    call.check(cublasSetStream(entry.handle, call.stream()), "cublasSetStream");
    call.check(cublasSetWorkspace(entry.handle, entry.workspace_at, entry.workspace_size.count()),
               "cublasSetWorkspace");
    entry.stream = call.stream();
  }
  return entry.handle;
}

void BlasHandles::forget(Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(stream.id);
  if (found == entries_.end()) return;
  if (found->second.handle != nullptr) cublasDestroy(found->second.handle);
  entries_.erase(found);
}

OpCall::OpCall(const Options& options) : options_(options) {
  const Status bound = options.device->bind_thread();
  if (!bound) fail("bind_thread", bound.error().text.c_str());
  stream_ = static_cast<cudaStream_t>(options.device->native_stream(options.stream));
  if (stream_ == nullptr) fail("native_stream", "the device has no CUDA stream behind it");
}

void OpCall::zero(float* at, std::int64_t count) {
  if (count <= 0) return;
  check(cudaMemsetAsync(at, 0, static_cast<std::size_t>(count) * sizeof(float), stream_), "cudaMemsetAsync");
}

void OpCall::check(cudaError_t result, const char* call) const {
  if (result == cudaSuccess) return;
  (void)cudaGetLastError();  // ours, reported here: not left for the next call
  fail(call, cudaGetErrorString(result));
}

void OpCall::check(cublasStatus_t result, const char* call) const {
  if (result != CUBLAS_STATUS_SUCCESS) fail(call, cublasGetStatusString(result));
}

void OpCall::require(bool condition, const char* what) const {
  if (!condition) fail("shape", what);
}

Address OpCall::take(Bytes size) {
  Address address = nullptr;
  taken_.push_back(options_.scratch->take(size, &address));
  return address;
}

void OpCall::check_grid(const Grid& grid) const {
  require(grid.x <= kMaxGridX && grid.y <= kMaxGridYZ && grid.z <= kMaxGridYZ, "larger than a CUDA grid");
}

void OpCall::fail(const char* call, const char* what) const {
  std::string text = std::string(options_.op) + " (";
  for (std::size_t i = 0; i < shape_.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape_[i]);
  throw std::runtime_error(text + "): " + call + ": " + what);
}

}  // namespace terrace::trainer::cuda
