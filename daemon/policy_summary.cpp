#include "daemon/policy_summary.hpp"

#include <cstdio>

namespace terrace {
namespace {

std::string text_of(const Amount& amount, const char* whole, const char* automatic) {
  switch (amount.form) {
    case Amount::Form::kAuto:
      return automatic;
    case Amount::Form::kBytes:
      return format_bytes(amount.bytes);
    case Amount::Form::kShare: {
      char share[32];
      std::snprintf(share, sizeof share, "%g%% of ", amount.share * 100);
      return std::string(share) + whole;
    }
  }
  return automatic;
}

std::string text_of(const Policy::Ddr& ddr) {
  std::string text = text_of(ddr.budget, "the host memory", "half of the host memory");
  switch (ddr.numa) {
    case NumaMode::kNearest:
      text += ", on the NUMA node nearest to the device";
      break;
    case NumaMode::kInterleave:
      text += ", interleaved over NUMA nodes";
      break;
    case NumaMode::kNodes:
      text += ", on NUMA nodes";
      for (const int node : ddr.nodes) text += " " + std::to_string(node);
      break;
  }
  switch (ddr.hugepages) {
    case HugePages::kOff:
      return text + ", in small pages";
    case HugePages::kTransparent:
      return text + ", in huge pages";
    case HugePages::kExplicit:
      break;
  }
  return text + ", in huge pages set aside by the administrator";
}

const char* text_of(SwapMode mode) {
  switch (mode) {
    case SwapMode::kOff:
      return "off: nothing is cached";
    case SwapMode::kAuto:
      return "auto: the plan chooses what is kept where";
    case SwapMode::kRules:
      return "rules: only what a rule names is kept";
  }
  return "";
}

const char* text_of(Contingency contingency) {
  switch (contingency) {
    case Contingency::kOffload:
      return "offloaded to DDR";
    case Contingency::kRecompute:
      return "recomputed";
    case Contingency::kFail:
      return "refused";
  }
  return "";
}

const char* text_of(RuleAction action) {
  switch (action) {
    case RuleAction::kAuto:
      return "left to the plan";
    case RuleAction::kHbm:
      return "kept in HBM";
    case RuleAction::kDdr:
      return "kept in DDR";
    case RuleAction::kDiscard:
      return "discarded";
  }
  return "";
}

const char* text_of(ExpertLoad load) {
  switch (load) {
    case ExpertLoad::kLayer:
      return "whole, in order";
    case ExpertLoad::kRouter:
      return "those with tokens, on the router's word";
    case ExpertLoad::kAuto:
      return "whole or on the router's word, as is cheaper";
  }
  return "";
}

const char* text_of(StateTier tier) { return tier == StateTier::kDdr ? "DDR" : "HBM"; }

std::string text_of(const Rule& rule) {
  std::string text = rule.match;
  if (rule.kind) text += std::string(" (") + name_of(*rule.kind) + ")";
  text += std::string(": ") + text_of(rule.action);
  if (rule.phase == RulePhase::kForward) text += " in forward";
  if (rule.phase == RulePhase::kRecompute) text += " in recomputation";
  if (rule.first_step != 0 || rule.last_step != UINT64_MAX) {
    text += ", steps " + std::to_string(rule.first_step) + " to " +
            (rule.last_step == UINT64_MAX ? "the end" : std::to_string(rule.last_step));
  }
  return text + ", priority " + std::to_string(rule.priority);
}

std::string text_of(const Policy::Daemon& daemon) {
  std::string text = daemon.socket;
  text += daemon.group.empty() ? ", for its own user and root"
                               : ", for its own user, root and group " + daemon.group;
  if (daemon.readers.empty()) return text;
  return text + "; totals for " + (daemon.readers == "*" ? "everybody" : "group " + daemon.readers);
}

std::string text_of(const JobRule& job) {
  std::string text = job.match;
  if (!job.user.empty()) text += " of user " + job.user;
  text += ": priority " + std::to_string(job.priority);
  const auto guarantee = [&text](const char* what, const Amount& amount) {
    if (amount == Amount::of(Bytes())) return;
    text += std::string(", guaranteed ") + what + ": " + text_of(amount, "what may be leased", "nothing");
  };
  guarantee("HBM of each device", job.hbm_guarantee);
  guarantee("DDR of each NUMA node", job.ddr_guarantee);
  if (job.link_guarantee > 0)
    text +=
        ", guaranteed time of each link: " + text_of(Amount::of_share(job.link_guarantee), "it", "nothing");
  return text;
}

const char* text_of(SpillWord spill) {
  if (spill == SpillWord::kOff) return "never";
  return spill == SpillWord::kAlways ? "in every program" : "in programs without PyTorch";
}

}  // namespace

std::string policy_summary(const Policy& policy) {
  std::string text;
  const auto line = [&](const char* what, const std::string& meaning) {
    text += std::string("  ") + what + meaning + "\n";
  };
  line("hbm         ", text_of(policy.hbm.budget, "each device", "all of each device") + ", " +
                           text_of(policy.hbm.reserve, "the device", "nothing") +
                           " left to the driver and libraries");
  line("ddr         ", text_of(policy.ddr));
  line("nvme        ", policy.nvme.budget == 0_B
                           ? "nothing goes there"
                           : "experts and optimizer state that DDR has no room for, up to " +
                                 format_bytes(policy.nvme.budget) + " in " + policy.nvme.path);
  line("swapcore    ", text_of(policy.swapcore.mode));
  line("            ",
       "cached outputs: HBM " +
           text_of(policy.swapcore.hbm_budget, "the device budget", "what the device budget leaves") +
           ", DDR " + text_of(policy.swapcore.ddr_budget, "the ddr budget", "all of the ddr budget"));
  for (const Rule& rule : policy.swapcore.rules) line("rule        ", text_of(rule));
  line("checkpoint  ",
       "activations may hold " +
           text_of(policy.checkpoint.budget, "the device budget", "what the device budget leaves") +
           " of HBM; the rest is " + text_of(policy.checkpoint.contingency));
  line("experts     ", text_of(policy.experts.resident, "expert weights", "all") +
                           " kept in HBM; the rest comes from DDR, as many layers ahead: " +
                           std::to_string(policy.experts.prefetch) + ", " + text_of(policy.experts.load));
  line("optimizer   ", std::string("state in ") + text_of(policy.optimizer.tier) +
                           ", gradients of experts in " + text_of(policy.optimizer.gradients));
  line("hook        ",
       std::string("cudaMemGetInfo says ") +
           (policy.hook.report == MemoryReport::kExtended ? "HBM and the ddr budget"
                                                          : "what is left of the HBM budget") +
           "; large blocks leave HBM " + text_of(policy.hook.spill));
  line("metrics     ", "http://" + policy.metrics.listen + "/metrics");
  line("daemon      ", text_of(policy.daemon));
  for (const JobRule& job : policy.daemon.jobs) line("job         ", text_of(job));
  return text;
}

}  // namespace terrace
