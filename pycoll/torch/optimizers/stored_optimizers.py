"""Optimizers that work with a store on parameter servers; DistributedOptimizer makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from pycoll.ps import Store, connect
from pycoll.ps.consistency import Consistency, consistency_of
from pycoll.torch.horovod import horovod_world
from pycoll.torch.horovod.process_sets import controller_of
from pycoll.torch.horovod.tasks import Collective
from pycoll.torch.optimizers.gradients import Settings
from pycoll.torch.optimizers.stored_steps import (
    Block,
    StoredGradients,
    StoredParameters,
    blocks_of,
    check_steppable,
)
from pycoll.torch.optimizers.wrapped_optimizers import Distributed, Wrapped, wrapped_by


def _refuse_group(store: Store) -> NoReturn:
    raise ValueError(
        f"add_param_group with {store.consistency}: the store holds the first parameters of the "
        "optimizer; make the DistributedOptimizer anew"
    )


class MeanWrapped(Wrapped):
    """An optimizer that steps by the means of a store with "bsp"."""

    @property
    def store(self) -> Store:
        """The store through which the gradients go."""
        assert isinstance(self._gradients, StoredGradients)
        return self._gradients.store

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: the keys of the store stay."""
        _refuse_group(self.store)

    def explain(self) -> str:
        """Describe the messages of a step, and the reason for them."""
        return (
            "each group of parameters in one array, after the backward pass; servers return the "
            f"mean of the gradients, and workers step\n{self.store.explain()}"
        )


class ServedWrapped(Distributed):
    """An optimizer whose parameters servers hold and step."""

    _stored: StoredParameters

    @property
    def store(self) -> Store:
        """The store that holds the parameters."""
        return self._stored.store

    def synchronize(self) -> None:
        """Do nothing: step() pushes the gradients of this worker as they are."""

    def skip_synchronize(self) -> Any:
        """Raise AssertionError: no worker has the gradients of all."""
        raise AssertionError(
            f"skip_synchronize() cannot be used with {self.store.consistency}: each worker pushes "
            "its own gradients in step()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: the keys of the store stay."""
        _refuse_group(self.store)

    # It calls the hooks that register_step_pre_hook and register_step_post_hook have added.
    @torch.optim.Optimizer.profile_hook_step  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients, let the servers step, and take their parameters.

        Returns what the closure returns, which is called first. Raises ValueError for a parameter
        that was changed elsewhere; the errors of ``Store.push`` and ``Store.pull``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stored.step(self.param_groups)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the settings of the groups. ValueError for a state, since the servers hold it."""
        if state_dict.get("state"):
            raise ValueError(
                f"state_dict has a state, and with {self.store.consistency} the servers hold it: "
                "load one whose 'state' is empty"
            )
        super().load_state_dict(state_dict)  # type: ignore[misc]  # the optimizer's class

    def explain(self) -> str:
        """Describe the messages of a step, and the reason for them."""
        return (
            "each group of parameters in one array, after the backward pass; servers step, and "
            f"workers take the parameters\n{self.store.explain()}"
        )


def agreed_consistency(consistency: Any, store: Any, architecture: str | None) -> Consistency:
    """The consistency that the arguments of DistributedOptimizer name.

    Raises ValueError for an unknown one, for a contradiction, and without architecture="ps".
    """
    if store is not None and not isinstance(store, Store):
        raise ValueError(f"store is {store!r}: expected one that pycoll.ps.connect() returned")
    given = store.consistency if store is not None and consistency is None else consistency
    found = consistency_of(given)
    if store is not None and store.consistency != found:
        raise ValueError(
            f"consistency is {found} and the store has {store.consistency}: leave out one of the "
            "two"
        )
    if architecture != "ps":
        raise ValueError(
            f"consistency is {found} and architecture is {architecture!r}: only servers have a "
            "consistency; pass architecture='ps'"
        )
    return found


def stored_optimizer(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    settings: Settings,
    consistency: Consistency,
    store: Store | None,
) -> Any:
    """Wrap an optimizer so that it works with a store; without one, with the servers of the job.

    All workers call this function. Raises ValueError for what servers cannot step, and in a job
    without servers; the errors of ``Store.init``.
    """
    blocks = blocks_of(optimizer.param_groups, names)
    steps_here = consistency.name == "bsp"
    if not steps_here:
        check_steppable(optimizer, names)
    used = _open_store(settings, consistency, blocks) if store is None else store
    if steps_here:
        wrapped = wrapped_by(optimizer, MeanWrapped)
        wrapped._policy = None
        wrapped._gradients = StoredGradients(used, blocks, names, settings.sparse_as_dense)
    else:
        wrapped = wrapped_by(optimizer, ServedWrapped)
        # Adagrad has made a state, which servers make anew.
        wrapped.state.clear()
        stepping = type(optimizer), optimizer.param_groups
        wrapped._stored = StoredParameters(used, blocks, names, settings.sparse_as_dense, stepping)
    return wrapped


def _open_store(settings: Settings, consistency: Consistency, blocks: list[Block]) -> Store:
    """Open a store on the servers of the job; it closes with the world."""
    home = controller_of(settings.process_set)
    if not home.comm.servers:
        raise ValueError(
            f"consistency is {consistency} and the job has no servers: start some (pycoll run "
            "--servers 1), or pass store=pycoll.ps.connect(comm) of a communicator that has them"
        )
    terms = {
        "consistency": str(consistency),
        "parameters": [[one.key, len(one.values), str(one.values.dtype)] for one in blocks],
    }
    task = Collective(terms, lambda comm: connect(comm, consistency=consistency))
    home.submit(task, None)
    store: Store = horovod_world.wait_for(task)
    home.adopt(store)
    return store
