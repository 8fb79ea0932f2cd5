"""The class that LocalSGD, SlowMo and DiLoCo place before an optimizer's class in its bases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycoll.errors import InvalidArgumentError
from pycoll.local_updates.local_state import LocalState
from pycoll.local_updates.updates import LocalUpdates

#: The entry of state_dict() with the state of local updates.
ENTRY = "local_updates"


def wrap(optimizer: torch.optim.Optimizer, updates: LocalUpdates, comm: Any) -> Any:
    """A new object of a class derived from the optimizer's; it shares all attributes."""
    base = type(optimizer)
    _check(optimizer, updates)
    made: Any = type(base.__name__, (LocallyUpdated, base), {"__module__": base.__module__})
    found = made.__new__(made)
    # A learning-rate scheduler may have set ``step`` on the instance. That function would step the
    # bare optimizer only.
    vars(found).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    found._updates, found._comm, found._local = updates, comm, None
    return found


def _check(optimizer: torch.optim.Optimizer, updates: LocalUpdates) -> None:
    name = type(optimizer).__name__
    modules = {kind.__module__ for kind in type(optimizer).__mro__}
    if isinstance(optimizer, LocallyUpdated):
        raise InvalidArgumentError(f"optimizer is a {name} that updates locally already")
    if any(module.startswith("pycoll.torch.optimizers") for module in modules):
        raise InvalidArgumentError(
            f"optimizer is a DistributedOptimizer ({name}), which averages the gradients of every "
            "step: wrap the optimizer of torch itself"
        )
    if isinstance(optimizer, torch.optim.LBFGS) and updates.starts_with_gradients:
        raise InvalidArgumentError(
            "optimizer is an LBFGS, which computes several gradients in a step, and every is "
            f"{updates.every}: expected a number of steps or an AdaComm"
        )
    parameters = _parameters(optimizer)
    if updates.fragments > len(parameters):
        raise InvalidArgumentError(
            f"fragments is {updates.fragments} and there are {len(parameters)} parameters: "
            "expected at most as many fragments as parameters"
        )


def _parameters(optimizer: Any) -> list[tuple[torch.nn.Parameter, float]]:
    """The parameters that need gradients, each with its learning rate."""
    return [
        (parameter, float(group.get("lr", 1.0)))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]


