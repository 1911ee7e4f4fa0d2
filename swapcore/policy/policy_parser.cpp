// A TOML document to a Policy, section by section.
#include <arpa/inet.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <set>

#include "swapcore/policy/contradictions.hpp"
#include "swapcore/policy/job_parser.hpp"
#include "swapcore/policy/known_keys.hpp"
#include "swapcore/policy/rule_parser.hpp"
#include "swapcore/policy/section_reader.hpp"
#include "swapcore/policy/value_words.hpp"

namespace terrace {
namespace {

constexpr std::size_t kSocketPathMost = 107;  // sun_path holds 108 bytes with its terminator
constexpr std::size_t kSourceMost = std::size_t{1} << 20;
constexpr std::int64_t kHighestNode = 1023;  // what the kernel's node masks hold

constexpr Word<NumaMode> kNumaModes[] = {{"nearest", NumaMode::kNearest},
                                         {"interleave", NumaMode::kInterleave}};
constexpr Word<SwapMode> kSwapModes[] = {
    {"off", SwapMode::kOff}, {"auto", SwapMode::kAuto}, {"rules", SwapMode::kRules}};
constexpr Word<SpillFormat> kSpillFormats[] = {{"exact", SpillFormat::kExact}, {"fp8", SpillFormat::kFp8}};
constexpr Word<Verify> kVerifies[] = {
    {"off", Verify::kOff}, {"sample", Verify::kSample}, {"always", Verify::kAlways}};
constexpr Word<Contingency> kContingencies[] = {
    {"offload", Contingency::kOffload}, {"recompute", Contingency::kRecompute}, {"fail", Contingency::kFail}};

constexpr Word<StateTier> kOptimizerTiers[] = {
    {"auto", StateTier::kAuto}, {"hbm", StateTier::kHbm}, {"ddr", StateTier::kDdr}};
constexpr Word<StateTier> kStateTiers[] = {{"hbm", StateTier::kHbm}, {"ddr", StateTier::kDdr}};
constexpr Word<MemoryReport> kMemoryReports[] = {{"physical", MemoryReport::kPhysical},
                                                 {"extended", MemoryReport::kExtended}};
constexpr Word<SpillWord> kSpillWords[] = {
    {"auto", SpillWord::kAuto}, {"always", SpillWord::kAlways}, {"off", SpillWord::kOff}};
constexpr std::int64_t kPrefetchMost = 16;  // layers
constexpr Word<ExpertLoad> kExpertLoads[] = {
    {"layer", ExpertLoad::kLayer}, {"router", ExpertLoad::kRouter}, {"auto", ExpertLoad::kAuto}};

std::vector<std::string_view> section_names() {
  std::vector<std::string_view> names;
  for (const KnownKey& entry : known_keys()) {
    const std::string_view top = entry.section.substr(0, entry.section.find('.'));
    if (!top.empty() && (names.empty() || names.back() != top)) names.push_back(top);
  }
  return names;
}

// What is wrong with the host part of an address, or nothing.
bool is_host(std::string_view host) {
  const std::string text(host);
  in6_addr address{};
  if (text.size() > 2 && text.front() == '[' && text.back() == ']')
    return inet_pton(AF_INET6, text.substr(1, text.size() - 2).c_str(), &address) == 1;
  if (text.find_first_not_of("0123456789.") == std::string::npos)
    return inet_pton(AF_INET, text.c_str(), &address) == 1;
  return text.size() <= 253 && text.front() != '-' && text.front() != '.' &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return c < 0x80 && (std::isalnum(c) != 0 || c == '-' || c == '.');
         });
}

std::optional<std::string> listen_fault(std::string_view listen) {
  const std::size_t colon = listen.rfind(':');
  if (colon == std::string_view::npos || colon + 1 == listen.size())
    return "has no port; use an address and a port like \"127.0.0.1:9464\"";
  const std::string_view port = listen.substr(colon + 1);
  unsigned number = 0;
  const auto parsed = std::from_chars(port.data(), port.data() + port.size(), number);
  if (parsed.ec != std::errc() || parsed.ptr != port.data() + port.size() || number > 65535)
    return "has the bad port " + in_quotes(port) + "; use 1 to 65535, or 0 for any that is free";
  if (colon == 0 || !is_host(listen.substr(0, colon)))
    return "has a bad address; use an IPv4 address, an IPv6 address in [ ], or a name of an IPv4 address "
           "before the port";
  return std::nullopt;
}

