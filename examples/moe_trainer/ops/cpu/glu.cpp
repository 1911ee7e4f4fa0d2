// SiTU-GLU: y = a(g) b(u), a = 4 tanh(g / 4) sigmoid(g), b = 25 tanh(u / 25); and the plain sum of two
// tensors.
#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec_math.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kGrain = 16384;

template <typename Body>
void for_vectors(std::int64_t count, Body&& body) {
  parallel_ranges(count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += kLanes) body(i, end - i);
  });
}

}  // namespace

void compute(const SituGlu& op, std::byte*) {
  for_vectors(op.count, [&](std::int64_t i, std::int64_t n) {
    const Vec g = load_part(op.g + i, n), u = load_part(op.u + i, n);
    store_part(op.y + i, 4.0F * tanh(g * 0.25F) * sigmoid(g) * (25.0F * tanh(u * 0.04F)), n);
  });
}

void compute(const SituGluBackward& op, std::byte*) {
  for_vectors(op.count, [&](std::int64_t i, std::int64_t n) {
    const Vec g = load_part(op.g + i, n), u = load_part(op.u + i, n), d_y = load_part(op.d_y + i, n);
    const Vec tg = tanh(g * 0.25F), s = sigmoid(g), tu = tanh(u * 0.04F);
    const Vec d_a = s * (1.0F - tg * tg) + 4.0F * tg * s * (1.0F - s);
    const Vec d_b = 1.0F - tu * tu;
    store_part(op.d_g + i, d_y * (25.0F * tu) * d_a, n);
    store_part(op.d_u + i, d_y * (4.0F * tg * s) * d_b, n);
    if (op.y != nullptr) store_part(op.y + i, 4.0F * tg * s * (25.0F * tu), n);
  });
}

void compute(const Add& op, std::byte*) {
  for_vectors(op.count, [&](std::int64_t i, std::int64_t n) {
    store_part(op.out + i, load_part(op.a + i, n) + load_part(op.b + i, n), n);
  });
}

}  // namespace terrace::trainer::cpu
