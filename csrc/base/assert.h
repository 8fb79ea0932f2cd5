// A check that stays on in release builds: a bug of ours aborts with the values that betray it.
// Never for what a user or the world can cause; that is a Status.
#pragma once

#include <cstdio>
#include <cstdlib>

// PYCOLL_ASSERT(condition, "format", values...): the text says what was expected and what was
// found.
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
