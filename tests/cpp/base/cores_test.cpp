// Cores are counted on machines with more of them than a cpu_set_t of fixed size holds.
#include "base/cores.h"

#include <sched.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "tests/cpp/support/check.h"

namespace {

// The number of cores that the kernel's mask has, and the thread's own mask as last bound.
constexpr std::size_t kMachineCores = 4096;
int last_bound = -1;

}  // namespace

// These take the place of the C library's functions: a machine of 4,096 cores, of which the thread
// may use 3 and 2,000.
extern "C" int sched_getaffinity(pid_t, std::size_t bytes, cpu_set_t* set) noexcept {
  if (bytes < kMachineCores / 8) {
    errno = EINVAL;
    return -1;
  }
  std::memset(static_cast<void*>(set), 0, bytes);
  CPU_SET_S(3, bytes, set);
  CPU_SET_S(2000, bytes, set);
  return 0;
}

extern "C" int sched_setaffinity(pid_t, std::size_t bytes, const cpu_set_t* set) noexcept {
  if (CPU_COUNT_S(bytes, set) == 1) {
    for (std::size_t core = 0; core < kMachineCores; ++core) {
      if (CPU_ISSET_S(core, bytes, set) != 0) last_bound = static_cast<int>(core);
    }
  }
  return 0;
}

TEST(cores_beyond_1024_are_counted) {
  CHECK(pycoll::usable_cores() == 2, "%d cores", pycoll::usable_cores());
  const std::vector<int> numbers = pycoll::usable_core_numbers();
  CHECK(numbers == (std::vector<int>{3, 2000}), "%zu numbers", numbers.size());
}

TEST(a_thread_moves_to_a_core_beyond_1024) {
  pycoll::move_to_core(2000);
  CHECK(last_bound == 2000, "bound to %d", last_bound);
  pycoll::move_to_core(5);  // not one of the thread's cores
  CHECK(last_bound == 2000, "bound to %d", last_bound);
}

RUN_TESTS()
