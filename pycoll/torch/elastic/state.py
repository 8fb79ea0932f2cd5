"""What training goes on from: values by name, each kept by a handler of its kind.

A state is saved in memory, restored from there, and made alike on all ranks by ``sync``, from the
rank with the most commits. ``TorchState`` is what most programs use, ``ObjectState`` has values
that can be pickled, and ``State`` is for classes that keep what they have by themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pycoll.bootstrap import roster
from pycoll.torch import world
from pycoll.torch.awaited import give_up
from pycoll.torch.elastic.sampler import ElasticSampler
from pycoll.torch.errors import HostsUpdatedInterrupt
from pycoll.torch.objects import allgather_object, broadcast_object
from pycoll.torch.ops import Max
from pycoll.torch.reducing import allreduce
from pycoll.torch.state import broadcast_optimizer_state, broadcast_parameters


class _Kept:
    """What can be remembered; classes on top of it say how."""

    def save(self) -> None:
        """Remember all as it is, in memory."""
        raise TypeError(f"{type(self).__name__} has no save()")

    def restore(self) -> None:
        """Make all what it was when it was remembered last."""
        raise TypeError(f"{type(self).__name__} has no restore()")

    def sync(self) -> None:
        """Make all alike on all ranks, and remember it."""
        raise TypeError(f"{type(self).__name__} has no sync()")


class StateHandler(_Kept):
    """One value of a state. ``root`` is the rank that has what all are to have, before ``sync``.

    Classes of one's own are used for values of their type by ``set_handler_registry``.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.root = 0

    def set_value(self, value: Any) -> None:
        """Another value takes the place of this one, and is remembered."""
        self.value = value
        self.save()


class ObjectHandler(StateHandler):
    """Anything that can be copied and pickled; what replaces it is remembered by save() only."""

    def __init__(self, value: Any, bcast_object: Callable[..., Any] = broadcast_object) -> None:
        super().__init__(value)
        self._bcast_object = bcast_object
        self.save()

    def save(self) -> None:
        """A copy."""
        self._saved = copy.deepcopy(self.value)

    def restore(self) -> None:
        """A copy of the copy."""
        self.value = copy.deepcopy(self._saved)

    def sync(self) -> None:
        """The root's object; functions that know rank 0 only serve where that is the root."""
        words = {"root_rank": self.root} if self.root else {}
        self.value = self._bcast_object(self.value, **words)
        self.save()

    def set_value(self, value: Any) -> None:
        """Until save() the one before is remembered: such values are the program's counters."""
        self.value = value


class StatefulHandler(StateHandler):
    """What has state_dict and load_state_dict, as schedulers have."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """A copy of its state_dict."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Loads what was saved."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Loads the root's state_dict."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), self.root))
        self.save()


class SamplerStateHandler(StatefulHandler):
    """How far a sampler has come; it shares the rest anew."""


class ModelStateHandler(StatefulHandler):
    """Parameters and buffers."""

    def restore(self) -> None:
        """Loads what was saved."""
        # Steps to come may wait for ranks that are gone, and their result would be replaced.
        give_up(self.value.parameters())
        super().restore()

    def sync(self) -> None:
        """The root's values, in place."""
        broadcast_parameters(self.value.state_dict(), self.root)
        self.save()


class OptimizerStateHandler(StatefulHandler):
    """Moments and learning rates."""

    def restore(self) -> None:
        """Loads what was saved."""
        give_up(p for group in self.value.param_groups for p in group["params"])
        super().restore()

    def sync(self) -> None:
        """The root's state."""
        broadcast_optimizer_state(self.value, self.root)
        self.save()


#: By the types of values; the first that fits.
Registry = list[tuple[type, Callable[[Any], StateHandler]]]
_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """The handlers of types that states know."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """States that are made from now on use these; other values are kept as objects."""
    _registry[:] = registry


class State(_Kept):
    """What ``run`` needs of a state; classes on top of it say how to save, restore and sync.

    ``bcast_object`` and ``get_rank`` are ``broadcast_object`` and ``rank`` of pycoll.torch, or
    functions like them. Every rank calls all methods but ``save`` and ``restore``.
    """

    commits: int
    _callbacks: list[Callable[[], Any]]

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        vars(self).update(_bcast_object=bcast_object, _rank=get_rank, _callbacks=[], commits=0)

    def reset(self) -> None:
        """Called after ranks have joined anew, before ``sync``."""

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
        """Called after ranks have joined anew: reset(), then the callbacks."""
        self.reset()
        for callback in self._callbacks:
            callback()


class ObjectState(State):
    """Values by name, which are attributes: ``state.epoch += 1``."""

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **values: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        vars(self)["_handlers"] = {name: self._handler_of(one) for name, one in values.items()}

    def _handler_of(self, value: Any) -> StateHandler:
        return ObjectHandler(value, self._bcast_object)

    def __getattr__(self, name: str) -> Any:
        handlers = vars(self).get("_handlers", {})
        if name not in handlers:
            has = ", ".join(handlers)
            raise AttributeError(f"{type(self).__name__} has no {name!r}: it has {has}")
        return handlers[name].value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or name.startswith("_"):
            vars(self)[name] = value
        elif name in self._handlers:
            self._handlers[name].set_value(value)
        else:
            self._handlers[name] = self._handler_of(value)

    def save(self) -> None:
        """Remember all as it is, in memory."""
        for one in self._handlers.values():
            one.save()

    def restore(self) -> None:
        """Make all what it was at the last save, commit or sync."""
        for one in self._handlers.values():
            one.restore()

    def sync(self) -> None:
        """Make all what the rank with the most commits has, and remember it.

        That is rank 0 unless it is new: of ranks with as many commits the lowest one. Values other
        than models and optimizers travel pickled: unpickling runs code that the sender chooses.
        """
        commits = allgather_object(self.commits)
        self.commits = max(commits)
        for one in self._handlers.values():
            one.root = commits.index(self.commits)
            one.sync()


class TorchState(ObjectState):
    """What training needs to go on: a model, an optimizer, and other values by name."""

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        named = {"model": model, "optimizer": optimizer, **values}
        given = {name: value for name, value in named.items() if value is not None}
        super().__init__(broadcast_object, world.rank, **given)

    def _handler_of(self, value: Any) -> StateHandler:
        for kind, handler in _registry:
            if isinstance(value, kind):
                return handler(value)
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return StatefulHandler(value)
        return super()._handler_of(value)

    def reset(self) -> None:
        """Samplers share anew."""
        for one in self._handlers.values():
            if isinstance(one.value, ElasticSampler):
                one.value.reset()
