#include "hooks/intercept/cuda/guest_uses.hpp"

#include <pthread.h>

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "hooks/intercept/cuda/pointer_pages.hpp"
#include "hooks/intercept/cuda/stream_pools.hpp"
#include "runtime/errno_kept.hpp"

namespace terrace::hooks::cuda {

// What a thread keeps between its calls, so that they allocate nothing. The next thread takes over the seat
// of one that has ended.
struct UseSeat {
  struct OfDevice {
    explicit OfDevice(DeviceBlocks& of) : blocks(of), uses(*of.space) {}
    DeviceBlocks& blocks;
    StableSpace::Uses uses;
    EventHandle behind = nullptr;  // the thread's own default stream
    [[nodiscard]] bool leaves_behind() noexcept try {
      return blocks.streams->leave_behind(behind) == kSuccess;
    } catch (...) {
      return false;
    }
  };
  std::vector<std::unique_ptr<OfDevice>> devices;
  // A launch has 4 KiB of parameters, with newer drivers eight times as much; and a library call a few.
  static constexpr std::size_t kMostPointers = 4608;
  std::array<const void*, kMostPointers> pointers;
  std::size_t count = 0;
  [[nodiscard]] std::span<const void* const> named() const { return {pointers.data(), count}; }
  std::vector<OfDevice*> inside;

