# The policy file's tests; included by tests/swapcore/CMakeLists.txt.
terrace_test(policy_test LABELS swapcore
  SOURCES contradictions_test.cpp job_parser_test.cpp policy_file_test.cpp policy_parser_test.cpp policy_test.cpp rule_parser_test.cpp
          rule_report_test.cpp section_reader_test.cpp
  LINKS terrace_swapcore)
