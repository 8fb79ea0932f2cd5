// A check that stays on in release builds. A violated invariant of pycoll itself aborts the process
// and prints the values involved. Errors that a user or the environment can cause are a Status
// instead.
#pragma once

#include <cstdio>
#include <cstdlib>

// PYCOLL_ASSERT(condition, "format", values...): the text states the expected and the actual value.
#define PYCOLL_ASSERT(condition, ...)                                                   \
  do {                                                                                  \
    if (__builtin_expect(!(condition), 0)) {                                            \
      std::fprintf(stderr, "pycoll: %s:%d: assertion failed: %s: ", __FILE__, __LINE__, \
                   #condition);                                                         \
      std::fprintf(stderr, __VA_ARGS__);                                                \
      std::fprintf(stderr, "\n");                                                       \
      std::abort();                                                                     \
    }                                                                                   \
  } while (false)
