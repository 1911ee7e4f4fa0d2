# The policy file: values, rules, parser. Included by swapcore/CMakeLists.txt, whose folder the paths start from.
# toml++ is used header-only and compiled into these sources: no link dependency.
list(APPEND TERRACE_SWAPCORE_SOURCES
  policy/amount.cpp
  policy/contradictions.cpp
  policy/job_parser.cpp
  policy/known_keys.cpp
  policy/load_policy.cpp
  policy/policy_parser.cpp
  policy/rule_parser.cpp
  policy/rule_report.cpp
  policy/rules.cpp
  policy/section_reader.cpp
  policy/value_words.cpp)
