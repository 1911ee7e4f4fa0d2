// The device behind the CUDA driver: virtual memory management, streams, events and copies of one GPU, in its
// primary context, which the CUDA runtime and the libraries in the process use too.
//
// cuda_device.cpp opens and describes it, cuda_memory.cpp has its memory, cuda_work.cpp its streams and
// copies, ring_exchange.cpp its exchanges with other devices, fp8_blocks.cpp its packing of numbers.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/cuda/driver.hpp"
#include "runtime/slot_table.hpp"

namespace terrace::cuda {

[[nodiscard]] inline CUdeviceptr pointer_of(const std::byte* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

// The first failure of host work on a stream. Work may outlive the stream's handle: whoever comes last frees
// it.
class HostFailure {
 public:
  void set(std::string text) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = Error{.code = Errc::kIo, .text = std::move(text)};
  }
  [[nodiscard]] std::optional<Error> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(failure_, std::nullopt);
  }

 private:
  std::mutex mutex_;
  std::optional<Error> failure_;
};

struct CudaStream {
  enum class Owner : std::uint8_t { kDevice, kFramework };
  CUstream handle = nullptr;
  Owner owner = Owner::kDevice;
  std::shared_ptr<HostFailure> host_failure;
};

class CudaDevice final : public Device {
 public:
  [[nodiscard]] static Result<std::unique_ptr<CudaDevice>> open(const Driver& driver, DeviceId id);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  [[nodiscard]] const DeviceInfo& info() const override { return info_; }
  [[nodiscard]] Result<Address> reserve(Bytes size) override;
  void release(Address address, Bytes size) override;
  [[nodiscard]] Result<Physical> create_physical(Bytes size) override;
  [[nodiscard]] Result<Physical> create_host_physical(Bytes size, int numa_node) override;
  void destroy_physical(Physical physical) override;
  [[nodiscard]] Status map(Address at, Physical physical, Bytes size) override;
  [[nodiscard]] Status map_all(Address at, std::span<const PhysicalPiece> pieces) override;
  [[nodiscard]] Status unmap(Address at, Bytes size) override;
  [[nodiscard]] Status grant_access_to(const Device& peer) override;
  [[nodiscard]] Result<MemoryInfo> memory() const override;
  [[nodiscard]] Status pin(Address host, Bytes size) override;
  void unpin(Address host, Bytes size) override;
  [[nodiscard]] Result<Stream> create_stream(StreamPriority priority) override;
  void destroy_stream(Stream stream) override;
  [[nodiscard]] Result<Stream> adopt_stream(void* native) override;
  [[nodiscard]] bool alive(Stream stream) const override { return streams_.find(stream.id).has_value(); }
  [[nodiscard]] Status synchronize(Stream stream) override;
  [[nodiscard]] Result<Event> create_event() override;
  void destroy_event(Event event) override;
  [[nodiscard]] Status record(Stream stream, Event event) override;
  [[nodiscard]] Status wait(Stream stream, Event event) override;
  [[nodiscard]] Status synchronize(Event event) override;
  [[nodiscard]] bool completed(Event event) const override;
  [[nodiscard]] Result<double> seconds_between(Event from, Event to) const override;
  [[nodiscard]] Status copy(Stream stream, Direction direction, Address to, const std::byte* from,
                            Bytes size) override;
  [[nodiscard]] Status copy_batch(Stream stream, Direction direction,
                                  std::span<const Transfer> pieces) override;
  [[nodiscard]] Status fill(Stream stream, Address to, std::uint8_t value, Bytes size) override;
  [[nodiscard]] Status launch_host(Stream stream, std::function<void()> work) override;
  [[nodiscard]] Status write_word(Stream stream, std::atomic<std::uint32_t>& word,
                                  std::uint32_t value) override;
  [[nodiscard]] Result<std::uint32_t> exchange_blocks() override;
  [[nodiscard]] Status exchange(Stream stream, const RingExchange& exchange) override;
  [[nodiscard]] Status pack_fp8(Stream stream, const Fp8Blocks& blocks) override;
  [[nodiscard]] Status unpack_fp8(Stream stream, const Fp8Blocks& blocks) override;
  [[nodiscard]] void* native_stream(Stream stream) const override { return stream_of(stream).handle; }
  [[nodiscard]] Status bind_thread() override;

