// out = alpha a + beta b;  y = factor x [/ (sqrt(sum of squares) + guard)]
#include "examples/moe_trainer/ops/cuda/fours.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"

namespace terrace::trainer::cuda {
namespace {

__global__ void add(Add op, Fours fours) {
  const std::int64_t i = fours.first();
  if (i >= op.count) return;
  float4 a{}, b{};
  if (op.a_factor != 0.0F) a = fours.load(op.a, i);
  if (op.b_factor != 0.0F) b = fours.load(op.b, i);
  fours.store(op.out, i,
              {a.x * op.a_factor + b.x * op.b_factor, a.y * op.a_factor + b.y * op.b_factor,
               a.z * op.a_factor + b.z * op.b_factor, a.w * op.a_factor + b.w * op.b_factor});
}

__global__ void convert(Convert op, Fours fours) {
  const std::int64_t i = fours.first();
  if (i >= op.count) return;
  float factor = op.factor;
  if (op.sum_of_squares != nullptr) factor /= sqrtf(*op.sum_of_squares) + kRootGuard;
  const float4 x = fours.load(op.x, i);
  fours.store(op.y, i, {x.x * factor, x.y * factor, x.z * factor, x.w * factor});
}

template <typename T>
__global__ void random_fill(RandomFill op, T* y) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < op.count) store_float(y + i, op.number(i));
}

}  // namespace

void launch(OpCall& call, const RandomFill& op) {
  call.set_shape({op.count});
  with_element(op.y.dtype(), [&](auto element) {
    using T = decltype(element);
    call.launch(random_fill<T>, grid_for(op.count), op, static_cast<T*>(op.y.at()));
  });
}

void launch(OpCall& call, const Add& op) {
  call.set_shape({op.count});
  call.launch(add, grid_of_fours(op.count), op, fours_of(op.count, op.a, op.b, op.out));
}

void launch(OpCall& call, const Convert& op) {
  call.set_shape({op.count});
  call.launch(convert, grid_of_fours(op.count), op, fours_of(op.count, op.x, op.y));
}

}  // namespace terrace::trainer::cuda
