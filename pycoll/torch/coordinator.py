"""Agrees on tasks with the other ranks and runs them; one per communicator.

    caller                      rounds                            other ranks' rounds
    submit(task)  ------------> agreement.add
                                agreement.begin, end  <---------> the same
    wait(task)                  settled all-reduces: one list
              <---------------- task.done

Rounds are driven by one thread at a time. A caller who waits does that himself: to hand it over
would cost him more than all of an agreement. Where the other ranks have not come after ``HELP_S``,
he leaves it to the coordinator's own thread, and waits as he would for anything else. That thread
also drives while nobody waits, beside a backward pass; it sleeps while this rank has nothing that
waits. While something waits for other ranks it asks again after pauses that grow to a cycle's
length, as it is called in Horovod.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pycoll import _core
from pycoll.communicator import Communicator
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.torch.agreement import KNOWN_MAX, Agreement, Round
from pycoll.torch.errors import HorovodInternalError
from pycoll.torch.running import Runner
from pycoll.torch.tasks import AllReduce, Barrier, Task
from pycoll.torch.timeline import Timeline
from pycoll.torch.variables import Variables

#: A weak reference to a method, or what looks like it.
Finish = Callable[[], Callable[[], None] | None]

PAUSE_MIN_S = 50e-6
#: A caller who waits drives rounds while the other ranks come within this; against it, a change of
#: threads is nothing.
HELP_S = 0.02
#: Barriers without a name, which are all alike, have so many names in turns, so that these become
#: known. More than that of one rank cannot be under way.
BARRIERS = 32
JOIN = "join"


class Coordinator:
    """Runs tasks over ``comm``, which it owns and nobody else may use.

    ``ranks`` are the global ranks of the communicator's. Any thread may submit and wait. ``wishes``
    are those of variables; ``fusion_bytes`` and ``cache`` have to be alike on all ranks.
    ``timeline`` records it. ``warn_after_s``: when whoever waits is to tell so; None for never.
    """

    def __init__(
        self, comm: Communicator, ranks: Sequence[int], timeline: Timeline, wishes: Variables
    ) -> None:
        self.comm = comm
        self.ranks = list(ranks)
        self.timeline = self._timeline = timeline
        self._wishes = wishes
        known_max = KNOWN_MAX if wishes.cache is None else wishes.cache
        self.warn_after_s = wishes.warn_after_s
        self._agreement = Agreement(comm, ranks, known_max, wishes.warn_after_s)
        #: Guards all below. The coordinator's thread sleeps on one condition, waiting callers on
        #: the other.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        #: Whether some thread drives rounds now; only that one touches the agreement.
        self._driven = False
        self._asleep = False
        #: How many callers wait on ``_ended``.
        self._waiting = 0
        self._arrived: list[Task] = []
        self._tasks: dict[str, Task] = {}
        #: Calls without a name, by kind, since all ranks last joined.
        self._counts: Counter[str] = Counter()
        self._joins = 0
        self._failure: str | None = None
        self._closing = False
        self._pid = os.getpid()
        self._runner = Runner(comm, self.ranks)
        #: Communicators of the same ranks that live as long as this.
        self._adopted: list[tuple[Communicator, Finish]] = []
        self._thread = threading.Thread(target=self._work, name="pycoll-torch", daemon=True)
        self._thread.start()

    def submit(self, task: Task, name: str | None, waits: bool = False) -> None:
        """Give ``task`` to all ranks under ``name``; without one, calls are counted instead.

        ``waits``: the caller calls ``wait`` at once, and drives it himself.

        Raises ValueError if the name is under way already, HorovodInternalError after a failure.
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
                turn = f"{self._joins}.{count}" if task.passing else f"turn {count % BARRIERS}"
                name = f"noname.{turn}"
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
        """Until a task that was submitted here is done; whether it is, after ``limit_s``."""
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

    def adopt(self, comm: Communicator, finish: Finish = lambda: None) -> None:
        """Close ``comm``, which somebody else uses, together with this.

        ``finish`` gives None, or what completes its user's work; for ``finish_adopted``.
        """
        self._adopted.append((comm, finish))

    def finish_adopted(self) -> None:
        """Complete what users of adopted communicators have under way; may raise what they do."""
        for _, finish in self._adopted:
            complete = finish()
            if complete is not None:
                complete()

    @property
    def has_adopted(self) -> bool:
        """Whether there are operations that no agreement knows of."""
        return bool(self._adopted)

    def close(self) -> None:
        """Leave; what is under way fails."""
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
        """Have the thread look at what there is; with the lock."""
        if self._asleep:
            self._asleep = False
            self._changed.notify()

    def _help(self, task: Task, limit_s: float, now_s: float) -> None:
        """Drive rounds until a task is done, unless another thread does; no longer than that, and
        not after a round that settled nothing, which the thread repeats with pauses."""
        end = now_s + limit_s
        with self._lock:
            if self._driven or self._closing or self._pid != os.getpid():
                return
            self._driven = True
        try:
            while not task.done and self._turn(limit_s) and time.monotonic() < end:
                pass
        except KeyboardInterrupt as interrupt:
            # While a round waits for others, nothing is lost: the thread goes on with it.
            if not self._agreement.under_way:
                self._fail_all(interrupt)
            raise
        except BaseException as error:
            self._fail_all(error)
        finally:
            with self._lock:
                self._driven = False
                if self._asleep and (self._arrived or self._agreement.waits):
                    self._wake()

    def _work(self) -> None:
        _core.work_in_background()
        pause = 0.0
        try:
            while self._await_reason(pause):
                idle = not self._turn(None)
                with self._lock:
                    self._driven = False
                pause = min(max(2 * pause, PAUSE_MIN_S), self._wishes.cycle_s) if idle else 0.0
        except BaseException as error:
            self._fail_all(error)
        else:
            self._fail_all(None)

    def _await_reason(self, pause: float) -> bool:
        """Wait until there is reason for a round, after a pause unless something has arrived; this
        thread drives then. False at the end."""
        end = time.monotonic() + pause
        with self._lock:
            while not self._closing:
                left = None
                if not self._driven and (self._arrived or self._agreement.waits):
                    left = 0.0 if self._arrived else end - time.monotonic()
                    if left <= 0:
                        self._asleep, self._driven = False, True
                        return True
                self._asleep = True
                self._changed.wait(left)
        return False

    def _turn(self, limit_s: float | None) -> bool | None:
        """A round, by whoever drives: whether it has settled anything. None if other ranks have not
        come within ``limit_s``; the next turn goes on with it."""
        agreement = self._agreement
        if not agreement.under_way:
            with self._lock:
                arrived, self._arrived = self._arrived, []
            for task in arrived:
                if task.kind == JOIN:
                    agreement.join()
                else:
                    agreement.add(task.key, task.terms, task.passing)
            if self._timeline.is_recording:
                self._timeline.cycle()
            agreement.begin()
        found = agreement.end(limit_s)
        if found is None:
            return None
        self._run_all(found)
        return bool(found.settled) or found.last_joined is not None

    def _run_all(self, found: Round) -> None:
        batch: list[AllReduce] = []
        nbytes, most = 0, self._wishes.fusion_bytes
        tells = self._timeline.is_recording
        for one in found.settled:
            task = self._tasks.get(one.key)
            if tells:
                self._timeline.end(one.key)
            if one.problem:
                if task is not None:
                    self._fail(task, HorovodInternalError(one.problem))
                continue
            if task is None:
                # Only joined ranks have nothing of their own.
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
                # Some ranks called what others did not; from here on they count alike again.
                self._joins += 1
                self._counts.clear()
                joins = [task for task in self._tasks.values() if task.kind == JOIN]
            for task in joins:
                self._timeline.end(task.key)
                self._complete([(task, found.last_joined)])

    def _run_batch(self, batch: list[AllReduce]) -> None:
        """Some all-reduces as one list; what cannot run, alike on all ranks, fails alone."""
        tells = self._timeline.is_recording
        if tells:
            self._timeline.begin_fused([task.key for task in batch], "ALLREDUCE")
        try:
            results = self._runner.reduced(batch)
        except InvalidArgumentError as error:
            for task in batch:
                self._timeline.end(task.key)
                if len(batch) == 1:
                    self._fail(task, _told(error))
                else:
                    self._run_batch([task])
            return
        for task in batch if tells else ():
            self._timeline.end(task.key)
        self._complete(results)

    def _run(self, task: Task) -> None:
        tells = self._timeline.is_recording
        if tells:
            self._timeline.begin(task.key, task.kind.upper())
        error: BaseException | None = None
        try:
            result = self._runner.ran(task)
        except (InvalidArgumentError, ValueError) as wrong:
            error = wrong
        if tells:
            self._timeline.end(task.key)
        if error is not None:
            self._fail(task, _told(error))
        else:
            self._complete([(task, result)])

    def _complete(self, results: Sequence[tuple[Task, Any]]) -> None:
        """The names are free again before anybody can know that they are."""
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
        """The end: nothing that waits stays without an answer."""
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
            # The others wait for this rank's messages, and would until their deadlines.
            self.comm.close()


def _told(error: BaseException) -> HorovodInternalError:
    failure = HorovodInternalError(str(error))
    failure.__cause__ = error
    return failure
