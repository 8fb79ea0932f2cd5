#include "base/cores.h"

#include <sched.h>

namespace pycoll {
namespace {

bool usable_set(cpu_set_t* set) {
  CPU_ZERO(set);
  return sched_getaffinity(0, sizeof(*set), set) == 0;
}

}  // namespace

int usable_cores() {
  cpu_set_t set;
  return usable_set(&set) ? CPU_COUNT(&set) : 1;
}

std::vector<int> usable_core_numbers() {
  std::vector<int> numbers;
  cpu_set_t set;
  if (!usable_set(&set)) return numbers;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) numbers.push_back(core);
  }
  return numbers;
}

int current_core() { return sched_getcpu(); }

void move_to_core(int core) {
  cpu_set_t before;
  if (core < 0 || core >= CPU_SETSIZE || !usable_set(&before) || !CPU_ISSET(core, &before)) return;
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  if (sched_setaffinity(0, sizeof(only), &only) != 0) return;
  (void)sched_setaffinity(0, sizeof(before), &before);
}

}  // namespace pycoll
