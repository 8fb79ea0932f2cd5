"""The thread that agrees on tasks and runs them, one per communicator.

    caller                      coordinator's thread              other ranks' threads
    submit(task)  ------------> agreement.add
                                agreement.round  <--------------> the same
    wait(task)                  settled all-reduces: one group
              <---------------- task.done

The thread sleeps while this rank has nothing that waits. While something waits for other ranks it
asks again after pauses that grow to a cycle's length, as it is called in Horovod.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pycoll.communicator import Communicator
from pycoll.errors import InvalidArgumentError
from pycoll.torch.agreement import KNOWN_MAX, Agreement, Round
from pycoll.torch.errors import HorovodInternalError
from pycoll.torch.tasks import AllReduce, Task
from pycoll.torch.timeline import Timeline
from pycoll.torch.variables import Variables

#: A weak reference to a method, or what looks like it.
Finish = Callable[[], Callable[[], None] | None]

PAUSE_MIN_S = 50e-6
JOIN = "join"


class Coordinator:
    """Runs tasks over ``comm``, which it owns and nobody else may use.

    ``ranks`` are the global ranks of the communicator's. Any thread may submit and wait. ``wishes``
    are those of variables; ``fusion_bytes`` and ``cache`` have to be alike on all ranks.
    ``timeline`` records it.
    """

    def __init__(
        self, comm: Communicator, ranks: Sequence[int], timeline: Timeline, wishes: Variables
    ) -> None:
        self.comm = comm
        self.ranks = list(ranks)
        self.timeline = self._timeline = timeline
        self._wishes = wishes
        known_max = KNOWN_MAX if wishes.cache is None else wishes.cache
        self._agreement = Agreement(comm, ranks, known_max, wishes.warn_after_s)
        self._changed = threading.Condition()
        self._arrived: list[Task] = []
        self._tasks: dict[str, Task] = {}
        #: Calls without a name, by kind, since all ranks last joined.
        self._counts: Counter[str] = Counter()
        self._joins = 0
        self._failure: str | None = None
        self._closing = False
        self._pid = os.getpid()
        #: Communicators of the same ranks that live as long as this.
        self._adopted: list[tuple[Communicator, Finish]] = []
        self._thread = threading.Thread(target=self._work, name="pycoll-torch", daemon=True)
        self._thread.start()

    def submit(self, task: Task, name: str | None) -> None:
        """Give ``task`` to all ranks under ``name``; without one, calls are counted instead.

        Raises ValueError if the name is under way already, HorovodInternalError after a failure.
        """
        if self._pid != os.getpid():
            raise HorovodInternalError(
                f"this process was forked from process {self._pid}, whose ranks it cannot reach: "
                "call hvd.init() here, or start it with the 'spawn' method"
            )
        with self._changed:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            if name is None:
                task.passing = True
                name = f"noname.{self._joins}.{self._counts[task.kind]}"
                self._counts[task.kind] += 1
            task.key = f"{task.kind}.{name}"
            if task.kind != JOIN:
                task.warn_after_s = self._wishes.warn_after_s
            if task.key in self._tasks:
                raise ValueError(
                    f"{task.kind} of {name!r} was called while the one before is still under way: "
                    "give every tensor a name of its own, or synchronize first"
                )
            self._tasks[task.key] = task
            self._arrived.append(task)
            self._changed.notify()
        self._timeline.begin(task.key, f"NEGOTIATE_{task.kind.upper()}")

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
        with self._changed:
            self._closing = True
            self._failure = self._failure or why
            self._changed.notify()

    def _work(self) -> None:
        pause = 0.0
        try:
            while self._take(pause):
                self._timeline.cycle()
                found = self._agreement.round()
                self._run_all(found)
                idle = not found.settled and found.last_joined is None
                pause = min(max(2 * pause, PAUSE_MIN_S), self._wishes.cycle_s) if idle else 0.0
        except BaseException as error:
            self._fail_all(error)
        else:
            self._fail_all(None)

    def _take(self, pause: float) -> bool:
        """Wait until there is reason for a round, and add what has arrived. False at the end."""
        with self._changed:
            if not self._agreement.waits:
                self._changed.wait_for(lambda: self._arrived or self._closing)
            elif pause > 0 and not self._arrived and not self._closing:
                self._changed.wait(pause)
            if self._closing:
                return False
            arrived, self._arrived = self._arrived, []
        for task in arrived:
            if task.kind == JOIN:
                self._agreement.join()
            else:
                self._agreement.add(task.key, task.terms, task.passing)
        return True

    def _run_all(self, found: Round) -> None:
        batch: list[AllReduce] = []
        for one in found.settled:
            task = self._tasks.get(one.key)
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
                if not self._fits(batch, task):
                    self._run_batch(batch)
                    batch = []
                batch.append(task)
                continue
            self._run_batch(batch)
            batch = []
            self._run(task)
        self._run_batch(batch)
        for stalled in found.stalled:
            if stalled.key in self._tasks:
                self._tasks[stalled.key].stalled = True
            if stalled.had[0] == self.comm.rank:
                warnings.warn(stalled.text, RuntimeWarning, stacklevel=2)
        if found.last_joined is not None:
            with self._changed:
                # Some ranks called what others did not; from here on they count alike again.
                self._joins += 1
                self._counts.clear()
            for task in [task for task in self._tasks.values() if task.kind == JOIN]:
                self._timeline.end(task.key)
                self._complete(task, found.last_joined)

    def _fits(self, batch: list[AllReduce], task: AllReduce) -> bool:
        """Whether a task may be reduced in one group with those; alike on all ranks."""
        most = self._wishes.fusion_bytes
        return most is None or sum(one.nbytes for one in (*batch, task)) <= most

    def _run_batch(self, batch: list[AllReduce]) -> None:
        """Several all-reduces as one group; what cannot run, alike on all ranks, fails alone."""
        if not batch:
            return
        comm = self.comm
        for task in batch:
            self._timeline.begin(task.key, "ALLREDUCE")
        try:
            with comm.group():
                for task in batch:
                    task.enter(comm)
        except InvalidArgumentError as error:
            for task in batch:
                self._timeline.end(task.key)
                if len(batch) == 1:
                    self._fail(task, _told(error))
                else:
                    self._run_batch([task])
            return
        for task in batch:
            result = task.leave(comm.size)
            self._timeline.end(task.key)
            self._complete(task, result)

    def _run(self, task: Task) -> None:
        self._timeline.begin(task.key, task.kind.upper())
        try:
            result = task.run(self.comm)
        except (InvalidArgumentError, ValueError) as error:
            self._timeline.end(task.key)
            self._fail(task, _told(error))
        else:
            self._timeline.end(task.key)
            self._complete(task, result)

    def _complete(self, task: Task, result: Any) -> None:
        """The name is free again before anybody can know that it is."""
        with self._changed:
            self._tasks.pop(task.key, None)
        task.complete(result)

    def _fail(self, task: Task, error: BaseException) -> None:
        with self._changed:
            self._tasks.pop(task.key, None)
        task.fail(error)

    def _fail_all(self, error: BaseException | None) -> None:
        """The end of the thread: nothing that waits stays without an answer."""
        with self._changed:
            reason = str(error) if error is not None else self._failure or "shut down"
            self._failure = self._failure or reason
            tasks = list(self._tasks.values())
            self._tasks.clear()
        for task in tasks:
            failure = HorovodInternalError(f"{task.key} did not finish: {reason}")
            failure.__cause__ = error
            task.fail(failure)


def _told(error: BaseException) -> HorovodInternalError:
    failure = HorovodInternalError(str(error))
    failure.__cause__ = error
    return failure
