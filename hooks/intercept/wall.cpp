#include "hooks/intercept/wall.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <thread>

#include "hooks/intercept/hook_settings.hpp"
#include "hooks/intercept/notice.hpp"
#include "runtime/errno_kept.hpp"
#include "runtime/metrics.hpp"
#include "runtime/thread_signals.hpp"

namespace terrace::hooks {
namespace {

constinit Wall the_wall;

// A guest waits no longer for a daemon that doesn't answer.
constexpr std::chrono::milliseconds kPatience{2000};
// And no longer for others to make room than the daemon waits for their answer.
constexpr std::chrono::seconds kRoomPatience{10};
// After the daemon has asked for less, what it has taken is not counted on for so long.
constexpr std::chrono::seconds kCeilingHolds{5};
// How long the device's books are taken at their word.
constexpr std::chrono::milliseconds kBooksHold{250};
// What a lease grows by at least: a share of the budget, so that a job asks the daemon seldom.
constexpr std::uint64_t kStepShare = 64;

}  // namespace

Wall& wall() noexcept { return the_wall; }

// True.
bool Wall::note_peak(Account& account, std::uint64_t now) noexcept {
  std::uint64_t peak = account.peak.load(std::memory_order_relaxed);
  while (now > peak && !account.peak.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
  return true;
}

bool Wall::charge(int device, Bytes bytes, Reclaim reclaim) noexcept {
  if (device < 0 || device >= kMostDevices) return true;
  Account& account = accounts_[static_cast<std::size_t>(device)];
  const std::uint64_t now = account.charged.fetch_add(bytes.count()) + bytes.count();
  if (now <= account.limit.load()) return note_peak(account, now);
  account.charged.fetch_sub(bytes.count());
  const ErrnoKept kept;
  try {
    bool charged = grow(account, device, bytes);
    if (reclaim == Reclaim::kNot) return charged;  // the caller may hold locks
    if (open_books_if_wanted() && !charged) charged = grow(account, device, bytes);
    if (!charged && others_make_room(account, bytes)) charged = grow(account, device, bytes);
    if (charged || source_.reclaim == nullptr) return charged;
    return source_.reclaim(device, bytes) > 0_B && grow(account, device, bytes);
  } catch (...) {  // no memory for our own notes: the driver decides
    account.charged.fetch_add(bytes.count());
    return true;
  }
}

// Whether it did. They are wanted under the account's lock, and opened without. Who allocates meanwhile does
// not wait: it may be for him that the loader's lock is held.
bool Wall::open_books_if_wanted() {
  Books wanted = Books::kWanted;
  if (books_.load(std::memory_order_relaxed) != wanted || source_.open_books == nullptr) return false;
  if (!books_.compare_exchange_strong(wanted, Books::kOpening)) return false;
  source_.open_books();
  books_.store(Books::kOpen, std::memory_order_release);
  return true;
}

bool Wall::grow(Account& account, int device, Bytes bytes) {
  const std::lock_guard lock(account.mutex);
  if (stands_aside()) {
    account.charged.fetch_add(bytes.count());
    return true;
  }
  if (account.lease == nullptr && !account.unknown) account.unknown = !open(account, device);
  if (account.unknown || switched_off(device)) {
    account.charged.fetch_add(bytes.count());
    return true;
  }
  Lease& lease = *account.lease;
  take_grants(lease);
  measure_context(account, device);
  publish(account);
  const Bytes needed = Bytes(account.charged.load()) + lease.context + bytes;
  // No device has so much: the driver says so itself.
  const bool absurd = bytes > lease.total;
  if (!absurd && needed > lease.lease) {
    if (needed > lease.budget) return false;
    const Bytes step = round_up(std::max(needed - lease.lease, lease.budget / kStepShare), 1_MiB);
    obtain(lease, std::min(step, lease.budget - lease.lease));
    publish(account);
  }
  const std::uint64_t now = account.charged.fetch_add(bytes.count()) + bytes.count();
  if (absurd || now <= account.limit.load()) return note_peak(account, now);
  account.charged.fetch_sub(bytes.count());
  return false;
}

// What the daemon grants of `wanted`. Without one the policy alone decides.
void Wall::obtain(Lease& lease, Bytes wanted) {
  if (lease.led) return;
  if (lease.link != nullptr && lease.link->request(TierId::kHbm, wanted)) return take_grants(lease);
  lease.lease += wanted;
}

void Wall::take_grants(Lease& lease) {
  if (lease.link == nullptr || lease.led) return;
  lease.lease = std::max(lease.lease, std::min(lease.link->lease(TierId::kHbm), lease.budget));
}

bool Wall::others_make_room(Account& account, Bytes bytes) {
  const std::lock_guard one_at_a_time(account.others_mutex);
  DaemonLink* link = nullptr;
  Bytes before, missing;
  {
    const std::lock_guard lock(account.mutex);
    if (account.lease == nullptr || account.lease->led || account.lease->link == nullptr) return false;
    const Lease& lease = *account.lease;
    const Bytes needed = Bytes(account.charged.load()) + lease.context + bytes;
    if (needed > lease.budget) return false;
    if (needed <= lease.lease) return true;
    link = lease.link.get();
    before = lease.lease;
    missing = std::min(std::max(needed - before, lease.budget / kStepShare), lease.budget - before);
  }
  (void)link->request_and_wait(TierId::kHbm, missing, kRoomPatience);
  const std::lock_guard lock(account.mutex);
  Lease& lease = *account.lease;
  if (lease.led) {  // by now somebody else leases
    link->release(TierId::kHbm, link->lease(TierId::kHbm));
    return true;
  }
  take_grants(lease);
  publish(account);
  return lease.lease > before;
}

bool Wall::open(Account& account, int device) {
  if (source_.facts == nullptr) return false;
  auto facts = source_.facts(device);
  if (!facts) return false;
  const Bytes budget = hbm_limit(hook_settings(), facts->total);
  if (budget == 0_B) {
    say_once(Notice::kNoBudget, "hbm.reserve leaves nothing of the device's " + format_bytes(facts->total) +
                                    ": its memory is not limited; give hbm.budget as a size");
    return false;
  }
  auto lease = std::make_unique<Lease>();
  lease->device = std::move(facts->name);
  lease->total = facts->total;
  lease->budget = budget;
  account.lease = lease.release();
  join_daemon(account, device, *account.lease);
  metrics().add<Metric::kBudgetBytes>(TierId::kHbm, budget);
  return true;
}

void Wall::join_daemon(Account& account, int device, Lease& lease) {
  DaemonLink::Options options = DaemonLink::options_from_environment();
  if (options.socket.empty()) return;
  auto page = SharedPage::create(options.job);
  if (!page) return;  // counting goes on in the private page
  lease.page = *std::move(page);
  options.page_fd = lease.page->fd();
  options.device = lease.device;
  options.capacity = lease.total;
  options.patience = kPatience;
  options.link_time = link_time(device);
  options.holdings = [&account] {
    DaemonLink::Holdings held{};
    held[static_cast<std::size_t>(TierId::kHbm)] = Bytes(account.charged.load());
    return held;
  };
  // The link's own thread goes on meanwhile: what leaves the device takes as long as the bus takes.
  options.on_shrink = [this, &account, device](const DaemonLink::Ask& ask) noexcept {
    try {
      const SignalsBlocked blocked;
      std::thread([this, &account, device, ask] { hold_less(account, device, ask); }).detach();
    } catch (...) {  // no thread: the daemon takes the process for deaf
    }
  };
  auto link = DaemonLink::start(std::move(options));
  if (!link) return;
  lease.link = *std::move(link);
  account.link.store(lease.link.get(), std::memory_order_release);
  // The counts of a process are in the page of its first device.
  if (!page_attached_.exchange(true)) attach_metrics(lease.page->metrics());
}

void Wall::hold_less(Account& account, int device, const DaemonLink::Ask& ask) noexcept try {
  const bool hbm = ask.tier == TierId::kHbm;  // of what is pinned nothing can be given
  Bytes excess;
  {
    const std::lock_guard lock(account.mutex);  // it is held while the link is being made
    Lease& lease = *account.lease;
    if (hbm && !lease.led) {  // else the daemon asks whoever leads
      lease.ceiling = ask.target;
      lease.ceiling_ends = steady_clock().now() + kCeilingHolds;
      lease.comes_down = true;
      excess = saturating_sub(Bytes(account.charged.load()) + lease.context, ask.target);
    }
  }
  if (excess > 0_B && source_.reclaim != nullptr) (void)source_.reclaim(device, excess);
  const std::lock_guard lock(account.mutex);
  Lease& lease = *account.lease;
  take_grants(lease);
  const Bytes before = lease.lease;
  lease.comes_down = false;
  if (hbm && !lease.led) {
    lease.lease = std::min(before, std::max(ask.target, Bytes(account.charged.load()) + lease.context));
    publish(account);
    // A charge that has come in between has seen the old limit, or is seen here.
    lease.lease = std::min(before, std::max(lease.lease, Bytes(account.charged.load()) + lease.context));
    publish(account);
  }
  if (lease.link != nullptr) lease.link->answer(ask, before - lease.lease);
} catch (...) {  // the daemon takes the process for deaf
}

void Wall::measure_context(Account& account, int device) {
  const auto facts = source_.facts(device);
  if (!facts || !facts->free) return;
  const Bytes others =
      saturating_sub(saturating_sub(facts->total, *facts->free), Bytes(account.charged.load()));
  account.lease->context = others <= kMostContextBytes ? others : context_beside_others(account, *facts);
}

// A charge comes before its memory and goes after it: what the books have beside the most that was charged
// while they were read is not too much, and the most of the last looks is nearest.
Bytes Wall::context_beside_others(Account& account, const DeviceFacts& facts) {
  if (source_.held == nullptr) return kMostContextBytes;
  if (books_.load(std::memory_order_acquire) != Books::kOpen) {
    Books closed = Books::kClosed;
    books_.compare_exchange_strong(closed, Books::kWanted);
    return kMostContextBytes;
  }
  Lease& lease = *account.lease;
  const Nanoseconds now = steady_clock().now();
  if (now >= lease.told_until) {
    lease.told_until = now + kBooksHold;
    const Bytes before(account.charged.load());
    const auto held = source_.held(facts);
    const Bytes charged = std::max(before, Bytes(account.charged.load()));
    // Far less than was charged: of another process, whose number is the same elsewhere.
    if (held && *held >= charged / 2)
      lease.told_context[lease.looks++ % lease.told_context.size()] = saturating_sub(*held, charged);
  }
  const Bytes told = *std::max_element(lease.told_context.begin(), lease.told_context.end());
  return told > 0_B ? std::min(told, kMostContextBytes) : kMostContextBytes;
}

void Wall::publish(Account& account) {
  account.limit.store(saturating_sub(account.lease->lease, account.lease->context).count());
}

void Wall::count_refusal(int device, Bytes bytes) noexcept try {
  if (device < 0 || device >= kMostDevices) return;
  Account& account = accounts_[static_cast<std::size_t>(device)];
  const ErrnoKept kept;
  account.refusals.fetch_add(1, std::memory_order_relaxed);
  metrics().add<Metric::kRefusedAllocations>(1);
  metrics().add<Metric::kRefusedBytes>(bytes);
  const std::lock_guard lock(account.mutex);
  if (account.lease == nullptr) return;
  const Bytes held(account.charged.load());
  const Lease& lease = *account.lease;
  std::string line = format_bytes(bytes) + " of HBM refused: " + format_bytes(held) + " of " +
                     format_bytes(lease.budget) + " are in use";
  if (lease.lease < lease.budget && held + bytes + lease.context <= lease.budget)
    line += ", and the daemon has no more to lease: `terrace status` lists who holds it";
  else
    line += ", and " + format_bytes(lease.context) + " by the driver; a larger hbm.budget leaves more room";
  say_once(Notice::kRefused, line);
} catch (...) {  // no memory for a line
}

void Wall::refund(int device, Bytes bytes) noexcept {
  if (device < 0 || device >= kMostDevices) return;
  Account& account = accounts_[static_cast<std::size_t>(device)];
  const std::uint64_t now = account.charged.fetch_sub(bytes.count()) - bytes.count();
  // Most of the lease unused: others may have it.
  if (now < account.limit.load(std::memory_order_relaxed) / 2) give_back_excess(account);
}

void Wall::give_back_excess(Account& account) noexcept {
  const ErrnoKept kept;
  const std::unique_lock lock(account.mutex, std::try_to_lock);
  if (!lock || account.lease == nullptr || account.lease->link == nullptr) return;
  if (account.lease->led) return;
  Lease& lease = *account.lease;
  take_grants(lease);
  const Bytes step = std::max(lease.budget / kStepShare, 1_MiB);
  const Bytes kept_for_use = Bytes(account.charged.load()) + lease.context + step * 2;
  if (lease.lease < kept_for_use + step) return;
  const Bytes before = lease.lease;
  lease.lease = kept_for_use;
  publish(account);
  // A charge that has come in between has seen the old limit, or is seen here.
  if (Bytes(account.charged.load()) + lease.context > lease.lease) {
    lease.lease = before;
    publish(account);
    return;
  }
  try {
    lease.link->release(TierId::kHbm, before - lease.lease);
  } catch (...) {  // the daemon hears of it with the next one
  }
}

void Wall::forget(int device) noexcept {
  if (device < 0 || device >= kMostDevices) return;
  accounts_[static_cast<std::size_t>(device)].charged.store(0);
}

std::optional<Bytes> Wall::room(int device) noexcept {
  if (device < 0 || device >= kMostDevices) return std::nullopt;
  Account& account = accounts_[static_cast<std::size_t>(device)];
  try {
    const ErrnoKept kept;
    const std::lock_guard lock(account.mutex);
    if (account.lease == nullptr) return std::nullopt;
    const Lease& lease = *account.lease;
    const bool less = steady_clock().now() < lease.ceiling_ends;
    // What was leased stays usable, but not while it is being given back: nothing is to fill it again.
    const Bytes kept_lease = lease.comes_down ? 0_B : lease.lease;
    const Bytes most = less ? std::min(lease.budget, std::max(lease.ceiling, kept_lease)) : lease.budget;
    return saturating_sub(most, Bytes(account.charged.load()) + lease.context);
  } catch (...) {
    return std::nullopt;
  }
}

Bytes Wall::charged(int device) const noexcept {
  return device < 0 || device >= kMostDevices
             ? 0_B
             : Bytes(accounts_[static_cast<std::size_t>(device)].charged.load());
}

Bytes Wall::used(int device) noexcept {
  if (device < 0 || device >= kMostDevices) return 0_B;
  Account& account = accounts_[static_cast<std::size_t>(device)];
  try {
    const ErrnoKept kept;
    const std::lock_guard lock(account.mutex);
    return Bytes(account.charged.load()) + (account.lease == nullptr ? 0_B : account.lease->context);
  } catch (...) {
    return charged(device);
  }
}

void Wall::set_limit(int device, Bytes limit) noexcept {
  if (device < 0 || device >= kMostDevices) return;
  Account& account = accounts_[static_cast<std::size_t>(device)];
  try {
    const ErrnoKept kept;
    const std::lock_guard lock(account.mutex);
    if (account.lease == nullptr && !account.unknown) account.unknown = !open(account, device);
    if (account.unknown || stands_aside()) return;
    Lease& lease = *account.lease;
    if (!lease.led && lease.link != nullptr)
      lease.link->release(TierId::kHbm, lease.link->lease(TierId::kHbm));
    lease.led = true;
    lease.lease = lease.budget = limit;
    publish(account);
    metrics().set<Metric::kBudgetBytes>(TierId::kHbm, 0_B);  // his page shows it
  } catch (...) {                                            // the wall stays where it is
  }
}

Bytes Wall::charged_peak(int device) const noexcept {
  return device < 0 || device >= kMostDevices
             ? 0_B
             : Bytes(accounts_[static_cast<std::size_t>(device)].peak.load());
}

std::uint64_t Wall::refusals(int device) const noexcept {
  return device < 0 || device >= kMostDevices
             ? 0
             : accounts_[static_cast<std::size_t>(device)].refusals.load(std::memory_order_relaxed);
}

Bytes Wall::budget(int device) noexcept {
  if (device < 0 || device >= kMostDevices) return {};
  Account& account = accounts_[static_cast<std::size_t>(device)];
  const std::lock_guard lock(account.mutex);
  return account.lease == nullptr ? 0_B : account.lease->budget;
}

Bytes Wall::context(int device) noexcept {
  if (device < 0 || device >= kMostDevices) return {};
  Account& account = accounts_[static_cast<std::size_t>(device)];
  const std::lock_guard lock(account.mutex);
  return account.lease == nullptr ? 0_B : account.lease->context;
}

Bytes Wall::lease_ddr(int device, Bytes wanted) noexcept try {
  if (device < 0 || device >= kMostDevices) return {};
  Account& account = accounts_[static_cast<std::size_t>(device)];
  const ErrnoKept kept;
  const std::lock_guard lender_lock(account.lender_mutex);
  if (account.lender.lend != nullptr) {
    const Bytes lent = std::min(Bytes(account.lender.lend(account.lender.self, wanted.count())), wanted);
    account.lent += lent;
    return lent;
  }
  DaemonLink* link = nullptr;
  {
    const std::lock_guard lock(account.mutex);
    if (account.lease == nullptr && !account.unknown) account.unknown = !open(account, device);
    if (!account.unknown) link = account.lease->link.get();
  }
  wanted = take_own_ddr(wanted);
  const Bytes granted = link == nullptr ? wanted : obtain_ddr(*link, account.own, wanted);
  own_ddr_.fetch_sub((wanted - granted).count());
  account.own += granted;
  return granted;
} catch (...) {
  return {};
}

// What the daemon grants of `wanted` on top of `own`, at once or when others have made room. Without one the
// policy alone decides.
Bytes Wall::obtain_ddr(DaemonLink& link, Bytes own, Bytes wanted) {
  if (wanted == 0_B) return wanted;
  const auto came = link.request_and_wait(TierId::kDdr, wanted, kRoomPatience);
  if (!came || *came >= wanted) return wanted;
  const Bytes granted = std::clamp(saturating_sub(link.lease(TierId::kDdr), own), *came, wanted);
  link.release(TierId::kDdr, saturating_sub(link.lease(TierId::kDdr), own + granted));
  return granted;
}

// Of the policy's DDR, which all devices share, as much of `wanted` as is left.
Bytes Wall::take_own_ddr(Bytes wanted) noexcept {
  const std::uint64_t most = hook_settings().ddr_budget.count();
  std::uint64_t now = own_ddr_.load();
  std::uint64_t taken = 0;
  do {
    taken = std::min(wanted.count(), most - std::min(most, now));
  } while (!own_ddr_.compare_exchange_weak(now, now + taken));
  return Bytes(taken);
}

// lender_mutex held.
void Wall::return_own_ddr(Account& account, Bytes bytes) {
  bytes = std::min(bytes, account.own);
  account.own -= bytes;
  own_ddr_.fetch_sub(bytes.count());
  const std::lock_guard lock(account.mutex);
  if (account.lease != nullptr && account.lease->link != nullptr)
    account.lease->link->release(TierId::kDdr, bytes);
}

void Wall::return_ddr(int device, Bytes bytes) noexcept try {
  if (device < 0 || device >= kMostDevices || bytes == 0_B) return;
  Account& account = accounts_[static_cast<std::size_t>(device)];
  const ErrnoKept kept;
  const std::lock_guard lock(account.lender_mutex);
  const Bytes lent = std::min(bytes, account.lent);
  account.lent -= lent;
  if (lent > 0_B) account.lender.take_back(account.lender.self, lent.count());
  if (bytes > lent) return_own_ddr(account, bytes - lent);
} catch (...) {
}

void Wall::set_lender(int device, const DdrLender& lender) noexcept try {
  if (device < 0 || device >= kMostDevices) return;
  Account& account = accounts_[static_cast<std::size_t>(device)];
  const std::lock_guard lock(account.lender_mutex);
  // What the last one lent is still out, and his lease is gone: it is the process's own until somebody lends
  // it.
  own_ddr_.fetch_add(account.lent.count());
  account.own += account.lent;
  account.lent = {};
  account.lender = lender;
  if (lender.lend == nullptr || account.own == 0_B) return;
  account.lent = std::min(Bytes(lender.lend(lender.self, account.own.count())), account.own);
  return_own_ddr(account, account.lent);
} catch (...) {
}

bool Wall::switched_off(int device) const noexcept {
  if (device < 0 || device >= kMostDevices) return false;
  const DaemonLink* link = accounts_[static_cast<std::size_t>(device)].link.load(std::memory_order_acquire);
  return link != nullptr && link->passthrough();
}

LinkTime* Wall::link_time(int device) noexcept {
  if (device < 0 || device >= kMostDevices) return nullptr;
  std::atomic<LinkTime*>& known = accounts_[static_cast<std::size_t>(device)].link_time;
  LinkTime* link = known.load(std::memory_order_acquire);
  if (link != nullptr) return link;
  auto* const made = new (std::nothrow) LinkTime;
  if (made == nullptr || known.compare_exchange_strong(link, made)) return made;
  delete made;
  return link;
}

// The parent's lease stays its own; what held its locks does not exist here.
void Wall::start_again_in_child() noexcept {
  for (Account& account : accounts_) new (&account) Account;
  page_attached_.store(false);
  own_ddr_.store(0);
  if (books_.load() != Books::kOpen)
    books_.store(Books::kClosed);  // whoever was opening them is the parent's
}

}  // namespace terrace::hooks
