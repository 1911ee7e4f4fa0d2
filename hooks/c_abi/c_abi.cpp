// The C functions over Session: checks what C can get wrong, lets no exception out, keeps the error in words.
#include <algorithm>
#include <cstring>
#include <set>

#include "hooks/c_abi/boundary.hpp"
#include "swapcore/session.hpp"

using namespace terrace;
using namespace terrace::c_abi;

// A session with the device and stream that it stands on.
struct terrace_session {
  std::unique_ptr<Device> device;
  Stream stream;
  bool has_stream = false;
  std::unique_ptr<Session> session;
  std::set<std::string> names;
  std::uint32_t sites = 0;
  std::uint64_t blocks = 0;
  // (site, micro-batch) offered in this step and not fetched: offering one twice is an error of the caller.
  std::set<std::pair<std::uint32_t, std::uint32_t>> offered;

  ~terrace_session() {
    session.reset();
    if (has_stream) device->destroy_stream(stream);
  }
};

struct terrace_block {
  terrace_session* owner;
  BlockRef held;
};

namespace {

static_assert(TERRACE_SCRATCH == static_cast<int>(Pool::kScratch) && kPoolCount == TERRACE_SCRATCH + 1);
static_assert(TERRACE_SCAN == static_cast<int>(SiteKind::kScan) && kSiteKindCount == TERRACE_SCAN + 1);

static_assert(TERRACE_F32 == static_cast<int>(Element::kF32) &&
              TERRACE_BF16 == static_cast<int>(Element::kBf16));

constexpr std::int32_t kLayersMost = 1 << 16;
constexpr std::uint64_t kDefaultEmulatedHbm = std::uint64_t{4} << 30;

terrace_result null_session() noexcept { return bad_argument("the session is null; open one first"); }
bool is_layer(std::int32_t layer) noexcept { return layer >= 0 && layer < kLayersMost; }
terrace_result bad_layer() noexcept { return bad_argument("layers count from 0, and are fewer than 65536"); }

template <typename Work>
terrace_result on_session(terrace_session* session, Work work) noexcept {
  if (session == nullptr) return null_session();
  return guarded([&] {
    work(*session->session);
    return TERRACE_OK;
  });
}

terrace_result offer(terrace_session* session, terrace_key key, const terrace_block* output,
                     Element element) noexcept {
  if (session == nullptr) return null_session();
  if (output == nullptr || output->owner != session)
    return bad_argument("the output is no block of this session");
  if (key.site >= session->sites) return bad_argument("the site is not declared");
  return guarded([&] {
    if (!session->offered.emplace(key.site, key.micro_batch).second)
      return bad_argument("this output was offered already in this step; fetch it or end the step first");
    session->session->offer({{key.site}, key.micro_batch}, output->held, element);
    return TERRACE_OK;
  });
}

SaveKey save_key(const terrace_save_key& key) noexcept { return {key.layer, key.micro_batch, key.slot}; }

terrace_result hand_out(terrace_session* session, BlockRef held, terrace_block** block) {
  *block = new terrace_block{session, std::move(held)};
  ++session->blocks;
  return TERRACE_OK;
}

Result<std::unique_ptr<terrace_session>> open_session(const terrace_options& options) {
  Session::Options wanted;
  if (options.policy_file != nullptr) {
    auto policy = load_policy(options.policy_file);
    if (!policy) return std::move(policy).error();
    wanted.policy = *std::move(policy);
  }
  if (options.hbm_budget > 0) wanted.policy.hbm.budget = Amount::of(Bytes(options.hbm_budget));
  EmulatedOptions emulated;
  emulated.capacity = Bytes(options.emulated_hbm);
  auto device = open_device(or_default(options.device, "auto"), emulated);
  if (!device) return std::move(device).error();
  auto opened = std::make_unique<terrace_session>();
  opened->device = *std::move(device);
  const auto stream = opened->device->create_stream(StreamPriority::kNormal);
  if (!stream) return stream.error();
  opened->stream = *stream;
  opened->has_stream = true;
  wanted.compute = *stream;
  wanted.job = or_default(options.job, "job");
  wanted.join_daemon = options.join_daemon != 0;
  auto session = Session::open(*opened->device, std::move(wanted));
  if (!session) return std::move(session).error();
  opened->session = *std::move(session);
  return opened;
}

}  // namespace

