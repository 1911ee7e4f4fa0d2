#include "examples/moe_trainer/ops/muon.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>
#include <vector>

namespace terrace::trainer {
namespace {

constexpr int kNewtonSchulzSteps = 5;
constexpr float kA = 3.4445F, kB = -4.7750F, kC = 2.0315F;

// Scratch of one type after another, held until the step is enqueued.
class Workspace {
 public:
  explicit Workspace(ScratchSource& source) : source_(source) {}
  Out take(std::int64_t count, Dtype dtype) {
    Address at = nullptr;
    holds_.push_back(source_.take(Bytes(static_cast<std::uint64_t>(count * bytes_of(dtype))), &at));
    return {at, dtype};
  }

 private:
  ScratchSource& source_;
  std::vector<std::shared_ptr<const void>> holds_;
};

// Where the steps work: x and y hold a matrix, gram and square its smaller square; squares one number.
struct Arrays {
  Out update, x, y, gram, square;
  float* squares;
};

// X <- a X + (b G + c G G) X with G = X X^T, or a X + X (b G + c G G) with G = X^T X where that is smaller.
void newton_schulz(Ops& ops, Stream stream, const Muon& muon, const Arrays& at) {
  const std::int64_t rows = muon.rows, columns = muon.columns, side = std::min(rows, columns);
  const bool wide = rows <= columns;
  for (int step = 0; step < kNewtonSchulzSteps; ++step) {
    ops.run(stream, Matmul{.m = side,
                           .n = side,
                           .k = std::max(rows, columns),
                           .a = at.x,
                           .ta = wide ? Transpose::kNo : Transpose::kYes,
                           .b = at.x,
                           .tb = wide ? Transpose::kYes : Transpose::kNo,
                           .c = at.gram});
    ops.run(stream, Matmul{.m = side,
                           .n = side,
                           .k = side,
                           .a = at.gram,
                           .ta = Transpose::kNo,
                           .b = at.gram,
                           .tb = Transpose::kNo,
                           .c = at.square});
    ops.run(stream, Add{.count = side * side,
                        .a = at.gram,
                        .b = at.square,
                        .out = at.gram,
                        .a_factor = kB,
                        .b_factor = kC});
    ops.run(stream, Matmul{.m = rows,
                           .n = columns,
                           .k = side,
                           .a = wide ? In(at.gram) : In(at.x),
                           .ta = Transpose::kNo,
                           .b = wide ? In(at.x) : In(at.gram),
                           .tb = Transpose::kNo,
                           .c = at.y});
    ops.run(stream, Add{.count = rows * columns, .a = at.x, .b = at.y, .out = at.x, .a_factor = kA});
  }
}

float update_scale(const Muon& muon) {
  const auto rows = static_cast<float>(muon.rows), columns = static_cast<float>(muon.columns);
  if (muon.scale == MuonScale::kMoonlight) return 0.2F * std::sqrt(std::max(rows, columns));
  return std::sqrt(std::max(1.0F, rows / columns));
}

Out part(Out array, std::int64_t first) {
  if (!array) return array;
  return {static_cast<std::byte*>(array.at()) + first * bytes_of(array.dtype()), array.dtype()};
}

void step_matrix(Ops& ops, Stream stream, const Muon& muon, const Arrays& at, std::int64_t first) {
  const std::int64_t count = muon.rows * muon.columns;
  float *momentum = muon.momentum + first, *parameter = muon.parameter + first;
  const float* gradient = muon.gradient + first;
  const float keep = muon.momentum_factor;
  ops.run(stream, Add{.count = count, .a = momentum, .b = gradient, .out = momentum, .a_factor = keep});
  In update = momentum;
  if (muon.kind == MuonMomentum::kNesterov) {
    ops.run(stream, Add{.count = count, .a = momentum, .b = gradient, .out = at.update, .a_factor = keep});
    update = at.update;
  }
  ops.run(stream, Add{.count = 1, .out = at.squares, .a_factor = 0, .b_factor = 0});  // zero
  ops.run(stream, SumOfSquares{.count = count, .x = update, .out = at.squares});
  ops.run(stream, Convert{.count = count, .x = update, .y = at.x, .sum_of_squares = at.squares});
  newton_schulz(ops, stream, muon, at);
  ops.run(stream, Add{.count = count,
                      .a = parameter,
                      .b = at.x,
                      .out = parameter,
                      .a_factor = 1.0F - muon.learning_rate * muon.weight_decay,
                      .b_factor = -muon.learning_rate * update_scale(muon)});
  if (muon.compute_copy) {
    ops.run(stream, Convert{.count = count, .x = parameter, .y = part(muon.compute_copy, first)});
  }
}

}  // namespace

void muon_step(Ops& ops, ScratchSource& scratch, Stream stream, const Muon& muon) {
  if (muon.rows < 1 || muon.columns < 1 || muon.matrices < 0) {
    throw std::runtime_error("muon: a matrix has at least one row and one column");
  }
  Workspace workspace(scratch);
  const std::int64_t count = muon.rows * muon.columns, side = std::min(muon.rows, muon.columns);
  Arrays at{};
  if (muon.kind == MuonMomentum::kNesterov) at.update = workspace.take(count, Dtype::kF32);
  at.x = workspace.take(count, muon.products);
  at.y = workspace.take(count, muon.products);
  at.gram = workspace.take(side * side, muon.products);
  at.square = workspace.take(side * side, muon.products);
  at.squares = workspace.take(1, Dtype::kF32).as<float>();
  for (std::int64_t i = 0; i < muon.matrices; ++i) step_matrix(ops, stream, muon, at, i * count);
}

}  // namespace terrace::trainer
