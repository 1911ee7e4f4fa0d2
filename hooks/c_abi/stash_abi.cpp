// The C functions over Stash.
#include "hooks/c_abi/terrace_stash.h"

#include <map>
#include <memory>
#include <mutex>

#include "hooks/c_abi/boundary.hpp"
#include "swapcore/stash/stash.hpp"

using namespace terrace;
using namespace terrace::c_abi;

// A stash with its device, and the names of the framework's streams there.
struct terrace_stash {
  std::unique_ptr<Device> device;
  std::unique_ptr<Stash> stash;
  std::mutex mutex;
  std::map<void*, Stream> adopted;

  ~terrace_stash() {
    stash.reset();
    for (const auto& [native, stream] : adopted) device->destroy_stream(stream);
  }
  // Who stands behind a native stream: nobody but the host where memory is the host's.
  [[nodiscard]] Result<Stash::User> user(void* native) {
    if (device->info().can.host_addressable) return Stash::User();
    const std::lock_guard lock(mutex);
    const auto known = adopted.find(native);
    if (known != adopted.end()) return Stash::User(known->second);
    const auto stream = device->adopt_stream(native);
    if (!stream) return stream.error();
    adopted.emplace(native, *stream);
    return Stash::User(*stream);
  }
};

namespace {

static_assert(TERRACE_FOR_OPTIMIZER == static_cast<int>(Stash::Purpose::kOptimizer));
static_assert(TERRACE_FOR_WEIGHTS == static_cast<int>(Stash::Purpose::kWeights));

constexpr double kDefaultEmulatedLink = 8e9;

terrace_result null_stash() noexcept { return bad_argument("the stash is null; open one first"); }

// `work` takes the stash and the user, and gives a Status.
template <typename Work>
terrace_result on_stash(terrace_stash* stash, void* stream, Work work) noexcept {
  if (stash == nullptr) return null_stash();
  return guarded([&] {
    const auto user = stash->user(stream);
    if (!user) return failed(user.error());
    return result_of(work(*stash->stash, *user));
  });
}

Result<std::unique_ptr<Device>> open_device_of(const terrace_stash_options& options) {
  const std::string kind = or_default(options.device, "auto");
  if (kind == "cuda" || (kind == "auto" && cuda_available()))
    return open_cuda_device(DeviceId{options.device_index});
  EmulatedOptions emulated;
  emulated.h2d_bytes_per_second = options.emulated_link;
  emulated.d2h_bytes_per_second = options.emulated_link;
  return open_device(kind, emulated);
}

Result<std::unique_ptr<terrace_stash>> open_stash(const terrace_stash_options& options) {
  Stash::Options wanted;
  if (options.policy_file != nullptr) {
    auto policy = load_policy(options.policy_file);
    if (!policy) return std::move(policy).error();
    wanted.policy = *std::move(policy);
  }
  if (options.ddr_budget > 0) wanted.policy.ddr.budget = Amount::of(Bytes(options.ddr_budget));
  wanted.job = or_default(options.job, "job");
  wanted.join_daemon = options.join_daemon != 0;
  auto device = open_device_of(options);
  if (!device) return std::move(device).error();
  auto opened = std::make_unique<terrace_stash>();
  opened->device = *std::move(device);
  auto stash = Stash::open(*opened->device, std::move(wanted));
  if (!stash) return std::move(stash).error();
  opened->stash = *std::move(stash);
  return opened;
}

}  // namespace

