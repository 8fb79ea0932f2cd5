"""The gradients of an optimizer that has a policy: they live in the memory of a Scheduler.

A gradient is copied there when the backward pass has it, unless it is there already (it is, where
the step before was not followed by ``zero_grad(set_to_none=True)``), and stays there: after the
first step ``parameter.grad`` is a part of the scheduler's memory, which the next step overwrites.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pycoll.arrays import empty
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.optim import Entry, Policy, Scheduler
from pycoll.torch import world
from pycoll.torch.coordinator import Coordinator
from pycoll.torch.errors import HorovodInternalError
from pycoll.torch.gradients import Settings, dense, put_back
from pycoll.torch.ops import WORDS, Average, scaled
from pycoll.torch.process_sets import coordinator_of
from pycoll.torch.tasks import Collective


class ScheduledGradients:
    """The gradients of one optimizer between backward pass and step.

    ``named`` are all parameters with their names, those that need gradients being reduced. The
    scheduler is made in the first backward pass, and anew where the world is another one since.
    ``overlaps``: whether the next forward pass takes gradients one by one, by ``receive``.
    """

    def __init__(
        self, named: dict[torch.Tensor, str], settings: Settings, policy: Policy, overlaps: bool
    ) -> None:
        self.names = named
        self.settings = settings
        self.policy = policy
        self.passes = 1
        self._overlaps = overlaps
        #: Called before a step begins, and before the world is left.
        self.before_step: Callable[[], None] = lambda: None
        # The backward pass usually begins with the parameters that were made last.
        self.parameters = [p for p in reversed(named) if p.requires_grad]
        self.counts = dict.fromkeys(self.parameters, 0)
        #: Those under way, with what their decompression needs.
        self.under_way: dict[torch.Tensor, Any] = {}
        self._numbers = {p: number for number, p in enumerate(self.parameters)}
        self._home: Coordinator | None = None
        self._scheduler: Scheduler | None = None
        self._views: list[torch.Tensor] = []
        self._shapes: dict[torch.Tensor, tuple[tuple[int, ...], torch.dtype]] = {}
        self._word, self._before, self._after = self._scales()
        for parameter in self.parameters:
            if parameter.device.type != "cpu":
                raise ValueError(
                    f"{named[parameter]!r} is on {parameter.device}: with a policy, parameters "
                    "have to be in host memory"
                )
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.added)

    def reset(self) -> None:
        """Forget the passes that were counted."""
        self.under_way.clear()
        self.counts = dict.fromkeys(self.counts, 0)

    def added(self, parameter: torch.Tensor) -> None:
        """A backward pass has added to a gradient."""
        if self.counts[parameter] >= self.passes:
            raise AssertionError(
                f"the gradient of {self.names[parameter]!r} was computed more than "
                f"backward_passes_per_step={self.passes} times before step(): raise "
                "backward_passes_per_step to add up gradients on each rank first"
            )
        self.counts[parameter] += 1
        if self.counts[parameter] >= self.passes:
            with _told_as_horovods():
                self._give(parameter)

    def flush(self) -> dict[torch.Tensor, Any]:
        """Start what has not started, and do not wait; all gradients, with what receive() needs."""
        with _told_as_horovods():
            if not self.under_way:
                self.before_step()
            for parameter in self.parameters:
                if parameter not in self.under_way:
                    if parameter.grad is None:
                        # Another rank's forward pass may have used it.
                        parameter.grad = torch.zeros_like(parameter)
                    self._give(parameter)
            if self._scheduler is not None:
                self._scheduler.flush()
        notes = dict(self.under_way)
        self.reset()
        return notes

    def receive(self, parameter: torch.Tensor, note: Any) -> None:
        """Wait for one gradient that was under way at flush(), and put it in its place."""
        assert self._scheduler is not None
        with _told_as_horovods():
            self._scheduler.wait(self._numbers[parameter])
        self._put(parameter, note)

    @property
    def timed_step(self) -> int | None:
        """As the scheduler's; None while there is none."""
        return None if self._scheduler is None else self._scheduler.timed_step

    @property
    def waits_singly(self) -> bool:
        """Whether parameters are to step one by one."""
        return self._scheduler is None or self._scheduler.waits_singly

    def note_awaiting(self, seconds: float) -> None:
        """As the scheduler's."""
        if self._scheduler is not None:
            self._scheduler.note_awaiting(seconds)

    def await_messages(self) -> None:
        """Wait for all; the scheduler's step goes on."""
        assert self._scheduler is not None
        with _told_as_horovods():
            for number in self._numbers.values():
                self._scheduler.wait(number)

    def complete(self) -> None:
        """Wait for all; the scheduler's step ends."""
        if self._scheduler is not None:
            with _told_as_horovods():
                self._scheduler.wait()

    def synchronize(self) -> None:
        """Start what has not started, and wait for all."""
        notes = self.flush()
        self.complete()
        for parameter, note in notes.items():
            self._put(parameter, note)

    def explain(self) -> str:
        """What is sent, and why; see Scheduler."""
        if self._scheduler is None:
            return f"{self.policy}, from the first backward pass on"
        return self._scheduler.explain()

    def _give(self, parameter: torch.Tensor) -> None:
        """The gradient into the scheduler's memory."""
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse and not self.settings.sparse_as_dense:
            raise ValueError(
                f"the gradient of {self.names[parameter]!r} is sparse: with a policy, pass "
                "sparse_as_dense=True"
            )
        if not self.under_way:
            self._begin()
        self._check(parameter, grad)
        number = self._numbers[parameter]
        small, note = self.settings.compression.compress(dense(grad))
        view = self._views[number]
        source = scaled(small, self._before)
        if source.data_ptr() != view.data_ptr():
            view.copy_(source)
        if self._lives_there(parameter, view):
            parameter.grad = view
        self.under_way[parameter] = note
        assert self._scheduler is not None
        self._scheduler.ready(number)

    def _check(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """It is as it was when messages were made."""
        before = self._shapes[parameter]
        now = (tuple(grad.shape), grad.dtype)
        if now != before:
            raise ValueError(
                f"the gradient of {self.names[parameter]!r} has shape {now[0]} and type {now[1]}, "
                f"and had {before[0]} and {before[1]}: with a policy they stay; make the optimizer "
                "anew after changing the model"
            )

    def _begin(self) -> None:
        """A step begins, in the world as it is now."""
        self.before_step()
        home = coordinator_of(self.settings.process_set)
        if home is not self._home:
            task = Collective({"policy": str(self.policy)}, lambda comm: comm.split(0))
            home.submit(task, None)
            comm = world.waited(task)
            home.adopt(comm, weakref.WeakMethod(self._before_closing))
            self._shapes = {p: (tuple(p.shape), p.dtype) for p in self.parameters}
            entries = [self._entry(parameter) for parameter in self.parameters]
            self._scheduler = Scheduler(
                comm,
                entries,
                policy=self.policy,
                op=self._word,
                overlaps=self._overlaps,
                allocate=_allocated,
                observer=home.timeline,
            )
            self._home = home
        assert self._scheduler is not None
        # One that was given up has not ended.
        self._scheduler.wait()
        self._views = self._scheduler.begin()

    def _before_closing(self) -> None:
        self.before_step()

    def _entry(self, parameter: torch.Tensor) -> Entry:
        example = torch.empty(0, dtype=parameter.dtype, device="cpu")
        small, _ = self.settings.compression.compress(example)
        kind = str(small.dtype).removeprefix("torch.")
        return Entry(self.names[parameter], tuple(parameter.shape), kind)

    def _lives_there(self, parameter: torch.Tensor, view: torch.Tensor) -> bool:
        grad = parameter.grad
        assert grad is not None
        alike = not grad.is_sparse and grad.dtype == view.dtype
        return alike and grad.is_contiguous() and self._after == 1.0

    def _put(self, parameter: torch.Tensor, note: Any) -> None:
        """The reduced gradient as the parameter's own, where it is not that already."""
        view = self._views[self._numbers[parameter]]
        value = self.settings.compression.decompress(scaled(view, self._after), note)
        put_back(parameter, value)

    def _scales(self) -> tuple[str, float, float]:
        """The word of the reduction, and factors before and after it."""
        op, predivide = self.settings.op, self.settings.predivide
        if op != Average or predivide == 1.0:
            return WORDS[op], 1.0, 1.0
        return WORDS[op], 1.0 / predivide, predivide


@contextmanager
def _told_as_horovods() -> Iterator[None]:
    """What the world does is what programs for Horovod expect to catch; wrong requests stay."""
    try:
        yield
    except InvalidArgumentError:
        raise
    except PycollError as error:
        raise HorovodInternalError(str(error)) from error


def _allocated(count: int, kind: str) -> torch.Tensor:
    """Memory of torch's for a scheduler."""
    dtype = getattr(torch, kind)
    made = torch.from_numpy(empty(count * dtype.itemsize, "uint8")).view(dtype)
    return made.zero_()
