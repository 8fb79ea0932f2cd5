"""Beginning anew after a failure, from what was committed last: Horovod's elastic interface.

    @hvd.elastic.run
    def train(state): ...
    train(hvd.elastic.TorchState(model, optimizer, epoch=0))

Who has died is started again by ``pycoll run --restarts N``: the survivors go back to their last
commit and join anew, the new process meets them there, and all go on from what the rank with the
most commits has. Started by ``pycoll run --min-np N`` the survivors go on without it as long as
they are that many, and where slots come back, ``commit`` ends the world so that the next one has
more ranks. Otherwise joining fails with the names of the missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pycoll.bootstrap import roster
from pycoll.torch import world
from pycoll.torch.elastic.sampler import ElasticSampler
from pycoll.torch.elastic.state import ObjectState, State, TorchState
from pycoll.torch.errors import HorovodInternalError, HostsUpdatedInterrupt
from pycoll.torch.world import init, shutdown

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "shutdown"]


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(state, ...)``, called again from the last commit where it fails.

    After HorovodInternalError the state is restored; after HostsUpdatedInterrupt it is kept. Then
    all ranks leave, join, and sync. The error is raised instead if nothing was committed since the
    one before and the ranks are the same processes, as it would come again for ever.
    """

    @functools.wraps(function)
    def begun_anew(state: State, *args: Any, **words: Any) -> Any:
        commits_then = -1
        while True:
            failure = None
            processes = roster.pids()
            try:
                state.sync()
                return function(state, *args, **words)
            except HorovodInternalError as error:
                if state.commits == commits_then:
                    failure = error
                    if not roster.inside():
                        raise
                commits_then = state.commits
                state.restore()
            except HostsUpdatedInterrupt:
                pass
            world.shutdown()
            world.init()
            if failure is not None and roster.pids() == processes:
                raise failure
            state.on_reset()

    return begun_anew
