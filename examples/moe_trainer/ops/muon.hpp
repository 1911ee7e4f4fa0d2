// Muon: the update of a matrix is its momentum with all singular values brought near one.
//
// Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): five Newton-Schulz steps
// X <- a X + (b A + c A A) X with A = X X^T and (a, b, c) = (3.4445, -4.7750, 2.0315), from X = U / ||U||, U
// the momentum (Nesterov's by default); the shorter side's Gram matrix is used. Decay is decoupled, as in
// AdamW.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/ops.hpp"

namespace terrace::trainer {

enum class MuonMomentum : std::uint8_t { kNesterov, kPlain };
// What the orthogonal update is multiplied by, beside the learning rate.
enum class MuonScale : std::uint8_t {
  kJordan,     // sqrt(max(1, rows / columns))
  kMoonlight,  // 0.2 sqrt(max(rows, columns)): the size of AdamW's update (Liu et al. 2025, "Muon is
               // Scalable")
};

// A stack of matrices, such as the experts of a layer: each is orthogonalised by itself.
struct Muon {
  std::int64_t matrices, rows, columns;
  float* parameter;       // (matrices, rows, columns), fp32
  const float* gradient;  // the same
  float* momentum;        // the same: m <- momentum_factor m + gradient
  float learning_rate, momentum_factor, weight_decay;
  MuonMomentum kind = MuonMomentum::kNesterov;
  MuonScale scale = MuonScale::kMoonlight;
  Dtype products = Dtype::kBf16;  // of the Newton-Schulz steps
  Out compute_copy = nullptr;     // gets the new parameter, in its type
};
// Enqueues on `stream`; its scratch is one matrix in fp32, and two of the matrix and two of its smaller
// square in `products`.
void muon_step(Ops& ops, ScratchSource& scratch, Stream stream, const Muon& muon);

}  // namespace terrace::trainer
