#include "bench/copies_gemm.hpp"

#include <cblas.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace terrace::bench {
namespace {

constexpr std::uint64_t kCudaSize = 8192;
constexpr std::uint64_t kHostSize = 768;

// A block of HBM that goes back with its owner.
class Operand {
 public:
  static Result<Operand> make(const Gemm::Parts& parts, Bytes size) {
    auto block = parts.hbm.allocate(parts.stream, size, Pool::kScratch);
    if (!block) return block.error();
    return Operand(parts, *block);
  }
  Operand(Operand&& other) noexcept
      : parts_(other.parts_), block_(other.block_), owned_(std::exchange(other.owned_, false)) {}
  Operand& operator=(Operand&&) = delete;
  ~Operand() {
    if (owned_) (void)parts_.hbm.free(parts_.stream, block_);
  }
  [[nodiscard]] Address at() const { return block_.address; }
  [[nodiscard]] Bytes size() const { return block_.size; }

 private:
  Operand(const Gemm::Parts& parts, Block block) : parts_(parts), block_(std::move(block)) {}
  Gemm::Parts parts_;
  Block block_;
  bool owned_ = true;
};

// 16 random bits a word of which `keep` stay and `set` are added: exponents that make numbers of about one.
struct Pattern {
  std::uint16_t keep;
  std::uint16_t set;
};

Status fill_random(const Gemm::Parts& parts, const Operand& operand, Pattern pattern) {
  auto host = parts.ddr.allocate(operand.size(), Pool::kScratch);
  if (!host) return host.error();
  std::uint64_t state = 0x9E3779B97F4A7C15ULL;
  for (std::uint64_t i = 0; i + 1 < host->size.count(); i += 2) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    const auto word = static_cast<std::uint16_t>((state & pattern.keep) | pattern.set);
    std::memcpy(host->address + i, &word, sizeof word);
  }
  Status copied =
      parts.device.copy(parts.stream, Direction::kH2D, operand.at(), host->address, operand.size());
  if (copied) copied = parts.device.synchronize(parts.stream);
  (void)parts.ddr.free(*host);
  return copied;
}

// The few entry points of cuBLAS, with its numbers: <cublas_api.h> of CUDA 12 and 13 agree on them.
struct Cublas {
  using Handle = void*;
  int (*create)(Handle*) = nullptr;
  int (*destroy)(Handle) = nullptr;
  int (*set_stream)(Handle, void*) = nullptr;
  int (*gemm)(Handle, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
              const void*, void*, int, int, int, int) = nullptr;
  static constexpr int kNoTranspose = 0;
  static constexpr int kBf16 = 14;
  static constexpr int kComputeFp32 = 68;
  static constexpr int kDefaultAlgorithm = -1;

  [[nodiscard]] static Result<Cublas> load() {
    for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
      void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) continue;
      Cublas found;
      found.create = reinterpret_cast<decltype(found.create)>(dlsym(library, "cublasCreate_v2"));
      found.destroy = reinterpret_cast<decltype(found.destroy)>(dlsym(library, "cublasDestroy_v2"));
      found.set_stream = reinterpret_cast<decltype(found.set_stream)>(dlsym(library, "cublasSetStream_v2"));
      found.gemm = reinterpret_cast<decltype(found.gemm)>(dlsym(library, "cublasGemmEx"));
      if (found.create && found.destroy && found.set_stream && found.gemm) return found;
    }
    return Error{.code = Errc::kNotSupported,
                 .text =
                     "no libcublas.so.13 or .12 on this machine; install cuBLAS, or put it on "
                     "LD_LIBRARY_PATH, to measure copies beside a matrix product"};
  }
};

