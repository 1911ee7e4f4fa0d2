#include "examples/moe_trainer/families/stored_names.hpp"

#include <algorithm>
#include <utility>

namespace terrace::trainer {

namespace {

std::int64_t count_of(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

// What is before `end` in a name that ends with it; empty: it does not.
std::string before(const std::string& name, const std::string& end) {
  if (name.size() < end.size() || name.compare(name.size() - end.size(), end.size(), end) != 0) return "";
  return name.substr(0, name.size() - end.size());
}

std::string replaced(std::string name, const std::string& from, const std::string& to) {
  const std::size_t at = name.find(from);
  return at == std::string::npos ? name : name.replace(at, from.size(), to);
}

struct Split {
  std::string prefix;
  std::int64_t groups;             // 0: one, which has no number in its name
  std::vector<const char*> names;  // equal shares of each group, one behind the other
};

std::vector<StoredPiece> split(const FamilyTensor& tensor, const Split& how) {
  std::vector<StoredPiece> pieces;
  const std::int64_t each = count_of(tensor.shape) / std::max<std::int64_t>(how.groups, 1) /
                            static_cast<std::int64_t>(how.names.size());
  for (std::int64_t group = 0; group < std::max<std::int64_t>(how.groups, 1); ++group) {
    const std::string middle = how.groups > 0 ? std::to_string(group) + "." : "";
    for (const char* name : how.names) {
      pieces.push_back({how.prefix + middle + name, each});
    }
  }
  return pieces;
}

}  // namespace

std::vector<StoredPiece> stored_pieces(const FamilyTensor& tensor) {
  const std::int64_t groups = tensor.shape.front();
  if (const std::string at = before(tensor.name, "gate_up_proj"); !at.empty()) {
    return split(tensor, {at, groups, {"gate_proj.weight", "up_proj.weight"}});
  }
  if (const std::string at = before(tensor.name, "experts.down_proj"); !at.empty()) {
    return split(tensor, {at + "experts.", groups, {"down_proj.weight"}});
  }
  if (const std::string at = before(tensor.name, "conv1d.weight"); !at.empty()) {
    return split(tensor, {at, 0, {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"}});
  }
  return {{replaced(tensor.name, ".forget_gate.", "."), count_of(tensor.shape)}};
}

std::string other_name(const std::string& name) {
  const bool expert = name.find(".mlp.experts.") != std::string::npos;
  std::string other = replaced(name, ".mlp.", ".block_sparse_moe.");
  if (!expert) return other;
  other = replaced(std::move(other), ".gate_proj.", ".w1.");
  other = replaced(std::move(other), ".down_proj.", ".w2.");
  return replaced(std::move(other), ".up_proj.", ".w3.");
}

}  // namespace terrace::trainer
