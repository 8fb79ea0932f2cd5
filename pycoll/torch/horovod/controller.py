"""The controller: negotiates tasks with the other ranks and runs them; one per communicator.

    caller                      rounds                            rounds of other ranks
    submit(task)  ------------> negotiation.add
                                negotiation.begin, end  <-------> the same
    wait(task)                  ready all-reduces: one list
              <---------------- task.done

One thread at a time drives rounds. A caller that waits drives them itself, since handing them to
another thread costs more than a whole negotiation. If other ranks are missing after ``HELP_S``, the
caller leaves the round to the controller's own thread and sleeps until its task is done.

That thread also drives rounds while no caller waits, for example during a backward pass. It sleeps
while no task of this rank waits. While a task waits for other ranks, the thread repeats rounds
after pauses that grow to the cycle time of Horovod.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pycoll import _core
from pycoll.comm.communicator import Communicator
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.torch.horovod.horovod_errors import HorovodInternalError
from pycoll.torch.horovod.negotiation import KNOWN_MAX, Negotiation, Round
from pycoll.torch.horovod.task_runner import Runner
from pycoll.torch.horovod.tasks import AllReduce, Barrier, Task
from pycoll.torch.horovod.timeline import Timeline
from pycoll.torch.horovod.variables import Variables

#: A weak reference to a method, or a function that returns a function or None.
Finish = Callable[[], Callable[[], None] | None]

#: The first pause between rounds that make nothing ready; it doubles up to the cycle time.
PAUSE_MIN_S = 50e-6
#: The seconds for which a waiting caller drives a round. A change of threads is short against it.
HELP_S = 0.02
#: Barriers without a name use this many names in rotation, so that the names become known. A rank
#: cannot have more barriers than this under way.
BARRIERS = 32
JOIN = "join"


class Closing(Protocol):
    """A communicator, or a store on servers."""

    def close(self) -> None:
        """Leave the other ranks."""


class Controller:
    """The controller: runs tasks over ``comm``, which it owns and no other code may use.

    ``ranks``: the global rank of each rank of ``comm``. ``timeline``: records the tasks.
    ``settings``: those of the environment; ``fusion_bytes`` and ``cache`` must be equal on all
    ranks. The attribute ``warn_after_s`` is the time in seconds after which a waiting caller
    warns; None for never. Any thread may submit and wait.
    """

    def __init__(
        self, comm: Communicator, ranks: Sequence[int], timeline: Timeline, settings: Variables
    ) -> None:
        self.comm = comm
        self.ranks = list(ranks)
        self.timeline = self._timeline = timeline
        self._settings = settings
        known_max = KNOWN_MAX if settings.cache is None else settings.cache
        self.warn_after_s = settings.warn_after_s
        self._negotiation = Negotiation(comm, ranks, known_max, settings.warn_after_s)
        #: Guards the members below. The controller's thread sleeps on ``_changed``, waiting callers
        #: on ``_ended``.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        #: Whether a thread drives rounds now; only that thread uses ``_negotiation``.
        self._driven = False
        self._asleep = False
        #: The number of callers that wait on ``_ended``.
        self._waiting = 0
        self._arrived: list[Task] = []
        self._tasks: dict[str, Task] = {}
        #: The number of calls without a name, by kind, since all ranks last joined.
        self._counts: Counter[str] = Counter()
        self._joins = 0
        self._failure: str | None = None
        self._closing = False
        self._pid = os.getpid()
        self._runner = Runner(comm, self.ranks)
        #: Communicators and stores of the same ranks that close together with this controller.
        self._adopted: list[tuple[Closing, Finish]] = []
        self._thread = threading.Thread(target=self._work, name="pycoll-torch", daemon=True)
        self._thread.start()

    def submit(self, task: Task, name: str | None, waits: bool = False) -> None:
        """Submit ``task`` under ``name``; without a name, a count of calls serves as the name.

        ``waits``: the caller will call ``wait`` at once, which drives the round.

        Raises ValueError if the name is already under way, HorovodInternalError after a failure and
        in a forked process.
        """
        if self._pid != os.getpid():
            raise HorovodInternalError(
                f"this process was forked from process {self._pid}, whose ranks it cannot reach: "
                "call hvd.init() here, or start it with the 'spawn' method"
            )
        with self._lock:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            if name is None:
                count = self._counts[task.kind]
                self._counts[task.kind] += 1
                task.passing = task.kind != Barrier.kind
                label = f"{self._joins}.{count}" if task.passing else f"turn {count % BARRIERS}"
                name = f"noname.{label}"
            task.key = key = f"{task.kind}.{name}"
            if key in self._tasks:
                raise ValueError(
                    f"{task.kind} of {name!r} was called while the one before is still under way: "
                    "give every tensor a name of its own, or synchronize first"
                )
            task.home = self
            self._runner.on_devices |= task.order is not None
            self._tasks[key] = task
            self._arrived.append(task)
            if self._asleep and not waits:
                self._wake()
        if self._timeline.is_recording:
            self._timeline.begin(task.key, f"NEGOTIATE_{task.kind.upper()}")

    def wait(self, task: Task, limit_s: float | None) -> bool:
        """Wait up to ``limit_s`` seconds for a submitted task; return whether it is done."""
        begin = time.monotonic()
        self._help(task, HELP_S if limit_s is None else min(limit_s, HELP_S), begin)
        if task.done:
            return True
        with self._lock:
            self._waiting += 1
            try:
                while not task.done:
                    left = None if limit_s is None else begin + limit_s - time.monotonic()
                    if left is not None and left <= 0:
                        return False
                    self._ended.wait(left)
            finally:
                self._waiting -= 1
        return True

    def adopt(self, comm: Closing, finish: Finish = lambda: None) -> None:
        """Close ``comm``, which other code uses, together with this controller; or a store.

        ``finish`` returns None, or a function that completes the work of that code; see
        ``finish_adopted``.
        """
        self._adopted.append((comm, finish))

    def finish_adopted(self) -> None:
        """Complete the work under way on adopted communicators; raises what that work raises."""
        for _, finish in self._adopted:
            complete = finish()
            if complete is not None:
                complete()

    @property
    def has_adopted(self) -> bool:
        """Whether there are communicators whose operations are not negotiated."""
        return bool(self._adopted)

    def close(self) -> None:
        """Stop the thread and close the communicators; tasks under way fail."""
        self._end("hvd.shutdown() was called")
        for comm, _ in self._adopted:
            comm.close()
        self.comm.close()
        if self._pid == os.getpid() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _end(self, why: str) -> None:
        with self._lock:
            self._closing = True
            self._failure = self._failure or why
            self._changed.notify()

    def _wake(self) -> None:
        """Wake the controller's thread. Requires the lock."""
        if self._asleep:
            self._asleep = False
            self._changed.notify()

    def _help(self, task: Task, limit_s: float, now_s: float) -> None:
        """Drive rounds until a task is done, for at most ``limit_s``, unless another thread does.

        Stops after a round that made nothing ready; the controller's thread repeats it with pauses.
        """
        end = now_s + limit_s
        with self._lock:
            if self._driven or self._closing or self._pid != os.getpid():
                return
            self._driven = True
        try:
            while not task.done and self._turn(limit_s) and time.monotonic() < end:
                pass
        except KeyboardInterrupt as interrupt:
            # While a round waits for other ranks, nothing is lost: the thread goes on with it.
            if not self._negotiation.under_way:
                self._fail_all(interrupt)
            raise
        except BaseException as error:
            self._fail_all(error)
        finally:
            with self._lock:
                self._driven = False
                if self._asleep and (self._arrived or self._negotiation.waits):
                    self._wake()

    def _work(self) -> None:
        _core.work_in_background()
        pause = 0.0
        try:
            while self._await_reason(pause):
                idle = not self._turn(None)
                with self._lock:
                    self._driven = False
                pause = min(max(2 * pause, PAUSE_MIN_S), self._settings.cycle_s) if idle else 0.0
        except BaseException as error:
            self._fail_all(error)
        else:
            self._fail_all(None)

    def _await_reason(self, pause: float) -> bool:
        """Wait until a round is due, and make this thread the driver. False at the end.

        A round is due when a task has arrived, or ``pause`` seconds later while tasks wait.
        """
        end = time.monotonic() + pause
        with self._lock:
            while not self._closing:
                left = None
                if not self._driven and (self._arrived or self._negotiation.waits):
                    left = 0.0 if self._arrived else end - time.monotonic()
                    if left <= 0:
                        self._asleep, self._driven = False, True
                        return True
                self._asleep = True
                self._changed.wait(left)
        return False

    def _turn(self, limit_s: float | None) -> bool | None:
        """Run a round as the driving thread; return whether it made anything ready.

        None if other ranks are missing after ``limit_s``; the next call goes on with the round.
        """
        negotiation = self._negotiation
        if not negotiation.under_way:
            with self._lock:
                arrived, self._arrived = self._arrived, []
            for task in arrived:
                if task.kind == JOIN:
                    negotiation.join()
                else:
                    negotiation.add(task.key, task.terms, task.passing)
            if self._timeline.is_recording:
                self._timeline.cycle()
            negotiation.begin()
        found = negotiation.end(limit_s)
        if found is None:
            return None
        self._run_all(found)
        return bool(found.ready) or found.last_joined is not None

    def _run_all(self, found: Round) -> None:
        batch: list[AllReduce] = []
        nbytes, most = 0, self._settings.fusion_bytes
        records = self._timeline.is_recording
        for one in found.ready:
            task = self._tasks.get(one.key)
            if records:
                self._timeline.end(one.key)
            if one.problem:
                if task is not None:
                    self._fail(task, HorovodInternalError(one.problem))
                continue
            if task is None:
                # Only a joined rank has no task of its own for a ready name.
                task = AllReduce.of_zeros(one.terms)
                task.key = one.key
            if isinstance(task, AllReduce) and task.fused:
                nbytes += task.nbytes
                if most is not None and nbytes > most:
                    if batch:
                        self._run_batch(batch)
                    batch, nbytes = [], task.nbytes
                batch.append(task)
                continue
            if batch:
                self._run_batch(batch)
                batch, nbytes = [], 0
            self._run(task)
        if batch:
            self._run_batch(batch)
        for stalled in found.stalled:
            if stalled.key in self._tasks:
                self._tasks[stalled.key].stalled = True
            if stalled.had[0] == self.comm.rank:
                warnings.warn(stalled.text, RuntimeWarning, stacklevel=2)
        if found.last_joined is not None:
            with self._lock:
                # Before the join some ranks made calls that others did not. From here on the
                # counts of all ranks are equal again.
                self._joins += 1
                self._counts.clear()
                joins = [task for task in self._tasks.values() if task.kind == JOIN]
            for task in joins:
                self._timeline.end(task.key)
                self._complete([(task, found.last_joined)])

    def _run_batch(self, batch: list[AllReduce]) -> None:
        """Run all-reduces as one list. If the list cannot run on all ranks, run each alone."""
        records = self._timeline.is_recording
        if records:
            self._timeline.begin_fused([task.key for task in batch], "ALLREDUCE")
        try:
            results = self._runner.reduce(batch)
        except InvalidArgumentError as error:
            for task in batch:
                self._timeline.end(task.key)
                if len(batch) == 1:
                    self._fail(task, _internal_error(error))
                else:
                    self._run_batch([task])
            return
        for task in batch if records else ():
            self._timeline.end(task.key)
        self._complete(results)

    def _run(self, task: Task) -> None:
        records = self._timeline.is_recording
        if records:
            self._timeline.begin(task.key, task.kind.upper())
        error: BaseException | None = None
        try:
            result = self._runner.run(task)
        except (InvalidArgumentError, ValueError) as wrong:
            error = wrong
        if records:
            self._timeline.end(task.key)
        if error is not None:
            self._fail(task, _internal_error(error))
        else:
            self._complete([(task, result)])

    def _complete(self, results: Sequence[tuple[Task, Any]]) -> None:
        """Set results. Names become free before a caller can see that its task is done."""
        with self._lock:
            for task, result in results:
                self._tasks.pop(task.key, None)
                task.result, task.done = result, True
            if self._waiting:
                self._ended.notify_all()

    def _fail(self, task: Task, error: BaseException) -> None:
        with self._lock:
            self._tasks.pop(task.key, None)
            task.error, task.done = error, True
            self._ended.notify_all()

    def _fail_all(self, error: BaseException | None) -> None:
        """Stop, and give every waiting task an error."""
        with self._lock:
            self._closing = True
            reason = str(error) if error is not None else self._failure or "shut down"
            self._failure = self._failure or reason
            for task in self._tasks.values():
                task.error = HorovodInternalError(f"{task.key} did not finish: {reason}")
                task.error.__cause__ = error
                task.done = True
            self._tasks.clear()
            self._ended.notify_all()
            self._changed.notify()
        if error is not None and not isinstance(error, PycollError):
            # Other ranks wait for messages of this rank. Closing makes them fail at once instead of
            # at their deadlines.
            self.comm.close()


def _internal_error(error: BaseException) -> HorovodInternalError:
    failure = HorovodInternalError(str(error))
    failure.__cause__ = error
    return failure
