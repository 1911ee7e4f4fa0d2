#include "allocator/pinned_extents.hpp"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "runtime/assert.hpp"
#include "runtime/clock.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

constexpr Bytes kHugePage = 2_MiB;
constexpr Bytes kLargestGrowth = 4_GiB;
constexpr std::uint64_t kGrowthShare = 8;  // of what is mapped: what is pinned ahead is at most an eighth
// A block larger than this part of a slab has one of its own: the tail it left might fit nobody.
constexpr std::uint64_t kLargeShare = 4;

std::uint64_t offset_of(const std::byte* address) { return reinterpret_cast<std::uintptr_t>(address); }
Address address_of(std::uint64_t offset) { return reinterpret_cast<Address>(offset); }

}  // namespace

PinnedExtents::PinnedExtents(Device& device, Options options)
    : device_(device), options_(std::move(options)) {}

PinnedExtents::~PinnedExtents() {
  const std::lock_guard growth(growth_);
  std::vector<std::unique_ptr<PinnedSlab>> slabs;
  {
    const std::lock_guard lock(mutex_);
    join_kept();
    slabs = detach_free_slabs(mapped_);
    TERRACE_CHECK(slabs_.empty(), "every range is given back before its slabs go");
  }
  release(std::move(slabs));
}

PinnedExtents::Slabs::const_iterator PinnedExtents::slab_at(const std::byte* address) const {
  auto slab = slabs_.upper_bound(address);
  if (slab == slabs_.begin()) return slabs_.end();
  --slab;
  return address < slab->second.memory->end() ? slab : slabs_.end();
}

PinnedExtents::Slab& PinnedExtents::slab_of(const std::byte* address) {
  const auto slab = slab_at(address);
  TERRACE_CHECK(slab != slabs_.end(), "a range lies in a slab");
  return slabs_.find(slab->first)->second;
}

std::optional<Address> PinnedExtents::best_fit(Bytes span) {
  const auto fit = free_.best_fit(span);
  if (!fit) return std::nullopt;
  (void)free_.take(fit->offset, span);
  const Address address = address_of(fit->offset);
  slab_of(address).free -= span;
  return address;
}

void PinnedExtents::join_kept() {
  for (auto& [span, addresses] : kept_) {
    for (const Address address : addresses) {
      free_.insert({offset_of(address), Bytes(span)});
      slab_of(address).free += Bytes(span);
    }
  }
  kept_.clear();
}

std::optional<Address> PinnedExtents::take_free(Bytes span) {
  if (const auto same = kept_.find(span.count()); same != kept_.end() && !same->second.empty()) {
    const Address address = same->second.back();
    same->second.pop_back();
    return address;
  }
  if (const auto address = best_fit(span)) return address;
  if (kept_.empty()) return std::nullopt;
  join_kept();
  return best_fit(span);
}

Result<Address> PinnedExtents::take(Bytes span) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto address = take_free(span)) return *address;
  }
  const std::lock_guard growth(growth_);
  {
    // Somebody else may have grown or freed while this thread waited.
    const std::lock_guard lock(mutex_);
    if (const auto address = take_free(span)) return *address;
  }
  return grow(span);
}

void PinnedExtents::give(Address address, Bytes span) {
  const std::lock_guard lock(mutex_);
  kept_[span.count()].push_back(address);
}

// Largest first, until `enough` bytes are detached or none is left.
std::vector<std::unique_ptr<PinnedSlab>> PinnedExtents::detach_free_slabs(Bytes enough) {
  std::vector<Slabs::iterator> candidates;
  for (auto slab = slabs_.begin(); slab != slabs_.end(); ++slab) {
    if (slab->second.free == slab->second.memory->size()) candidates.push_back(slab);
  }
  std::sort(candidates.begin(), candidates.end(),
            [](const auto& a, const auto& b) { return a->second.memory->size() > b->second.memory->size(); });
  std::vector<std::unique_ptr<PinnedSlab>> detached;
  for (const auto& slab : candidates) {
    if (enough == 0_B) break;
    const Bytes size = slab->second.memory->size();
    enough = saturating_sub(enough, size);
    (void)free_.take(offset_of(slab->first), size);
    detached.push_back(std::move(slab->second.memory));
    slabs_.erase(slab);
  }
  return detached;
}

Bytes PinnedExtents::release(std::vector<std::unique_ptr<PinnedSlab>> slabs) {
  Bytes released;
  for (auto& slab : slabs) {
    const Bytes size = slab->size();
    slab.reset();
    options_.lease->release(size);
    released += size;
    const std::lock_guard lock(mutex_);
    mapped_ -= size;
  }
  return released;
}

