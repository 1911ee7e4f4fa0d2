// The gated activations, their gradients, and the activation behind a grouped product. fp32 and bf16 rows
// with a stride are read and written where they lie: two halves of one array overlap as ranges, which
// stand-ins in fp32 could not serve.
#include <algorithm>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec_math.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kGrain = 16384;

// body(row, column, how many columns are left)
template <typename Body>
void for_row_vectors(std::int64_t rows, std::int64_t width, Body&& body) {
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, width));
  parallel_ranges(rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t i = 0; i < width; i += kLanes) body(row, i, width - i);
    }
  });
}

// Rows of one type, eight elements at a time.
template <typename T>
struct Lanes;
template <>
struct Lanes<float> {
  static Vec load(const float* at, std::int64_t count) { return load_part(at, count); }
  static void store(float* at, Vec v, std::int64_t count) { store_part(at, v, count); }
};
template <>
struct Lanes<Bf16> {
  static Vec load(const Bf16* at, std::int64_t count) {
    Vec v{};
    for (std::int64_t i = 0; i < std::min(count, kLanes); ++i) v[i] = to_float(at[i]);
    return v;
  }
  static void store(Bf16* at, Vec v, std::int64_t count) {
    for (std::int64_t i = 0; i < std::min(count, kLanes); ++i) at[i] = to_bf16(v[i]);
  }
};

struct Factors {  // y = gate * up, and the slopes of each
  Vec gate, up, gate_slope, up_slope;
};
template <GluActivation Activation>
inline Factors factors(Vec g, Vec u) {
  const Vec s = sigmoid(g);
  if constexpr (Activation == GluActivation::kSwi) return {g * s, u, s + g * s * (1.0F - s), splat(1.0F)};
  const Vec tg = tanh(g * 0.25F), tu = tanh(u * 0.04F);
  return {4.0F * tg * s, 25.0F * tu, s * (1.0F - tg * tg) + 4.0F * tg * s * (1.0F - s), 1.0F - tu * tu};
}

// body(the activation as the compiler knows it)
template <typename Body>
void with_activation(GluActivation activation, Body&& body) {
  if (activation == GluActivation::kSwi)
    return body([](Vec g, Vec u) { return factors<GluActivation::kSwi>(g, u); });
  body([](Vec g, Vec u) { return factors<GluActivation::kSitu>(g, u); });
}

template <typename T>
void forward(const Glu& op) {
  using Row = Lanes<T>;
  const T *g = op.g.as<T>(), *u = op.u.as<T>();
  T* y = op.y.as<T>();
  with_activation(op.activation, [&](auto activate) {
    for_row_vectors(op.rows, op.width, [&](std::int64_t row, std::int64_t i, std::int64_t n) {
      const Factors f =
          activate(Row::load(g + row * op.g_stride + i, n), Row::load(u + row * op.u_stride + i, n));
      Row::store(y + row * op.width + i, f.gate * f.up, n);
    });
  });
}

template <typename T>
void backward(const GluBackward& op) {
  using Row = Lanes<T>;
  const T *g = op.g.as<T>(), *u = op.u.as<T>(), *d_y = op.d_y.as<T>();
  T *d_g = op.d_g.as<T>(), *d_u = op.d_u.as<T>();
  T* y = op.y ? op.y.as<T>() : nullptr;
  with_activation(op.activation, [&](auto activate) {
    for_row_vectors(op.rows, op.width, [&](std::int64_t row, std::int64_t i, std::int64_t n) {
      const Factors f =
          activate(Row::load(g + row * op.g_stride + i, n), Row::load(u + row * op.u_stride + i, n));
      const Vec d = Row::load(d_y + row * op.width + i, n);
      Row::store(d_g + row * op.d_g_stride + i, d * f.up * f.gate_slope, n);
      Row::store(d_u + row * op.d_u_stride + i, d * f.gate * f.up_slope, n);
      if (y != nullptr) Row::store(y + row * op.width + i, f.gate * f.up, n);
    });
  });
}

}  // namespace

void compute(const Glu& op, std::byte*) {
  op.y.dtype() == Dtype::kF32 ? forward<float>(op) : forward<Bf16>(op);
}

void compute(const GluBackward& op, std::byte*) {
  op.d_g.dtype() == Dtype::kF32 ? backward<float>(op) : backward<Bf16>(op);
}

// Where gu is not wanted, scratch holds it.
Bytes scratch_bytes(const GroupedGlu& op) {
  if (op.gu) return Bytes();
  return Bytes(static_cast<std::uint64_t>(op.rows * 2 * op.n) * sizeof(float));
}

void compute(const GroupedGlu& op, std::byte* scratch) {
  float* gu = op.gu ? op.gu.f32() : reinterpret_cast<float*>(scratch);
  compute(GroupedMatmul{.groups = op.groups,
                        .rows = op.rows,
                        .n = 2 * op.n,
                        .k = op.k,
                        .offsets = op.offsets,
                        .a = op.a,
                        .w = op.w,
                        .c = gu},
          GroupedPass::kForward);
  const std::int64_t first = op.offsets[0];
  const float* rows = gu + first * 2 * op.n;
  compute(Glu{.rows = op.offsets[op.groups] - first,
              .width = op.n,
              .activation = op.activation,
              .g = rows,
              .g_stride = 2 * op.n,
              .u = rows + op.n,
              .u_stride = 2 * op.n,
              .y = op.y.f32() + first * op.n},
          nullptr);
}

}  // namespace terrace::trainer::cpu
