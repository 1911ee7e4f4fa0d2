// Sparse attention: selection, forward and backward, at the widths of the large model.
#include <algorithm>
#include <vector>

#include "bench/kernels.hpp"

namespace terrace::bench {
namespace {

using namespace trainer;

struct Size {
  const char* form;
  DsaShape shape;
  [[nodiscard]] bool latent() const { return shape.key_width != shape.value_width; }
  [[nodiscard]] std::string name() const {
    return std::string(form) + "/" + std::to_string(shape.batch) + "x" + std::to_string(shape.length) + "x" +
           std::to_string(shape.heads) + "x" + std::to_string(shape.top_k);
  }
  [[nodiscard]] std::int64_t tokens() const { return shape.batch * shape.length; }
  // (token, key) pairs of full rows: the usual way to count, though the first rows are shorter.
  [[nodiscard]] double pairs() const {
    return static_cast<double>(tokens()) * static_cast<double>(shape.slots());
  }
  [[nodiscard]] double products(std::int64_t widths) const {
    return 2 * pairs() * static_cast<double>(shape.heads) * static_cast<double>(widths);
  }
  // Of q, k, v, gate and y, in bf16.
  [[nodiscard]] double array_bytes() const {
    const std::int64_t row = shape.heads * (shape.key_width + 2 * shape.value_width) + shape.key_width +
                             (latent() ? 0 : shape.value_width);
    return 2.0 * static_cast<double>(tokens() * row);
  }
  [[nodiscard]] double list_bytes() const { return 4 * pairs(); }
};

DsaInputs attention_inputs(CaseArrays& arrays, const Size& size) {
  const DsaShape& s = size.shape;
  const std::int64_t tokens = size.tokens();
  return {.q = arrays.random(tokens * s.heads * s.key_width, Dtype::kBf16),
          .k = arrays.random(tokens * s.key_width, Dtype::kBf16),
          .v = size.latent() ? In(nullptr, Dtype::kBf16)
                             : In(arrays.random(tokens * s.value_width, Dtype::kBf16)),
          .gate = arrays.random(tokens * s.heads * s.value_width, Dtype::kBf16),
          .sink = arrays.floats(s.heads),
          .index_q = In(nullptr, Dtype::kBf16),
          .index_k = In(nullptr, Dtype::kBf16),
          .index_w = In(nullptr, Dtype::kBf16)};
}
void add_index_inputs(CaseArrays& arrays, const Size& size, DsaInputs& in) {
  const DsaShape& s = size.shape;
  in.index_q = arrays.random(size.tokens() * s.index_heads * s.index_width, Dtype::kBf16);
  in.index_k = arrays.random(size.tokens() * s.index_width, Dtype::kBf16);
  in.index_w = arrays.random(size.tokens() * s.index_heads, Dtype::kBf16);
}
const std::int32_t* select(KernelBench& bench, CaseArrays& arrays, const Size& size) {
  DsaInputs in{};
  add_index_inputs(arrays, size, in);
  std::int32_t* selected = arrays.int_output(size.tokens() * size.shape.slots());
  bench.ops().run(bench.stream(), DsaSelect{size.shape, in, selected});
  return selected;
}

void add_select(KernelBench& bench, const Size& size) {
  const DsaShape& s = size.shape;
  const double causal = 0.5 * static_cast<double>(size.tokens()) * static_cast<double>(s.length + 1);
  const double index_row = static_cast<double>(s.index_heads * (s.index_width + 1) + s.index_width);
  bench.add({.name = "select/" + size.name(),
             .flops = 2 * causal * static_cast<double>(s.index_heads * s.index_width),
             .bytes = 2 * static_cast<double>(size.tokens()) * index_row + size.list_bytes(),
             .prepare = [size, &bench](CaseArrays& arrays) -> Launch {
               DsaInputs in{};
               add_index_inputs(arrays, size, in);
               const DsaSelect op{size.shape, in, arrays.int_output(size.tokens() * size.shape.slots())};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

void add_forward(KernelBench& bench, const Size& size) {
  const DsaShape& s = size.shape;
  bench.add({.name = "forward/" + size.name(),
             .flops = size.products(s.key_width + s.value_width),
             .bytes = size.array_bytes() + size.list_bytes(),
             .prepare = [size, &bench](CaseArrays& arrays) -> Launch {
               const std::int64_t rows = size.tokens() * size.shape.heads;
               const Dsa op{.shape = size.shape,
                            .in = attention_inputs(arrays, size),
                            .selected = select(bench, arrays, size),
                            .y = arrays.output(rows * size.shape.value_width, Dtype::kBf16),
                            .lse = arrays.float_output(rows)};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

// From the log-sum-exps and the attention that the forward pass wrote: alone, with the map of keys that
// another layer's backward pass made, or with the indexer.
enum class Indexer : std::uint8_t { kApart, kApartSharedMap, kLearns };

const KeyWord* map_keys(KernelBench& bench, CaseArrays& arrays, const Size& size,
                        const std::int32_t* selected) {
  const std::int64_t words = size.tokens() * key_map_words(size.shape.length);
  auto* map = reinterpret_cast<KeyWord*>(arrays.int_output(2 * words));
  bench.ops().run(bench.stream(), MapKeys{size.shape, selected, map});
  return map;
}

void add_backward(KernelBench& bench, const Size& size, Indexer indexer) {
  const DsaShape& s = size.shape;
  const bool learns = indexer == Indexer::kLearns, shared_map = indexer == Indexer::kApartSharedMap;
  const char* what = learns ? "backward_indexer/" : shared_map ? "backward_shared_map/" : "backward/";
  const double index_products = 3 * 2 * size.pairs() * static_cast<double>(s.index_heads * s.index_width);
  bench.add({.name = what + size.name(),
             .flops = size.products(3 * s.key_width + 2 * s.value_width) + (learns ? index_products : 0.0),
             .bytes = 2 * size.array_bytes() + size.list_bytes(),
             .prepare = [size, learns, shared_map, &bench](CaseArrays& arrays) -> Launch {
               const DsaShape& shape = size.shape;
               const std::int64_t tokens = size.tokens(), rows = tokens * shape.heads;
               DsaInputs in = attention_inputs(arrays, size);
               const std::int32_t* selected = select(bench, arrays, size);
               const Out attention = arrays.output(rows * shape.value_width, Dtype::kBf16);
               float* lse = arrays.float_output(rows);
               bench.ops().run(bench.stream(), Dsa{.shape = shape,
                                                   .in = in,
                                                   .selected = selected,
                                                   .y = arrays.output(rows * shape.value_width, Dtype::kBf16),
                                                   .lse = lse,
                                                   .attention = attention});
               const auto out = [&](std::int64_t count) { return arrays.output(count, Dtype::kBf16); };
               DsaBackward op{
                   .shape = shape,
                   .in = in,
                   .selected = selected,
                   .d_y = arrays.random(rows * shape.value_width, Dtype::kBf16),
                   .d_q = out(rows * shape.key_width),
                   .d_k = out(tokens * shape.key_width),
                   .d_v = size.latent() ? Out(nullptr, Dtype::kBf16) : out(tokens * shape.value_width),
                   .d_gate = out(rows * shape.value_width),
                   .d_sink = arrays.floats(shape.heads),
                   .lse = lse,
                   .attention = attention};
               if (learns) {
                 add_index_inputs(arrays, size, op.in);
                 op.index_loss_weight = 1;
                 op.d_index_q = out(tokens * shape.index_heads * shape.index_width);
                 op.d_index_k = out(tokens * shape.index_width);
                 op.d_index_w = out(tokens * shape.index_heads);
               }
               if (shared_map) op.key_map = map_keys(bench, arrays, size, selected);
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

// The map alone: what a layer saves that finds it made.
void add_map(KernelBench& bench, const Size& size) {
  const std::int64_t words = size.tokens() * key_map_words(size.shape.length);
  bench.add({.name = "map_keys/" + size.name(),
             .bytes = size.list_bytes() + 8 * static_cast<double>(words),
             .prepare = [size, words, &bench](CaseArrays& arrays) -> Launch {
               const MapKeys op{size.shape, select(bench, arrays, size),
                                reinterpret_cast<KeyWord*>(arrays.int_output(2 * words))};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

// A selection and the scan of a KDA layer that does not depend on it, one after the other and side by side.
enum class Streams : std::uint8_t { kOne, kTwo };

void add_select_and_kda(KernelBench& bench, const Size& size, const KdaShape& kda, Streams streams) {
  const bool two = streams == Streams::kTwo;
  bench.add({.name = (two ? "select_beside_kda/" : "select_then_kda/") + size.name(),
             .prepare = [size, kda, two, &bench](CaseArrays& arrays) -> Launch {
               DsaInputs in{};
               add_index_inputs(arrays, size, in);
               const DsaSelect choose{size.shape, in, arrays.int_output(size.tokens() * size.shape.slots())};
               const std::int64_t rows = kda.batch * kda.length * kda.value_heads;
               const auto draw = [&](std::int64_t count) { return arrays.random(count, Dtype::kBf16); };
               const Kda scan{kda,
                              {.q = draw(rows * kda.key_width),
                               .k = draw(rows * kda.key_width),
                               .v = draw(rows * kda.value_width),
                               .gate = arrays.random(rows * kda.key_width, Dtype::kBf16, {1, -3}),
                               .beta = draw(rows),
                               .a_log = arrays.floats(kda.value_heads, {.deviation = 0.3}),
                               .dt_bias = arrays.floats(kda.value_heads * kda.key_width)},
                              arrays.output(rows * kda.value_width, Dtype::kBf16)};
               return [choose, scan, two, &bench] {
                 if (!two) {
                   bench.ops().run(bench.stream(), choose);
                   bench.ops().run(bench.stream(), scan);
                   return;
                 }
                 bench.fork();
                 bench.beside().ops.run(bench.beside().stream, choose);
                 bench.ops().run(bench.stream(), scan);
                 bench.join();
               };
             }});
}

}  // namespace

void add_dsa_cases(KernelBench& bench) {
  const Size latent = bench.tiny() ? Size{"latent", {1, 24, 2, 576, 512, 8, 128, 8}}
                                   : Size{"latent", {1, 8192, 64, 576, 512, 64, 128, 2048}};
  const Size plain = bench.tiny() ? Size{"plain", {1, 24, 2, 128, 128, 8, 128, 8}}
                                  : Size{"plain", {1, 8192, 64, 128, 128, 64, 128, 2048}};
  for (const Size& size : {latent, plain}) {
    add_forward(bench, size);
    add_backward(bench, size, Indexer::kApart);
    add_backward(bench, size, Indexer::kApartSharedMap);
  }
  add_backward(bench, latent, Indexer::kLearns);
  add_map(bench, latent);
  add_select(bench, latent);
  const KdaShape kda = bench.tiny() ? KdaShape{1, 24, 2, 2, 128, 128} : KdaShape{1, 8192, 96, 96, 128, 128};
  for (const Streams streams : {Streams::kOne, Streams::kTwo})
    add_select_and_kda(bench, latent, kda, streams);
  if (!bench.tiny()) add_select(bench, {"latent", {1, 65536, 64, 576, 512, 64, 128, 2048}});
}

}  // namespace terrace::bench
