// Traces on the bare device.
#include "allocator/replay/replayed_allocator.hpp"

#include <algorithm>
#include <unordered_map>

#include "allocator/replay/device_streams.hpp"

namespace terrace {
namespace {

class DeviceReplay final : public ReplayedAllocator {
 public:
  DeviceReplay(Device& device, Bytes budget) : device_(device), streams_(device), budget_(budget) {}
  ~DeviceReplay() override {
    for (const auto& [id, held] : blocks_) {
      // Asked twice; what is not unmapped then stays with the device.
      if (!give_back(held)) (void)give_back(held);
    }
  }

  const std::string& name() const override { return name_; }
  Status prepare(ReplayStream stream) override { return streams_.prepare(stream); }

  Status allocate(ReplayStream, const ReplayBlock& block, Pool pool) override {
    const Bytes size = round_up(std::max(block.size, 1_B), device_.info().granularity);
    if (reserved_ + size > budget_) {
      return out_of_budget(size, pool,
                           format_bytes(size) + " do not fit the budget of " + format_bytes(budget_));
    }
    auto address = device_.reserve(size);
    if (!address) return std::move(address).error();
    auto physical = device_.create_physical(size);
    if (!physical) {
      device_.release(*address, size);
      return std::move(physical).error();
    }
    if (Status mapped = device_.map(*address, *physical, size); !mapped) {
      device_.destroy_physical(*physical);
      device_.release(*address, size);
      return mapped;
    }
    reserved_ += size;
    blocks_.emplace(block.id, Held{*address, *physical, size});
    return {};
  }

  Status free(ReplayStream stream, const ReplayBlock& block) override {
    const auto held = blocks_.find(block.id);
    if (Status done = device_.synchronize(streams_.at(stream)); !done) return done;
    if (Status given = give_back(held->second); !given) return given;
    blocks_.erase(held);
    return {};
  }

  Bytes reserved() const override { return reserved_; }

 private:
  struct Held {
    Address address;
    Physical physical;
    Bytes size;
  };
  Status give_back(const Held& held) {
    if (Status unmapped = device_.unmap(held.address, held.size); !unmapped) return unmapped;
    device_.destroy_physical(held.physical);
    device_.release(held.address, held.size);
    reserved_ -= held.size;
    return {};
  }

  const std::string name_ = "baseline";
  Device& device_;
  DeviceStreams streams_;
  const Bytes budget_;
  Bytes reserved_;
  std::unordered_map<std::uint64_t, Held> blocks_;
};

}  // namespace

Result<std::unique_ptr<ReplayedAllocator>> replay_on_device(Device& device, Bytes budget) {
  return std::unique_ptr<ReplayedAllocator>(std::make_unique<DeviceReplay>(device, budget));
}

}  // namespace terrace
