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

void sort_by_leaving(std::vector<const PagedBlock*>& blocks) {
  std::sort(blocks.begin(), blocks.end(), used_later);
}

// Those that could leave HBM, the one used last first.
std::vector<const PagedBlock*> leavers(std::span<const PagedBlock> blocks) {
  std::vector<const PagedBlock*> found;
  for (const PagedBlock& block : blocks) {
    if (block.in_hbm && block.movable) found.push_back(&block);
  }
  sort_by_leaving(found);
  return found;
}

// What should travel: out, the one used last first, and back, the one used soonest first.
struct Misplaced {
  std::vector<const PagedBlock*> out, back;
};
Misplaced misplaced(std::span<const PagedBlock> blocks, const PageNeeds& needs) {
  Bytes room = needs.room;
  std::vector<const PagedBlock*> candidates;
  for (const PagedBlock& block : blocks) {
    if (!block.movable) continue;
    if (block.in_hbm) room += block.size;
    candidates.push_back(&block);
  }
  std::sort(candidates.begin(), candidates.end(), [](const PagedBlock* a, const PagedBlock* b) {
    return a->stays != b->stays ? a->stays : used_later(b, a);
  });
  Misplaced found;
  bool full = false;  // what is used later takes no room before what is used sooner
  for (const PagedBlock* const block : candidates) {
    const bool wanted = block->stays || next_of(*block) < needs.uses_ahead;
    full = full || (wanted && block->size > room);
    if (!full && (wanted || block->in_hbm) && block->size <= room) {
      room -= block->size;
      if (!block->in_hbm) found.back.push_back(block);
    } else if (block->in_hbm) {
      found.out.push_back(block);
    }
  }
  sort_by_leaving(found.out);
  std::sort(found.back.begin(), found.back.end(),
            [](const PagedBlock* a, const PagedBlock* b) { return next_of(*a) < next_of(*b); });
  return found;
}

}  // namespace

PagePlan plan_pages(std::span<const PagedBlock> blocks, const PageNeeds& needs) {
  const Misplaced found = misplaced(blocks, needs);
  PagePlan plan;
  std::size_t next_out = 0;
  Bytes room = needs.room, coming;
  for (const PagedBlock* const block : found.back) {
    if (coming + block->size > needs.bytes_ahead && coming > 0_B) break;
    while (room < block->size && next_out < found.out.size()) {
      room += found.out[next_out]->size;
      plan.to_ddr.push_back(found.out[next_out++]->at);
    }
    if (room < block->size) break;
    plan.to_hbm.push_back(block->at);
    plan.behind.push_back(plan.to_ddr.size());
    room -= block->size;
    coming += block->size;
  }
  return plan;
}

std::vector<Address> make_room(std::span<const PagedBlock> blocks, Bytes room, Bytes size,
                               std::span<const Address> spared) {
  // First what should be in DDR.
  std::vector<const PagedBlock*> leave =
      misplaced(blocks, {.room = room, .uses_ahead = kNever, .bytes_ahead = {}}).out;
  for (const PagedBlock* const block : leavers(blocks)) {
    if (std::find(leave.begin(), leave.end(), block) == leave.end()) leave.push_back(block);
  }
  std::vector<Address> out;
  for (const PagedBlock* const block : leave) {
    if (room >= size) break;
    if (std::find(spared.begin(), spared.end(), block->at) != spared.end()) continue;
    out.push_back(block->at);
    room += block->size;
  }
  if (room < size) out.clear();
  return out;
}

}  // namespace terrace
