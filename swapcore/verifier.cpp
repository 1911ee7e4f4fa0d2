#include "swapcore/verifier.hpp"

#include <pthread.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <system_error>
#include <utility>

#include "runtime/thread_signals.hpp"

namespace terrace {

struct Verifier::Check {
  std::span<const std::byte> bytes;
  std::optional<std::uint64_t> first;
  int looks_to_come = 0;
  bool same = true;
  bool forgotten = false;
};

namespace {
std::uint64_t look(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

// One number in sixteen, without a period that the blocks of a step could share.
bool sampled(std::uint64_t number) { return (number * 0x9E3779B97F4A7C15U) >> 60 == 0; }
}  // namespace

Verifier::~Verifier() {
  thread_.request_stop();
  changed_.notify_all();
}

void Verifier::note(Check& check, std::uint64_t seen) {
  if (!check.first) check.first = seen;
  check.same = check.same && *check.first == seen;
  --check.looks_to_come;
}

void Verifier::serve(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "terrace-verify");
  leave_signals_to_others();
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [this] { return !asked_.empty(); })) {
    under_way_ = std::move(asked_.front());
    asked_.pop_front();
    const bool wanted = !under_way_->forgotten;
    lock.unlock();
    const std::uint64_t seen = wanted ? look(under_way_->bytes) : 0;
    lock.lock();
    if (wanted) note(*under_way_, seen);
    under_way_.reset();
    changed_.notify_all();
  }
}

void Verifier::ask(const CheckRef& check) {
  if (!thread_.joinable()) {
    try {
      thread_ = std::jthread([this](const std::stop_token& stop) { serve(stop); });
    } catch (const std::system_error&) {
      ++check->looks_to_come;
      note(*check, look(check->bytes));
      return;
    }
  }
  {
    const std::lock_guard lock(mutex_);
    ++check->looks_to_come;
    asked_.push_back(check);
  }
  changed_.notify_all();
}

Verifier::CheckRef Verifier::arrived(std::span<const std::byte> bytes) {
  if (which_ == Verify::kOff) return nullptr;
  if (which_ == Verify::kSample && !sampled(blocks_++)) return nullptr;
  auto check = std::make_shared<Check>();
  check->bytes = bytes;
  ask(check);
  return check;
}

void Verifier::leaves(const CheckRef& check) { ask(check); }

bool Verifier::looked(const CheckRef& check) {
  const std::lock_guard lock(mutex_);
  return check->looks_to_come == 0;
}

bool Verifier::intact(const CheckRef& check) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&check] { return check->looks_to_come == 0; });
  return check->same;
}

void Verifier::forget(const CheckRef& check) {
  std::unique_lock lock(mutex_);
  check->forgotten = true;
  changed_.wait(lock, [this, &check] { return under_way_ != check; });
}

}  // namespace terrace
