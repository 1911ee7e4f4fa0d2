// The text of configs/nano.toml, built in: the program needs no file beside it.
#pragma once

namespace terrace::trainer {
extern const char* const kDefaultConfig;
}  // namespace terrace::trainer
