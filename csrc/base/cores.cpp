#include "base/cores.h"

#include <sched.h>

#include <cerrno>
#include <memory>

namespace pycoll {
namespace {

// The largest machine that Linux can be configured for has fewer cores.
constexpr int kCoresMax = 1 << 16;

// A set of cores that is as large as this machine needs; cpu_set_t ends at 1,024 cores.
class CoreSet {
 public:
  explicit CoreSet(int cores)
      : set_(CPU_ALLOC(static_cast<std::size_t>(cores))),
        cores_(cores),
        bytes_(CPU_ALLOC_SIZE(static_cast<std::size_t>(cores))) {
    if (set_) CPU_ZERO_S(bytes_, set_.get());
  }

  // The cores on which the calling thread may run; an empty set if the system does not report them.
  static CoreSet usable() {
    for (int cores = CPU_SETSIZE; cores <= kCoresMax; cores *= 2) {
      CoreSet found(cores);
      if (!found.set_) break;
      if (sched_getaffinity(0, found.bytes_, found.set_.get()) == 0) return found;
      if (errno != EINVAL) break;  // EINVAL: the machine has more cores than the set
    }
    return CoreSet(0);
  }

  int cores() const { return cores_; }
  bool has(int core) const { return set_ && CPU_ISSET_S(core, bytes_, set_.get()) != 0; }
  int count() const { return set_ ? CPU_COUNT_S(bytes_, set_.get()) : 0; }
  void add(int core) { CPU_SET_S(core, bytes_, set_.get()); }
  bool bind() const { return set_ && sched_setaffinity(0, bytes_, set_.get()) == 0; }

 private:
  struct Free {
    void operator()(cpu_set_t* set) const { CPU_FREE(set); }
  };
  std::unique_ptr<cpu_set_t, Free> set_;
  int cores_;
  std::size_t bytes_;
};

}  // namespace

int usable_cores() {
  const int count = CoreSet::usable().count();
  return count > 0 ? count : 1;
}

std::vector<int> usable_core_numbers() {
  std::vector<int> numbers;
  const CoreSet usable = CoreSet::usable();
  for (int core = 0; core < usable.cores(); ++core) {
    if (usable.has(core)) numbers.push_back(core);
  }
  return numbers;
}

int current_core() { return sched_getcpu(); }

void move_to_core(int core) {
  const CoreSet before = CoreSet::usable();
  if (core < 0 || core >= before.cores() || !before.has(core)) return;
  CoreSet only(before.cores());
  only.add(core);
  if (only.bind()) (void)before.bind();
}

bool can_move() {
  const CoreSet before = CoreSet::usable();
  if (before.count() == 0 || !before.bind()) return false;
  const CoreSet after = CoreSet::usable();
  if (after.count() != before.count()) return false;
  for (int core = 0; core < before.cores(); ++core) {
    if (before.has(core) != (core < after.cores() && after.has(core))) return false;
  }
  return true;
}

}  // namespace pycoll
