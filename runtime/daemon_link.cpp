#include "runtime/daemon_link.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "runtime/link_time.hpp"
#include "runtime/metrics.hpp"
#include "runtime/shared_page.hpp"
#include "runtime/thread_signals.hpp"
#include "runtime/wire.hpp"

namespace terrace {
namespace {

using std::chrono::milliseconds;
using WallClock = std::chrono::steady_clock;

constexpr std::size_t kMaxWaiting = 64;  // callers that wait for an answer at the same time
constexpr milliseconds kStopCheck{50};   // longest time a stopping link goes on waiting for the daemon

// Descriptors that a forked child must close, so that the daemon sees the parent hang up. Fixed slots: the
// handler runs between fork and exec, where nothing may be allocated or locked.
constexpr std::size_t kMaxLinks = 16;
constinit std::array<std::atomic<int>, kMaxLinks> sockets_of_links{};  // fd + 1; 0: free
constinit std::atomic<std::uint32_t> forks{0};  // how many forks lie between the first process and this one

void close_in_child() {
  for (auto& slot : sockets_of_links) {
    const int fd = slot.exchange(0, std::memory_order_relaxed);
    if (fd > 0) ::close(fd - 1);
  }
  forks.fetch_add(1, std::memory_order_relaxed);
}

std::size_t index_of(TierId tier) { return static_cast<std::size_t>(tier); }

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

struct Question {
  LeaseRequest request;
  std::optional<Result<LeaseGrant>> answer;
};

enum class Saying : std::uint8_t { kNoDaemon, kWentAway, kRefused, kCount };

}  // namespace

struct DaemonLink::Impl {
  Options options;
  std::uint32_t owner = forks.load(std::memory_order_relaxed);
  OwnedFd wake{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  WireConnection connection;  // the link thread's, once it runs
  std::uint32_t sequence = 0;
  milliseconds pause{};
  WallClock::time_point next_attempt{};
  std::array<bool, static_cast<std::size_t>(Saying::kCount)> said{};
  std::size_t fork_slot = kMaxLinks;
  std::shared_ptr<LinkBoard> board;  // that options.link_time has a seat at

  std::atomic<bool> stopping{false};
  std::atomic<bool> connected{false};
  std::atomic<std::uint64_t> joins{0};
  std::array<std::atomic<std::uint64_t>, kTierCount> lease{};
  std::array<std::atomic<std::uint64_t>, kTierCount> budget{};
  std::atomic<bool> passthrough{false};

  std::mutex mutex;
  std::condition_variable answered;                    // a question, or what was kept of one
  std::deque<std::shared_ptr<Question>> questions;     // under mutex
  std::array<std::uint64_t, kTierCount> to_release{};  // under mutex: given back here, not yet told
  std::deque<ShrinkReply> replies;                     // under mutex: the same, as answers
  std::array<std::uint64_t, kTierCount> wish{};        // under mutex: the lease that kept requests come to
  std::array<bool, kTierCount> coming{};               // under mutex: others make room
  bool wishes_due = false;                             // the daemon does not know them
  std::thread thread;

  ~Impl() {
    forget_socket();
    leave_seat();
  }

  void say(Saying kind, const std::string& line) {
    bool& before = said[static_cast<std::size_t>(kind)];
    if (std::exchange(before, true)) return;
    if (options.say) {
      options.say(line);
      return;
    }
    const std::string whole = "terrace: " + line + "\n";
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, whole.data(), whole.size());
  }

  void remember_socket() {
    for (std::size_t i = 0; i < kMaxLinks && fork_slot == kMaxLinks; ++i) {
      int free = 0;
      if (sockets_of_links[i].compare_exchange_strong(free, connection.fd() + 1)) fork_slot = i;
    }
  }
  void forget_socket() {
    if (fork_slot < kMaxLinks) sockets_of_links[fork_slot].store(0);
    fork_slot = kMaxLinks;
  }

