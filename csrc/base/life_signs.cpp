#include "base/life_signs.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>

namespace pycoll {
namespace {

// Which file a number stood for: the owner may have closed it since, and somebody else have it.
struct Known {
  dev_t device = 0;
  ino_t inode = 0;
};

struct Registry {
  std::mutex mutex;  // held by the thread that forks, in parent and child, until fork() is over
  std::map<int, Known> signs;
};

// Never destroyed: a fork may come after everything.
Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

bool identify(int fd, Known* known) {
  struct stat facts = {};
  if (::fstat(fd, &facts) != 0) return false;
  *known = {facts.st_dev, facts.st_ino};
  return true;
}

// In the child, where it makes system calls only.
void cut_off() {
  int dead = -1;
  for (const auto& [fd, known] : registry().signs) {
    Known now;
    if (!identify(fd, &now) || now.device != known.device || now.inode != known.inode) continue;
    if (dead >= 0) {
      (void)::dup3(dead, fd, O_CLOEXEC);
      continue;
    }
    // Closed first: so there is room for one descriptor, whatever the limit.
    ::close(fd);
    dead = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (dead < 0 || dead == fd) continue;
    (void)::dup3(dead, fd, O_CLOEXEC);
    ::close(dead);
    dead = fd;
  }
}

void before_fork() { registry().mutex.lock(); }

void after_fork_in_parent() { registry().mutex.unlock(); }

void after_fork_in_child() {
  cut_off();
  registry().mutex.unlock();
}

}  // namespace

void end_with_process(int fd) {
  static const int handlers [[maybe_unused]] =
      pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  Known known;
  if (!identify(fd, &known)) return;
  const std::lock_guard lock(registry().mutex);
  registry().signs[fd] = known;
}

}  // namespace pycoll
