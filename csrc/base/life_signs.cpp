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

// Identity of the file behind a registered descriptor. The owner may have closed the descriptor
// since, and the number may belong to another file now.
struct FileId {
  dev_t device = 0;
  ino_t inode = 0;
};

struct Registry {
  std::mutex mutex;  // a thread that forks holds it in parent and child until fork() returns
  std::map<int, FileId> signs;
};

// Never destroyed, because a process may fork after static destructors have run.
Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

bool identify(int fd, FileId* file) {
  struct stat facts = {};
  if (::fstat(fd, &facts) != 0) return false;
  *file = {facts.st_dev, facts.st_ino};
  return true;
}

// Replaces every registered descriptor by an unconnected socket. Runs in the child of a fork, so it
// makes system calls only.
void replace_signs() {
  int dead = -1;
  for (const auto& [fd, file] : registry().signs) {
    FileId now;
    if (!identify(fd, &now) || now.device != file.device || now.inode != file.inode) continue;
    if (dead >= 0) {
      (void)::dup3(dead, fd, O_CLOEXEC);
      continue;
    }
    // The number is closed first, so that the limit on descriptors leaves one for socket().
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
  replace_signs();
  registry().mutex.unlock();
}

}  // namespace

void end_with_process(int fd) {
  static const int handlers [[maybe_unused]] =
      pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  FileId file;
  if (!identify(fd, &file)) return;
  const std::lock_guard lock(registry().mutex);
  registry().signs[fd] = file;
}

}  // namespace pycoll
