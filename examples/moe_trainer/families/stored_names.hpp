// How released files hold what the library keeps in one tensor: an expert at a time, a convolution at a time,
// under other names. The library reads both forms, and so do we; written is its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "examples/moe_trainer/families/family.hpp"

namespace terrace::trainer {

// The next `count` numbers of the family's tensor, as a tensor of a file.
struct StoredPiece {
  std::string name;
  std::int64_t count = 0;
};
// In order and without gaps; one piece of another name where only that differs.
[[nodiscard]] std::vector<StoredPiece> stored_pieces(const FamilyTensor& tensor);
// What the released files of kimi_linear call a tensor among experts; others: the name itself.
[[nodiscard]] std::string other_name(const std::string& name);

}  // namespace terrace::trainer
