#include "examples/moe_trainer/model/patch_embedder.hpp"

namespace terrace::trainer {

namespace {

// Of what enters the stream: that of a token's embedding.
constexpr double kStart = 0.5;

}  // namespace

PatchEmbedder::PatchEmbedder(ParameterGroup& group, RowMaps& maps, const Config& config) : config_(config) {
  const ImagesConfig& images = config.images;
  const std::int64_t hidden = config.model.hidden;
  const std::int64_t grid = images.grid();
  matrix_ = &group.declare(matrix("images.patch", hidden, images.numbers()));
  position_ =
      &group.declare({.name = "images.position", .shape = {2 * grid, hidden}, .init = Init::normal(kStart)});
  norm_ = {.weight = &group.declare(vector_of("images.norm", {hidden}, kStart)),
           .eps = static_cast<float>(config.model.norm_eps)};
  const std::int64_t rows = config.most_image_rows();
  const auto row = [=](std::int64_t patch) { return patch / grid % grid; };
  const auto column = [=](std::int64_t patch) { return grid + patch % grid; };
  grid_row_ = &maps.get("images.grid_row", rows, row);
  grid_column_ = &maps.get("images.grid_column", rows, column);
  grid_both_ = &maps.get("images.grid_both", 2 * rows, [=](std::int64_t piece) {
    return piece % 2 == 0 ? row(piece / 2) : column(piece / 2);
  });
}

PatchEmbedder::Rows PatchEmbedder::rows_of(const Pass& pass, const ImageBatch& images) const {
  Rows made{.patches = pass.tensor(images.rows, config_.images.numbers()),
            .sum = pass.tensor(images.rows, config_.model.hidden)};
  pass.ops.run(pass.stream, Convert{.count = made.patches.count(), .x = images.patches, .y = made.patches});
  linear(pass, made.patches, *matrix_, made.sum);
  pass.ops.run(pass.stream, SumRows{.tokens = images.rows,
                                    .width = made.sum.width,
                                    .top_k = 2,
                                    .row = grid_both_->places(),
                                    .weight = nullptr,
                                    .x = position_->operand(),
                                    .out = made.sum,
                                    .into = Accumulate::kAdd});
  return made;
}

void PatchEmbedder::forward(const Pass& pass, const ImageBatch& images, const Tensor& x) const {
  const Tensor normed = norm_.forward(pass, rows_of(pass, images).sum);
  pass.ops.run(pass.stream, SumRows{.tokens = x.rows,
                                    .width = x.width,
                                    .top_k = 1,
                                    .row = images.row_of_token,
                                    .weight = nullptr,
                                    .x = normed,
                                    .out = x,
                                    .into = Accumulate::kAdd});
}

void PatchEmbedder::backward(const Pass& pass, const ImageBatch& images, const Tensor& d_x) const {
  const Rows made = rows_of(pass, images);
  const Tensor d_normed = pass.tensor(images.rows, d_x.width);
  const Tensor d_sum = pass.tensor(images.rows, d_x.width);
  pass.ops.run(pass.stream, GatherRows{.rows = images.rows,
                                       .width = d_x.width,
                                       .top_k = 1,
                                       .source = images.token_of_row,
                                       .x = d_x,
                                       .out = d_normed});
  norm_.backward(pass, made.sum, d_normed, d_sum);
  linear_weight_gradient(pass, d_sum, made.patches, *matrix_);
  for (const RowMap* places : {grid_row_, grid_column_}) {
    pass.ops.run(pass.stream, EmbeddingBackward{.tokens = images.rows,
                                                .width = d_sum.width,
                                                .vocabulary = position_->shape[0],
                                                .ids = places->places(),
                                                .d_out = d_sum,
                                                .d_table = position_->gradient});
  }
}

}  // namespace terrace::trainer