  // Without a seat the process's copies are limited by nobody.
  void take_seat(Envelope& welcome) {
    const std::size_t seat = std::get<Welcome>(welcome.message).link_seat;
    if (options.link_time == nullptr || !welcome.fd.valid() || seat == 0 || seat > LinkBoard::kSlots) return;
    auto opened = LinkBoard::open(std::move(welcome.fd));
    if (!opened) return;
    board = *std::move(opened);
    options.link_time->take_seat(board, seat - 1);
  }
  void leave_seat() {
    if (board != nullptr) options.link_time->leave_seat(std::exchange(board, nullptr).get());
  }

  // The connection is of no more use; what was granted stays granted.
  void hang_up() {
    forget_socket();
    leave_seat();
    connection.close();
    connected.store(false, std::memory_order_release);
    const std::lock_guard lock(mutex);
    coming = {};
    answered.notify_all();
  }

  void count(FaultPoint point) { metrics().add<Metric::kFaults>(point, 1); }

  Hello hello() {
    Hello hello;
    hello.pid = ::getpid();
    hello.job = WireText<64>(clean_job_name(options.job));
    hello.device = WireText<32>(options.device);
    hello.capacity = options.capacity.count();
    hello.run = options.run;
    hello.numa_node = options.numa_node;
    hello.course = passthrough.load(std::memory_order_relaxed) ? Course::kPassthrough : Course::kTiering;
    const Holdings held = options.holdings ? options.holdings() : Holdings{};
    const std::lock_guard lock(mutex);
    for (std::size_t tier = 0; tier < kTierCount; ++tier) {
      hello.held[tier] = std::max(held[tier].count(), lease[tier].load(std::memory_order_relaxed));
      to_release[tier] = 0;  // the daemon learns the lease as it is now
      coming[tier] = false;
    }
    replies.clear();
    return hello;
  }

  // What the daemon says of itself. Anything else is of another version's making, and ignored.
  void take_unasked(const Message& message) {
    if (const auto* grant = std::get_if<LeaseGrant>(&message)) {
      lease[grant->tier].fetch_add(grant->granted, std::memory_order_relaxed);
      const std::lock_guard lock(mutex);
      coming[grant->tier] = grant->coming != 0;
      answered.notify_all();
    } else if (const auto* shrink = std::get_if<ShrinkRequest>(&message)) {
      const Ask ask{static_cast<TierId>(shrink->tier), shrink->ask, Bytes(shrink->target),
                    milliseconds(shrink->patience_ms)};
      if (options.on_shrink) return options.on_shrink(ask);
      const std::lock_guard lock(mutex);
      replies.push_back({shrink->tier, 0, shrink->ask, 0});
    } else if (const auto* steer = std::get_if<Steer>(&message)) {
      passthrough.store(steer->course == Course::kPassthrough, std::memory_order_relaxed);
    }
  }

  // Sends and waits for the answer with the same sequence number. Errors: kTimeout, kCancelled (stopping),
  // kIo, kProtocol, and what a Refusal says; after each of them the connection is of no more use.
  Result<Envelope> exchange(const Message& message, int fd = -1) {
    const std::uint32_t mine = ++sequence;
    if (Status sent = connection.send(message, mine, fd); !sent) {
      count(FaultPoint::kWireSend);
      return sent.error();
    }
    const auto deadline = WallClock::now() + options.patience;
    while (WallClock::now() < deadline) {
      if (stopping.load(std::memory_order_relaxed)) return Error{Errc::kCancelled, "the link is stopping"};
      auto reply = connection.receive(kStopCheck);
      if (!reply && reply.error().code == Errc::kTimeout) continue;
      if (!reply) {
        count(FaultPoint::kWireReceive);
        return reply.error();
      }
      if (const auto* refusal = std::get_if<Refusal>(&reply->message))
        return Error{refusal->code, refusal->text};
      if (reply->sequence == mine) return reply;
      if (reply->sequence == 0) take_unasked(reply->message);
    }
    return Error{Errc::kTimeout, "the daemon at " + options.socket + " does not answer"};
  }

