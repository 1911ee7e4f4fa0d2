#include "examples/moe_trainer/model/selections.hpp"

namespace terrace::trainer {

namespace {

bool looks_at_chosen_tokens(const Config& config, int layer) {
  const MixerKind mixer = config.kind(layer).mixer;
  return mixer == MixerKind::kDsa || (mixer == MixerKind::kMla && config.mla.index_heads > 0);
}

}  // namespace

SharedChoice shared_choice(const Config& config, int layer) {
  SharedChoice choice{.owner = layer, .last = layer};
  std::int64_t place = -1;  // among the sparse layers
  for (int i = 0; i < config.model.layers; ++i) {
    if (!looks_at_chosen_tokens(config, i)) continue;
    ++place;
    const bool selects = place % config.dsa.select_every == 0;
    if (selects && i > layer) break;
    if (selects) choice.owner = i;
    if (i >= layer) choice.last = i;
  }
  return choice;
}

}  // namespace terrace::trainer
