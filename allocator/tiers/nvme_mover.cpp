#include "allocator/tiers/nvme_mover.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>

#include "allocator/tiers/checksum.hpp"
#include "allocator/tiers/io_thread.hpp"
#include "runtime/assert.hpp"
#include "runtime/clock.hpp"

namespace terrace {
namespace {

using Kind = NvmeTransfer::Kind;

constexpr Nanoseconds kFirstPause{20'000};
constexpr Nanoseconds kLongestPause{500'000};

Address aligned(Address address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  return address + (round_up(Bytes(at), kFileAlignment).count() - at);
}

}  // namespace

Result<std::unique_ptr<NvmeMover>> NvmeMover::create(const Parts& parts, const Options& options) {
  auto engine = open_io_engine(options.io, options.pieces);
  if (!engine) return std::move(engine).error();
  // One block, and room to align it: a pool of small blocks need not know of files.
  auto memory = parts.pool.allocate(options.piece * options.pieces + kFileAlignment, Pool::kScratch);
  if (!memory) return std::move(memory).error();
  std::unique_ptr<NvmeMover> mover(new NvmeMover(parts, options, *memory, std::move(engine).value()));
  try {
    mover->thread_ = std::jthread([raw = mover.get()](const std::stop_token& stop) { raw->run(stop); });
  } catch (const std::system_error& refused) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = std::string("nvme tier: no thread for its transfers: ") + refused.what()};
  }
  return mover;
}

NvmeMover::NvmeMover(const Parts& parts, const Options& options, const Block& memory,
                     std::unique_ptr<IoEngine> engine)
    : parts_(parts),
      options_(options),
      memory_(memory),
      engine_(std::move(engine)),
      bounces_(options.pieces) {
  Address buffer = aligned(memory.address);
  for (Bounce& bounce : bounces_) {
    bounce.buffer = buffer;
    buffer += options.piece.count();
  }
}

NvmeMover::~NvmeMover() {
  if (thread_.joinable()) {
    thread_.request_stop();
    thread_.join();
  }
  const Status freed = parts_.pool.free(memory_);
  TERRACE_CHECK(freed.ok(), "the bounce buffers are the pool's");
}

void NvmeMover::submit(std::shared_ptr<NvmeTransfer> transfer, EventPool::Held after) {
  {
    const std::lock_guard lock(inbox_mutex_);
    Job job;
    job.pieces = round_up(transfer->request().size, options_.piece) / options_.piece;
    job.transfer = std::move(transfer);
    job.after = std::move(after);
    inbox_.push_back(std::move(job));
  }
  engine_->wake();
}

double NvmeMover::bytes_per_second(Kind kind) const {
  return rates_[static_cast<std::size_t>(kind)].bytes_per_second.load(std::memory_order_relaxed);
}

void NvmeMover::run(const std::stop_token& stop) {
  prepare_io_thread("terrace-nvme");
  const std::stop_callback woken(stop, [this] { engine_->wake(); });
  std::vector<IoOutcome> ended;
  while (!(stop.stop_requested() && idle())) {
    take_inbox();
    bool went_on = admit();
    went_on |= start_pieces();
    went_on |= advance_copies();
    std::optional<Nanoseconds> most;
    if (went_on) {
      pause_ = most.emplace(0);
    } else if (device_owes()) {
      most = pause_ = std::clamp(2 * pause_, kFirstPause, kLongestPause);
    }
    engine_->wait(most, ended);
    if (!ended.empty()) pause_ = Nanoseconds(0);  // what comes of them may be with the device soon
    for (const IoOutcome& outcome : ended) answered(outcome);
    ended.clear();
    retire();
  }
}

bool NvmeMover::idle() {
  const std::lock_guard lock(inbox_mutex_);
  return inbox_.empty() && waiting_.empty() && loads_.empty() && stores_.empty();
}

bool NvmeMover::device_owes() const {
  return !waiting_.empty() || std::ranges::any_of(bounces_, [](const Bounce& bounce) {
    return bounce.stage == Stage::kCopyingOut || bounce.stage == Stage::kCopyingIn;
  });
}

void NvmeMover::take_inbox() {
  const std::lock_guard lock(inbox_mutex_);
  waiting_.splice(waiting_.end(), inbox_);
}

bool NvmeMover::admit() {
  bool any = false;
  for (auto job = waiting_.begin(); job != waiting_.end();) {
    const auto next = std::next(job);
    if (job->after == nullptr || parts_.device.completed(*job->after)) {
      if (job->after != nullptr) {
        job->status = parts_.device.synchronize(*job->after);  // does not wait: how it ended
        job->after.reset();
      }
      begin_rate(rate_of(job->request().kind));
      Jobs& jobs = job->request().kind == Kind::kLoad ? loads_ : stores_;
      jobs.splice(jobs.end(), waiting_, job);
      any = true;
    }
    job = next;
  }
  return any;
}

NvmeMover::Bounce* NvmeMover::free_bounce() {
  const auto found = std::ranges::find(bounces_, Stage::kIdle, &Bounce::stage);
  return found == bounces_.end() ? nullptr : &*found;
}

bool NvmeMover::start_pieces() {
  bool any = false;
  for (Jobs* jobs : {&loads_, &stores_}) {
    for (Job& job : *jobs) any |= start_pieces_of(job);
  }
  return any;
}

bool NvmeMover::start_pieces_of(Job& job) {
  bool any = false;
  while (job.startable()) {
    Bounce* bounce = free_bounce();
    if (bounce == nullptr) break;
    start(*bounce, job);
    any = true;
  }
  return any;
}

void NvmeMover::start(Bounce& bounce, Job& job) {
  bounce.job = &job;
  bounce.piece = job.started++;
  ++job.in_flight;
  const bool load = job.request().kind == Kind::kLoad;
  bounce.stage = load ? Stage::kReading : Stage::kCopyingOut;
  Status asked = load ? ask_file(bounce) : ask_device(bounce, Direction::kD2H);
  if (!asked.ok()) end_piece(bounce, std::move(asked));
}

bool NvmeMover::advance_copies() {
  bool any = false;
  for (Bounce& bounce : bounces_) {
    if (bounce.stage != Stage::kCopyingOut && bounce.stage != Stage::kCopyingIn) continue;
    if (!bounce.copy.done()) continue;
    copied(bounce);
    any = true;
  }
  return any;
}

void NvmeMover::copied(Bounce& bounce) {
  Status how = bounce.copy.synchronize();  // does not wait: how it ended
  bounce.copy = {};
  if (!how.ok() || bounce.stage == Stage::kCopyingIn || !bounce.job->status.ok()) {
    return end_piece(bounce, std::move(how));
  }
  bounce.job->request().stored->checksums[bounce.piece] = checksum_of(bounce);
  // The file is written in whole blocks; nobody else's bytes go along.
  const Bytes size = bytes_of(*bounce.job, bounce.piece);
  const Bytes padded = round_up(size, kFileAlignment);
  std::memset(bounce.buffer + size.count(), 0, (padded - size).count());
  bounce.stage = Stage::kWriting;
  if (Status asked = ask_file(bounce); !asked.ok()) end_piece(bounce, std::move(asked));
}

void NvmeMover::answered(const IoOutcome& outcome) {
  Bounce& bounce = bounces_[outcome.tag];
  const bool reading = bounce.stage == Stage::kReading;
  if (outcome.error != 0) {
    const std::string what =
        outcome.error == ENODATA ? "the file ends before it" : std::strerror(outcome.error);
    return end_piece(bounce, failed(bounce, (reading ? "reading " : "writing ") + what));
  }
  if (!reading || !bounce.job->status.ok()) return end_piece(bounce, {});
  if (checksum_of(bounce) != bounce.job->request().stored->checksums[bounce.piece]) {
    return end_piece(bounce, failed(bounce, "other bytes came back than were stored: a torn or stale write"));
  }
  bounce.stage = Stage::kCopyingIn;
  if (Status asked = ask_device(bounce, Direction::kH2D); !asked.ok()) end_piece(bounce, std::move(asked));
}

Status NvmeMover::ask_file(Bounce& bounce) {
  const bool write = bounce.stage == Stage::kWriting;
  const Status asked =
      engine_->submit({.kind = write ? IoRequest::Kind::kWrite : IoRequest::Kind::kRead,
                       .file = parts_.file.fd(),
                       .buffer = bounce.buffer,
                       .size = round_up(bytes_of(*bounce.job, bounce.piece), kFileAlignment),
                       .offset = bounce.job->request().offset + bounce.piece * options_.piece.count(),
                       .tag = static_cast<std::uint64_t>(&bounce - bounces_.data())});
  if (asked.ok()) return {};
  return failed(bounce, asked.error().text);
}

Status NvmeMover::ask_device(Bounce& bounce, Direction direction) {
  const NvmeTransfer::Request& request = bounce.job->request();
  const std::uint64_t offset = bounce.piece * options_.piece.count();
  const Bytes size = bytes_of(*bounce.job, bounce.piece);
  const bool out = direction == Direction::kD2H;
  const Transfer piece = out ? Transfer{bounce.buffer, request.from + offset, size}
                             : Transfer{request.to + offset, bounce.buffer, size};
  auto copy = parts_.copies.submit({.direction = direction,
                                    .reason = out ? CopyReason::kSpill : CopyReason::kRestore,
                                    .priority = out ? CopyPriority::kBackground : CopyPriority::kUrgent},
                                   {&piece, 1});
  if (!copy) return std::move(copy).error();
  bounce.copy = std::move(copy).value();
  return {};
}

void NvmeMover::end_piece(Bounce& bounce, Status how) {
  if (!how.ok() && bounce.job->status.ok()) bounce.job->status = std::move(how);
  --bounce.job->in_flight;
  bounce.job = nullptr;
  bounce.stage = Stage::kIdle;
}

void NvmeMover::retire() {
  for (Jobs* jobs : {&loads_, &stores_}) {
    for (auto job = jobs->begin(); job != jobs->end();) {
      if (job->in_flight > 0 || job->startable()) {
        ++job;
        continue;
      }
      end_rate(rate_of(job->request().kind), job->status.ok() ? job->request().size : Bytes{});
      job->transfer->finish(std::move(job->status));
      job = jobs->erase(job);
    }
  }
}

Bytes NvmeMover::bytes_of(const Job& job, std::uint64_t piece) const {
  return std::min(options_.piece, job.request().size - options_.piece * piece);
}

std::uint64_t NvmeMover::checksum_of(const Bounce& bounce) const {
  const std::span<const std::byte> bytes(bounce.buffer, bytes_of(*bounce.job, bounce.piece).count());
  return checksum(bytes, bounce.job->request().stored->generation);
}

Error NvmeMover::failed(const Bounce& bounce, const std::string& what) const {
  const Job& job = *bounce.job;
  const Bytes size = bytes_of(job, bounce.piece);
  return Error{.code = Errc::kIo,
               .text = "nvme tier: block " + std::to_string(job.request().block) + ", " + format_bytes(size) +
                       " at " + std::to_string(bounce.piece * options_.piece.count()) + " of " +
                       std::to_string(job.request().size.count()) + ": " + what,
               .bytes = size};
}

void NvmeMover::begin_rate(Rate& rate) const {
  if (rate.under_way++ == 0) rate.since = steady_clock().now();
}

void NvmeMover::end_rate(Rate& rate, Bytes moved) const {
  const Nanoseconds now = steady_clock().now();
  rate.busy += now - std::exchange(rate.since, now);
  --rate.under_way;
  rate.moved += moved;
  if (rate.busy <= Nanoseconds(0)) return;
  rate.bytes_per_second.store(static_cast<double>(rate.moved.count()) / seconds_of(rate.busy),
                              std::memory_order_relaxed);
}

}  // namespace terrace
