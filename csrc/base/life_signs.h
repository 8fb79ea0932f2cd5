// Descriptors whose end tells other processes that this one has ended. A forked child must not hold
// them: it would keep the sign alive when its parent is killed.
#pragma once

namespace pycoll {

// In every child that fork() makes from now on, `fd` is the descriptor of a socket that is
// connected to nobody: it reads and writes nothing, and its number stays taken, so that copies of
// the owner in the child close what is theirs to close. The owner closes `fd` as any other; whoever
// gets the number afterwards is not affected. Any thread. Children of exec need close-on-exec
// beside. Not reached: children made by a bare clone(2), and a fork in another thread between the
// making of the descriptor and this call.
void end_with_process(int fd);

}  // namespace pycoll
