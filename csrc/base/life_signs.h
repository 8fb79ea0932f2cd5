// Descriptors whose end tells other processes that this process has ended. A forked child must not
// hold them, because it would keep them open after its parent is killed.
#pragma once

namespace pycoll {

// Registers `fd`. In every later child of fork(), `fd` is an unconnected socket that carries no
// bytes. Its number stays taken, so that a copy of the owner in the child closes only its own
// descriptor. The owner closes `fd` as any other descriptor; a later user of the same number is not
// affected. Any thread.
//
// Children that call exec need close-on-exec in addition. Two cases are not covered: children made
// by a bare clone(2), and a fork in another thread between the creation of the descriptor and this
// call.
void end_with_process(int fd);

}  // namespace pycoll