std::optional<std::string> socket_fault(std::string_view path) {
  if (path.empty() || path.front() != '/') return "is not absolute; use a path that begins with /";
  if (path.size() > kSocketPathMost)
    return "is " + std::to_string(path.size()) + " bytes long; the system takes at most " +
           std::to_string(kSocketPathMost) + ": use a shorter path";
  if (path.back() == '/') return "names a folder; add a file name, as in \"/run/terrace/terraced.sock\"";
  if (path.find('\0') != std::string_view::npos) return "holds a zero byte; use a plain path";
  return std::nullopt;
}

class PolicyParser {
 public:
  explicit PolicyParser(const toml::table& root) : root_(root) {}

  Result<Policy> parse(std::string_view source) {
    const std::vector<std::string_view> sections = section_names();
    const SectionReader top(root_, "", problems_, sections);
    read_version(top);
    with_section("hbm", [&](const SectionReader& r) { read_hbm(r); });
    with_section("ddr", [&](const SectionReader& r) { read_ddr(r); });
    with_section("nvme", [&](const SectionReader& r) { read_nvme(r); });
    with_section("swapcore", [&](const SectionReader& r) { read_swapcore(r); });
    with_section("checkpoint", [&](const SectionReader& r) { read_checkpoint(r); });
    with_section("experts", [&](const SectionReader& r) { read_experts(r); });
    with_section("optimizer", [&](const SectionReader& r) { read_optimizer(r); });
    with_section("hook", [&](const SectionReader& r) {
      policy_.hook.report = r.word<MemoryReport>("report", policy_.hook.report, kMemoryReports).value;
      policy_.hook.spill = r.word<SpillWord>("spill", policy_.hook.spill, kSpillWords).value;
    });
    with_section("metrics", [&](const SectionReader& r) { read_metrics(r); });
    with_section("daemon", [&](const SectionReader& r) { read_daemon(r); });
    if (problems_.empty()) find_contradictions(policy_, positions_, rules_, problems_);
    if (!problems_.empty()) return problems_.first(source);
    for (PlacedRule& placed : rules_) policy_.swapcore.rules.push_back(std::move(placed.rule));
    policy_.source = source;
    return std::move(policy_);
  }

 private:
  template <typename ReadSection>
  void with_section(std::string_view name, ReadSection read) {
    const toml::node* node = root_.get(name);
    if (node == nullptr) return;
    const toml::table* table = node->as_table();
    if (table == nullptr) {
      problems_.add(position_of(node->source()), name,
                    "must be one section; write it once as [" + std::string(name) + "] with its keys below");
      return;
    }
    static constexpr std::string_view kRule[] = {"rule"};
    static constexpr std::string_view kJob[] = {"job"};
    std::span<const std::string_view> subsections;
    if (name == "swapcore") subsections = kRule;
    if (name == "daemon") subsections = kJob;
    read(SectionReader(*table, name, problems_, subsections));
  }

  static void read_version(const SectionReader& reader) {
    const auto version = reader.integer("version", 1, {INT64_MIN, INT64_MAX});
    if (version.position && version.value != 1)
      reader.problem(*version.position, "version",
                     std::to_string(version.value) + " is not known; this Terrace reads version = 1");
  }

  void read_hbm(const SectionReader& reader) {
    auto& hbm = policy_.hbm;
    keep(reader.amount("budget", hbm.budget, AutoAllowed::kNo), hbm.budget, positions_.hbm_budget);
    keep(reader.amount("reserve", hbm.reserve, AutoAllowed::kNo), hbm.reserve, positions_.hbm_reserve);
  }

  void read_ddr(const SectionReader& reader) {
    auto& ddr = policy_.ddr;
    keep(reader.amount("budget", ddr.budget, AutoAllowed::kYes), ddr.budget, positions_.ddr_budget);
    read_huge_pages(reader);
    const toml::node* numa = reader.node("numa");
    if (numa != nullptr && numa->is_array()) {
      read_nodes(reader, *numa->as_array());
    } else if (numa != nullptr && !numa->is_string()) {
      reader.problem(position_of(numa->source()), "numa",
                     "is of the wrong type; use \"nearest\", \"interleave\", or a list of nodes like [0, 1]");
    } else {
      ddr.numa = reader.word<NumaMode>("numa", ddr.numa, kNumaModes).value;
    }
  }

