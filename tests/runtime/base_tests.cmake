terrace_test(runtime_wire_test LABELS runtime SOURCES metrics_test.cpp shared_page_test.cpp wire_test.cpp
             LINKS terrace_base)
terrace_test(runtime_label_names_test LABELS runtime SOURCES label_names_test.cpp LINKS terrace_runtime)
