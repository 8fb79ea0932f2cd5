"""Parameters with a deferred step: any read of such a parameter makes it step first.

Between ``step()`` and the next forward pass a parameter may hold old values while its gradient is
still being reduced. No code may see these values, and a program can read them in many ways: use a
weight of another module, call ``state_dict()``, copy, save, clip. So in this time the class of the
parameter is ``DeferredParameter``. torch calls ``__torch_function__`` of that class before any
function that takes the tensor, also inside a list, and before any access to an attribute. That
method steps the parameter, which restores its class, and then calls the function.

torch does not make this call for C++ extensions that take tensors directly, nor for
autograd.Function.apply. The forward hooks of the modules (deferred_step.py) step the parameters
before these run. If such a function only saves a parameter of another module for the backward pass,
autograd reports that the parameter was modified since.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.nn import Parameter

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
    """The class of a parameter from ``await_step`` to ``stepped``."""

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
        with torch._C.DisableTorchFunctionSubclass():
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


class Step(Protocol):
    """The deferred step of a parameter."""

    def finish(self, others: Sequence[torch.Tensor] = ()) -> None:
        """Step the parameter, and those of ``others`` that are deferred; calls ``stepped``."""

    def drop_gradient(self) -> None:
        """Note that the program set the gradient to None; it becomes None after the step."""

    def give_up(self) -> None:
        """Drop this step and all other deferred steps of the same optimizer."""


def await_step(parameter: torch.Tensor, step: Step) -> None:
    """Make ``parameter`` deferred: any read of it finishes ``step`` first."""
    setattr(parameter, _STEP, step)
    parameter.__class__ = DeferredParameter
    _waiting.add(id(parameter))


def stepped(parameter: torch.Tensor) -> None:
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
