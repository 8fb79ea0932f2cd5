// A test framework in one page: TEST(name) { CHECK(condition, "format", values...); } and
// RUN_TESTS(). A failed check prints values and aborts the test program with status 1; nothing is
// ever skipped.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace pycoll::testing {

struct Case {
  std::string name;
  std::function<void()> run;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registrar {
  Registrar(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

inline int run_all() {
  for (const Case& one : cases()) {
    std::printf("%s\n", one.name.c_str());
    std::fflush(stdout);
    one.run();
  }
  std::printf("%zu passed, 0 failed\n", cases().size());
  return cases().empty() ? 1 : 0;
}

}  // namespace pycoll::testing

#define TEST(test_name)                                                                    \
  static void test_name();                                                                 \
  static const ::pycoll::testing::Registrar test_name##_registrar(#test_name, &test_name); \
  static void test_name()

#define CHECK(condition, ...)                                                   \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::printf("%s:%d: check failed: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                                 \
      std::printf("\n");                                                        \
      std::fflush(stdout);                                                      \
      std::_Exit(1);                                                            \
    }                                                                           \
  } while (false)

#define RUN_TESTS() \
  int main() { return ::pycoll::testing::run_all(); }
