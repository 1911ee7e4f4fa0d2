// What the user asked for: the policy file as a value. Every field has the default that an empty file gives.
//
// The file is TOML; docs/POLICY.md lists every key. Unknown keys, bad units and contradictions are errors of
// the form
//   terrace.toml:7:10: hbm.budget: "140%" is more than the device; use a size like "96GiB" or a share up to
//   "100%"
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/huge_pages.hpp"
#include "runtime/result.hpp"
#include "runtime/units.hpp"
#include "swapcore/site.hpp"
#include "swapcore/streamed/load_choice.hpp"
#include "swapcore/verifier.hpp"

namespace terrace {

// A limit as written: "24GiB", "80%" of something that is known later, or "auto".
struct Amount {
  enum class Form : std::uint8_t { kAuto, kBytes, kShare };
  Form form = Form::kAuto;
  Bytes bytes;       // kBytes
  double share = 0;  // kShare: 0..1
  // The bytes meant, where a share is of `whole` and auto means `automatic`.
  [[nodiscard]] Bytes resolve(Bytes whole, Bytes automatic) const;
  [[nodiscard]] static Amount of(Bytes bytes) { return {Form::kBytes, bytes, 0}; }
  [[nodiscard]] static Amount of_share(double share) { return {Form::kShare, {}, share}; }
  bool operator==(const Amount&) const = default;
};

enum class SwapMode : std::uint8_t { kOff, kAuto, kRules };
enum class Contingency : std::uint8_t { kOffload, kRecompute, kFail };
enum class RuleAction : std::uint8_t { kAuto, kHbm, kDdr, kDiscard };
[[nodiscard]] const char* name_of(RuleAction action);  // "auto", "hbm", "ddr", "discard"
enum class RulePhase : std::uint8_t { kAny, kForward, kRecompute };
enum class SpillFormat : std::uint8_t { kExact, kFp8 };
// kAuto: HBM in the trainer; in a PyTorch program DDR once what saved tensors can give up does not suffice.
enum class StateTier : std::uint8_t { kHbm, kDdr, kAuto };
enum class MemoryReport : std::uint8_t { kPhysical, kExtended };
enum class SpillWord : std::uint8_t { kAuto, kAlways, kOff };
enum class NumaMode : std::uint8_t { kNearest, kInterleave, kNodes };

// In a file, from 1.
struct FilePosition {
  std::uint32_t line = 1, column = 1;
  auto operator<=>(const FilePosition&) const = default;
};

struct Rule {
  std::string match;             // glob over site names: * within a dotted part or across parts
  std::optional<SiteKind> kind;  // none: any
  RulePhase phase = RulePhase::kAny;
  RuleAction action = RuleAction::kAuto;
  int priority = 0;              // the highest matching rule decides; equals must agree
  std::uint64_t first_step = 0;  // steps = "0..100": inclusive
  std::uint64_t last_step = UINT64_MAX;
  std::optional<FilePosition> position = std::nullopt;  // of `match`; none: made in a program
};

// [[daemon.job]]: what terraced grants the processes of a job.
struct JobRule {
  std::string match;  // glob over job names
  std::string user;   // only of this user's processes; empty: of anybody's
  int priority = 1;   // a job of priority 4 is due four times what one of priority 1 is
  Amount hbm_guarantee = Amount::of(Bytes());  // on each device
  Amount ddr_guarantee = Amount::of(Bytes());  // on each NUMA node
  double link_guarantee = 0;                   // of the time of each device's link and direction, 0..1
};

struct Policy {
  std::string source;  // what errors name the file by; empty: made in a program
  struct Hbm {
    Amount budget = Amount::of_share(0.9);
    Amount reserve = Amount::of(2_GiB);
  } hbm;
  struct Ddr {
    Amount budget;  // auto: half of what the cgroup allows
    NumaMode numa = NumaMode::kNearest;
    std::vector<int> nodes;                         // numa = [0, 1]
    HugePages hugepages = HugePages::kTransparent;  // false, true, "explicit"
  } ddr;
  struct Nvme {
    std::string path = "/var/tmp";  // a folder
    Bytes budget;                   // of the file in it; 0: nothing goes there
  } nvme;
  struct Swapcore {
    SwapMode mode = SwapMode::kAuto;
    Amount hbm_budget;  // auto: what the device budget leaves
    Amount ddr_budget;  // auto: all of ddr.budget
    Verify verify = Verify::kOff;
    SpillFormat spill_format = SpillFormat::kExact;  // kFp8: what comes back is near what left, and not it
    std::vector<Rule> rules;
  } swapcore;
  struct Checkpoint {
    Amount budget;
    Contingency contingency = Contingency::kOffload;
  } checkpoint;
  struct Experts {
    Amount resident = Amount::of_share(1);  // of expert weights, in HBM; the rest streams from DDR
    int prefetch = 1;                       // layers ahead
    ExpertLoad load = ExpertLoad::kAuto;    // by whose word they are fetched
  } experts;
  struct Optimizer {
    StateTier tier = StateTier::kAuto;
    StateTier gradients = StateTier::kHbm;  // of trained experts
  } optimizer;
  struct Hook {
    MemoryReport report = MemoryReport::kPhysical;  // what cudaMemGetInfo says under `terrace run`
    SpillWord spill = SpillWord::kAuto;             // whose blocks leave HBM under their pointers
  } hook;
  struct Metrics {
    std::string listen = "127.0.0.1:9464";
    std::string tls_cert, tls_key, auth_file;  // absolute paths; empty: HTTP, for whoever reaches the address
  } metrics;
  struct Daemon {
    std::string socket = "/run/terrace/terraced.sock";
    std::string group;          // whose members may register; empty: the daemon's own user and root
    std::string readers;        // whose members may ask for totals; "*": everybody
    std::vector<JobRule> jobs;  // the first that matches decides
  } daemon;
};

// Reads a policy from TOML text; `source` names it in errors.
// Errors: kInvalidArgument with "source:line:column: key: what; what would do".
[[nodiscard]] Result<Policy> parse_policy(std::string_view toml, std::string_view source);
// Errors: kIo (missing, unreadable: says which and what to do), else as parse_policy.
[[nodiscard]] Result<Policy> load_policy(const std::string& path);

// "24GiB", "512 MiB", "80%", "auto". Errors: kInvalidArgument; the text says what would be accepted.
[[nodiscard]] Result<Amount> parse_amount(std::string_view text);
// "24GiB" only. Errors as above.
[[nodiscard]] Result<Bytes> parse_bytes(std::string_view text);

// Whether a glob (`layer.*.moe.fc1`) matches a site name.
[[nodiscard]] bool glob_matches(std::string_view glob, std::string_view name);
// The rule that decides about a site at a step: of those that match the one of highest priority, or null. Of
// equals, which say the same (rule_report.hpp refuses others), the first.
[[nodiscard]] const Rule* deciding_rule(const std::vector<Rule>& rules, const SiteSpec& site, RulePhase phase,
                                        std::uint64_t step);
// Its action, or kAuto where none matches.
[[nodiscard]] RuleAction decide(const std::vector<Rule>& rules, const SiteSpec& site, RulePhase phase,
                                std::uint64_t step);

}  // namespace terrace
