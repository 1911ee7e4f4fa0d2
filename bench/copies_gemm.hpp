// The matrix product that copies are measured beside: on cuda bf16 8192 cubed through cuBLAS, opened at run
// time where the machine has it; on a device with host kernels fp32 through OpenBLAS on one thread.
#pragma once

#include <memory>
#include <string>

#include "allocator/ddr_pool.hpp"
#include "allocator/hbm_pool.hpp"
#include "runtime/device.hpp"

namespace terrace::bench {

class Gemm {
 public:
  struct Parts {
    Device& device;
    HbmPool& hbm;
    DdrPool& ddr;  // for a while: the operands on their way in
    Stream stream;
  };
  // HBM that the operands take.
  [[nodiscard]] static Bytes hbm_bytes(const Device& device);
  // Its operands are random, the same in every run: a GPU's clock depends on what it multiplies.
  // Errors: kNotSupported (no cuBLAS on this machine), those of the pools and the device.
  [[nodiscard]] static Result<std::unique_ptr<Gemm>> open(const Parts& parts);
  virtual ~Gemm() = default;  // the stream has finished
  // One product on the stream.
  [[nodiscard]] virtual Status launch() = 0;
  [[nodiscard]] virtual double flops() const = 0;
};

}  // namespace terrace::bench