extern "C" {

const char* terrace_version(void) { return TERRACE_VERSION; }
const char* terrace_last_error(void) { return last_error(); }

terrace_options terrace_default_options(void) {
  return {sizeof(terrace_options), "auto", kDefaultEmulatedHbm, 0, nullptr, "job", 1};
}

terrace_result terrace_open(const terrace_options* options, terrace_session** session) {
  if (session == nullptr) return bad_argument("there is no place for the session; pass its address");
  *session = nullptr;
  terrace_options taken = terrace_default_options();
  if (options != nullptr && !take_struct(options, &taken))
    return bad_argument("options.struct_size is wrong; start from terrace_default_options()");
  return guarded([&] {
    auto opened = open_session(taken);
    if (!opened) return failed(opened.error());
    *session = opened->release();
    return TERRACE_OK;
  });
}

terrace_result terrace_close(terrace_session* session) {
  if (session == nullptr) return TERRACE_OK;
  if (session->blocks > 0) return bad_argument("blocks of the session are still held; release them first");
  return guarded([&] {
    delete session;
    return TERRACE_OK;
  });
}

void* terrace_native_stream(terrace_session* session) {
  return session == nullptr ? nullptr : session->device->native_stream(session->stream);
}

terrace_result terrace_synchronize(terrace_session* session) {
  if (session == nullptr) return null_session();
  return guarded([&] {
    const Status done = session->device->synchronize(session->stream);
    return done ? TERRACE_OK : failed(done.error());
  });
}

terrace_result terrace_allocate(terrace_session* session, uint64_t bytes, terrace_pool pool,
                                terrace_block** block) {
  if (block == nullptr) return bad_argument("there is no place for the block; pass its address");
  *block = nullptr;
  if (session == nullptr) return null_session();
  if (static_cast<unsigned>(pool) >= kPoolCount) return bad_argument("the pool is not one of terrace_pool");
  if (bytes > INT64_MAX) return bad_argument("no machine has that many bytes; is the size negative?");
  return guarded([&] {
    auto allocated = session->session->allocate(Bytes(bytes), static_cast<Pool>(pool));
    if (!allocated) return failed(allocated.error());
    return hand_out(session, *std::move(allocated), block);
  });
}

void* terrace_block_address(const terrace_block* block) {
  return block == nullptr ? nullptr : block->held->address;
}
uint64_t terrace_block_bytes(const terrace_block* block) {
  return block == nullptr ? 0 : block->held->size.count();
}

void terrace_release(terrace_block* block) {
  if (block == nullptr) return;
  (void)guarded([&] {
    --block->owner->blocks;
    delete block;
    return TERRACE_OK;
  });
}

terrace_result terrace_declare_site(terrace_session* session, const terrace_site_spec* spec, uint32_t* site) {
  if (session == nullptr) return null_session();
  terrace_site_spec taken{};
  if (spec == nullptr || site == nullptr || !take_struct(spec, &taken))
    return bad_argument("spec or site is null, or spec.struct_size is wrong");
  if (taken.name == nullptr || *taken.name == '\0') return bad_argument("a site needs a name");
  if (static_cast<unsigned>(taken.kind) >= kSiteKindCount)
    return bad_argument("the kind is not one of terrace_site_kind");
  if (!is_layer(taken.layer)) return bad_layer();
  return guarded([&] {
    if (!session->names.insert(taken.name).second)
      return bad_argument("a site of this name is declared already; names are unique in a session");
    *site = session->session
                ->declare({taken.name, static_cast<SiteKind>(taken.kind), taken.layer,
                           or_default(taken.group, taken.name)})
                .index;
    session->sites = std::max(session->sites, *site + 1);
    return TERRACE_OK;
  });
}

terrace_result terrace_begin_step(terrace_session* session) {
  return on_session(session, [&](Session& s) {
    session->offered.clear();
    s.begin_step();
  });
}
terrace_result terrace_enter_forward(terrace_session* session, int32_t layer, uint32_t micro_batch) {
  if (!is_layer(layer)) return bad_layer();
  return on_session(session, [&](Session& s) { s.enter_forward(layer, micro_batch); });
}
terrace_result terrace_enter_head(terrace_session* session, uint32_t micro_batch) {
  return on_session(session, [&](Session& s) { s.enter_head(micro_batch); });
}
terrace_result terrace_enter_backward(terrace_session* session, int32_t layer, uint32_t micro_batch) {
  if (!is_layer(layer)) return bad_layer();
  return on_session(session, [&](Session& s) { s.enter_backward(layer, micro_batch); });
}
terrace_result terrace_enter_update(terrace_session* session) {
  return on_session(session, [](Session& s) { s.enter_update(); });
}
terrace_result terrace_cancel_step(terrace_session* session) {
  return on_session(session, [&](Session& s) {
    session->offered.clear();
    s.cancel_step();
  });
}
terrace_result terrace_end_step(terrace_session* session) {
  return on_session(session, [&](Session& s) {
    session->offered.clear();
    s.end_step();
  });
}

terrace_result terrace_offer(terrace_session* session, terrace_key key, const terrace_block* output) {
  return offer(session, key, output, Element::kOpaque);
}
terrace_result terrace_offer_numbers(terrace_session* session, terrace_key key, const terrace_block* output,
                                     terrace_element element) {
  if (static_cast<unsigned>(element) > TERRACE_BF16)
    return bad_argument("the element is not one of terrace_element");
  return offer(session, key, output, static_cast<Element>(element));
}

terrace_result terrace_changed(terrace_session* session, terrace_key key) {
  if (session == nullptr) return null_session();
  if (key.site >= session->sites) return bad_argument("the site is not declared");
  return on_session(session, [&](Session& s) { s.changed({{key.site}, key.micro_batch}); });
}

terrace_result terrace_fetch(terrace_session* session, terrace_key key, terrace_block** output) {
  if (output == nullptr) return bad_argument("there is no place for the output; pass its address");
  *output = nullptr;
  if (session == nullptr) return null_session();
  if (key.site >= session->sites) return bad_argument("the site is not declared");
  return guarded([&] {
    session->offered.erase({key.site, key.micro_batch});
    BlockRef found = session->session->fetch({{key.site}, key.micro_batch});
    return found ? hand_out(session, std::move(found), output) : TERRACE_OK;
  });
}

terrace_result terrace_save(terrace_session* session, terrace_save_key key, const terrace_block* activation) {
  if (session == nullptr) return null_session();
  if (activation == nullptr || activation->owner != session)
    return bad_argument("the activation is no block of this session");
  if (!is_layer(key.layer)) return bad_layer();
  return guarded([&] { return result_of(session->session->save(save_key(key), activation->held)); });
}
terrace_result terrace_load(terrace_session* session, terrace_save_key key, terrace_block** activation) {
  if (activation == nullptr) return bad_argument("there is no place for the activation; pass its address");
  *activation = nullptr;
  if (session == nullptr) return null_session();
  if (!is_layer(key.layer)) return bad_layer();
  return guarded([&] {
    auto loaded = session->session->load(save_key(key));
    if (!loaded) return failed(loaded.error());
    return hand_out(session, *std::move(loaded), activation);
  });
}

terrace_result terrace_read_counters(terrace_session* session, terrace_counters* counters) {
  if (session == nullptr) return null_session();
  if (counters == nullptr || counters->struct_size < sizeof(std::size_t) ||
      counters->struct_size > sizeof(terrace_counters))
    return bad_argument("counters is null, or its struct_size is wrong");
  return guarded([&] {
    const SessionCounters counted = session->session->counters();
    const PoolUsage hbm = session->session->hbm_usage(), ddr = session->session->ddr_usage();
    terrace_counters all{};
    all.struct_size = counters->struct_size;
    all.hits = counted.hits;
    all.misses = counted.misses;
    all.late = counted.late;
    all.evictions = counted.evictions;
    all.spilled_bytes = counted.spilled.count();
    all.restored_bytes = counted.restored.count();
    all.stall_seconds = counted.stall_seconds;
    all.hbm_budget_bytes = hbm.budget.count();
    all.hbm_peak_bytes = hbm.mapped_peak.count();
    all.ddr_budget_bytes = ddr.budget.count();
    all.ddr_peak_bytes = ddr.mapped_peak.count();
    std::memcpy(counters, &all, counters->struct_size);
    return TERRACE_OK;
  });
}

}  // extern "C"
