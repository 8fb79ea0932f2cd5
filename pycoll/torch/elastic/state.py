"""Elastic states: named values from which training resumes, each kept by a handler of its type.

A state is saved in memory and restored from there. ``sync`` copies the state of the rank with the
most commits to all ranks. Most programs use ``TorchState``. ``ObjectState`` holds values that can
be pickled. ``State`` is the base for classes with other storage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pycoll.bootstrap.rendezvous import elastic_worker
from pycoll.torch.elastic.sampler import ElasticSampler
from pycoll.torch.horovod import horovod_world
from pycoll.torch.horovod.horovod_errors import HostsUpdatedInterrupt
from pycoll.torch.horovod.object_calls import allgather_object, broadcast_object
from pycoll.torch.horovod.reducing_calls import allreduce
from pycoll.torch.horovod.scaled_ops import Max
from pycoll.torch.memory.deferred_parameter import give_up
from pycoll.torch.optimizers.initial_state import (
    broadcast_optimizer_state,
    broadcast_parameters,
)


class _Kept:
    """Base of states and handlers; subclasses implement save, restore and sync."""

    def save(self) -> None:
        """Save the current values in memory."""
        raise TypeError(f"{type(self).__name__} has no save()")

    def restore(self) -> None:
        """Restore the values that were saved last."""
        raise TypeError(f"{type(self).__name__} has no restore()")

    def sync(self) -> None:
        """Make the values equal on all ranks, and save them. Collective."""
        raise TypeError(f"{type(self).__name__} has no sync()")


class StateHandler(_Kept):
    """Keeps one value of a state. ``root``: the rank whose value ``sync`` copies to all ranks.

    ``set_handler_registry`` assigns handler classes to types of values.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.root = 0

    def set_value(self, value: Any) -> None:
        """Replace the value, and save the new one."""
        self.value = value
        self.save()


class ObjectHandler(StateHandler):
    """Keeps a value that can be copied and pickled. Only save() saves a replaced value."""

    def __init__(self, value: Any, bcast_object: Callable[..., Any] = broadcast_object) -> None:
        super().__init__(value)
        self._bcast_object = bcast_object
        self.save()

    def save(self) -> None:
        """Save a deep copy."""
        self._saved = copy.deepcopy(self.value)

    def restore(self) -> None:
        """Restore a deep copy of the saved value."""
        self.value = copy.deepcopy(self._saved)

    def sync(self) -> None:
        """Take the object of the root.

        A ``bcast_object`` without an argument ``root_rank`` works where rank 0 is the root.
        """
        words = {"root_rank": self.root} if self.root else {}
        self.value = self._bcast_object(self.value, **words)
        self.save()

    def set_value(self, value: Any) -> None:
        """Replace the value without saving it: such values are counters of the program."""
        self.value = value


class StatefulHandler(StateHandler):
    """Keeps a value with state_dict and load_state_dict, such as a learning-rate scheduler."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Save a deep copy of its state_dict."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the saved state_dict."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Load the state_dict of the root."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), self.root))
        self.save()


class SamplerStateHandler(StatefulHandler):
    """Keeps the progress of a sampler, which shares the remaining samples when it is loaded."""


class ModelStateHandler(StatefulHandler):
    """Keeps parameters and buffers of a model."""

    def restore(self) -> None:
        """Load the saved state_dict, and drop deferred steps."""
        # Deferred steps may wait for lost ranks, and restore() would replace their result.
        give_up(self.value.parameters())
        super().restore()

    def sync(self) -> None:
        """Take the values of the root, in place."""
        broadcast_parameters(self.value.state_dict(), self.root)
        self.save()


class OptimizerStateHandler(StatefulHandler):
    """Keeps the state and options of an optimizer."""

    def restore(self) -> None:
        """Load the saved state_dict, and drop deferred steps."""
        give_up(p for group in self.value.param_groups for p in group["params"])
        super().restore()

    def sync(self) -> None:
        """Take the state of the root."""
        broadcast_optimizer_state(self.value, self.root)
        self.save()


#: Pairs of a type and a handler class; the first type that matches a value decides.
Registry = list[tuple[type, Callable[[Any], StateHandler]]]
_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """The (type, handler class) pairs that TorchState uses."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the pairs for states made from now on. Values of other types are kept as objects."""
    _registry[:] = registry


