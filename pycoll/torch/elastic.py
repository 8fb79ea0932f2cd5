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

import copy
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from pycoll.bootstrap import roster
from pycoll.torch import world
from pycoll.torch.awaited import give_up
from pycoll.torch.errors import HorovodInternalError, HostsUpdatedInterrupt
from pycoll.torch.objects import allgather_object, broadcast_object
from pycoll.torch.ops import Max
from pycoll.torch.reducing import allreduce
from pycoll.torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = ["ElasticSampler", "TorchState", "run"]


class ElasticSampler(torch.utils.data.Sampler):
    """This rank's share of a data set, less what all ranks have had in this epoch.

    ``record_batch`` after each batch, ``set_epoch`` at the end of each epoch. A sampler in a
    TorchState goes on after a failure where the last commit was. The shares are equally long: the
    first samples come twice where the number of ranks does not divide.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with all samples, in an order of its own."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has had a batch of this size."""
        self.processed_num += batch_size * world.size()

    def state_dict(self) -> dict[str, int]:
        """How far it has come."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share what is left among the ranks that there are now."""
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        left = order[self.processed_num :]
        missing = -len(left) % world.size()
        self._mine = (left + (left * missing)[:missing])[world.rank() :: world.size()]

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._mine))

    def __len__(self) -> int:
        return len(self._mine)


class _Kept(Protocol):
    """One member of a state."""

    value: Any

    def save(self) -> None:
        """Remember it as it is."""

    def restore(self) -> None:
        """Make it what was remembered."""

    def sync(self, root: int) -> None:
        """Make it what rank ``root`` has, and remember that."""


class _Object:
    """Anything that can be copied and pickled."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value)

    def restore(self) -> None:
        self.value = copy.deepcopy(self._saved)

    def sync(self, root: int) -> None:
        self.value = broadcast_object(self.value, root)
        self.save()


class _Stateful(_Object):
    """What has state_dict and load_state_dict: samplers, schedulers."""

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self, root: int) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root))
        self.save()


class _Model(_Stateful):
    """Parameters and buffers."""

    def restore(self) -> None:
        # Steps to come may wait for ranks that are gone, and their result would be replaced.
        give_up(self.value.parameters())
        super().restore()

    def sync(self, root: int) -> None:
        broadcast_parameters(self.value.state_dict(), root)
        self.save()


class _Optimizer(_Stateful):
    """Moments and learning rates."""

    def restore(self) -> None:
        give_up(p for group in self.value.param_groups for p in group["params"])
        super().restore()

    def sync(self, root: int) -> None:
        broadcast_optimizer_state(self.value, root)
        self.save()


def _kept(value: Any) -> _Kept:
    if isinstance(value, torch.nn.Module):
        return _Model(value)
    if isinstance(value, torch.optim.Optimizer):
        return _Optimizer(value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return _Stateful(value)
    return _Object(value)


class TorchState:
    """What training needs to go on: a model, an optimizer, and other values by name.

    Values are attributes: ``state.epoch += 1``. All methods but ``save`` and ``restore`` are called
    by every rank.
    """

    commits: int

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        named = {"model": model, "optimizer": optimizer, **values}
        members = {name: _kept(value) for name, value in named.items() if value is not None}
        vars(self).update(_members=members, _callbacks=[], commits=0)

    def __getattr__(self, name: str) -> Any:
        members = vars(self).get("_members", {})
        if name not in members:
            raise AttributeError(f"TorchState has no {name!r}: it has {', '.join(members)}")
        return members[name].value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        elif name in self._members:
            self._members[name].value = value
        else:
            self._members[name] = _kept(value)

    def save(self) -> None:
        """Remember all as it is, in memory."""
        for one in self._members.values():
            one.save()

    def restore(self) -> None:
        """Make all what it was at the last save, commit or sync."""
        for one in self._members.values():
            one.restore()

    def sync(self) -> None:
        """Make all what the rank with the most commits has, and remember it.

        That is rank 0 unless it is new: of ranks with as many commits the lowest one.
        """
        commits = allgather_object(self.commits)
        self.commits = max(commits)
        root = commits.index(self.commits)
        for one in self._members.values():
            one.sync(root)

    def commit(self) -> None:
        """save(), and check_host_updates()."""
        self.save()
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """HostsUpdatedInterrupt, on all ranks at once, if there is another number of slots.

        Exchanges a number, and that only in a job whose number of ranks may change.
        """
        if not roster.inside():
            return
        mine = torch.tensor([int(roster.changed())], device="cpu")
        if allreduce(mine, name="elastic.check_host_updates", op=Max).item():
            raise HostsUpdatedInterrupt("the number of slots has changed: all ranks join anew")

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Functions to be called after ranks have joined anew."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after ranks have joined anew: samplers share anew, callbacks are called."""
        for one in self._members.values():
            if isinstance(one.value, ElasticSampler):
                one.value.reset()
        for callback in self._callbacks:
            callback()


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(state, ...)``, called again from the last commit where it fails.

    After HorovodInternalError the state is restored; after HostsUpdatedInterrupt it is kept. Then
    all ranks leave, join, and sync. The error is raised instead if nothing was committed since the
    one before and the ranks are the same processes, as it would come again for ever.
    """

    @functools.wraps(function)
    def begun_anew(state: TorchState, *args: Any, **words: Any) -> Any:
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
