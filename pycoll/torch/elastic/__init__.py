"""The elastic interface of Horovod: after a failure, training resumes from the last commit.

    @hvd.elastic.run
    def train(state): ...
    train(hvd.elastic.TorchState(model, optimizer, epoch=0))

``pycoll run --restarts N`` restarts a rank that has died. The survivors restore their last commit
and join a new world together with the new process. All ranks then continue from the state of the
rank with the most commits. Under ``pycoll run --min-np N`` the survivors continue without the lost
rank as long as N of them are left. Where slots return, ``commit`` ends the world so that the next
one has more ranks. Otherwise joining fails with an error that names the missing ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pycoll.bootstrap.rendezvous import elastic_worker
from pycoll.errors import PeerLostError, TimeoutError
from pycoll.torch.elastic.sampler import ElasticSampler
from pycoll.torch.elastic.state import ObjectState, State, TorchState
from pycoll.torch.horovod import horovod_world
from pycoll.torch.horovod.horovod_errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
)
from pycoll.torch.horovod.horovod_world import shutdown
from pycoll.torch.horovod.process_sets import init

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "shutdown"]


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``function(state, ...)`` so that a failure calls it again, from the last commit.

    After HorovodInternalError the state is restored, and likewise after PeerLostError or
    TimeoutError of pycoll's own calls; after HostsUpdatedInterrupt it is kept. Then all ranks leave
    the world, join a new one, reset the state and synchronize it.

    Arguments: ``function``, whose first argument is a ``State``.

    Result: a function with the same arguments and result.

    Errors: the error of a failure that would repeat forever. That is so if the ranks are the same
    processes and the state had no commit since the error before. Other errors of ``function``, and
    those of ``init``, pass through.

    Cost: a synchronization of the state before each call.

    >>> @hvd.elastic.run
    ... def train(state):
    ...     while state.epoch < 10:
    ...         state.epoch += 1
    ...         state.commit()
    ...     return state.epoch
    >>> train(hvd.elastic.TorchState(epoch=0))
    10
    """

    @functools.wraps(function)
    def begun_anew(state: State, *args: Any, **words: Any) -> Any:
        commits_then = -1
        while True:
            failure: Exception | None = None
            processes = elastic_worker.processes()
            try:
                state.sync()
                return function(state, *args, **words)
            except (HorovodInternalError, PeerLostError, TimeoutError) as error:
                if state.commits == commits_then:
                    failure = error
                    if not elastic_worker.inside():
                        raise
                commits_then = state.commits
                state.restore()
            except HostsUpdatedInterrupt:
                pass
            horovod_world.shutdown()
            init()
            if failure is not None and elastic_worker.processes() == processes:
                raise failure
            state.on_reset()

    return begun_anew
