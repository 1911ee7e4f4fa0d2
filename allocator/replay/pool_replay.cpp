// Traces on HbmPool.
#include <unordered_map>

#include "allocator/hbm_pool.hpp"
#include "allocator/replay/device_streams.hpp"
#include "allocator/replay/replayed_allocator.hpp"

namespace terrace {
namespace {

class PoolReplay final : public ReplayedAllocator {
 public:
  PoolReplay(Device& device, std::unique_ptr<HbmPool> pool) : streams_(device), pool_(std::move(pool)) {}
  ~PoolReplay() override {
    for (const auto& [id, block] : blocks_) (void)pool_->free_completed(block);  // nothing was launched
  }

  const std::string& name() const override { return name_; }
  Status prepare(ReplayStream stream) override { return streams_.prepare(stream); }

  Status allocate(ReplayStream stream, const ReplayBlock& block, Pool pool) override {
    auto allocated = pool_->allocate(streams_.at(stream), block.size, pool);
    if (!allocated) return std::move(allocated).error();
    blocks_.emplace(block.id, *allocated);
    return {};
  }

  Status free(ReplayStream stream, const ReplayBlock& block) override {
    const auto held = blocks_.find(block.id);
    if (Status freed = pool_->free(streams_.at(stream), held->second); !freed) return freed;
    blocks_.erase(held);
    return {};
  }

  Bytes reserved() const override { return pool_->usage().mapped; }

 private:
  const std::string name_ = "terrace";
  DeviceStreams streams_;  // outlive the pool, which orders blocks behind them
  std::unique_ptr<HbmPool> pool_;
  std::unordered_map<std::uint64_t, Block> blocks_;
};

}  // namespace

Result<std::unique_ptr<ReplayedAllocator>> replay_on_pool(Device& device, Bytes budget) {
  auto pool = HbmPool::create(device, {.budget = budget, .chunk = {}});
  if (!pool) return std::move(pool).error();
  return std::unique_ptr<ReplayedAllocator>(std::make_unique<PoolReplay>(device, std::move(*pool)));
}

}  // namespace terrace