Bytes PinnedExtents::trim(Until until) {
  const std::lock_guard growth(growth_);
  std::vector<std::unique_ptr<PinnedSlab>> slabs;
  {
    const std::lock_guard lock(mutex_);
    join_kept();
    slabs = detach_free_slabs(until == Until::kBudgetIsKept ? options_.lease->excess() : mapped_);
  }
  return release(std::move(slabs));
}

// What the next slab is charged: at least `span`, and more to grow ahead.
HostLease::Range PinnedExtents::wanted(Bytes span) const {
  const Bytes ahead = round_down(std::min(mapped() / kGrowthShare, kLargestGrowth), kHugePage);
  const Bytes shared = std::max(options_.least_slab, ahead);
  const Bytes most = span > shared / kLargeShare ? span : shared;
  const bool whole_pages = options_.slab.huge_pages == HugePages::kExplicit;
  return {.least = span, .most = whole_pages ? round_up(most, kHugePage) : most};
}

// Charges a slab of at least `span`; zero: there is no room, whatever is given up.
Bytes PinnedExtents::charge(Bytes span) {
  if (const Bytes charged = options_.lease->charge(wanted(span)); charged > 0_B) return charged;
  std::vector<std::unique_ptr<PinnedSlab>> slabs;
  {
    const std::lock_guard lock(mutex_);
    Bytes free;
    for (const auto& [base, slab] : slabs_) {
      if (slab.free == slab.memory->size()) free += slab.free;
    }
    if (options_.lease->room() + free < span) return {};
    slabs = detach_free_slabs(saturating_sub(span, options_.lease->room()));
  }
  release(std::move(slabs));
  return options_.lease->charge({.least = span, .most = span});
}

Result<std::unique_ptr<PinnedSlab>> PinnedExtents::new_slab(Bytes span) {
  if (span > options_.lease->budget())
    return out_of_budget(span, Pool::kScratch,
                         format_bytes(span) + " of pinned host memory are more than the budget");
  Bytes size = charge(span);
  if (size == 0_B)
    return out_of_budget(span, Pool::kScratch,
                         "no room for " + format_bytes(span) + " of pinned host memory");
  auto slab = PinnedSlab::create(device_, size, options_.slab);
  if (!slab && size > span) {
    // The system has no room to grow ahead; what is needed now may still fit.
    options_.lease->release(size - span);
    size = span;
    slab = PinnedSlab::create(device_, size, options_.slab);
  }
  if (!slab) options_.lease->release(size);
  return slab;
}

void PinnedExtents::note_pages(HugePages pages) {
  if (pages == options_.slab.huge_pages) return;
  metrics().add<Metric::kFaults>(FaultPoint::kHostMap, 1);
  if (std::exchange(said_, true)) return;
  const std::string line =
      "explicit huge pages were refused (vm.nr_hugepages sets 2 MiB pages aside); pinned memory takes "
      "transparent ones";
  if (options_.say) {
    options_.say(line);
  } else {
    std::fprintf(stderr, "terrace: %s\n", line.c_str());
  }
}

Result<Address> PinnedExtents::grow(Bytes span) {
  const Nanoseconds began = steady_clock().now();
  auto slab = new_slab(span);
  metrics().add<Metric::kPinSeconds>(steady_clock().now() - began);
  if (!slab) return std::move(slab).error();
  note_pages((*slab)->pages());
  const std::lock_guard lock(mutex_);
  const Address base = (*slab)->base();
  const Bytes size = (*slab)->size();
  metrics().add<Metric::kPinnedBytes>(size);
  mapped_ += size;
  mapped_peak_ = std::max(mapped_peak_, mapped_);
  slabs_.emplace(base, Slab{.memory = std::move(slab).value(), .free = size});
  free_.insert({offset_of(base), size});
  const auto address = best_fit(span);
  TERRACE_CHECK(address.has_value(), "a new slab has room for what it was made for");
  return *address;
}

bool PinnedExtents::contains(const std::byte* address) const {
  const std::lock_guard lock(mutex_);
  return slab_at(address) != slabs_.end();
}

Bytes PinnedExtents::mapped() const {
  const std::lock_guard lock(mutex_);
  return mapped_;
}

Bytes PinnedExtents::mapped_peak() const {
  const std::lock_guard lock(mutex_);
  return mapped_peak_;
}

void PinnedExtents::reset_peak() {
  const std::lock_guard lock(mutex_);
  mapped_peak_ = mapped_;
}

}  // namespace terrace
