// What a layer chose in forward and must not choose again: expert routing, selected tokens. Ties and rounding
// could flip a second choice, so recomputation replays the first.
#pragma once

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/model/pass.hpp"

namespace terrace::trainer {

// What a layer saves through the session.
enum class SaveSlot : std::uint32_t { kLayerInput = 0, kRouting = 1, kSelected = 2 };

[[nodiscard]] inline SaveKey save_key(const Pass& pass, int layer, SaveSlot slot) {
  return {.layer = layer, .micro_batch = pass.micro_batch, .slot = static_cast<std::uint32_t>(slot)};
}

// Forward: a new block that `choose(const BlockRef&)` fills, saved where layers are recomputed. Recompute:
// that block.
template <typename Choose>
[[nodiscard]] BlockRef decide_once(const Pass& pass, const SaveKey& key, Bytes size, Choose&& choose) {
  if (pass.phase == Phase::kRecompute) return require(pass.session.load(key));
  BlockRef block = pass.memory.block(size, Pool::kActivation);
  choose(block);
  if (pass.recompute == Recompute::kFull) require(pass.session.save(key, block));
  return block;
}

}  // namespace terrace::trainer