class State(_Kept):
    """The base class of elastic states; subclasses implement save, restore and sync.

    All ranks must call every method except ``save`` and ``restore``. ``commits`` is the number of
    commits.

    Arguments: ``bcast_object`` and ``get_rank``, which are ``broadcast_object`` and ``rank`` of
    pycoll.torch or functions like them.

    Errors: TypeError from a method that a subclass lacks.

    Cost: none in itself.

    >>> class Counter(hvd.elastic.State):
    ...     epoch = saved = 0
    ...     def save(self): self.saved = self.epoch
    ...     def restore(self): self.epoch = self.saved
    ...     def sync(self): self.epoch = hvd.broadcast_object(self.epoch, root_rank=0)
    >>> counter = Counter(hvd.broadcast_object, hvd.rank)
    >>> counter.commit()
    >>> counter.commits
    1
    """

    commits: int
    _callbacks: list[Callable[[], Any]]

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        vars(self).update(_bcast_object=bcast_object, _rank=get_rank, _callbacks=[], commits=0)

    def reset(self) -> None:
        """Adapt to a new world; called after the ranks have joined it, before ``sync``."""

    def commit(self) -> None:
        """Save the state, count the commit, and check for host updates.

        Raises HostsUpdatedInterrupt; see ``check_host_updates``.
        """
        self.save()
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks at once, if the number of slots has changed.

        Cost: an all-reduce of one number in an elastic job, nothing in other jobs.
        """
        if not elastic_worker.inside():
            return
        mine = torch.tensor([int(elastic_worker.changed())], device="cpu")
        if allreduce(mine, name="elastic.check_host_updates", op=Max).item():
            raise HostsUpdatedInterrupt("the number of slots has changed: all ranks join anew")

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Add functions to call after the ranks have joined a new world."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call reset(), then the callbacks; ``run`` calls this after joining a new world."""
        self.reset()
        for callback in self._callbacks:
            callback()


class ObjectState(State):
    """An elastic state of named values, which are attributes: ``state.epoch += 1``.

    Arguments: ``bcast_object`` and ``get_rank`` as of ``State``; ``values``, which can be copied
    and pickled.

    Errors: AttributeError for a name that is neither an attribute nor a value.

    Cost: a copy of each value in memory.

    >>> state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0)
    >>> state.epoch += 1
    >>> state.restore()
    >>> state.epoch
    0
    """

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
        """Save the current values in memory."""
        for one in self._handlers.values():
            one.save()

    def restore(self) -> None:
        """Restore the values of the last save, commit or sync."""
        for one in self._handlers.values():
            one.restore()

    def sync(self) -> None:
        """Copy the values of the rank with the most commits to all ranks, and save them.

        Among ranks with equally many commits the lowest one is the source. Collective. Values other
        than models and optimizers are pickled: unpickling runs code that the sender chooses (see
        SECURITY.md).
        """
        commits = allgather_object(self.commits)
        self.commits = max(commits)
        for one in self._handlers.values():
            one.root = commits.index(self.commits)
            one.sync()


class TorchState(ObjectState):
    """The elastic state of a training program: a model, an optimizer, and other named values.

    Arguments: ``model`` and ``optimizer``, each optional; ``values``, of types in the handler
    registry, with state_dict and load_state_dict, or that can be copied and pickled.

    Errors: AttributeError for a name that is neither an attribute nor a value.

    Cost: a copy of each value in memory.

    >>> state = hvd.elastic.TorchState(torch.nn.Linear(2, 1), epoch=0)
    >>> state.epoch += 1
    >>> state.commit()
    >>> state.commits
    1
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        named = {"model": model, "optimizer": optimizer, **values}
        given = {name: value for name, value in named.items() if value is not None}
        super().__init__(broadcast_object, horovod_world.rank, **given)

    def _handler_of(self, value: Any) -> StateHandler:
        for kind, handler in _registry:
            if isinstance(value, kind):
                return handler(value)
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return StatefulHandler(value)
        return super()._handler_of(value)

    def reset(self) -> None:
        """Make samplers share the remaining samples among the ranks of the new world."""
        for one in self._handlers.values():
            if isinstance(one.value, ElasticSampler):
                one.value.reset()
