"""Reduce the gradients of an optimizer with a policy, in the memory of a Scheduler.

When a gradient is ready, it is copied into the memory of the scheduler, and ``parameter.grad``
becomes a view of that memory. The next step overwrites it. A gradient that already is such a view
is not copied; this holds unless ``zero_grad(set_to_none=True)`` followed the step before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pycoll.arrays.registry import empty
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.gradients.codec_choice import check_codecs
from pycoll.gradients.coded_messages import Kept, load_state, state_of
from pycoll.gradients.layout import Entry
from pycoll.gradients.policies import Policy
from pycoll.gradients.scheduler import Scheduler
from pycoll.torch.horovod import horovod_world
from pycoll.torch.horovod.controller import Controller
from pycoll.torch.horovod.horovod_errors import HorovodInternalError
from pycoll.torch.horovod.process_sets import controller_of
from pycoll.torch.horovod.scaled_ops import WORDS, Average, scale_tensor
from pycoll.torch.horovod.tasks import Collective
from pycoll.torch.optimizers.coded_state import as_arrays, as_tensors, check_idle, check_policy
from pycoll.torch.optimizers.gradients import Settings, dense, put_back


class ScheduledGradients:
    """Reduces the gradients of one optimizer between backward pass and step.

    ``named``: all parameters with their names; those that need gradients are reduced. The first
    backward pass makes the scheduler, and a step in a new world makes a new one.
    ``overlaps``: whether the next forward pass receives gradients one by one, by ``receive``.
    """

    def __init__(
        self, named: dict[torch.Tensor, str], settings: Settings, policy: Policy, overlaps: bool
    ) -> None:
        self.names = named
        self.settings = settings
        self.policy = policy
        self.passes = 1
        self._overlaps = overlaps
        #: Called before a step begins, and before the communicator closes.
        self.before_step: Callable[[], None] = lambda: None
        # The backward pass usually begins with the parameters that were created last.
        self.parameters = [p for p in reversed(named) if p.requires_grad]
        self.counts = dict.fromkeys(self.parameters, 0)
        #: Parameters whose gradients are under way, with the context of their decompression.
        self.under_way: dict[torch.Tensor, Any] = {}
        self._numbers = {p: number for number, p in enumerate(self.parameters)}
        self._home: Controller | None = None
        self._scheduler: Scheduler | None = None
        #: A loaded state that replaces that of the scheduler at the next step; else None.
        self._coded_state: dict[str, Any] | None = None
        self._views: list[torch.Tensor] = []
        self._shapes: dict[torch.Tensor, tuple[tuple[int, ...], torch.dtype]] = {}
        self._word, self._before, self._after = self._scales()
        for parameter in self.parameters:
            if parameter.device.type != "cpu":
                raise ValueError(
                    f"{named[parameter]!r} is on {parameter.device}: with a policy, parameters "
                    "have to be in host memory"
                )
        check_codecs(
            settings.codec,
            policy,
            settings.architecture,
            self._word,
            [self._entry(parameter) for parameter in self.parameters],
        )
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.note_gradient)

    def coded_state(self) -> dict[str, Any]:
        """The memory of codecs, for a checkpoint of this rank; see coded_state.py."""
        check_idle(bool(self.under_way))
        if self._coded_state is not None:
            return self._coded_state
        if self._scheduler is None:
            return state_of(Kept({}, {}, 0), [])
        check_idle(self._scheduler.is_open)
        return as_tensors(self._scheduler.state_dict())

    def load_coded_state(self, entry: Any) -> None:
        """Begin the next step with a ``coded_state()``; None: without residuals."""
        check_policy(entry, has_policy=True)
        entries = [self._entry(parameter) for parameter in self.parameters]
        found = Kept({}, {}, 0) if entry is None else load_state(as_arrays(entry), entries)
        self._coded_state = as_tensors(state_of(found, entries))

    def reset(self) -> None:
        """Reset the counts of backward passes and forget gradients under way."""
        self.under_way.clear()
        self.counts = dict.fromkeys(self.counts, 0)

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """Count a backward pass that has added to a gradient (hook); may pass it on."""
        if self.counts[parameter] >= self.passes:
            raise AssertionError(
                f"the gradient of {self.names[parameter]!r} was computed more than "
                f"backward_passes_per_step={self.passes} times before step(): raise "
                "backward_passes_per_step to add up gradients on each rank first"
            )
        self.counts[parameter] += 1
        if self.counts[parameter] >= self.passes:
            with _as_horovod_errors():
                self._give(parameter)

    def flush(self) -> dict[torch.Tensor, Any]:
        """Start the remaining reductions without waiting.

        Returns all parameters, each with the context that receive() needs.
        """
        with _as_horovod_errors():
            if not self.under_way:
                self.before_step()
            for parameter in self.parameters:
                if parameter not in self.under_way:
                    if parameter.grad is None:
                        # The forward pass of another rank may have used this parameter.
                        parameter.grad = torch.zeros_like(parameter)
                    self._give(parameter)
            if self._scheduler is not None:
                self._scheduler.flush()
        notes = dict(self.under_way)
        self.reset()
        return notes

    def receive(self, parameter: torch.Tensor, note: Any) -> None:
        """Wait for one gradient that flush() returned, and store it in the parameter."""
        assert self._scheduler is not None
        with _as_horovod_errors():
            self._scheduler.wait(self._numbers[parameter])
        self._put(parameter, note)

    @property
    def timed_step(self) -> int | None:
        """``timed_step`` of the scheduler; None before the first step."""
        return None if self._scheduler is None else self._scheduler.timed_step

    @property
    def waits_singly(self) -> bool:
        """Whether parameters should step one by one."""
        return self._scheduler is None or self._scheduler.waits_singly

    def note_awaiting(self, seconds: float) -> None:
        """Pass the seconds on to ``note_awaiting`` of the scheduler."""
        if self._scheduler is not None:
            self._scheduler.note_awaiting(seconds)

    def await_messages(self) -> None:
        """Wait for all gradients without ending the step of the scheduler."""
        assert self._scheduler is not None
        with _as_horovod_errors():
            for number in self._numbers.values():
                self._scheduler.wait(number)

    def complete(self) -> None:
        """Wait for all gradients and end the step of the scheduler."""
        if self._scheduler is not None:
            with _as_horovod_errors():
                self._scheduler.wait()

    def synchronize(self) -> None:
        """Start the remaining reductions, wait for all, and store the gradients."""
        notes = self.flush()
        self.complete()
        for parameter, note in notes.items():
            self._put(parameter, note)

    def explain(self) -> str:
        """Describe the messages of a step; see ``Scheduler.explain``."""
        if self._scheduler is None:
            return f"{self.policy}, from the first backward pass on"
        return self._scheduler.explain()

    def _give(self, parameter: torch.Tensor) -> None:
        """Copy the gradient into the memory of the scheduler and declare it ready."""
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
        source = scale_tensor(small, self._before)
        if source.data_ptr() != view.data_ptr():
            view.copy_(source)
        if self._lives_there(parameter, view):
            parameter.grad = view
        self.under_way[parameter] = note
        assert self._scheduler is not None
        self._scheduler.ready(number)

    def _check(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Raise ValueError unless shape and dtype are those of the communication plan."""
        before = self._shapes[parameter]
        now = (tuple(grad.shape), grad.dtype)
        if now != before:
            raise ValueError(
                f"the gradient of {self.names[parameter]!r} has shape {now[0]} and type {now[1]}, "
                f"and had {before[0]} and {before[1]}: with a policy they stay; make the optimizer "
                "anew after changing the model"
            )

    def _begin(self) -> None:
        """Begin a step; in a new world, make a communicator and a scheduler first."""
        self.before_step()
        home = controller_of(self.settings.process_set)
        if home is not self._home:
            words = {
                "policy": str(self.policy),
                "architecture": self.settings.architecture,
                "codec": str(self.settings.codec),
            }
            task = Collective(words, lambda comm: comm.dup())
            home.submit(task, None)
            comm = horovod_world.wait_for(task)
            home.adopt(comm, weakref.WeakMethod(self._before_closing))
            self._shapes = {p: (tuple(p.shape), p.dtype) for p in self.parameters}
            entries = [self._entry(parameter) for parameter in self.parameters]
            former, self._scheduler = (
                self._scheduler,
                Scheduler(
                    comm,
                    entries,
                    policy=self.policy,
                    architecture=self.settings.architecture,
                    op=self._word,
                    overlaps=self._overlaps,
                    allocate=allocate,
                    observer=home.timeline,
                    compress=self.settings.codec,
                ),
            )
            # The residuals of a failed step belong to gradients that no optimizer steps by. Ranks
            # may have stopped after different steps, so their number and Q begin anew.
            if former is not None and not former.is_open:
                anew = {**former.state_dict(), "step": 0, "factors": {}}
                self._scheduler.load_state_dict(anew)
            self._home = home
        assert self._scheduler is not None
        # End a step that was given up.
        self._scheduler.wait()
        if self._coded_state is not None:
            self._scheduler.load_state_dict(as_arrays(self._coded_state))
            self._coded_state = None
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
        """Store the reduced gradient in the parameter, unless its gradient is the view itself."""
        view = self._views[self._numbers[parameter]]
        value = self.settings.compression.decompress(scale_tensor(view, self._after), note)
        put_back(parameter, value)

    def _scales(self) -> tuple[str, float, float]:
        """The name of the reduction, and the factors applied before and after it."""
        op, predivide = self.settings.op, self.settings.predivide
        if op != Average or predivide == 1.0:
            return WORDS[op], 1.0, 1.0
        return WORDS[op], 1.0 / predivide, predivide


@contextmanager
def _as_horovod_errors() -> Iterator[None]:
    """Raise failures of the world as HorovodInternalError; InvalidArgumentError stays itself."""
    try:
        yield
    except InvalidArgumentError:
        raise
    except PycollError as error:
        raise HorovodInternalError(str(error)) from error


def allocate(count: int, kind: str) -> torch.Tensor:
    """Allocate a torch tensor of zeros for the scheduler."""
    dtype = getattr(torch, kind)
    made = torch.from_numpy(empty(count * dtype.itemsize, "uint8")).view(dtype)
    return made.zero_()