  [[nodiscard]] OfDevice& of(DeviceBlocks& blocks) {
    for (const auto& each : devices) {
      if (&each->blocks == &blocks) return *each;
    }
    inside.reserve(devices.size() + 1);
    return *devices.emplace_back(std::make_unique<OfDevice>(blocks));
  }
};

namespace {

// By thread. Nothing with a destructor: calls come while a thread's and the process's objects go.
thread_local constinit UseSeat* this_seat = nullptr;
// Taken: a call of this thread is inside.
thread_local constinit bool seated = false;

union IdleSeats {
  constexpr IdleSeats() : seats() {}
  ~IdleSeats() {}
  struct {
    std::mutex mutex;
    std::vector<UseSeat*> idle;
  } seats;
};
constinit IdleSeats the;

// The system's own thread-local storage calls back when a thread ends.
void give_seat_back(void* seat) {
  this_seat = nullptr;
  try {
    const std::lock_guard lock(the.seats.mutex);
    the.seats.idle.push_back(static_cast<UseSeat*>(seat));
  } catch (...) {  // it is lost
  }
}

UseSeat* seat_of_this_thread() {
  if (this_seat != nullptr) [[likely]]
    return this_seat;
  static const pthread_key_t key = [] {
    pthread_key_t made{};
    (void)pthread_key_create(&made, give_seat_back);
    return made;
  }();
  {
    const std::lock_guard lock(the.seats.mutex);
    if (!the.seats.idle.empty()) {
      this_seat = the.seats.idle.back();
      the.seats.idle.pop_back();
    }
  }
  if (this_seat == nullptr) this_seat = new UseSeat;
  (void)pthread_setspecific(key, this_seat);
  return this_seat;
}

// Not a default stream, which every context has.
bool is_named(StreamHandle stream) { return stream != kLegacyStream && stream != kPerThreadStream; }

// The context that a stream belongs to. A handle of the driver's says so; the default streams are those of
// the thread's context.
ContextHandle context_of(StreamHandle stream) {
  const DriverCalls& driver = *driver_calls();
  ContextHandle context = nullptr;
  const CallResult result =
      is_named(stream) ? driver.stream_context(stream, &context) : driver.context_get(&context);
  return result == kSuccess ? context : nullptr;
}

// Whose blocks a launch on this stream uses by counts: all others' it fixes. With one device there is no
// choice.
DeviceBlocks* blocks_of(StreamHandle stream) {
  StableBlocks& form = stable_blocks();
  if (form.only_device()) return &form.at(0);
  for (std::uint32_t i = 0; is_named(stream) && i < form.devices(); ++i) {
    if (form.at(i).streams->find(stream)) return &form.at(i);
  }
  return form.of(context_of(stream));
}

bool is_captured(StreamHandle stream) {
  int captured = 0;
  const DriverCalls& driver = *driver_calls();
  return stream_pools().capturing() && driver.stream_captured(stream, &captured) == kSuccess && captured != 0;
}

// Null: what a launch was given is all that it can reach, as far as its words say. Else why not.
const char* reaches_more(const Launch& launch, std::size_t words) {
  if (words > UseSeat::kMostPointers) return "it has more parameters than are looked at";
  if (LibraryArguments::reach() == Reach::kEverything) return "a library was given tables of pointers";
  if (tensor_maps().hide_addresses() && may_hold_tensor_map(launch, launch_layouts())) [[unlikely]]
    return "it may be given a tensor map that hides its address";
  const PointerPages& tables = pointer_pages();
  if (!tables.any()) [[likely]]
    return nullptr;
  bool named = false;
  const auto note = [&](std::uint64_t word) { named = named || tables.marked(word); };
  (void)each_parameter_word(launch, launch_layouts(), note);
  LibraryArguments::each_word(note);
  return named ? "it is given memory to which addresses of blocks were copied" : nullptr;
}

void count_launch(Readable readable, std::size_t blocks) {
  if (readable == Readable::kYes) {
    metrics().add<Metric::kLaunches>(1);
    metrics().add<Metric::kLaunchBlocks>(blocks);
  } else {
    metrics().add<Metric::kOpaqueLaunches>(1);
  }
}

DevicePointer number_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

void forget_seat_in_child() noexcept {
  this_seat = nullptr;
  seated = false;
  new (&the) IdleSeats;
}

// seat_->pointers, on a stream.
void GuestUses::take(StreamHandle stream, Absent absent) {
  StableBlocks& form = stable_blocks();
  stream_ = stream;
  if (is_captured(stream)) {
    for (const void* const pointer : seat_->named())
      form.fix(number_of(pointer), FixedReason::kCaptured, StableBlocks::Where::kLeave);
    return;
  }
  DeviceBlocks* const own = blocks_of(stream);
  // Another device's, whose streams its blocks cannot wait for.
  if (own == nullptr || form.devices() > 1) {
    std::size_t kept = 0;
    for (const void* const pointer : seat_->named()) {
      if (own != nullptr && own->holds(number_of(pointer))) {
        seat_->pointers[kept++] = pointer;
      } else {
        form.fix(number_of(pointer), FixedReason::kPeer, StableBlocks::Where::kBring);
      }
    }
    seat_->count = kept;
  }
  if (own == nullptr || seat_->count == 0) return;
  UseSeat::OfDevice& seat = seat_->of(*own);
  const StreamSlot slot = own->streams->slot_of(stream);
  seat_->inside.push_back(&seat);
  if (absent == Absent::kBring) {
    own->space->let_out_of_reach();  // this runtime's launches are seen
    if (own->device->was_refused()) [[unlikely]]
      StableBlocks::follow_the_wall(*own);
    own->pager->begin(seat.uses, seat_->named(), slot);
  } else {
    seat.uses.begin(seat_->named(), slot);
  }
}

void GuestUses::take_all(StreamHandle stream) {
  StableBlocks& form = stable_blocks();
  stream_ = stream;
  const bool captured = is_captured(stream);
  DeviceBlocks* const own = blocks_of(stream);
  // Before any gate is entered: whoever fixes may have to wait for a mover.
  for (std::uint32_t i = 0; i < form.devices(); ++i) {
    DeviceBlocks& blocks = form.at(i);
    if (captured) {
      form.fix_all(blocks, FixedReason::kCaptured, StableBlocks::Where::kLeave);
    } else if (&blocks != own && blocks.shared.load()) {
      form.fix_all(blocks, FixedReason::kPeer, StableBlocks::Where::kBring);
    }
  }
  if (captured || own == nullptr) return;
  UseSeat::OfDevice& seat = seat_->of(*own);
  const StreamSlot slot = own->streams->slot_of(stream);
  seat_->inside.push_back(&seat);
  seat.uses.begin_everything(slot);
}

void GuestUses::take_launch(const Launch& launch, StreamName stream) noexcept {
  if (seated) return;  // a call inside of one that has its uses
  const ErrnoKept kept;
  try {
    UseSeat* const seat = seat_of_this_thread();
    const StableBlocks::Span span = stable_blocks().span();
    std::size_t words = 0, found = 0;
    // Without a branch: most words lead nowhere.
    const auto note = [&](std::uint64_t word) {
      if (++words > UseSeat::kMostPointers) [[unlikely]]
        return;
      seat->pointers[found] = reinterpret_cast<const void*>(word);
      found += span.may_hold(word) ? 1 : 0;
    };
    Readable readable = each_parameter_word(launch, launch_layouts(), note);
    LibraryArguments::each_word(note);
    seat->count = found;
    const char* const why = readable == Readable::kNo ? "" : reaches_more(launch, words);
    if (why != nullptr) {
      readable = Readable::kNo;
      note_opaque(launch.function, why);
    }
    if (!stream_pools().any()) count_launch(readable, found);
    if (readable == Readable::kYes && found == 0) return;
    seat_ = seat;
    seated = true;
    if (readable == Readable::kYes) {
      take(resolved(stream), Absent::kBring);
    } else {
      take_all(resolved(stream));
    }
  } catch (...) {
    without_memory(stream);
  }
}

void GuestUses::take_copy(StreamName stream, std::span<const DevicePointer> ends) noexcept {
  if (seated) return;
  const ErrnoKept kept;
  try {
    const StableBlocks& form = stable_blocks();
    UseSeat* seat = nullptr;
    for (const DevicePointer address : ends) {
      if (!form.may_hold(address)) continue;
      if (seat == nullptr) {
        seat = seat_of_this_thread();
        seat->count = 0;
      }
      seat->pointers[seat->count++] = reinterpret_cast<const void*>(address);
    }
    if (seat == nullptr) return;
    seat_ = seat;
    seated = true;
    take(resolved(stream), Absent::kLeave);
  } catch (...) {
    without_memory(stream);
  }
}

void GuestUses::take_everything(StreamName stream) noexcept {
  if (seated) return;
  const ErrnoKept kept;
  try {
    seat_ = seat_of_this_thread();
    seated = true;
    take_all(resolved(stream));
  } catch (...) {
    without_memory(stream);
  }
}

// Nothing may move any more: there is no memory to note who uses what.
void GuestUses::without_memory(StreamName) noexcept {
  stable_blocks().stop_moving();
  stable_blocks().keep_reachable();
}

void GuestUses::end() noexcept {
  const ErrnoKept kept;
  bool left_behind = true;
  for (UseSeat::OfDevice* const each : seat_->inside) {
    if (stream_ == kPerThreadStream) left_behind = each->leaves_behind() && left_behind;
    each->uses.end();
  }
  // Nobody can tell when this work will have ended: what is there stays.
  if (!left_behind) stable_blocks().stop_moving();
  seat_->inside.clear();
  seated = false;
  seat_ = nullptr;
}

}  // namespace terrace::hooks::cuda
