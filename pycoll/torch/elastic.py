"""Beginning anew after a failure, from what was committed last: Horovod's elastic interface.

    @hvd.elastic.run
    def train(state): ...
    train(hvd.elastic.TorchState(model, optimizer, epoch=0))

The ranks of a job stay the same: who has died is not replaced here, and joining without it fails
with the names of the missing. A launcher that starts all ranks again, as torchrun does, is what
brings the dead back.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from pycoll.torch import world
from pycoll.torch.awaited import give_up
from pycoll.torch.errors import HorovodInternalError, HostsUpdatedInterrupt
from pycoll.torch.objects import broadcast_object
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

    def sync(self) -> None:
        """Make it what rank 0 has, and remember that."""


class _Object:
    """Anything that can be copied and pickled."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value)

    def restore(self) -> None:
        self.value = copy.deepcopy(self._saved)

    def sync(self) -> None:
        self.value = broadcast_object(self.value, 0)
        self.save()


class _Stateful(_Object):
    """What has state_dict and load_state_dict: samplers, schedulers."""

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0))
        self.save()


class _Model(_Stateful):
    """Parameters and buffers."""

    def restore(self) -> None:
        # Steps to come may wait for ranks that are gone, and their result would be replaced.
        give_up(self.value.parameters())
        super().restore()

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), 0)
        self.save()


class _Optimizer(_Stateful):
    """Moments and learning rates."""

    def restore(self) -> None:
        give_up(p for group in self.value.param_groups for p in group["params"])
        super().restore()

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, 0)
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
        """Make all what rank 0 has, and remember it."""
        for one in self._members.values():
            one.sync()

    def commit(self) -> None:
        """save(), and check_host_updates()."""
        self.save()
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Nothing to raise: the hosts of a job do not change while it runs."""

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
    one before, as it would come again for ever.
    """

    @functools.wraps(function)
    def begun_anew(state: TorchState, *args: Any, **words: Any) -> Any:
        commits_then = -1
        while True:
            try:
                state.sync()
                return function(state, *args, **words)
            except HorovodInternalError:
                if state.commits == commits_then:
                    raise
                commits_then = state.commits
                state.restore()
            except HostsUpdatedInterrupt:
                pass
            world.shutdown()
            world.init()
            state.on_reset()

    return begun_anew
