"""LocalSGD, SlowMo and DiLoCo wrap an optimizer of torch, and need torch only when called."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pycoll.compress import Codec
from pycoll.errors import InvalidArgumentError
from pycoll.local_updates.outer_step import Outer
from pycoll.local_updates.schedules import Schedule
from pycoll.local_updates.updates import LocalUpdates


def LocalSGD(  # noqa: N802  # the name of the method
    optimizer: Any, every: int | Schedule = 8, *, comm: Any = None
) -> Any:
    """Wrap an optimizer so that ranks step by themselves and average parameters every few steps.

    Arguments: ``optimizer``, an optimizer of torch, not used by itself afterwards; ``every``, the
    inner steps between averages, or a ``PostLocal`` or ``AdaComm``; ``comm``, the communicator, by
    default the world at each synchronisation.

    Result: an optimizer with the class name of ``optimizer`` that shares its parameter groups and
    state, and has these members in addition:
        ``step(closure=None, *, loss=None)``: an inner step, then what is due after it. The first
            one takes the parameters of rank 0. ``AdaComm`` needs the loss, or a closure.
        ``finish()``: ends the round, so that all ranks have equal parameters. Collective.
        ``synchronized``: whether the last step completed a round.
        ``local_state``: the ``LocalState``, None before the first step.
    Its ``state_dict()`` has an entry ``"local_updates"``; parameters differ between the ranks
    inside a round, so each rank saves its own. All ranks must step equally often.

    Errors: InvalidArgumentError for arguments out of bounds, at once, and for parameters that are
    not floating-point, at the first step. MismatchError at the first step names the first
    difference between the ranks. After a failed synchronisation the parameters are those after the
    inner step. The next step or ``finish()`` in a new world catches up.

    Cost: an all-reduce of the parameters per round.

    Source: Stich, "Local SGD converges fast and communicates little", 2019 (arXiv 1805.09767).

    >>> model = torch.nn.Linear(2, 1)
    >>> inner = torch.optim.SGD(model.parameters(), 0.1)
    >>> optimizer = pycoll.optim.LocalSGD(inner, every=1, comm=comm)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.synchronized
    True
    """
    return _wrap(optimizer, LocalUpdates(every), comm)


def SlowMo(  # noqa: N802  # the name of the method
    optimizer: Any,
    every: int | Schedule = 16,
    *,
    lr: float = 1.0,
    momentum: float = 0.5,
    comm: Any = None,
) -> Any:
    """Wrap an optimizer as ``LocalSGD`` does, with a slow momentum over the averages.

    Let a be the common parameters, x the parameters of the ranks, and s the inner learning rate. A
    round ends with u = momentum u + (a - mean(x)) / s, a = a - lr s u, x = a.

    Arguments: ``optimizer``, ``every`` and ``comm`` as those of ``LocalSGD``; ``lr``, above 0;
    ``momentum``, from 0 to below 1. With lr=1 and momentum=0 it is ``LocalSGD``. s is the ``lr`` of
    the parameter's group in the last step in which it was not 0.

    Result: that of ``LocalSGD``. Errors: those of ``LocalSGD``.

    Cost: an all-reduce of the parameters per round, and memory for two copies of them.

    Source: Wang, Tantia, Ballas and Rabbat, "SlowMo: improving communication-efficient distributed
    SGD with slow momentum", 2020 (arXiv 1910.00643).

    >>> inner = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), 0.1)
    >>> optimizer = pycoll.optim.SlowMo(inner, every=16, comm=comm)
    >>> type(optimizer).__name__
    'SGD'
    """
    outer = Outer(lr, momentum, in_inner_rate=True)
    return _wrap(optimizer, LocalUpdates(every, outer), comm)


def DiLoCo(  # noqa: N802  # the name of the method
    optimizer: Any,
    every: int | Schedule = 100,
    *,
    outer: Mapping[str, Any] | None = None,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
    compress: Codec | None = None,
    comm: Any = None,
) -> Any:
    """Wrap an optimizer so that ranks step alone for long, and an outer step moves them together.

    Let a be the common parameters and x the parameters of the ranks. A round ends with a step of
    SGD from a, with the gradient d = a - mean(x). Then x = mix x + (1 - mix) a.

    Arguments: ``optimizer``, ``every`` and ``comm`` as those of ``LocalSGD``; ``outer``, a dict
    with ``lr``, ``momentum`` and ``nesterov`` of the outer step, by default 0.7, 0.9 and True. With
    lr 1 and momentum 0 it is ``LocalSGD``. ``fragments``, ``delay``, ``mix`` and ``compress`` as
    those of ``LocalUpdates``: fragments of the parameters are averaged at different times, each
    while ``delay`` inner steps run.

    Result: that of ``LocalSGD``. Errors: those of ``LocalSGD``.

    Cost: an all-reduce of the parameters per round, in ``fragments`` messages, and memory for two
    copies of the parameters and, with ``delay``, of a fragment.

    Source: Douillard et al., "DiLoCo: distributed low-communication training of language models",
    2024 (arXiv 2311.08105), and "Streaming DiLoCo with overlapping communication", 2025 (arXiv
    2501.18512).

    >>> inner = torch.optim.AdamW(torch.nn.Linear(2, 1).parameters(), 4e-4)
    >>> optimizer = pycoll.optim.DiLoCo(
    ...     inner, every=100, fragments=2, delay=2, mix=0.5, comm=comm
    ... )
    >>> type(optimizer).__name__
    'AdamW'
    """
    given = {"lr": 0.7, "momentum": 0.9, "nesterov": True} if outer is None else outer
    updates = LocalUpdates(every, given, fragments, delay, mix, compress)
    return _wrap(optimizer, updates, comm)


def _wrap(optimizer: Any, updates: LocalUpdates, comm: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__name__}: expected an optimizer of torch; for "
            "arrays of NumPy, JAX and others use pycoll.optim.LocalUpdates"
        )
    from pycoll.local_updates.torch_optimizer import wrap

    return wrap(optimizer, updates, comm)
