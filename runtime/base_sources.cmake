# What a process and terraced share: the metrics table, the page, the wire protocol and the client's side of it.
list(APPEND TERRACE_BASE_SOURCES metrics.cpp shared_page.cpp wire.cpp daemon_link.cpp)
