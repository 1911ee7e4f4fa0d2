terrace_test(runtime_wire_test LABELS runtime SOURCES link_time_test.cpp metrics_test.cpp shared_page_test.cpp wire_test.cpp
             LINKS terrace_base)
terrace_test(runtime_label_names_test LABELS runtime SOURCES label_names_test.cpp LINKS terrace_runtime)
terrace_program(terrace_test_recording SOURCES recording_program.cpp LINKS terrace_base)
terrace_test(runtime_trace_test LABELS runtime SOURCES trace_reader_test.cpp trace_recorder_test.cpp LINKS terrace_base)
add_dependencies(runtime_trace_test terrace_test_recording)