extern "C" {

int32_t terrace_stash_abi(void) { return TERRACE_STASH_ABI; }

terrace_stash_options terrace_default_stash_options(void) {
  return {sizeof(terrace_stash_options), "auto", 0, nullptr, "job", 1, 0, kDefaultEmulatedLink};
}

terrace_result terrace_stash_open(const terrace_stash_options* options, terrace_stash** stash) {
  if (stash == nullptr) return bad_argument("there is no place for the stash; pass its address");
  *stash = nullptr;
  terrace_stash_options taken = terrace_default_stash_options();
  if (options != nullptr && !take_struct(options, &taken))
    return bad_argument("options.struct_size is wrong; start from terrace_default_stash_options()");
  if (!(taken.emulated_link > 0)) return bad_argument("options.emulated_link is a rate above zero");
  return guarded([&] {
    auto opened = open_stash(taken);
    if (!opened) return failed(opened.error());
    *stash = opened->release();
    return TERRACE_OK;
  });
}

terrace_result terrace_stash_close(terrace_stash* stash) {
  return guarded([&] {
    delete stash;
    return TERRACE_OK;
  });
}

terrace_result terrace_stash_read_budgets(terrace_stash* stash, terrace_stash_budgets* budgets) {
  if (stash == nullptr) return null_stash();
  const Budgets& resolved = stash->stash->budgets();
  const Policy& policy = stash->stash->policy();
  terrace_stash_budgets all{};
  all.hbm = resolved.hbm.count();
  all.ddr = resolved.ddr.count();
  all.activations =
      policy.checkpoint.budget.form == Amount::Form::kAuto ? TERRACE_UNLIMITED : resolved.checkpoint.count();
  all.optimizer_tier = policy.optimizer.tier == StateTier::kHbm   ? TERRACE_OPTIMIZER_IN_HBM
                       : policy.optimizer.tier == StateTier::kDdr ? TERRACE_OPTIMIZER_IN_DDR
                                                                  : TERRACE_OPTIMIZER_WHERE_ROOM_IS;
  all.off = policy.swapcore.mode == SwapMode::kOff ? 1 : 0;
  return give_struct(all, budgets) ? TERRACE_OK
                                   : bad_argument("budgets is null, or its struct_size is wrong");
}

terrace_result terrace_stash_read_lease(terrace_stash* stash, terrace_stash_lease* lease) {
  if (stash == nullptr) return null_stash();
  return guarded([&] {
    const ProcessLease::State state = stash->stash->lease().state();
    terrace_stash_lease all{};
    all.hbm_bytes = state.hbm.count();
    all.hbm_target_bytes = state.target.count();
    all.hbm_used_bytes = state.used.count();
    all.ddr_bytes = stash->stash->lease().ddr().count();
    all.switched_off = state.switched_off ? 1 : 0;
    all.overflow_bytes = state.overflow.count();
    all.refusals = state.refusals;
    return give_struct(all, lease) ? TERRACE_OK : bad_argument("lease is null, or its struct_size is wrong");
  });
}

terrace_result terrace_stash_give_way(terrace_stash* stash, uint64_t used_bytes, uint64_t needed_bytes) {
  if (stash == nullptr) return null_stash();
  return guarded([&] {
    stash->stash->lease().give_way(Bytes(used_bytes), Bytes(needed_bytes));
    return TERRACE_OK;
  });
}

terrace_result terrace_stash_spill(terrace_stash* stash, void* stream, const void* from, uint64_t bytes,
                                   terrace_purpose purpose, uint64_t* entry) {
  if (entry == nullptr) return bad_argument("there is no place for the entry; pass its address");
  *entry = 0;
  if (static_cast<unsigned>(purpose) > TERRACE_FOR_WEIGHTS)
    return bad_argument("the purpose is not one of terrace_purpose");
  if (bytes > INT64_MAX) return bad_argument("no machine has that many bytes; is the size negative?");
  return on_stash(stash, stream, [&](Stash& s, Stash::User user) -> Status {
    auto id = s.spill(user, static_cast<const std::byte*>(from), Bytes(bytes),
                      static_cast<Stash::Purpose>(purpose));
    if (!id) return id.error();
    *entry = id->value;
    return {};
  });
}

terrace_result terrace_stash_depart(terrace_stash* stash, void* stream, uint64_t entry) {
  return on_stash(stash, stream, [&](Stash& s, Stash::User user) { return s.depart(user, {entry}); });
}

terrace_result terrace_stash_left(terrace_stash* stash, uint64_t entry, int32_t* left) {
  if (stash == nullptr) return null_stash();
  if (left == nullptr) return bad_argument("there is no place for the answer; pass its address");
  *left = 0;
  return guarded([&] {
    const auto answer = stash->stash->left({entry});
    if (!answer) return failed(answer.error());
    *left = *answer ? 1 : 0;
    return TERRACE_OK;
  });
}

terrace_result terrace_stash_restore(terrace_stash* stash, void* stream, uint64_t entry, void* to) {
  return on_stash(stash, stream, [&](Stash& s, Stash::User user) {
    return s.restore(user, {entry}, static_cast<Address>(to));
  });
}

terrace_result terrace_stash_await(terrace_stash* stash, void* stream, uint64_t entry) {
  return on_stash(stash, stream, [&](Stash& s, Stash::User user) { return s.await(user, {entry}); });
}

terrace_result terrace_stash_drop(terrace_stash* stash, void* stream, uint64_t entry) {
  return on_stash(stash, stream, [&](Stash& s, Stash::User user) { return s.drop(user, {entry}); });
}

terrace_result terrace_stash_note_step(terrace_stash* stash, double seconds, uint64_t held_peak_bytes) {
  if (stash == nullptr) return null_stash();
  if (!(seconds >= 0)) return bad_argument("a step takes no negative time");
  return guarded([&] {
    stash->stash->note_step(seconds, Bytes(held_peak_bytes));
    return TERRACE_OK;
  });
}

terrace_result terrace_stash_read_counters(terrace_stash* stash, terrace_stash_counters* counters) {
  if (stash == nullptr) return null_stash();
  return guarded([&] {
    const Stash::Counters counted = stash->stash->counters();
    const PoolUsage ddr = stash->stash->ddr_usage();
    terrace_stash_counters all{};
    all.spills = counted.spills;
    all.restores = counted.restores;
    all.spilled_bytes = counted.spilled.count();
    all.restored_bytes = counted.restored.count();
    all.entries = counted.entries;
    all.ddr_bytes = ddr.live.count();
    all.ddr_peak_bytes = ddr.live_peak.count();
    all.spill_stall_seconds = counted.spill_stall_seconds;
    all.restore_stall_seconds = counted.restore_stall_seconds;
    all.optimizer_stall_seconds = counted.optimizer_stall_seconds;
    all.weights_stall_seconds = counted.weights_stall_seconds;
    return give_struct(all, counters) ? TERRACE_OK
                                      : bad_argument("counters is null, or its struct_size is wrong");
  });
}

}  // extern "C"
