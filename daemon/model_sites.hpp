// The sites of a model, as the reference trainer lists them.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/result.hpp"
#include "swapcore/site.hpp"

namespace terrace {

// Runs `moe_trainer --sites --config MODEL`, found in the folder `programs` or else in PATH. Errors:
// kNotFound (no such program), kIo (it could not be run), kInvalidArgument with an empty text where the
// program has said on stderr what is wrong with the model, kProtocol (it printed something else).
[[nodiscard]] Result<std::vector<SiteSpec>> sites_of_model(const std::string& model,
                                                           const std::filesystem::path& programs);

// What the program prints: {"sites": [{"name": "layer.0.kda.q", "kind": "matmul", "layer": 0, "group":
// "kda.q"}, ...]}. Errors: kProtocol.
[[nodiscard]] Result<std::vector<SiteSpec>> sites_from_json(std::string_view json);

}  // namespace terrace