class CublasGemm final : public Gemm {
 public:
  static Result<std::unique_ptr<Gemm>> make(const Parts& parts) {
    const auto cublas = Cublas::load();
    if (!cublas) return cublas.error();
    if (Status bound = parts.device.bind_thread(); !bound) return bound.error();
    std::vector<Operand> operands;
    for (int i = 0; i < 3; ++i) {
      auto operand = Operand::make(parts, Bytes(kCudaSize * kCudaSize * 2));
      if (!operand) return operand.error();
      operands.push_back(std::move(operand).value());
    }
    for (int i = 0; i < 2; ++i) {
      // bf16: sign and mantissa random, exponent 126: from 0.5 to 1.
      if (Status filled = fill_random(parts, operands[static_cast<std::size_t>(i)], {0x807F, 126 << 7});
          !filled)
        return filled.error();
    }
    Cublas::Handle handle = nullptr;
    if (cublas->create(&handle) != 0 ||
        cublas->set_stream(handle, parts.device.native_stream(parts.stream)) != 0)
      return Error{.code = Errc::kOutOfMemory, .text = "cuBLAS gave no handle"};
    return std::unique_ptr<Gemm>(new CublasGemm(*cublas, handle, std::move(operands)));
  }
  ~CublasGemm() override { cublas_.destroy(handle_); }
  Status launch() override {
    constexpr int kSide = static_cast<int>(kCudaSize);
    const float one = 1;
    const float zero = 0;
    const int result = cublas_.gemm(handle_, Cublas::kNoTranspose, Cublas::kNoTranspose, kSide, kSide, kSide,
                                    &one, operands_[0].at(), Cublas::kBf16, kSide, operands_[1].at(),
                                    Cublas::kBf16, kSide, &zero, operands_[2].at(), Cublas::kBf16, kSide,
                                    Cublas::kComputeFp32, Cublas::kDefaultAlgorithm);
    if (result == 0) return {};
    return Error{.code = Errc::kIo, .text = "cublasGemmEx failed with status " + std::to_string(result)};
  }
  [[nodiscard]] double flops() const override {
    const auto side = static_cast<double>(kCudaSize);
    return 2 * side * side * side;
  }

 private:
  CublasGemm(const Cublas& cublas, Cublas::Handle handle, std::vector<Operand> operands)
      : cublas_(cublas), handle_(handle), operands_(std::move(operands)) {}
  const Cublas cublas_;
  const Cublas::Handle handle_;
  std::vector<Operand> operands_;
};

class HostGemm final : public Gemm {
 public:
  static Result<std::unique_ptr<Gemm>> make(const Parts& parts) {
    openblas_set_num_threads(1);
    std::vector<Operand> operands;
    for (int i = 0; i < 3; ++i) {
      auto operand = Operand::make(parts, Bytes(kHostSize * kHostSize * sizeof(float)));
      if (!operand) return operand.error();
      operands.push_back(std::move(operand).value());
      // Half of a float each: a small one either way.
      if (Status filled = fill_random(parts, operands.back(), {0x803F, 0x3F00}); !filled)
        return filled.error();
    }
    return std::unique_ptr<Gemm>(new HostGemm(parts, std::move(operands)));
  }
  Status launch() override {
    return parts_.device.launch_host(parts_.stream, [this] {
      constexpr int kSide = static_cast<int>(kHostSize);
      const auto matrix = [this](std::size_t i) { return reinterpret_cast<float*>(operands_[i].at()); };
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, kSide, kSide, kSide, 1.0F, matrix(0), kSide,
                  matrix(1), kSide, 0.0F, matrix(2), kSide);
    });
  }
  [[nodiscard]] double flops() const override {
    const auto side = static_cast<double>(kHostSize);
    return 2 * side * side * side;
  }

 private:
  HostGemm(const Parts& parts, std::vector<Operand> operands)
      : parts_(parts), operands_(std::move(operands)) {}
  const Parts parts_;
  std::vector<Operand> operands_;
};

}  // namespace

Bytes Gemm::hbm_bytes(const Device& device) {
  return device.info().can.host_kernels ? Bytes(3 * kHostSize * kHostSize * sizeof(float))
                                        : Bytes(3 * kCudaSize * kCudaSize * 2);
}

Result<std::unique_ptr<Gemm>> Gemm::open(const Parts& parts) {
  return parts.device.info().can.host_kernels ? HostGemm::make(parts) : CublasGemm::make(parts);
}

}  // namespace terrace::bench
