// The frozen model under adapters, where it is one that was trained before.
#pragma once

#include <cstdint>
#include <string>

#include "examples/moe_trainer/config.hpp"
#include "examples/moe_trainer/model/model.hpp"

namespace terrace::trainer {

// Sets every frozen array, and the routers' biases, from a checkpoint of a model that was trained whole.
// Values are rounded where the frozen model is kept in bf16. Throws Failure (kBadInput): no such file, a
// checkpoint of adapters, of a model of another kind (which key says otherwise) or of other shapes. The owner
// makes the copies that products read afterwards.
void load_base(const std::string& path, const Config& config, Session& session, const Model& model);

// Of the bits of every array that adapters leave alone, by name and in order; waits for the compute stream.
[[nodiscard]] std::uint64_t base_fingerprint(Session& session, const Model& model);

}  // namespace terrace::trainer
