// Images as tokens: x_t += norm(w patch + row embedding + column embedding) for the token t of each patch,
// in whose place the token embedding has put that of kImageToken.
//
// The places are learned by row and column apart, so that a grid of n by n takes 2 n vectors. The norm comes
// after the sum: before it a patch of one colour would lose how bright it is.
//
// Nothing is kept for backward: to make the rows again is one small product.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/model/linear.hpp"
#include "examples/moe_trainer/model/row_map.hpp"

namespace terrace::trainer {

// The images of a micro-batch, on the device; their patches one after the other, row by row.
struct ImageBatch {
  std::int64_t rows = 0;                       // patches of all images; 0: none
  const float* patches = nullptr;              // (rows, ImagesConfig::numbers()), numbers from -1 to 1
  const std::int32_t* token_of_row = nullptr;  // (rows), no token twice
  const std::int32_t* row_of_token = nullptr;  // (tokens); -1: no patch
};

class PatchEmbedder {
 public:
  // `group` is trained, also where the rest of the model is frozen: nobody else has these weights.
  PatchEmbedder(ParameterGroup& group, RowMaps& maps, const Config& config);

  // Adds to x (tokens, hidden).
  void forward(const Pass& pass, const ImageBatch& images, const Tensor& x) const;
  // Adds to the parameters' gradients, given that of x after forward.
  void backward(const Pass& pass, const ImageBatch& images, const Tensor& d_x) const;

 private:
  struct Rows {
    Tensor patches;  // in the type of activations
    Tensor sum;      // before the norm
  };
  [[nodiscard]] Rows rows_of(const Pass& pass, const ImageBatch& images) const;

  const Config& config_;
  const Parameter* matrix_ = nullptr;    // (hidden, numbers)
  const Parameter* position_ = nullptr;  // (2 grid, hidden): the rows', then the columns'
  Norm norm_;
  const RowMap* grid_row_ = nullptr;  // of each patch, its row of position_, and so on
  const RowMap* grid_column_ = nullptr;
  const RowMap* grid_both_ = nullptr;  // one after the other
};

}  // namespace terrace::trainer
