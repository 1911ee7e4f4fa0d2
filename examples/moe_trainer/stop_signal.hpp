// SIGINT and SIGTERM as a wish to stop after the step: the first is remembered, the second ends the process.
#pragma once

namespace terrace::trainer {

void watch_stop_signals();
// The signal that asked to stop, or 0.
[[nodiscard]] int stop_signal();

}  // namespace terrace::trainer