  bool join() {
    auto connecting = WireConnection::connect(options.socket);
    if (!connecting) {
      count(FaultPoint::kWireConnect);
      say(Saying::kNoDaemon, connecting.error().text + ": budgets come from the policy alone");
      return false;
    }
    connection = std::move(*connecting);
    remember_socket();
    auto reply = exchange(hello(), options.page_fd);
    const auto* welcome = reply ? std::get_if<Welcome>(&reply->message) : nullptr;
    if (welcome == nullptr) {
      const std::string why = reply ? "it did not say welcome" : reply.error().text;
      say(Saying::kRefused, "not joined to the daemon at " + options.socket + ": " + why);
      hang_up();
      return false;
    }
    for (std::size_t tier = 0; tier < kTierCount; ++tier) {
      budget[tier].store(welcome->budget[tier], std::memory_order_relaxed);
      // What the process holds without ever having been granted it counts as granted from now on.
      auto& leased = lease[tier];
      leased.store(std::max(leased.load(std::memory_order_relaxed), welcome->leased[tier]),
                   std::memory_order_relaxed);
    }
    take_seat(*reply);
    pause = options.first_pause;
    wishes_due = true;
    joins.fetch_add(1, std::memory_order_relaxed);
    connected.store(true, std::memory_order_release);
    return true;
  }

  void lost(const Error& error) {
    hang_up();
    next_attempt = WallClock::now() + pause;
    if (error.code == Errc::kCancelled) return;
    say(Saying::kWentAway, "the daemon went away (" + error.text + "); going on with what was granted");
  }

  void wake_thread() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake.get(), &one, sizeof one);
  }

  // Waits for a question, a stop, the daemon's hang-up, or the time to be over.
  void wait(milliseconds longest) {
    std::array<pollfd, 2> waiting{pollfd{wake.get(), POLLIN, 0}, pollfd{connection.fd(), POLLIN, 0}};
    const nfds_t count = connection.open() ? 2 : 1;
    if (::poll(waiting.data(), count, static_cast<int>(longest.count())) <= 0) return;
    std::uint64_t ignored = 0;
    if (waiting[0].revents != 0) {
      [[maybe_unused]] const ssize_t drained = ::read(wake.get(), &ignored, sizeof ignored);
    }
    if (count == 2 && waiting[1].revents != 0) {
      auto unasked = connection.receive(milliseconds(0));
      if (unasked) return take_unasked(unasked->message);
      if (unasked.error().code != Errc::kTimeout) lost(unasked.error());
    }
  }

  void tell_releases() {
    for (std::size_t tier = 0; tier < kTierCount && connection.open(); ++tier) {
      Release release{static_cast<std::uint32_t>(tier), 0, 0};
      {
        const std::lock_guard lock(mutex);
        release.bytes = std::exchange(to_release[tier], 0);
      }
      if (release.bytes == 0) continue;
      if (const auto reply = exchange(release); !reply) lost(reply.error());
    }
  }

  void tell_answers() {
    while (connection.open()) {
      ShrinkReply reply;
      {
        const std::lock_guard lock(mutex);
        if (replies.empty()) return;
        reply = replies.front();
        replies.pop_front();
      }
      if (const auto done = exchange(reply); !done) lost(done.error());
    }
  }

  // What was kept by an earlier daemon, or before the connection broke, is asked for again.
  void renew_wishes() {
    if (!std::exchange(wishes_due, false)) return;
    for (std::size_t tier = 0; tier < kTierCount && connection.open(); ++tier) {
      LeaseRequest request{static_cast<std::uint32_t>(tier), Unmet::kKeep, 0};
      {
        const std::lock_guard lock(mutex);
        const std::uint64_t now = lease[tier].load(std::memory_order_relaxed);
        if (wish[tier] <= now) continue;
        request.wanted = wish[tier] - now;
      }
      (void)ask(request);
    }
  }

  Result<LeaseGrant> ask(const LeaseRequest& request) {
    if (!connection.open()) return Error{Errc::kNotFound, "no daemon"};
    const auto reply = exchange(request);
    if (!reply) {
      lost(reply.error());
      return reply.error();
    }
    const auto* grant = std::get_if<LeaseGrant>(&reply->message);
    if (grant == nullptr || grant->tier != request.tier || grant->granted > request.wanted) {
      const Error error{Errc::kProtocol, "the daemon granted what was not asked for"};
      lost(error);
      return error;
    }
    lease[request.tier].fetch_add(grant->granted, std::memory_order_relaxed);
    const std::lock_guard lock(mutex);
    coming[request.tier] = grant->coming != 0;
    return *grant;
  }

  Result<LeaseGrant> ask_or_fail(const LeaseRequest& request) noexcept {
    try {
      return ask(request);
    } catch (...) {  // the one who waits is told in any case
      hang_up();
      return Error{Errc::kOutOfMemory, {}};
    }
  }

  void answer_questions() {
    for (;;) {
      std::shared_ptr<Question> question;
      {
        const std::lock_guard lock(mutex);
        if (questions.empty()) return;
        question = questions.front();
        questions.pop_front();
      }
      Result<LeaseGrant> answer = ask_or_fail(question->request);
      const std::lock_guard lock(mutex);
      question->answer.emplace(std::move(answer));
      answered.notify_all();
    }
  }

  void turn() {
    if (!connection.open()) {
      answer_questions();
      const auto left = std::chrono::ceil<milliseconds>(next_attempt - WallClock::now());
      if (left > milliseconds(0)) return wait(left);
      if (!join()) pause = std::min(pause * 2, options.longest_pause);
      next_attempt = WallClock::now() + pause;
      return;
    }
    renew_wishes();
    tell_releases();
    tell_answers();
    answer_questions();
    {
      const std::lock_guard lock(mutex);
      if (!replies.empty()) return;  // made while the daemon was asked
    }
    wait(milliseconds(1000));
  }

  void run() noexcept {
    while (!stopping.load(std::memory_order_acquire)) {
      try {
        turn();
      } catch (...) {  // no memory, or a callback that threw: nothing of it may reach the guest
        hang_up();
        pause = options.longest_pause;
      }
    }
    hang_up();
    answer_questions_at_the_end();
  }

  void answer_questions_at_the_end() noexcept {
    const std::lock_guard lock(mutex);
    for (const auto& question : questions) question->answer.emplace(Error{Errc::kCancelled, {}});
    questions.clear();
    answered.notify_all();
  }

  // From any thread: the question, and the answer to it. Errors: as DaemonLink::request().
  Result<Bytes> put(const LeaseRequest& request, bool joined) {
    if (!joined) return Error{Errc::kNotFound, "no daemon at " + options.socket};
    const auto began = WallClock::now();
    auto question = std::make_shared<Question>();
    question->request = request;
    std::unique_lock lock(mutex);
    if (questions.size() >= kMaxWaiting) return Error{Errc::kIo, "too many lease requests at once"};
    questions.push_back(question);
    wake_thread();
    // Every question is answered: the thread's own waits are bounded.
    answered.wait(lock, [&] { return question->answer.has_value(); });
    metrics().add<Metric::kStallSeconds>(StallReason::kDaemon, WallClock::now() - began);
    if (!*question->answer) return question->answer->error();
    return Bytes((*question->answer)->granted);
  }

  [[nodiscard]] bool in_owner() const { return forks.load(std::memory_order_relaxed) == owner; }
};

