#include "examples/moe_trainer/config.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <numeric>
#include <variant>
#include <vector>

#include "examples/moe_trainer/failure.hpp"
#include "examples/moe_trainer/ops/attnres.hpp"
#include "swapcore/policy/toml.hpp"

namespace terrace::trainer {

const char* name_of(Recompute recompute) { return recompute == Recompute::kNone ? "none" : "full"; }

namespace {

enum class DecidesNumbers : std::uint8_t { kYes, kNo };

struct Integer {
  std::int64_t* value;
  std::int64_t least;
};
struct Real {
  double* value;
  double least, most;
};
struct Choice {  // of an enum of one byte: its values' names, in their order
  void* value;
  std::vector<const char*> names;

  [[nodiscard]] std::uint8_t& index() const { return *static_cast<std::uint8_t*>(value); }
  [[nodiscard]] std::string list() const {
    std::string text = std::string("\"") + names[0] + "\"";
    for (std::size_t i = 1; i < names.size(); ++i) {
      text += (i + 1 < names.size() ? ", \"" : " or \"") + std::string(names[i]) + "\"";
    }
    return text;
  }
};
struct Words {
  std::vector<std::string>* value;
};
struct Key {
  const char* table;
  const char* name;
  std::variant<Integer, Real, Choice, Words> field;
  DecidesNumbers numbers = DecidesNumbers::kYes;
};

// The whole file, one row a key: reading, errors and the canonical text come from here alone.
std::vector<Key> keys_of(Config& c) {
  return {
      {"model", "layers", Integer{&c.model.layers, 1}},
      {"model", "hidden", Integer{&c.model.hidden, 1}},
      {"model", "dsa_every", Integer{&c.model.dsa_every, 1}},
      {"model", "norm_eps", Real{&c.model.norm_eps, 0, 1}},
      {"model", "residual", Choice{&c.model.residual, {"plain", "attnres"}}},
      {"model", "residual_block", Integer{&c.model.residual_block, 1}},
      {"kda", "heads", Integer{&c.kda.heads, 1}},
      {"kda", "head_width", Integer{&c.kda.head_width, 1}},
      {"kda", "conv_taps", Integer{&c.kda.conv_taps, 1}},
      {"kda", "gate_rank", Integer{&c.kda.gate_rank, 1}},
      {"kda", "lower_bound", Real{&c.kda.lower_bound, -100, 0}},
      {"dsa", "heads", Integer{&c.dsa.heads, 1}},
      {"dsa", "key_width", Integer{&c.dsa.key_width, 1}},
      {"dsa", "value_width", Integer{&c.dsa.value_width, 1}},
      {"dsa", "index_heads", Integer{&c.dsa.index_heads, 1}},
      {"dsa", "index_width", Integer{&c.dsa.index_width, 1}},
      {"dsa", "top_k", Integer{&c.dsa.top_k, 1}},
      {"dsa", "index_loss_weight", Real{&c.dsa.index_loss_weight, 0, 1e6}},
      {"dsa", "select_every", Integer{&c.dsa.select_every, 1}},
      {"dsa", "warmup_steps", Integer{&c.dsa.warmup_steps, 0}},
      {"moe", "latent", Integer{&c.moe.latent, 1}},
      {"moe", "experts", Integer{&c.moe.experts, 1}},
      {"moe", "top_k", Integer{&c.moe.top_k, 1}},
      {"moe", "groups", Integer{&c.moe.groups, 1}},
      {"moe", "top_groups", Integer{&c.moe.top_groups, 1}},
      {"moe", "expert_width", Integer{&c.moe.expert_width, 1}},
      {"moe", "shared_width", Integer{&c.moe.shared_width, 1}},
      {"moe", "scaling", Real{&c.moe.scaling, 0, 1e6}},
      {"moe", "balance", Choice{&c.moe.balance, {"sign", "quantile"}}},
      {"moe", "sequence_loss_weight", Real{&c.moe.sequence_loss_weight, 0, 1e3}},
      {"moe", "balance_rate", Real{&c.moe.balance_rate, 0, 1}},
      {"moe", "capacity", Real{&c.moe.capacity, 0, 1e6}},
      {"moe", "compute", Choice{&c.moe.compute, {"same", "fp8"}}},
      {"lora", "rank", Integer{&c.lora.rank, 0}},
      {"lora", "targets", Words{&c.lora.targets}},
      {"lora", "base", Choice{&c.lora.base, {"same", "int8"}}},
      {"images", "patch", Integer{&c.images.patch, 0}},
      {"images", "size", Integer{&c.images.size, 1}},
      {"images", "content", Choice{&c.images.content, {"pixels", "blank"}}},
      {"train", "batch", Integer{&c.train.batch, 1}},
      {"train", "length", Integer{&c.train.length, 1}},
      {"train", "micro_batches", Integer{&c.train.micro_batches, 1}},
      {"train", "steps", Integer{&c.train.steps, 1}, DecidesNumbers::kNo},
      {"train", "schedule_steps", Integer{&c.train.schedule_steps, 1}},
      {"train", "warmup_steps", Integer{&c.train.warmup_steps, 0}},
      {"train", "learning_rate", Real{&c.train.learning_rate, 0, 10}},
      {"train", "final_learning_rate", Real{&c.train.final_learning_rate, 0, 10}},
      {"train", "optimizer", Choice{&c.train.optimizer, {"adamw", "muon"}}},
      {"train", "muon_momentum", Real{&c.train.muon_momentum, 0, 1}},
      {"train", "beta1", Real{&c.train.beta1, 0, 1}},
      {"train", "beta2", Real{&c.train.beta2, 0, 1}},
      {"train", "adam_eps", Real{&c.train.adam_eps, 0, 1}},
      {"train", "weight_decay", Real{&c.train.weight_decay, 0, 10}},
      {"train", "clip_norm", Real{&c.train.clip_norm, 0, 1e9}},
      {"train", "recompute", Choice{&c.train.recompute, {"none", "full"}}, DecidesNumbers::kNo},
      {"train", "compute", Choice{&c.train.compute, {"fp32", "bf16"}}},
  };
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

std::string nearest(std::string_view written, const std::vector<std::string>& known) {
  return *std::min_element(known.begin(), known.end(), [&](const std::string& a, const std::string& b) {
    return edit_distance(written, a) < edit_distance(written, b);
  });
}

class Reader {
 public:
  enum class Sections : std::uint8_t { kAll, kRun };
  Reader(std::string source, Config& config, Sections sections)
      : source_(std::move(source)), config_(config), sections_(sections), keys_(keys_of(config)) {}

  void read(const toml::table& file) {
    for (const auto& [name, node] : file) read_table(std::string(name.str()), node, name.source());
    check_whole(file);
  }

 private:
  [[noreturn]] void error(const toml::source_region& at, const std::string& text) const {
    bad_input(source_ + ":" + std::to_string(at.begin.line) + ":" + std::to_string(at.begin.column) + ": " +
              text);
  }

  void read_table(const std::string& table, const toml::node& node, const toml::source_region& at) {
    std::vector<std::string> tables;
    for (const Key& key : keys_) {
      if (tables.empty() || tables.back() != key.table) tables.emplace_back(key.table);
    }
    if (std::find(tables.begin(), tables.end(), table) == tables.end()) {
      // A key outside of its section is likelier than a section misspelt that far.
      const auto key =
          std::find_if(keys_.begin(), keys_.end(), [&](const Key& k) { return table == k.name; });
      const std::string meant = key != keys_.end() ? key->table : nearest(table, tables);
      error(at, "unknown section \"" + table + "\"; did you mean [" + meant + "]?");
    }
    if (sections_ == Sections::kRun && table != "train" && table != "lora" && table != "images") {
      error(at,
            "[" + table +
                "]: the model comes from its folder; only [train], [lora] and [images] are read beside it");
    }
    if (!node.is_table()) error(at, table + ": write a section, [" + table + "]");
    for (const auto& [name, value] : *node.as_table()) {
      read_key(table, std::string(name.str()), value, name.source());
    }
  }

  void read_key(const std::string& table, const std::string& name, const toml::node& value,
                const toml::source_region& at) {
    std::vector<std::string> names;
    for (const Key& key : keys_) {
      if (table != key.table) continue;
      if (name == key.name) {
        std::visit([&](const auto& field) { assign(table + "." + name, field, value); }, key.field);
        return;
      }
      names.emplace_back(key.name);
    }
    error(at, table + "." + name + ": unknown key; did you mean \"" + nearest(name, names) + "\"?");
  }

  void assign(const std::string& name, const Integer& field, const toml::node& value) const {
    if (!value.is_integer() || **value.as_integer() < field.least || **value.as_integer() > INT32_MAX) {
      error(value.source(), name + ": use a whole number, " + std::to_string(field.least) + " or more");
    }
    *field.value = **value.as_integer();
  }
  void assign(const std::string& name, const Real& field, const toml::node& value) const {
    const auto number = value.is_number() ? value.value<double>() : std::nullopt;
    if (!number || !(*number >= field.least && *number <= field.most)) {
      char range[64];
      std::snprintf(range, sizeof range, "%g to %g", field.least, field.most);
      error(value.source(), name + ": use a number from " + range);
    }
    *field.value = *number;
  }
  void assign(const std::string& name, const Choice& field, const toml::node& value) const {
    const auto text = value.value<std::string>();
    const auto found = std::find_if(field.names.begin(), field.names.end(),
                                    [&](const char* known) { return text == known; });
    if (found == field.names.end()) error(value.source(), name + ": use " + field.list());
    field.index() = static_cast<std::uint8_t>(found - field.names.begin());
  }

  void assign(const std::string& name, const Words& field, const toml::node& value) const {
    const toml::array* list = value.as_array();
    field.value->clear();
    for (std::size_t i = 0; list != nullptr && i < list->size(); ++i) {
      if (const auto word = (*list)[i].value<std::string>()) field.value->push_back(*word);
    }
    if (list == nullptr || field.value->size() != list->size()) {
      error(value.source(), name + ": use a list of names, such as [\"kda.q\", \"moe.fc2\"]");
    }
  }

  [[nodiscard]] static toml::source_region place_of(const toml::table& file, const char* table,
                                                    const char* key) {
    const auto node = file[table][key];
    return node ? node.node()->source() : toml::source_region{{1, 1}, {1, 1}, nullptr};
  }

  void check_images(const toml::table& file) const {
    const ImagesConfig& images = config_.images;
    if (images.patch == 0) {
      if (file["images"] && !file["images"]["patch"]) {
        error(file["images"].node()->source(), "images.patch: say how many pixels a patch's side has");
      }
      return;
    }
    const auto at = [&](const char* key) { return place_of(file, "images", key); };
    if (images.size % images.patch != 0) {
      error(at("patch"),
            "images.patch: must divide images.size, " + std::to_string(images.size) + ", evenly");
    }
    if (images.tokens() + kShortestCaption > config_.train.length) {
      error(at("size"), "images.size: an image is " + std::to_string(images.tokens()) +
                            " tokens, which with a caption must fit into train.length, " +
                            std::to_string(config_.train.length) + "; use larger patches or sequences");
    }
  }

  void check_warm_up(const toml::source_region& at) const {
    if (config_.dsa.index_loss_weight == 0) {
      error(at, "dsa.warmup_steps: indexers learn from their loss alone; give it a dsa.index_loss_weight");
    }
    if (config_.model.dsa_every > config_.model.layers) {
      error(at, "dsa.warmup_steps: no layer is sparse; model.dsa_every is at most model.layers, " +
                    std::to_string(config_.model.layers));
    }
    const std::vector<std::string>& targets = config_.lora.targets;
    const bool learns = config_.lora.rank == 0 ||
                        std::any_of(targets.begin(), targets.end(),
                                    [](const std::string& name) { return name.rfind("dsa.index_", 0) == 0; });
    if (!learns) {
      error(at,
            "dsa.warmup_steps: the indexers are frozen; name a matrix of theirs in lora.targets, as "
            "\"dsa.index_q\"");
    }
  }

  void check_base(const toml::source_region& at) const {
    if (config_.lora.base != LoraBase::kInt8) return;
    if (config_.lora.rank == 0) {
      error(at, "lora.base: \"int8\" is for a frozen model; give it adapters by lora.rank and lora.targets");
    }
    if (config_.moe.compute == ExpertCompute::kFp8) {
      error(at,
            "lora.base: \"int8\" and moe.compute = \"fp8\" exclude each other: experts are kept in one form");
    }
  }

  // What no key can be blamed for alone; the position is that of the key to change.
  void check_whole(const toml::table& file) const {
    const auto at = [&](const char* table, const char* key) { return place_of(file, table, key); };
    const ModelConfig& model = config_.model;
    const std::int64_t blocks = (model.layers + model.residual_block - 1) / model.residual_block;
    if (model.residual == ResidualKind::kAttnRes && blocks >= kMaxAttnResSources) {
      error(at("model", "residual_block"), "model.residual_block: makes " + std::to_string(blocks) +
                                               " blocks of " + std::to_string(model.layers) +
                                               " layers; at most " + std::to_string(kMaxAttnResSources - 1));
    }
    if (config_.dsa.warmup_steps > 0) check_warm_up(at("dsa", "warmup_steps"));
    if ((config_.lora.rank > 0) == config_.lora.targets.empty()) {
      error(at("lora", "rank"), "lora: a rank and targets go together");
    }
    check_base(at("lora", "base"));
    check_images(file);
    const MoeConfig& moe = config_.moe;
    if (moe.balance == Balance::kQuantile && moe.top_k >= moe.experts) {
      error(at("moe", "balance"), "moe.balance: \"quantile\" needs more experts than moe.top_k");
    }
    if (moe.compute == ExpertCompute::kFp8 && config_.train.compute != Dtype::kBf16) {
      error(at("moe", "compute"), "moe.compute: \"fp8\" needs train.compute = \"bf16\"");
    }
    if (moe.top_groups > moe.groups) {
      error(at("moe", "top_groups"), "moe.top_groups: at most moe.groups, " + std::to_string(moe.groups));
    }
    if (moe.experts % moe.groups != 0) {
      error(at("moe", "groups"),
            "moe.groups: must divide moe.experts, " + std::to_string(moe.experts) + ", evenly");
    }
    const std::int64_t eligible = moe.experts / moe.groups * moe.top_groups;
    if (moe.top_k > eligible) {
      error(at("moe", "top_k"),
            "moe.top_k: at most the " + std::to_string(eligible) + " experts that a token may choose from");
    }
  }

  std::string source_;
  Config& config_;
  Sections sections_;
  std::vector<Key> keys_;
};

Config parse(std::string_view toml, const std::string& source, Reader::Sections sections) {
  const toml::parse_result parsed = toml::parse(toml, source);
  if (!parsed) {
    const toml::parse_error& error = parsed.error();
    const auto at = error.source().begin;
    bad_input(source + ":" + std::to_string(at.line) + ":" + std::to_string(at.column) + ": " +
              std::string(error.description()));
  }
  Config config;
  Reader(source, config, sections).read(parsed.table());
  return config;
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) {
    bad_input(path + ": cannot read the configuration: " + std::strerror(errno) +
              "; see examples/moe_trainer/configs/ for some that work");
  }
  return text;
}

}  // namespace

Config parse_config(std::string_view toml, const std::string& source) {
  return parse(toml, source, Reader::Sections::kAll);
}

Config load_config(const std::string& path) { return parse_config(read_text(path), path); }

RunConfig load_run_config(const std::string& path) {
  const Config config = parse(read_text(path), path, Reader::Sections::kRun);
  return {.train = config.train, .lora = config.lora, .images = config.images};
}

std::string canonical_text(const Config& config) {
  Config copy = config;
  std::string text;
  for (const Key& key : keys_of(copy)) {
    if (key.numbers == DecidesNumbers::kNo) continue;
    if (config.images.patch == 0 && std::string_view(key.table) == "images") continue;
    char value[64] = "";
    if (const auto* integer = std::get_if<Integer>(&key.field)) {
      std::snprintf(value, sizeof value, "%lld", static_cast<long long>(*integer->value));
    } else if (const auto* real = std::get_if<Real>(&key.field)) {
      std::snprintf(value, sizeof value, "%.17g", *real->value);
    } else if (const auto* words = std::get_if<Words>(&key.field)) {
      if (words->value->empty()) continue;
      text += std::string(key.table) + "." + key.name + " =";
      for (const std::string& word : *words->value) text += " " + word;
      text += "\n";
      continue;
    } else {
      const auto& choice = std::get<Choice>(key.field);
      std::snprintf(value, sizeof value, "%s", choice.names[choice.index()]);
    }
    text += std::string(key.table) + "." + key.name + " = " + value + "\n";
  }
  if (!config.model.source.empty()) text += "model.source = " + config.model.source + "\n";
  return text;
}

}  // namespace terrace::trainer
