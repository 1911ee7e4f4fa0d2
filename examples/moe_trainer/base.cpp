#include "examples/moe_trainer/base.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <span>
#include <sstream>
#include <string_view>
#include <vector>

#include "examples/moe_trainer/checkpoint.hpp"
#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/host_copy.hpp"
#include "examples/moe_trainer/random.hpp"

namespace terrace::trainer {

namespace {

// Keys of a model's sections that say how it was trained, or how it is computed, and not what it is.
constexpr std::array<std::string_view, 6> kOfTraining = {"dsa.index_loss_weight", "dsa.warmup_steps",
                                                         "moe.balance",           "moe.balance_rate",
                                                         "moe.compute",           "moe.sequence_loss_weight"};

bool is_frozen(const NamedArray& array) { return array.parameter == nullptr || !array.parameter->trained(); }

// Canonical text by key.
std::map<std::string, std::string> keys_in(const std::string& canonical) {
  std::map<std::string, std::string> keys;
  std::istringstream lines(canonical);
  std::string line;
  while (std::getline(lines, line)) {
    const std::size_t equals = line.find(" = ");
    if (equals != std::string::npos) keys[line.substr(0, equals)] = line.substr(equals + 3);
  }
  return keys;
}

bool describes_model(const std::string& key) {
  const std::string table = key.substr(0, key.find('.'));
  if (table == "train" || table == "lora" || table == "images") return false;
  return std::find(kOfTraining.begin(), kOfTraining.end(), key) == kOfTraining.end();
}

void check_same_model(const std::string& path, const Config& config) {
  const auto there = keys_in(read_checkpoint_info(path).config);
  const auto here = keys_in(canonical_text(config));
  const auto rank = there.find("lora.rank");
  if (rank != there.end() && rank->second != "0") {
    bad_input(path + ": holds adapters alone; --base wants a checkpoint of a whole model");
  }
  for (const auto& [key, value] : here) {
    const auto found = there.find(key);
    if (!describes_model(key) || found == there.end() || found->second == value) continue;
    bad_input(path + ": was trained with " + key + " = " + found->second + " (here: " + value +
              "); describe the same model with --config");
  }
}

// Numbers in the order in which they lie, `first` the next; those of an unfinished row wait in `rest`.
void set_rows(Session& session, const Parameter& parameter, std::int64_t first,
              std::span<const float> numbers, std::vector<float>& rest) {
  const std::int64_t begin = first - static_cast<std::int64_t>(rest.size());
  rest.insert(rest.end(), numbers.begin(), numbers.end());
  const std::size_t width = static_cast<std::size_t>(parameter.width());
  const std::size_t whole = rest.size() / width * width;
  if (whole > 0) set_values(session, parameter, begin, std::span(rest).first(whole));
  rest.erase(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(whole));
}

}  // namespace

void load_base(const std::string& path, const Config& config, Session& session, const Model& model) {
  check_same_model(path, config);
  std::vector<CheckpointNumbers> wanted;
  const auto rest = std::make_shared<std::vector<float>>();  // empty again at each array's end
  for (const NamedArray& array : model.arrays()) {
    if (!is_frozen(array)) continue;
    wanted.push_back({array.name, array.shape, [&session, array, rest](std::int64_t first, auto numbers) {
                        if (array.parameter == nullptr) {
                          upload(session, numbers, array.value + first);
                        } else if (array.parameter->in_blocks()) {
                          set_rows(session, *array.parameter, first, numbers, *rest);
                        } else {
                          set_values(session, *array.parameter, first, numbers);
                        }
                      }});
  }
  read_checkpoint_numbers(path, wanted);
}

std::uint64_t base_fingerprint(Session& session, const Model& model) {
  require(session.device().synchronize(session.compute()));  // what lives in DDR came there in its order
  std::uint64_t hash = hash_text("");
  for (const NamedArray& array : model.arrays()) {
    if (!is_frozen(array)) continue;
    hash = hash_text(array.name, hash);
    const std::int64_t count = array.parameter != nullptr ? array.parameter->count() : array.shape.front();
    const auto add = [&hash](const std::vector<std::byte>& bytes) {
      hash = hash_text({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, hash);
    };
    const auto on_device = [&session](const auto* from, std::int64_t numbers) {
      return download_bytes(session, reinterpret_cast<const std::byte*>(from),
                            static_cast<std::size_t>(numbers) * sizeof *from);
    };
    if (array.parameter == nullptr) {
      add(on_device(array.value, count));
      continue;
    }
    const Parameter& p = *array.parameter;
    if (p.in_blocks()) {
      const bool away = p.home.block_numbers != nullptr;
      add(away ? home_numbers(p) : on_device(p.block_numbers, count));
      add(away ? home_scales(p) : on_device(p.block_scale, p.scale_count()));
    } else if (p.home.value != nullptr || p.home.copy != nullptr) {
      add(home_numbers(p));
    } else {
      add(p.value != nullptr ? on_device(p.value, count) : on_device(p.copy, count));
    }
  }
  return hash;
}

}  // namespace terrace::trainer
