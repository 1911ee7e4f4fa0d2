# What a process and terraced share: the metrics table, the page, the wire protocol and the client's side of it.
list(APPEND TERRACE_BASE_SOURCES metrics.cpp site_groups.cpp shared_page.cpp wire.cpp daemon_link.cpp link_board.cpp
                                 link_time.cpp thread_signals.cpp)
# Traces of allocations: the format, its reader, and the recorder that also serves in guests.
list(APPEND TERRACE_BASE_SOURCES trace/format.cpp trace/live_ids.cpp trace/reader.cpp trace/recorder.cpp
                                 trace/recording_file.cpp)
