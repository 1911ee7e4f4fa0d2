#include "allocator/host_handle_pool.hpp"

#include <algorithm>
#include <utility>

#include "runtime/assert.hpp"
#include "runtime/clock.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

constexpr std::byte kByHost{0x5a};
constexpr std::uint8_t kByDevice = 0xa5;

// Gives back what a trial of a node has made, whichever step fails.
struct Trial {
  Device& device;
  Bytes size;
  Address at = nullptr;
  std::optional<Physical> physical{};
  std::optional<Stream> stream{};
  bool mapped = false;

  explicit Trial(Device& d) : device(d), size(d.info().granularity) {}
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;
  ~Trial() {
    if (stream) device.destroy_stream(*stream);
    // Refused once, it may be let go the second time; a range that stays mapped can't be given back.
    if (mapped && !device.unmap(at, size).ok() && !device.unmap(at, size).ok()) return;
    if (physical) device.destroy_physical(*physical);
    if (at != nullptr) device.release(at, size);
  }
};

// Both ends of the memory: a node may serve one side and not the other.
Status write_and_read(Trial& trial) {
  const Bytes last = trial.size - 1_B;
  auto* bytes = const_cast<volatile std::byte*>(trial.at);
  bytes[0] = kByHost;
  bytes[last.count()] = kByHost;
  auto stream = trial.device.create_stream(StreamPriority::kNormal);
  if (!stream) return stream.error();
  trial.stream = *stream;
  if (Status filled = trial.device.fill(*stream, trial.at, kByDevice, last); !filled.ok()) return filled;
  if (Status done = trial.device.synchronize(*stream); !done.ok()) return done;
  if (bytes[0] == std::byte{kByDevice} && bytes[last.count()] == kByHost) return {};
  return Error{.code = Errc::kNotSupported, .text = "the host does not see what the device wrote"};
}

Status try_node(Device& device, int node) {
  Trial trial(device);
  auto at = device.reserve(trial.size);
  if (!at) return at.error();
  trial.at = *at;
  auto physical = device.create_host_physical(trial.size, node);
  if (!physical) return physical.error();
  trial.physical = *physical;
  if (Status mapped = device.map(trial.at, *physical, trial.size); !mapped.ok()) return mapped;
  trial.mapped = true;
  return write_and_read(trial);
}

}  // namespace

HostHandlePool::HostHandlePool(Device& device, Options options)
    : device_(device),
      lease_(std::move(options.lease)),
      chunk_(round_up(std::max(options.chunk, 1_B), device.info().granularity)),
      nodes_(std::move(options.nodes)) {}

Result<std::unique_ptr<HostHandlePool>> HostHandlePool::create(Device& device, Options options) {
  TERRACE_CHECK(options.lease != nullptr, "host handles are charged to a lease");
  if (!device.info().can.host_physical) {
    return Error{.code = Errc::kNotSupported,
                 .text = device.info().name +
                         " maps no host memory at a reserved address: spilled blocks "
                         "cannot keep their pointers"};
  }
  std::unique_ptr<HostHandlePool> pool(new HostHandlePool(device, std::move(options)));
  if (Status probed = pool->probe_nodes(); !probed.ok()) return probed.error();
  return pool;
}

Status HostHandlePool::probe_nodes() {
  const Bytes size = device_.info().granularity;
  if (!lease_->try_charge(size)) {
    return out_of_budget(size, Pool::kScratch,
                         "no room to try host memory: " + format_bytes(size) + " of the DDR budget of " +
                             format_bytes(lease_->budget()));
  }
  std::vector<int> working;
  std::optional<Error> why;
  for (const int node : nodes_) {
    const Status tried = try_node(device_, node);
    if (tried.ok()) {
      working.push_back(node);
    } else {
      why = tried.error();
    }
  }
  lease_->release(size);
  nodes_ = std::move(working);
  if (!nodes_.empty()) return {};
  return Error{.code = Errc::kNotSupported,
               .text = "no NUMA node serves memory that " + device_.info().name +
                       " can map: " + (why ? why->text : "none was named")};
}

HostHandlePool::~HostHandlePool() {
  TERRACE_CHECK(live_.empty(), "every handle is given back before its pool goes");
  trim(Until::kNothingIsKept);
}