 private:
  struct PhysicalState {
    CUmemGenericAllocationHandle handle = 0;
    Bytes size;
    std::optional<int> host_node;  // host memory of this NUMA node; nothing: device memory
  };
  struct Mapping {
    Bytes size;
    std::optional<int> host_node;
  };
  struct PriorityRange {
    int normal = 0;
    int high = 0;
  };

  CudaDevice(const Driver& driver, CUdevice device, CUcontext context, DeviceId id);
  [[nodiscard]] Status describe();

  // Makes one driver call in the device's context and leaves the thread's own as it was: the thread may be a
  // guest's, at work on another device. Which context is current is the driver's to say: a note of our own
  // would be stale as soon as the CUDA runtime or a second device changed it.
  template <typename Invoke>
  [[nodiscard]] CUresult in_context(Invoke&& invoke) const {
    CUcontext before = nullptr;
    if (const CUresult asked = driver_.cuCtxGetCurrent(&before); asked != CUDA_SUCCESS) return asked;
    if (before == context_) return invoke();
    if (const CUresult bound = driver_.cuCtxSetCurrent(context_); bound != CUDA_SUCCESS) return bound;
    const CUresult result = invoke();
    driver_.cuCtxSetCurrent(before);
    return result;
  }
  template <typename Invoke>
  [[nodiscard]] Status call(const char* name, Bytes size, Invoke&& invoke) const {
    return check(driver_, in_context(std::forward<Invoke>(invoke)),
                 {.call = name, .size = size, .device = info_.id});
  }
  [[nodiscard]] Error invalid(std::string text, Bytes size) const;
  [[nodiscard]] Status check_size(const char* call, Bytes size) const;
  [[nodiscard]] Result<Physical> create(Bytes size, const CUmemAllocationProp& kind,
                                        std::optional<int> host_node);
  // Opens a mapped range to everybody who may touch it. memory_mutex_ held.
  [[nodiscard]] Status map_piece(Address at, const PhysicalPiece& piece) const;
  [[nodiscard]] Status open_access(Address at, const Mapping& mapping) const;
  [[nodiscard]] CudaStream stream_of(Stream stream) const;  // unknown: a programmer error, as the next one
  [[nodiscard]] CUevent event_of(Event event) const;

  const Driver& driver_;
  const CUdevice device_;
  const CUcontext context_;
  DeviceInfo info_;
  CUmemAllocationProp memory_kind_{};
  PriorityRange priorities_;

  mutable std::mutex memory_mutex_;  // the four below
  // Who may touch what is mapped: this device, and each peer that has been let in.
  std::vector<CUmemAccessDesc> access_;
  std::map<Physical, PhysicalState> physical_;
  std::map<Address, Mapping> mappings_;
  std::map<Address, Bytes> pinned_;
  std::uint64_t last_physical_ = 0;

  SlotTable<CudaStream> streams_;
  SlotTable<CUevent> events_;

  // The runtime's own device code, loaded when first asked for.
  struct RingKernel {
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    std::uint32_t blocks = 0;  // resident at once
  };
  [[nodiscard]] Result<RingKernel> ring_kernel();
  [[nodiscard]] Result<RingKernel> load_ring_kernel() const;
  struct Fp8Kernels {
    CUmodule module = nullptr;
    CUfunction pack = nullptr, unpack = nullptr;
  };
  [[nodiscard]] Result<Fp8Kernels> fp8_kernels();
  [[nodiscard]] Result<Fp8Kernels> load_fp8_kernels() const;
  [[nodiscard]] Status launch_fp8(Stream stream, CUfunction kernel, const Fp8Blocks& blocks);
  std::mutex kernel_mutex_;  // the two below
  std::optional<RingKernel> ring_kernel_;
  std::optional<Fp8Kernels> fp8_kernels_;
};

}  // namespace terrace::cuda
