// What a thread that does I/O for us does first.
#pragma once

namespace terrace {

// Names the calling thread (at most 15 characters) and leaves the process's signals to its own threads.
// Faults stay open: they belong to whoever caused them.
void prepare_io_thread(const char* name);

}  // namespace terrace