std::vector<HostHandlePool::Handle> HostHandlePool::detach_kept(Bytes enough) {
  std::vector<Handle> detached;
  while (enough > 0_B && !kept_.empty()) {
    const auto largest = std::prev(kept_.end());
    const Handle handle = largest->second.back();
    largest->second.pop_back();
    if (largest->second.empty()) kept_.erase(largest);
    enough = saturating_sub(enough, handle.size);
    detached.push_back(handle);
  }
  return detached;
}

Bytes HostHandlePool::destroy(const std::vector<Handle>& handles) {
  Bytes destroyed;
  for (const Handle& handle : handles) {
    device_.destroy_physical(handle.physical);
    lease_->release(handle.size);
    destroyed += handle.size;
  }
  const std::lock_guard lock(mutex_);
  usage_.held -= destroyed;
  return destroyed;
}

bool HostHandlePool::charge(Bytes size) {
  if (lease_->try_charge(size)) return true;
  std::vector<Handle> handles;
  {
    const std::lock_guard lock(mutex_);
    const Bytes kept = usage_.held - usage_.live;
    if (lease_->room() + kept < size) return false;
    handles = detach_kept(saturating_sub(size, lease_->room()));
  }
  destroy(handles);
  return lease_->try_charge(size);
}

Result<HostHandlePool::Handle> HostHandlePool::create_on_a_node(Bytes size) {
  std::size_t first = 0;
  {
    const std::lock_guard lock(mutex_);
    first = turn_++;
  }
  std::optional<Error> why;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const int node = nodes_[(first + i) % nodes_.size()];
    const Nanoseconds began = steady_clock().now();
    auto physical = device_.create_host_physical(size, node);
    metrics().add<Metric::kPinSeconds>(steady_clock().now() - began);
    if (physical) {
      metrics().add<Metric::kPinnedBytes>(size);
      return Handle{.physical = *physical, .size = size, .node = node};
    }
    why = std::move(physical).error();
  }
  return *std::move(why);
}

Result<HostHandlePool::Handle> HostHandlePool::take(Bytes size) {
  if (size == 0_B) {
    return Error{.code = Errc::kInvalidArgument, .text = "a handle of no bytes; ask for at least one"};
  }
  const auto refused = [&] {
    return out_of_budget(size, Pool::kScratch,
                         format_bytes(size) + " of host memory do not fit: " + format_bytes(lease_->held()) +
                             " of the DDR budget of " + format_bytes(lease_->budget()) + " are held");
  };
  // Before rounding: rounding up what is absurd would wrap around.
  if (size > lease_->budget()) return refused();
  const Bytes whole = round_up(size, chunk_);
  {
    const std::lock_guard lock(mutex_);
    if (const auto same = kept_.find(whole); same != kept_.end()) {
      const Handle handle = same->second.back();
      same->second.pop_back();
      if (same->second.empty()) kept_.erase(same);
      live_.emplace(handle.physical, handle);
      usage_.live += whole;
      return handle;
    }
  }
  if (!charge(whole)) return refused();
  auto handle = create_on_a_node(whole);
  if (!handle) {
    lease_->release(whole);
    return handle;
  }
  const std::lock_guard lock(mutex_);
  live_.emplace(handle->physical, *handle);
  usage_.held += whole;
  usage_.live += whole;
  return handle;
}

Status HostHandlePool::give_back(const Handle& handle) {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(handle.physical);
  if (found == live_.end()) {
    return Error{.code = Errc::kInvalidArgument,
                 .text = "a handle of host memory was given back that is not in use here"};
  }
  const Handle known = found->second;
  live_.erase(found);
  usage_.live -= known.size;
  kept_[known.size].push_back(known);
  return {};
}

Bytes HostHandlePool::trim(Until until) {
  std::vector<Handle> handles;
  {
    const std::lock_guard lock(mutex_);
    handles = detach_kept(until == Until::kBudgetIsKept ? lease_->excess() : usage_.held);
  }
  return destroy(handles);
}

HostHandlePool::Usage HostHandlePool::usage() const {
  const std::lock_guard lock(mutex_);
  return usage_;
}

}  // namespace terrace