class LocallyUpdated:
    """An optimizer whose parameters are synchronised after some of its steps."""

    _updates: LocalUpdates
    _comm: Any
    #: None before the first step.
    _local: LocalState | None
    param_groups: list[dict[str, Any]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError: a copy would have lost its ranks and parameters."""
        raise TypeError(
            f"an optimizer with local updates ({type(self).__name__}) cannot be copied or pickled: "
            "take its state_dict(), and load it into one that is wrapped anew"
        )

    @property
    def local_state(self) -> LocalState | None:
        """The state of the local updates; None before the first step."""
        return self._local

    @property
    def synchronized(self) -> bool:
        """Whether the last step completed a round, for example to commit an elastic state."""
        return self._local is not None and self._local.synchronized

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any:
        """Step by this rank's gradients, then synchronise the fragments that are due.

        In the first steps of ``PostLocal`` the gradients are those of all ranks. Collective in
        these, in the first step and where a synchronisation is due.
        """
        state = self._meet()
        needs_loss = self._updates.needs_loss(state)
        if needs_loss and closure is None and loss is None:
            raise InvalidArgumentError(
                f"loss is None and every is {self._updates.every}: call step(loss=loss), or step "
                "with a closure that returns the loss"
            )
        inner: Any = super().step  # type: ignore[misc]  # the next base is the optimizer's class
        if self._updates.reduces_gradients(state):
            told = self._evaluate(closure)
            self._average_gradients(state)
            inner()
        else:
            told = inner(closure) if closure is not None else inner()
        loss = told if loss is None else loss
        arrays, rates = self._arrays()
        state = self._updates.note_step(arrays, state, float(loss) if needs_loss else None, rates)
        self._local = state
        self._keep(arrays, *self._updates.caught_up(arrays, state))
        return told

    # torch wraps the step of every class in its step hooks; the inner step runs them already.
    step.hooked = True  # type: ignore[attr-defined]

    def finish(self) -> None:
        """End the round, so that all ranks have equal parameters. Collective.

        Call it before an evaluation and at the end of the training. Errors: those of all_reduce.
        """
        state = self._meet()
        arrays, _ = self._arrays()
        self._keep(arrays, *self._updates.finish_round(arrays, state))

    def state_dict(self) -> dict[str, Any]:
        """The state of the inner optimizer, with the entry ``"local_updates"`` of this rank."""
        saved: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        state = self._local
        saved[ENTRY] = None if state is None else state.state_dict()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a ``state_dict``; one of a bare optimizer begins anew."""
        rest = {name: value for name, value in state_dict.items() if name != ENTRY}
        self._load_inner(rest)
        saved = state_dict.get(ENTRY)
        self._local = None if saved is None else self._there(LocalState.load(saved))

    def state_for_others(self) -> dict[str, Any]:
        """``state_dict()`` without this rank's residuals, for ranks that take it."""
        saved = self.state_dict()
        if saved[ENTRY] is not None:
            saved[ENTRY] = {**saved[ENTRY], "residuals": []}
        return saved

    def take_state_of(self, state_dict: dict[str, Any]) -> None:
        """Load another rank's ``state_for_others()``, and keep what this rank alone holds.

        See ``LocalState.levelled_with``.
        """
        own = self._local
        self.load_state_dict(state_dict)
        if own is not None and self._local is not None:
            self._local = own.levelled_with(self._local)

    def meet_again(self) -> None:
        """Compare the ranks at the next step, also on a communicator where they have met."""
        self._local = None if self._local is None else self._local.without_work()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; after the first step it raises InvalidArgumentError."""
        # torch calls it in its constructor, before this class is among the bases.
        if self._local is not None:
            raise InvalidArgumentError(
                "param_group comes after the first step: local updates keep their parameters; make "
                "the optimizer anew"
            )
        super().add_param_group(param_group)  # type: ignore[misc]

    def _meet(self) -> LocalState:
        """The state on the current communicator; meets the ranks of a new one first."""
        comm = self._comm
        if comm is None:
            import pycoll

            comm = pycoll.world()
        if self._local is not None and self._local.comm is comm:
            return self._local
        arrays, _ = self._arrays()
        named = [(f"parameter {number}", one) for number, one in enumerate(arrays)]
        met = self._updates.meet(named, self._local, comm, self._inner_state())
        if met.extra is not None:
            self._load_inner(met.extra)
        self._keep(arrays, met.arrays, met.state)
        # A synchronisation may be due that a failure has prevented.
        self._keep(arrays, *self._updates.caught_up(arrays, met.state))
        assert self._local is not None
        return self._local

    def _load_inner(self, saved: dict[str, Any]) -> None:
        """Load the state of the inner optimizer into the same list of parameter groups."""
        # A learning-rate scheduler may hold the optimizer from before the wrapping, and its list.
        groups = self.param_groups
        super().load_state_dict(saved)  # type: ignore[misc]
        groups[:] = self.param_groups
        self.param_groups = groups

    def _inner_state(self) -> dict[str, Any]:
        """The state of the inner optimizer, in host memory; load_state_dict moves it back."""
        saved: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        state = {
            key: {
                name: value.cpu() if isinstance(value, torch.Tensor) else value
                for name, value in one.items()
            }
            for key, one in saved["state"].items()
        }
        return {**saved, "state": state}

    def _arrays(self) -> tuple[list[torch.Tensor], list[float]]:
        """The memory of the parameters and their learning rates."""
        pairs = _parameters(self)
        return [parameter.detach() for parameter, _ in pairs], [rate for _, rate in pairs]

    def _keep(
        self, arrays: list[torch.Tensor], values: list[torch.Tensor], state: LocalState
    ) -> None:
        """Write new values into the parameters, and keep the state they belong to."""
        with torch.no_grad():
            for array, value in zip(arrays, values, strict=True):
                if value is not array:
                    array.copy_(value)
        self._local = state

    def _there(self, state: LocalState) -> LocalState:
        """A loaded state with its arrays on the devices of the parameters."""
        arrays, _ = self._arrays()
        if state.anchors is not None and len(state.anchors) != len(arrays):
            raise InvalidArgumentError(
                f"the saved state has {len(state.anchors)} parameters and the optimizer "
                f"{len(arrays)}: load it into the same model"
            )
        return state.map_arrays(lambda number, one: one.to(arrays[number].device))

    @staticmethod
    def _evaluate(closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _average_gradients(self, state: LocalState) -> None:
        """Replace the gradients by their averages; parameters without one count as zeros."""
        parameters = [parameter for parameter, _ in _parameters(self)]
        given = []
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise InvalidArgumentError(
                    f"the gradient of parameter {number} is sparse: PostLocal averages dense ones"
                )
            given.append(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            )
        averages = self._updates.gradients(given, state)
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.grad = average