  void read_huge_pages(const SectionReader& reader) {
    const toml::node* pages = reader.node("hugepages");
    if (pages == nullptr) return;
    const auto* word = pages->as_string();
    if (pages->is_boolean()) {
      const bool on = reader.flag("hugepages", true).value;
      policy_.ddr.hugepages = on ? HugePages::kTransparent : HugePages::kOff;
    } else if (word != nullptr && word->get() == "explicit") {
      policy_.ddr.hugepages = HugePages::kExplicit;
    } else {
      const std::string what =
          word != nullptr ? in_quotes(word->get()) + " is not known here" : "is of the wrong type";
      reader.problem(
          position_of(pages->source()), "hugepages",
          what + "; use true, false, or \"explicit\" for 2 MiB pages set aside by vm.nr_hugepages");
    }
  }

  void read_nodes(const SectionReader& reader, const toml::array& nodes) {
    const std::string would_do = "list each node once, as in [0, 1]";
    policy_.ddr.numa = NumaMode::kNodes;
    if (nodes.empty()) reader.problem(position_of(nodes.source()), "numa", "is an empty list; " + would_do);
    std::set<std::int64_t> seen;
    for (const toml::node& element : nodes) {
      const auto* number = element.as_integer();
      if (number == nullptr || number->get() < 0 || number->get() > kHighestNode) {
        reader.problem(
            position_of(element.source()), "numa",
            "holds what is no node number from 0 to " + std::to_string(kHighestNode) + "; " + would_do);
      } else if (!seen.insert(number->get()).second) {
        reader.problem(position_of(element.source()), "numa",
                       "names node " + std::to_string(number->get()) + " twice; " + would_do);
      } else {
        policy_.ddr.nodes.push_back(static_cast<int>(number->get()));
      }
    }
  }

  void read_nvme(const SectionReader& reader) {
    auto& nvme = policy_.nvme;
    const auto path = reader.text("path", nvme.path);
    if (path.position &&
        (path.value.empty() || path.value.front() != '/' || path.value.find('\0') != std::string::npos)) {
      reader.problem(
          *path.position, "path",
          in_quotes(path.value) + " is no absolute path; use a folder on the drive, as \"/scratch\"");
    }
    nvme.path = path.value;
    const auto budget = reader.amount("budget", Amount::of(nvme.budget), AutoAllowed::kNo);
    if (budget.value.form == Amount::Form::kShare) {
      reader.problem(*budget.position, "budget",
                     "is a share; a drive may hold other things, so use a size like \"500GiB\"");
    }
    nvme.budget = budget.value.bytes;
  }

  void read_swapcore(const SectionReader& reader) {
    auto& swapcore = policy_.swapcore;
    keep(reader.word<SwapMode>("mode", swapcore.mode, kSwapModes), swapcore.mode, positions_.swapcore_mode);
    keep(reader.amount("hbm_budget", swapcore.hbm_budget, AutoAllowed::kYes), swapcore.hbm_budget,
         positions_.swapcore_hbm_budget);
    keep(reader.amount("ddr_budget", swapcore.ddr_budget, AutoAllowed::kYes), swapcore.ddr_budget,
         positions_.swapcore_ddr_budget);
    swapcore.verify = reader.word<Verify>("verify", swapcore.verify, kVerifies).value;
    swapcore.spill_format =
        reader.word<SpillFormat>("spill_format", swapcore.spill_format, kSpillFormats).value;
    if (const toml::node* rules = reader.node("rule")) rules_ = parse_rules(*rules, problems_);
  }

  void read_checkpoint(const SectionReader& reader) {
    auto& checkpoint = policy_.checkpoint;
    keep(reader.amount("budget", checkpoint.budget, AutoAllowed::kYes), checkpoint.budget,
         positions_.checkpoint_budget);
    checkpoint.contingency =
        reader.word<Contingency>("contingency", checkpoint.contingency, kContingencies).value;
  }

  void read_experts(const SectionReader& reader) {
    auto& experts = policy_.experts;
    experts.resident = reader.amount("resident", experts.resident, AutoAllowed::kNo).value;
    experts.prefetch =
        static_cast<int>(reader.integer("prefetch", experts.prefetch, {1, kPrefetchMost}).value);
    experts.load = reader.word<ExpertLoad>("load", experts.load, kExpertLoads).value;
  }

