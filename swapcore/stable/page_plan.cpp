#include "swapcore/stable/page_plan.hpp"

#include <algorithm>
#include <limits>

namespace terrace {
namespace {

constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

std::size_t next_of(const PagedBlock& block) { return block.next.value_or(kNever); }

// Used later: by the schedule; among those of which it knows nothing, less recently used.
bool used_later(const PagedBlock* a, const PagedBlock* b) {
  if (next_of(*a) != next_of(*b)) return next_of(*a) > next_of(*b);
  return a->last_use < b->last_use;
}

// Those that could leave HBM, the one used last first.
std::vector<const PagedBlock*> leavers(std::span<const PagedBlock> blocks) {
  std::vector<const PagedBlock*> found;
  for (const PagedBlock& block : blocks) {
    if (block.in_hbm && block.movable) found.push_back(&block);
  }
  std::sort(found.begin(), found.end(), used_later);
  return found;
}

}  // namespace

PagePlan plan_pages(std::span<const PagedBlock> blocks, const PageNeeds& needs) {
  std::vector<const PagedBlock*> wanted;
  for (const PagedBlock& block : blocks) {
    if (!block.in_hbm && block.movable && next_of(block) < needs.uses_ahead) wanted.push_back(&block);
  }
  std::sort(wanted.begin(), wanted.end(),
            [](const PagedBlock* a, const PagedBlock* b) { return next_of(*a) < next_of(*b); });
  const std::vector<const PagedBlock*> out = leavers(blocks);
  PagePlan plan;
  std::size_t next_out = 0;
  Bytes room = needs.room, coming;
  for (const PagedBlock* const block : wanted) {
    if (coming + block->size > needs.bytes_ahead && coming > 0_B) break;
    const std::size_t first_out = next_out;
    Bytes made = room;
    while (made < block->size && next_out < out.size() && next_of(*out[next_out]) > next_of(*block)) {
      made += out[next_out++]->size;
    }
    if (made < block->size) break;
    for (std::size_t i = first_out; i < next_out; ++i) plan.to_ddr.push_back(out[i]->at);
    plan.to_hbm.push_back(block->at);
    plan.behind.push_back(plan.to_ddr.size());
    room = made - block->size;
    coming += block->size;
  }
  return plan;
}

std::vector<Address> make_room(std::span<const PagedBlock> blocks, Bytes room, Bytes size,
                               std::span<const Address> spared) {
  std::vector<Address> out;
  for (const PagedBlock* const block : leavers(blocks)) {
    if (room >= size) break;
    if (std::find(spared.begin(), spared.end(), block->at) != spared.end()) continue;
    out.push_back(block->at);
    room += block->size;
  }
  if (room < size) out.clear();
  return out;
}

}  // namespace terrace
