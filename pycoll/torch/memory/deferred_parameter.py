"""Parameters with a deferred step: any read of such a parameter makes it step first.

Between ``step()`` and the next forward pass a parameter may hold old values while its gradient is
still being reduced. No code may see these values, and a program can read them in many ways: use a
weight of another module, call ``state_dict()``, copy, save, clip. So in this time the class of the
parameter is ``DeferredParameter``. torch calls ``__torch_function__`` of that class before any
function that takes the tensor, also inside a list, and before any access to an attribute. That
method steps the parameter, which restores its class, and then calls the function. The self-test of
``DEFERRED`` checks that this version of torch does so.

torch does not make this call for C++ extensions that take tensors directly, nor for
autograd.Function.apply. The forward hooks of the modules (deferred_step.py) step the parameters
before these run. If such a function only saves a parameter of another module for the backward pass,
autograd reports that the parameter was modified since.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from pycoll.doors import TORCH_TESTED, Door, expect
from pycoll.torch.memory import compiling

#: The attribute of a deferred parameter that holds its step.
_STEP = "_pycoll_step"
_SET_GRAD = torch.Tensor.grad.__set__
#: The ids of all deferred parameters. Hooks return at once while the set is empty.
_waiting: set[int] = set()
#: Functions that read neither values nor gradients.
_HARMLESS = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout", "ndim")
    ),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "stride", "element_size")),
    *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.__len__),
}


class DeferredParameter(Parameter):
    """The class of a parameter from ``await_step`` to ``restore_class``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Step the deferred parameters among the arguments, then call ``func``.

        torch calls this method for every function with a deferred parameter among its arguments.
        """
        if func == _SET_GRAD and args[1] is None:
            vars(args[0])[_STEP].drop_gradient()
            return None
        if func not in _HARMLESS:
            for one in _among((args, kwargs or {})):
                finish(one)
        # During the step itself the parameter still has this class.
        with as_parameters():
            return func(*args, **(kwargs or {}))

    # These methods of Parameter read the class before they read the values.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        finish(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        finish(self)
        return self.__reduce_ex__(protocol)

    def __repr__(self, *args: Any, **words: Any) -> str:
        finish(self)
        return repr(self)


def as_parameters() -> contextlib.AbstractContextManager[Any]:
    """A context in which torch treats deferred parameters as ordinary ones."""
    context: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return context


class Step(Protocol):
    """The deferred step of a parameter."""

    def finish(self, others: Sequence[torch.Tensor] = ()) -> None:
        """Step the parameter and the deferred ones of ``others``; calls ``restore_class``."""

    def drop_gradient(self) -> None:
        """Note that the program set the gradient to None; it becomes None after the step."""

    def give_up(self) -> None:
        """Drop this step and all other deferred steps of the same optimizer."""


def await_step(parameter: torch.Tensor, step: Step) -> None:
    """Make ``parameter`` deferred: any read of it finishes ``step`` first."""
    setattr(parameter, _STEP, step)
    parameter.__class__ = DeferredParameter
    _waiting.add(id(parameter))


def restore_class(parameter: torch.Tensor) -> None:
    """Restore the class of a deferred parameter."""
    parameter.__class__ = Parameter
    del vars(parameter)[_STEP]
    _waiting.discard(id(parameter))


def can_be_deferred(parameter: torch.Tensor) -> bool:
    """Whether the class is torch's own; a subclass may have a ``__torch_function__`` of its own."""
    return type(parameter) is Parameter


def finish(parameter: torch.Tensor) -> None:
    """Step the parameter if its step is deferred."""
    step = vars(parameter).get(_STEP)
    if step is not None:
        step.finish()


def own_parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters of a module itself, including its ParameterLists and ParameterDicts.

    Those containers are modules without a call of their own, so no forward hook runs for them.
    """
    found: list[torch.Tensor] = list(module.parameters(recurse=False))
    for child in module.children():
        if isinstance(child, torch.nn.ParameterList | torch.nn.ParameterDict):
            found += child.parameters()
    return found


def finish_own(module: torch.nn.Module, *_: Any) -> None:
    """Step the deferred parameters of a module: a hook before its forward function.

    The hook refers to no optimizer, so that modules with it can be copied and pickled.
    """
    if not _waiting:
        return
    own = own_parameters(module)
    for parameter in own:
        step = vars(parameter).get(_STEP)
        if step is not None:
            step.finish(own)


def give_up(parameters: Iterable[torch.Tensor]) -> None:
    """Drop the deferred steps of parameters whose values are about to be replaced."""
    for parameter in parameters:
        step = vars(parameter).get(_STEP)
        if step is not None:
            step.give_up()


def _among(arguments: Iterable[Any]) -> Iterator[DeferredParameter]:
    """Yield the deferred parameters among function arguments, also inside lists and dicts."""
    for one in arguments:
        if isinstance(one, DeferredParameter):
            yield one
        elif isinstance(one, list | tuple):
            yield from _among(one)
        elif isinstance(one, dict):
            yield from _among(one.values())


class _TestStep:
    """A step that adds 1, as the self-test makes it."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self.steps = self.drops = 0

    def finish(self, others: Sequence[torch.Tensor] = ()) -> None:
        self.steps += 1
        with torch.no_grad(), as_parameters():
            self._parameter.add_(1)
        restore_class(self._parameter)

    def drop_gradient(self) -> None:
        self.drops += 1

    def give_up(self) -> None:
        restore_class(self._parameter)


_EYE = torch.eye(2, dtype=torch.float32, device="cpu")
#: Ways to read a parameter whose values are 1 before its step and 2 after it.
_READS: dict[str, Callable[[Any], torch.Tensor]] = {
    "an operator": lambda one: one * 1,
    "a function of a list": lambda one: torch.stack([one])[0],
    "a method": lambda one: one.clone(),
    "an attribute": lambda one: one.data,
    "a function of modules": lambda one: torch.nn.functional.linear(one, _EYE),
    "a copy": copy.deepcopy,
    "an index": lambda one: one[:],
}


def _test() -> None:
    """Raise unless torch steps a deferred parameter before each kind of read."""
    compiling.check()
    options = vars(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0))
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        expect(name in options, f"an optimizer has no {name}")
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        for how, read in _READS.items():
            parameter = Parameter(torch.ones(2, dtype=torch.float32))
            step = _TestStep(parameter)
            await_step(parameter, step)
            expect(
                parameter.shape == (2,) and parameter.dim() == 1 and step.steps == 0,
                "the shape of a parameter cannot be read before its step",
            )
            parameter.grad = None
            expect((step.drops, step.steps) == (1, 0), "torch drops a gradient unheard")
            values = read(parameter)
            expect(step.steps == 1, f"{how} does not step the parameter that it reads")
            expect(values.tolist() == [2.0, 2.0], f"{how} reads a parameter before its step")
            expect(type(parameter) is Parameter, "a stepped parameter has another class")


#: The door (docs/process-wide.md) to deferred steps. Each optimizer reads ``deferred_steps``
#: itself.
DEFERRED = Door(
    "deferred steps",
    _test,
    "With model=, step() steps all parameters at once.",
    "torch",
    TORCH_TESTED,
)
