#include "examples/moe_trainer/model/indexer.hpp"

#include <utility>

#include "runtime/assert.hpp"

namespace terrace::trainer {

namespace {

// Above that each layer's backward makes what it needs of the map by itself.
constexpr std::int64_t kMostKeyMapBytes = 128LL << 20;

IndexLists lists_of(const DsaShape& shape) {
  return {.rows = shape.batch * shape.length, .slots = shape.slots(), .length = shape.length};
}
Bytes list_bytes(const IndexLists& lists) {
  return Bytes(static_cast<std::uint64_t>(lists.rows * lists.slots) * sizeof(std::int32_t));
}
std::int32_t* positions(const BlockRef& block) { return reinterpret_cast<std::int32_t*>(block->address); }

}  // namespace

Indexer::Indexer(const LayerScope& scope, const Options& options)
    : config_(scope.config),
      options_(options),
      layer_(scope.layer),
      choice_(shared_choice(scope.config, scope.layer)),
      own_(declare(scope)) {}

std::optional<Indexer::Weights> Indexer::declare(const LayerScope& scope) const {
  if (choice_.owner != layer_) return std::nullopt;
  const std::size_t before = scope.parameters.parameters().size();
  const auto projection = [&](const char* name, std::int64_t out, std::int64_t in) {
    const std::string full = options_.prefix + name;
    return Projection{scope.matrix(full, out, in), scope.site(full, SiteKind::kMatmul)};
  };
  const Weights weights{.q = projection("index_q", options_.heads * options_.width, options_.source_width),
                        .k = projection("index_k", options_.width, config_.model.hidden),
                        .w = projection("index_w", options_.heads, config_.model.hidden),
                        .norm = scope.vector(options_.prefix + "index_norm", {options_.width}, 1),
                        .bias = scope.vector(options_.prefix + "index_bias", {options_.width}, 0)};
  std::deque<Parameter>& all = scope.parameters.parameters();
  for (std::size_t i = before; i < all.size(); ++i) all[i].part = Part::kIndexer;  // adapters too
  return weights;
}

void Indexer::describe(DsaShape& shape) const {
  shape.index_heads = options_.heads;
  shape.index_width = options_.width;
}

void Indexer::fill(DsaInputs& in, const Saved& saved) {
  in.index_q = saved.q;
  in.index_k = saved.k;
  in.index_w = saved.w;
}

float Indexer::loss_weight() const {
  return static_cast<float>(config_.dsa.index_loss_weight / static_cast<double>(config_.tokens_per_step()));
}

Tensor Indexer::rotated(const Pass& pass, Tensor x, std::int64_t heads, RotaryDirection way) const {
  if (options_.rope_width == 0) return x;
  Tensor y = pass.tensor(x.rows, x.width);
  pass.ops.run(pass.stream, Rotary{.batch = config_.train.batch,
                                   .length = config_.train.length,
                                   .heads = heads,
                                   .width = options_.width,
                                   .rotary_width = options_.rope_width,
                                   .layout = RotaryLayout::kHalf,
                                   .direction = way,
                                   .theta = options_.rope_theta,
                                   .x = x,
                                   .y = y});
  return y;
}

void Indexer::score(const Pass& pass, const Tensor& x, const Tensor& source, Saved& s) const {
  const auto project = [&](const Projection& p, const Tensor& from) {
    return linear_site(pass, p.site, Reads::kInBackward, from, p.weight);
  };
  s.q = rotated(pass, project(own_->q, source), options_.heads, RotaryDirection::kForward);
  s.k_in = project(own_->k, x);
  s.w = project(own_->w, x);
  Tensor normed = pass.tensor(x.rows, options_.width);
  pass.ops.run(pass.stream, LayerNorm{.rows = x.rows,
                                      .width = options_.width,
                                      .eps = static_cast<float>(options_.norm_eps),
                                      .x = s.k_in,
                                      .w = own_->norm.value,
                                      .b = own_->bias.value,
                                      .y = normed});
  s.k = rotated(pass, std::move(normed), 1, RotaryDirection::kForward);
}

void Indexer::forward(const Pass& pass, const Tensor& x, const Tensor& source, const DsaShape& shape,
                      Saved& s) const {
  if (selects()) score(pass, x, source, s);
  if (pass.phase == Phase::kWarmUp) return;
  BlockRef& lists = pass.selections->of(choice_.owner).lists;
  if (pass.chooses()) {
    if (selects()) lists = select(pass, shape, s);
    TERRACE_CHECK(lists != nullptr, "the layer that selects comes first");
  } else if (lists == nullptr) {
    lists = load(pass, lists_of(shape));  // the last layer to read the choice is the first to be recomputed
  }
  s.selected = lists;
  if (pass.chooses() ? layer_ == choice_.last : selects()) lists.reset();
}

BlockRef Indexer::select(const Pass& pass, const DsaShape& shape, const Saved& saved) const {
  const IndexLists lists = lists_of(shape);
  BlockRef block = pass.memory.block(list_bytes(lists), Pool::kActivation);
  DsaSelect op{.shape = shape, .in = {}, .selected = positions(block)};
  fill(op.in, saved);
  if (pass.chooser != nullptr) {
    pass.chooser->choose(op);
  } else {
    pass.ops.run(pass.stream, op);
  }
  if (pass.recompute == Recompute::kFull) save(pass, lists, block);
  return block;
}

// Of the layer that asks for it first, so that it is on its way back in time.
SaveKey Indexer::key(const Pass& pass) const { return save_key(pass, choice_.last, SaveSlot::kSelected); }

void Indexer::save(const Pass& pass, const IndexLists& lists, const BlockRef& selected) const {
  if (index_form(lists) == IndexForm::kList) return require(pass.session.save(key(pass), selected));
  const Bytes size(static_cast<std::uint64_t>(packed_index_bytes(lists)));
  const BlockRef packed = pass.memory.block(size, Pool::kActivation);
  pass.ops.run(pass.stream, PackIndices{lists, positions(selected), packed->address});
  require(pass.session.save(key(pass), packed));
}

BlockRef Indexer::load(const Pass& pass, const IndexLists& lists) const {
  BlockRef saved = require(pass.session.load(key(pass)));
  if (index_form(lists) == IndexForm::kList) return saved;
  BlockRef block = pass.memory.block(list_bytes(lists), Pool::kActivation);
  pass.ops.run(pass.stream, UnpackIndices{lists, saved->address, positions(block)});
  return block;
}

BlockRef Indexer::key_map(const Pass& pass, const DsaShape& shape, const Saved& saved) const {
  const std::int64_t bytes =
      shape.batch * shape.length * key_map_words(shape.length) * static_cast<std::int64_t>(sizeof(KeyWord));
  if (choice_.owner == choice_.last || bytes > kMostKeyMapBytes) return nullptr;
  BlockRef& map = pass.selections->of(choice_.owner).key_map;
  if (map == nullptr) {
    map = pass.memory.block(Bytes(static_cast<std::uint64_t>(bytes)), Pool::kActivation);
    pass.ops.run(
        pass.stream,
        MapKeys{.shape = shape, .selected = saved.list(), .words = reinterpret_cast<KeyWord*>(map->address)});
  }
  return selects() ? std::exchange(map, nullptr) : map;
}

bool Indexer::reads_input() const {
  return selects() && config_.dsa.index_loss_weight > 0 && trains(own_->k.weight, own_->w.weight);
}

bool Indexer::reads_source() const {
  return selects() && config_.dsa.index_loss_weight > 0 && trains(own_->q.weight);
}

void Indexer::drop_unless_learning(Saved& saved) const {
  if (!learns()) drop(saved.q, saved.k_in, saved.k, saved.w);
}

Indexer::Gradients Indexer::gradients(const Pass& pass, std::int64_t tokens) const {
  if (!learns()) return {};
  return {pass.tensor(tokens, options_.heads * options_.width), pass.tensor(tokens, options_.width),
          pass.tensor(tokens, options_.heads)};
}

void Indexer::backward(const Pass& pass, const Tensor& x, const Tensor& source, const Saved& s,
                       const Gradients& d) const {
  if (!d.q) return;
  linear_weight_gradient(pass, rotated(pass, d.q, options_.heads, RotaryDirection::kInverse), source,
                         own_->q.weight);
  linear_weight_gradient(pass, d.w, x, own_->w.weight);
  const Tensor d_k_in = pass.tensor(x.rows, options_.width);
  pass.ops.run(pass.stream, LayerNormBackward{.rows = x.rows,
                                              .width = options_.width,
                                              .eps = static_cast<float>(options_.norm_eps),
                                              .x = s.k_in,
                                              .w = own_->norm.value,
                                              .d_y = rotated(pass, d.k, 1, RotaryDirection::kInverse),
                                              .d_x = d_k_in,
                                              .d_w = own_->norm.gradient,
                                              .d_b = own_->bias.gradient});
  linear_weight_gradient(pass, d_k_in, x, own_->k.weight);
}

}  // namespace terrace::trainer
