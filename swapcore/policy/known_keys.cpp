#include "swapcore/policy/known_keys.hpp"

namespace terrace {
namespace {

constexpr KnownKey kKnownKeys[] = {
    {"", "version", "1"},
    {"hbm", "budget", "\"90%\""},
    {"hbm", "reserve", "\"2GiB\""},
    {"ddr", "budget", "\"auto\""},
    {"ddr", "numa", "\"nearest\""},
    {"ddr", "hugepages", "true"},
    {"nvme", "path", "\"/var/tmp\""},
    {"nvme", "budget", "\"0\""},
    {"swapcore", "mode", "\"auto\""},
    {"swapcore", "hbm_budget", "\"auto\""},
    {"swapcore", "ddr_budget", "\"auto\""},
    {"swapcore", "verify", "\"off\""},
    {"swapcore", "spill_format", "\"exact\""},
    {"swapcore.rule", "match", ""},
    {"swapcore.rule", "kind", "\"any\""},
    {"swapcore.rule", "phase", "\"any\""},
    {"swapcore.rule", "steps", "\"0..\""},
    {"swapcore.rule", "action", ""},
    {"swapcore.rule", "priority", "0"},
    {"checkpoint", "budget", "\"auto\""},
    {"checkpoint", "contingency", "\"offload\""},
    {"experts", "resident", "\"100%\""},
    {"experts", "prefetch", "1"},
    {"experts", "load", "\"auto\""},
    {"optimizer", "tier", "\"auto\""},
    {"optimizer", "gradients", "\"hbm\""},
    {"hook", "report", "\"physical\""},
    {"hook", "spill", "\"auto\""},
    {"metrics", "listen", "\"127.0.0.1:9464\""},
    {"metrics", "tls_cert", "\"\""},
    {"metrics", "tls_key", "\"\""},
    {"metrics", "auth_file", "\"\""},
    {"daemon", "socket", "\"/run/terrace/terraced.sock\""},
    {"daemon", "group", "\"\""},
    {"daemon", "readers", "\"\""},
    {"daemon.job", "match", ""},
    {"daemon.job", "user", "\"\""},
    {"daemon.job", "priority", "1"},
    {"daemon.job", "hbm_guarantee", "\"0\""},
    {"daemon.job", "ddr_guarantee", "\"0\""},
    {"daemon.job", "link_guarantee", "\"0\""},
};

}  // namespace

std::span<const KnownKey> known_keys() { return kKnownKeys; }

}  // namespace terrace
