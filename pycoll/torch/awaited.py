"""Parameters whose step is still to come: whoever reads one makes it step first.

Between ``step()`` and the next forward pass a parameter may hold its old values while its gradient
still travels. Nobody may see them, and a program may look in many ways: call another module's
weight, ``state_dict()``, copy, save, clip. So for that time the parameter's class is ``Awaited``:
torch asks a class of its own before any function that takes such a tensor, also within a list, and
any attribute of it; the answer here is to step the parameter, which gives it its class back, and
then to do what was asked. What torch does not ask about are extensions in C++ that take tensors
past it, and autograd.Function.apply; hooks of the modules (overlap.py) are there before those.
Where such a function only keeps a parameter of another module for the backward pass, autograd says
that it was modified since.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.nn import Parameter

#: The attribute of an awaited parameter that has its step.
_STEP = "_pycoll_step"
_SET_GRAD = torch.Tensor.grad.__set__
#: Parameters that are awaited now, by id, so that nobody looks for them where there are none.
_waiting: set[int] = set()
#: Functions that look at neither values nor gradients.
_HARMLESS = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout", "ndim")
    ),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "stride", "element_size")),
    *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.__len__),
}


class Awaited(Parameter):
    """The class of a parameter from ``await_step`` to ``stepped``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch calls this for every function with such a tensor among its arguments."""
        if func == _SET_GRAD and args[1] is None:
            vars(args[0])[_STEP].drop_gradient()
            return None
        if func not in _HARMLESS:
            for one in _among((args, kwargs or {})):
                finish(one)
        # Within the step itself the class is still this one.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # Parameter's own ones look at the class before they look at the values.

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
    """What a parameter waits for."""

    def finish(self, beside: Sequence[torch.Tensor] = ()) -> None:
        """Do it, which calls ``stepped``; with it the steps of others that wait for the same."""

    def drop_gradient(self) -> None:
        """The program sets the gradient to None, as it shall be after the step."""

    def give_up(self) -> None:
        """It is not to be done any more, nor are those of parameters that wait beside."""


def await_step(parameter: torch.Tensor, step: Step) -> None:
    """From now on ``step`` is finished before anybody reads ``parameter``."""
    setattr(parameter, _STEP, step)
    parameter.__class__ = Awaited
    _waiting.add(id(parameter))


def stepped(parameter: torch.Tensor) -> None:
    """It is a parameter like any other again."""
    parameter.__class__ = Parameter
    del vars(parameter)[_STEP]
    _waiting.discard(id(parameter))


def can_be_awaited(parameter: torch.Tensor) -> bool:
    """Only parameters of torch's own class: others may have an answer of their own."""
    return type(parameter) is Parameter


def finish(parameter: torch.Tensor) -> None:
    """Make it step, if that is still to come."""
    step = vars(parameter).get(_STEP)
    if step is not None:
        step.finish()


def own_parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """A module's parameters, and those of its lists and dicts of parameters, which nobody calls."""
    found: list[torch.Tensor] = list(module.parameters(recurse=False))
    for child in module.children():
        if isinstance(child, torch.nn.ParameterList | torch.nn.ParameterDict):
            found += child.parameters()
    return found


def finish_own(module: torch.nn.Module, *_: Any) -> None:
    """Make a module's own parameters step: a hook in front of its forward function.

    It knows no optimizer, so that modules that have it can be copied and pickled.
    """
    if not _waiting:
        return
    own = own_parameters(module)
    for parameter in own:
        step = vars(parameter).get(_STEP)
        if step is not None:
            step.finish(own)


def give_up(parameters: Iterable[torch.Tensor]) -> None:
    """Steps to come are lost, since what parameters hold is going to be replaced anyway."""
    for parameter in parameters:
        step = vars(parameter).get(_STEP)
        if step is not None:
            step.give_up()


def _among(arguments: Iterable[Any]) -> Iterator[Awaited]:
    """Those within arguments of a function, which may be lists and dicts of them."""
    for one in arguments:
        if isinstance(one, Awaited):
            yield one
        elif isinstance(one, list | tuple):
            yield from _among(one)
        elif isinstance(one, dict):
            yield from _among(one.values())
