#include "examples/moe_trainer/expert_store.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "examples/moe_trainer/failure.hpp"
#include "runtime/metrics.hpp"

namespace terrace::trainer {

namespace {

constexpr Bytes kPlaceAlignment = 256_B;
// What a router's word takes before one was asked for: a copy of a few bytes and a wait for it.
constexpr double kAskingSeconds = 50e-6;

Bytes bytes_of_counts(std::size_t counts) { return Bytes(counts * sizeof(std::int32_t)); }

}  // namespace

// A layer stays where the share of all that lies up to it has room for it beside those that stay before it.
std::vector<StateTier> ExpertStore::spread(std::span<const Bytes> layers, Bytes resident) {
  const double all = static_cast<double>(std::accumulate(layers.begin(), layers.end(), 0_B).count());
  const double limit = std::min(all, static_cast<double>(resident.count()));
  std::vector<StateTier> tiers;
  double seen = 0, staying = 0;
  for (const Bytes layer : layers) {
    const auto bytes = static_cast<double>(layer.count());
    seen += bytes;
    const bool stays = limit == all || staying + bytes <= limit * (seen / all) * (1 + 1e-12);
    if (stays) staying += bytes;
    tiers.push_back(stays ? StateTier::kHbm : StateTier::kDdr);
  }
  return tiers;
}

ExpertStore::ExpertStore(Memory& memory, std::vector<ParameterGroup*> groups, const Options& options)
    : memory_(memory),
      session_(memory.session()),
      options_(options),
      ahead_(static_cast<std::size_t>(options.prefetch)),
      asking_(session_.device()),
      load_(options.load == ExpertLoad::kRouter ? ExpertLoad::kRouter : ExpertLoad::kLayer) {
  Bytes largest, all;
  std::size_t counts = 0;
  for (const ParameterGroup* group : groups) {
    largest = std::max(largest, group->expert_block_bytes());
    all += group->expert_block_bytes();
    counts += group->expert_count() * static_cast<std::size_t>(options.micro_batches);
  }
  ring_ = require(session_.open_ring({.slot = largest,
                                      .slots = static_cast<int>(std::min(ahead_ + 1, groups.size())),
                                      .pool = Pool::kExpert,
                                      .user = session_.compute(),
                                      .reason = CopyReason::kExpert,
                                      .cold = options.cold}));
  const double share = static_cast<double>(options.resident.count()) / static_cast<double>(all.count());
  for (ParameterGroup* group : groups) {
    const auto bytes = static_cast<double>(group->expert_block_bytes().count());
    add(*group, Bytes(static_cast<std::uint64_t>(bytes * std::min(1.0, share))));
  }
  counts_.emplace(session_.device(), bytes_of_counts(counts));
  std::memset(counts_->address(), 0, counts_->size().count());
  try {
    reader_ = require(session_.device().create_stream(StreamPriority::kNormal));
    for (Event* event : {&renewed_, &chosen_, &heard_}) *event = require(session_.device().create_event());
  } catch (...) {
    close();
    throw;
  }
  for (Layer& layer : layers_) layer.group->expert_store = this;
}

ExpertStore::~ExpertStore() { close(); }

void ExpertStore::close() {
  for (Layer& layer : layers_) layer.group->expert_store = nullptr;
  ring_.reset();
  Device& device = session_.device();
  if (reader_) (void)device.synchronize(*reader_);
  for (const Event event : {renewed_, chosen_, heard_}) {
    if (event != Event{}) device.destroy_event(event);
  }
  if (reader_) device.destroy_stream(*reader_);
}

void ExpertStore::add(ParameterGroup& group, Bytes resident) {
  const std::vector<SlotRing::PartRange> ranges = group.expert_ranges();
  std::vector<Bytes> part_bytes(group.expert_count());
  for (const SlotRing::PartRange& range : ranges) part_bytes[range.part] += range.size;
  const Bytes place = round_up(*std::max_element(part_bytes.begin(), part_bytes.end()), kPlaceAlignment);
  const std::size_t places = std::min<std::size_t>(part_bytes.size(), resident / place);
  layers_.push_back(
      {.group = &group,
       .item = ring_->add_block(group.expert_block_bytes(), ranges),
       .part_bytes = part_bytes,
       .kept = places > 0 ? memory_.block(place * places, Pool::kExpert) : nullptr,
       .place_bytes = place,
       .hot = HotSet(part_bytes.size(), places),
       .fired = std::vector<SlotRing::PartSet>(static_cast<std::size_t>(options_.micro_batches)),
       .counts_at = 0_B});
  Layer& layer = layers_.back();
  if (layers_.size() > 1) {
    const Layer& before = layers_.end()[-2];
    layer.counts_at = before.counts_at + bytes_of_counts(before.part_bytes.size() * before.fired.size());
  }
  for (std::size_t i = 0; i < places; ++i) keep(layer, i, layer.hot.places()[i]);
  if (group.cold_experts() == nullptr) return;
  for (std::uint32_t part = 0; part < part_bytes.size(); ++part) {
    std::vector<TierBlock> cold = group.cold_experts()->blocks_of(part);
    if (!cold.empty()) ring_->settle_on_tier(layer.item, part, std::move(cold));
  }
}

void ExpertStore::keep(const Layer& layer, std::size_t place, std::uint32_t part) {
  require(ring_->keep(layer.item, part, layer.kept->address + (layer.place_bytes * place).count()));
}

std::size_t ExpertStore::place_of(const ParameterGroup& group) const {
  const auto found = std::find_if(layers_.begin(), layers_.end(),
                                  [&group](const Layer& layer) { return layer.group == &group; });
  return static_cast<std::size_t>(found - layers_.begin());
}

// What is used from a place on: so many layers that way, and back again where the way ends.
std::vector<SlotRing::ItemId> ExpertStore::from(std::size_t place, Way way) const {
  const auto last = static_cast<std::ptrdiff_t>(layers_.size()) - 1;
  std::ptrdiff_t step = way == Way::kForward ? 1 : -1;
  auto at = static_cast<std::ptrdiff_t>(place);
  std::vector<SlotRing::ItemId> next = {layers_[place].item};
  while (next.size() < std::min(ahead_ + 1, layers_.size())) {
    if (at + step < 0 || at + step > last) {
      step = -step;
      at = static_cast<std::ptrdiff_t>(place);  // those passed on the way here come first again
      if (at + step < 0 || at + step > last) break;
    }
    at += step;
    const SlotRing::ItemId item = layers_[static_cast<std::size_t>(at)].item;
    if (std::find(next.begin(), next.end(), item) == next.end()) next.push_back(item);
  }
  for (const Layer& layer : layers_) {
    if (layer.awaits_renewal) std::erase(next, layer.item);
  }
  return next;
}

// A stream of its own brings them: what the compute stream has to do next does not wait for the link.
void ExpertStore::routed(const ParameterGroup& group, const Walk& walk, const std::int32_t* counts) {
  if (!walk.trains && load_ == ExpertLoad::kLayer) return;
  const Layer& layer = layers_[place_of(group)];
  const Address to = counts_->address() + counts_at(layer, walk.micro_batch).count();
  Device& device = session_.device();
  require(device.record(session_.compute(), chosen_));
  require(device.wait(*reader_, chosen_));
  require(device.copy(*reader_, Direction::kD2H, to, reinterpret_cast<const std::byte*>(counts),
                      bytes_of_counts(layer.part_bytes.size())));
  require(device.record(*reader_, heard_));
}

std::span<const std::int32_t> ExpertStore::counts_of(const Layer& layer, std::uint32_t micro_batch) const {
  const std::uint64_t first = counts_at(layer, micro_batch).count() / sizeof(std::int32_t);
  return counts_->as<const std::int32_t>().subspan(first, layer.part_bytes.size());
}

Bytes ExpertStore::counts_at(const Layer& layer, std::uint32_t micro_batch) {
  return layer.counts_at + bytes_of_counts(layer.part_bytes.size() * micro_batch);
}

// The host waits, and the compute stream with it once it has done what it was given.
void ExpertStore::hear_router(Layer& layer, std::uint32_t micro_batch) {
  Device& device = session_.device();
  require(asking_.around(session_.compute(), [&] { return device.synchronize(heard_); }));
  const std::span<const std::int32_t> counts = counts_of(layer, micro_batch);
  SlotRing::PartSet& fired = layer.fired[micro_batch];
  fired.resize(counts.size());
  std::transform(counts.begin(), counts.end(), fired.begin(), [](std::int32_t count) { return count > 0; });
}

// Has the ring know what is wanted of the layer, and of those that backward comes to next.
std::vector<SlotRing::ItemId> ExpertStore::ask_for(std::size_t place, const Walk& walk) {
  Layer& layer = layers_[place];
  if (load_ == ExpertLoad::kLayer) return from(place, walk.way);
  if (walk.way == Way::kForward) {
    hear_router(layer, walk.micro_batch);
    ring_->want(layer.item, layer.fired[walk.micro_batch]);
    return {layer.item};
  }
  std::vector<SlotRing::ItemId> next;
  for (std::size_t i = 0; i <= std::min(ahead_, place); ++i) {
    const Layer& one = layers_[place - i];
    ring_->want(one.item, one.fired[walk.micro_batch]);
    next.push_back(one.item);
  }
  return next;
}

void ExpertStore::acquire(const ParameterGroup& group, const Walk& walk) {
  require(failed_);
  const std::size_t place = place_of(group);
  const std::vector<SlotRing::ItemId> next = ask_for(place, walk);
  layers_[place].group->place_experts(require(ring_->acquire(next.front())).front());
  require(ring_->expect(next));
  metrics().add<Metric::kExpertUses>(load_ == ExpertLoad::kLayer ? ExpertWord::kLayer : ExpertWord::kRouter,
                                     1);
  collect_stalls();
}

void ExpertStore::collect_stalls() {
  const double late = ring_->collect_waits(), asked = asking_.collect();
  session_.count_stall(StallReason::kExpertLate, late);
  session_.count_stall(StallReason::kRouterWord, asked);
  stalled_ += late;
  asked_ += asked;
}

void ExpertStore::release(const ParameterGroup& group) noexcept {
  const std::size_t place = place_of(group);
  layers_[place].group->place_experts(nullptr);
  Status released = ring_->release(layers_[place].item, SlotRing::Use::kRead);
  if (failed_) failed_ = std::move(released);
}

void ExpertStore::begin_step() {
  stalled_ = asked_ = 0;
  step_began_ = std::chrono::steady_clock::now();
}

void ExpertStore::end_step() {
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - step_began_;
  require(session_.device().synchronize(*reader_));
  collect_stalls();
  cold_ = fired_ = 0_B;
  for (Layer& layer : layers_) count_uses(layer);
  const double share =
      cold_ > 0_B ? static_cast<double>(fired_.count()) / static_cast<double>(cold_.count()) : 1;
  const double computed = std::max(0.0, taken.count() - stalled_ - asked_);
  const auto fade = [this](double& value, double now) {
    value = steps_ < 2 ? now : (value + now) / 2;  // the first step pays for what is done once
  };
  fade(fired_share_, share);
  fade(compute_seconds_, computed);
  if (load_ == ExpertLoad::kRouter)
    asking_seconds_ = asking_seconds_ > 0 ? (asking_seconds_ + asked_) / 2 : asked_;
  ++steps_;
  if (options_.load != ExpertLoad::kAuto || steps_ < 2) return;
  if (const auto now = costs()) load_by(choose_load(*now, load_));
}

// Tokens of the step by expert; the hottest stay.
void ExpertStore::count_uses(Layer& layer) {
  std::vector<std::int64_t> uses(layer.part_bytes.size());
  for (std::uint32_t i = 0; i < layer.fired.size(); ++i) {
    const std::span<const std::int32_t> counts = counts_of(layer, i);
    for (std::uint32_t part = 0; part < uses.size(); ++part) {
      uses[part] += counts[part];
      if (layer.hot.has_place(part)) continue;
      cold_ += layer.part_bytes[part];
      if (counts[part] > 0) fired_ += layer.part_bytes[part];
    }
  }
  for (const HotSet::Change& change : layer.hot.end_step(uses)) {
    require(ring_->keep(layer.item, change.leaves, nullptr));
    keep(layer, change.place, change.comes);
  }
}

std::optional<LoadCosts> ExpertStore::costs() const {
  const SlotRing::Counters& moved = ring_->counters();
  if (moved.timed_seconds <= 0) return std::nullopt;
  const auto asked = static_cast<double>(layers_.size()) * static_cast<double>(options_.micro_batches);
  return LoadCosts{.forward_seconds = compute_seconds_ * options_.forward_share,
                   .backward_seconds = compute_seconds_ * (1 - options_.forward_share),
                   .asking_seconds = asking_seconds_ > 0 ? asking_seconds_ : asked * kAskingSeconds,
                   .all = cold_,
                   .fired_share = fired_share_,
                   .bytes_per_second = static_cast<double>(moved.timed.count()) / moved.timed_seconds};
}

void ExpertStore::load_by(ExpertLoad load) {
  if (load == load_) return;
  load_ = load;
  if (load == ExpertLoad::kRouter) return;
  for (const Layer& layer : layers_) {
    ring_->want(layer.item, SlotRing::PartSet(layer.part_bytes.size(), true));
  }
}

void ExpertStore::renew() {
  require(session_.device().record(session_.compute(), renewed_));
  for (const Layer& layer : layers_) ring_->renew_behind(layer.item, renewed_);
}

// What the next step begins with is on its way at once.
void ExpertStore::renew_behind(const ParameterGroup& group, Event event) {
  const std::size_t place = place_of(group);
  layers_[place].awaits_renewal = false;
  const SlotRing::ItemId item = layers_[place].item;
  ring_->renew_behind(item, event, SlotRing::Kept::kRenewed);
  if (load_ == ExpertLoad::kLayer && place <= ahead_) require(ring_->expect({&item, 1}));
}

void ExpertStore::renew_kept(const ParameterGroup& group, Stream stream, const ExpertNumbers& numbers) {
  const Layer& layer = layers_[place_of(group)];
  const auto each = static_cast<std::uint64_t>(group.bytes_of_expert_number());
  const auto first = static_cast<std::uint64_t>(numbers.first) * each;
  const std::uint64_t end = first + static_cast<std::uint64_t>(numbers.count) * each;
  std::vector<Transfer> transfers;
  std::vector<std::uint64_t> behind(layer.part_bytes.size());  // of a part, the bytes of its ranges before
  for (const SlotRing::PartRange& range : group.expert_ranges()) {
    const std::uint64_t from = std::max(first, range.at.count());
    const std::uint64_t to = std::min(end, (range.at + range.size).count());
    const Address kept = ring_->kept_at(layer.item, range.part);
    if (from < to && kept != nullptr) {
      transfers.push_back({kept + behind[range.part] + (from - range.at.count()), numbers.at + (from - first),
                           Bytes(to - from)});
    }
    behind[range.part] += range.size.count();
  }
  if (transfers.empty()) return;
  require(ring_->order_behind_kept(stream, layer.item));
  require(session_.device().copy_batch(stream, Direction::kD2D, transfers));
}

void ExpertStore::drain() {
  require(ring_->drain());
  for (const Layer& layer : layers_) require(ring_->forget(layer.item));
}

ExpertStore::Report ExpertStore::report() const {
  Report report{.load = load_, .fired_share = fired_share_, .break_even_share = {}, .kept = {}};
  if (const auto now = costs()) report.break_even_share = break_even_share(*now);
  for (const Layer& layer : layers_) {
    if (layer.kept != nullptr) report.kept += layer.kept->size;
  }
  return report;
}

}  // namespace terrace::trainer