DaemonLink::Options DaemonLink::options_from_environment() {
  Options options;
  options.socket = environment("TERRACE_SOCKET");
  if (const char* job = environment("TERRACE_JOB"); *job != '\0') options.job = job;
  options.run = std::strtoull(environment("TERRACE_RUN"), nullptr, 16);
  return options;
}

Result<std::unique_ptr<DaemonLink>> DaemonLink::start(Options options) noexcept {
  try {
    [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, &close_in_child);
    auto impl = std::make_unique<Impl>();
    impl->options = std::move(options);
    impl->pause = impl->options.first_pause;
    if (!impl->options.socket.empty()) {
      if (!impl->wake.valid()) return Error{Errc::kOutOfMemory, "daemon link: no eventfd"};
      impl->join();
      impl->next_attempt = WallClock::now() + impl->pause;
      const SignalsBlocked blocked;
      impl->thread = std::thread([self = impl.get()] { self->run(); });
    }
    return std::unique_ptr<DaemonLink>(new DaemonLink(std::move(impl)));
  } catch (...) {
    return Error{Errc::kOutOfMemory, {}};
  }
}

DaemonLink::DaemonLink(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

DaemonLink::~DaemonLink() {
  if (!impl_->in_owner()) {  // a forked child has no such thread to join: what it inherited is left alone
    (void)impl_.release();
    return;
  }
  if (!impl_->thread.joinable()) return;
  impl_->stopping.store(true, std::memory_order_release);
  impl_->wake_thread();
  impl_->thread.join();
}

bool DaemonLink::connected() const noexcept {
  return impl_->connected.load(std::memory_order_acquire) && impl_->in_owner();
}
std::uint64_t DaemonLink::joins() const noexcept { return impl_->joins.load(std::memory_order_relaxed); }
Bytes DaemonLink::lease(TierId tier) const noexcept {
  return impl_->in_owner() ? Bytes(impl_->lease[index_of(tier)].load(std::memory_order_relaxed)) : Bytes();
}
Bytes DaemonLink::node_budget(TierId tier) const noexcept {
  return Bytes(impl_->budget[index_of(tier)].load(std::memory_order_relaxed));
}

Result<Bytes> DaemonLink::request(TierId tier, Bytes bytes) noexcept {
  try {
    return impl_->put({static_cast<std::uint32_t>(tier), Unmet::kForget, bytes.count()}, connected());
  } catch (...) {
    return Error{Errc::kOutOfMemory, {}};
  }
}

Result<Bytes> DaemonLink::request_and_keep(TierId tier, Bytes bytes, milliseconds patience) noexcept {
  try {
    Impl& self = *impl_;
    const std::size_t index = index_of(tier);
    const std::uint64_t before = self.lease[index].load(std::memory_order_relaxed);
    const auto granted =
        self.put({static_cast<std::uint32_t>(tier), Unmet::kKeep, bytes.count()}, connected());
    if (!granted) return granted;
    const auto began = WallClock::now();
    const auto so_far = [&] {
      const std::uint64_t now = self.lease[index].load(std::memory_order_relaxed);
      return now > before ? now - before : 0;
    };
    std::unique_lock lock(self.mutex);
    self.wish[index] = before + bytes.count();
    self.answered.wait_until(lock, began + patience, [&] {
      return !self.coming[index] || so_far() >= bytes.count() || !connected();
    });
    metrics().add<Metric::kStallSeconds>(StallReason::kDaemon, WallClock::now() - began);
    return Bytes(so_far());
  } catch (...) {
    return Error{Errc::kOutOfMemory, {}};
  }
}

Result<Bytes> DaemonLink::request_and_wait(TierId tier, Bytes bytes, milliseconds patience) noexcept {
  const auto at_once = request(tier, bytes);
  if (!at_once || *at_once >= bytes) return at_once;
  const auto later = request_and_keep(tier, bytes - *at_once, patience);
  (void)request_and_keep(tier, Bytes(), {});
  return later ? *at_once + *later : *at_once;
}

void DaemonLink::answer(const Ask& ask, Bytes released) noexcept {
  if (!impl_->in_owner()) return;
  try {
    const std::lock_guard lock(impl_->mutex);
    auto& lease = impl_->lease[index_of(ask.tier)];
    const std::uint64_t given_back = std::min(released.count(), lease.load(std::memory_order_relaxed));
    // First: where there is no memory for it, nothing was given back.
    impl_->replies.push_back({static_cast<std::uint32_t>(ask.tier), 0, ask.number, given_back});
    lease.fetch_sub(given_back, std::memory_order_relaxed);
    impl_->wake_thread();
  } catch (...) {
    return;
  }
}

bool DaemonLink::passthrough() const noexcept { return impl_->passthrough.load(std::memory_order_relaxed); }

void DaemonLink::release(TierId tier, Bytes bytes) noexcept {
  if (!impl_->in_owner()) return;
  const std::lock_guard lock(impl_->mutex);
  auto& lease = impl_->lease[index_of(tier)];
  const std::uint64_t given_back = std::min(bytes.count(), lease.load(std::memory_order_relaxed));
  lease.fetch_sub(given_back, std::memory_order_relaxed);
  impl_->to_release[index_of(tier)] += given_back;
  auto& wish = impl_->wish[index_of(tier)];
  wish -= std::min(wish, given_back);
  impl_->wake_thread();
}

}  // namespace terrace