  void read_optimizer(const SectionReader& reader) {
    auto& optimizer = policy_.optimizer;
    optimizer.tier = reader.word<StateTier>("tier", optimizer.tier, kOptimizerTiers).value;
    const auto gradients = reader.word<StateTier>("gradients", optimizer.gradients, kStateTiers);
    optimizer.gradients = gradients.value;
    if (gradients.value == StateTier::kDdr && optimizer.tier != StateTier::kDdr) {
      reader.problem(
          *gradients.position, "gradients",
          "\"ddr\" goes with the state that they are stepped with; set optimizer.tier = \"ddr\" too");
    }
  }

  void read_metrics(const SectionReader& reader) {
    const auto listen = reader.text("listen", policy_.metrics.listen);
    if (listen.position) {
      if (const auto fault = listen_fault(listen.value))
        reader.problem(*listen.position, "listen", in_quotes(listen.value) + " " + *fault);
    }
    policy_.metrics.listen = listen.value;
    const auto certificate = file_in(reader, "tls_cert", policy_.metrics.tls_cert);
    const auto key = file_in(reader, "tls_key", policy_.metrics.tls_key);
    (void)file_in(reader, "auth_file", policy_.metrics.auth_file);
    if (policy_.metrics.tls_cert.empty() == policy_.metrics.tls_key.empty()) return;
    const bool first = !policy_.metrics.tls_cert.empty();
    if (const auto at = first ? certificate : key)
      reader.problem(*at, first ? "tls_cert" : "tls_key",
                     first ? "has no key beside it; name the key's PEM file in metrics.tls_key"
                           : "has no certificate beside it; name its PEM file in metrics.tls_cert");
  }

  // An absolute path, or nothing. Where the file names it.
  static std::optional<Position> file_in(const SectionReader& reader, std::string_view key,
                                         std::string& file) {
    const auto read = reader.text(key, file);
    const bool plain =
        read.value.empty() || (read.value.front() == '/' && read.value.find('\0') == std::string::npos);
    if (read.position && !plain)
      reader.problem(*read.position, key,
                     in_quotes(read.value) + " is not absolute; use a path that begins with /");
    if (plain) file = read.value;
    return read.position;
  }

  void read_daemon(const SectionReader& reader) {
    const auto socket = reader.text("socket", policy_.daemon.socket);
    if (socket.position) {
      if (const auto fault = socket_fault(socket.value))
        reader.problem(*socket.position, "socket", in_quotes(socket.value) + " " + *fault);
    }
    policy_.daemon.socket = socket.value;
    policy_.daemon.group = read_account(reader, "group");
    policy_.daemon.readers = read_account(reader, "readers");
    if (const toml::node* jobs = reader.node("job")) policy_.daemon.jobs = parse_jobs(*jobs, problems_);
  }

  // A group's name; "*" stands for everybody where readers are named.
  static std::string read_account(const SectionReader& reader, std::string_view key) {
    const auto name = reader.text(key, "");
    const bool everybody = key == "readers" && name.value == "*";
    if (name.position && !everybody) {
      if (const auto fault = account_fault(name.value))
        reader.problem(*name.position, key, in_quotes(name.value) + " " + *fault);
    }
    return name.value;
  }

  template <typename T>
  static void keep(const Read<T>& read, T& value, std::optional<Position>& position) {
    value = read.value;
    position = read.position;
  }

  const toml::table& root_;
  Policy policy_;
  PolicyPositions positions_;
  std::vector<PlacedRule> rules_;
  Problems problems_;
};

}  // namespace

Result<Policy> parse_policy(std::string_view text, std::string_view source) {
  if (text.size() > kSourceMost) {
    Problems problems;
    problems.add({1, 1}, "file",
                 "is larger than 1 MiB; a policy is a few dozen lines, so is this the right file?");
    return problems.first(source);
  }
  const toml::parse_result parsed = toml::parse(text);
  if (!parsed) {
    const toml::parse_error& error = parsed.error();
    Problems problems;
    problems.add(position_of(error.source()), "syntax",
                 std::string(error.description()) + "; docs/POLICY.md shows the form of the file");
    return problems.first(source);
  }
  return PolicyParser(parsed.table()).parse(source);
}

}  // namespace terrace
