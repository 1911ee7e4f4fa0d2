// What the hook has to say to a person: each kind once in a process, one line on stderr.
#pragma once

#include <cstdint>
#include <string_view>

namespace terrace::hooks {

enum class Notice : std::uint8_t {
  kRefused,     // an allocation met the budget
  kPoolLost,    // the pool serves no new allocations
  kNoBudget,    // the policy leaves nothing of a device
  kBadSetting,  // a variable of the environment
  kNoSpill,     // blocks of stable addresses cannot leave HBM
  kDdrFull,     // nor, for now, can they: DDR is full
  kOpaque       // a launch holds every block, for it does not say what it reaches
};

// Writes "terrace: LINE" where the kind has not been said. Never throws; errno is kept.
void say_once(Notice kind, std::string_view line) noexcept;
// Writes the lines as they are, in one call. Never throws; errno is kept.
void say_at_end(std::string_view lines) noexcept;

}  // namespace terrace::hooks
