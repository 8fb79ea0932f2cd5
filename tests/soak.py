"""Random operations of one communicator and its sub-groups, each compared with its exact result.

    python tests/soak.py --seconds 3600      # an hour; --help tells the rest

Ranks are processes. They draw the same operations from the same seed: collectives of all kinds,
dtypes, reductions and algorithms, blocking and not, of the world and of splits, lists, groups,
bound calls and messages. Each rank by itself makes its communicators forget what they prepared,
and chooses in which order it waits. A failure names seed and step.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# pytest adds this folder by itself; a run by hand does not.
sys.path.insert(0, str(Path(__file__).parent / "support"))
import oracle

import pycoll
from pycoll import _core
from pycoll.algorithms import TABLE
from pycoll.schedule.collectives import Collective

Array = Any
Comm = pycoll.Communicator
#: Of each dtype and reduction there are so many elements per rank; operations take parts of them.
_POOL = 6000
#: Ranks agree so often on whether time is left.
_STEPS_PER_LOOK = 200
_WAITING_MAX = 6
_BOUND_MAX = 40


class Done(NamedTuple):
    """What a rank did. ``forgotten``: how often it made a communicator forget."""

    operations: int
    seconds: float
    forgotten: int


class Team(NamedTuple):
    """A communicator, and its ranks' numbers in the world."""

    comm: Comm
    members: tuple[int, ...]


class _Bound(NamedTuple):
    """A bound call. ``refresh`` puts in new values, and gives what checks the result."""

    team: Team
    call: Callable[[], Any]
    what: str
    refresh: Callable[[], Callable[[], None]]


class Soak:
    """One rank's part. ``draw`` begins every step alike on all ranks, ``own`` is this rank's.

    Within a step all ranks of one team draw equally often.
    """

    def __init__(self, world: Comm, seed: int) -> None:
        self.draw = random.Random()
        self.own = random.Random(f"{seed}/{world.rank}")
        self.seed, self.world = seed, world
        self.teams = [Team(world, tuple(range(world.size)))]
        self.step = self.operations = self.forgotten = 0
        self.forget_in = 1
        self.what = ""
        self._inputs: dict[tuple[str, str], Array] = {}
        self._folds: dict[tuple[Any, ...], Array] = {}
        self._waiting: list[Callable[[], None]] = []
        self._bound: list[_Bound] = []
        self._kinds: list[tuple[int, Callable[[], None]]] = [
            (40, self.one),
            (12, self.listed),
            (12, self.grouped),
            (20, self.bound),
            (8, self.messages),
            (1, self.split),
        ]

    def run(self, operations: int, seconds: float) -> Done:
        """Until so many operations have run, or the time is over; collective."""
        begin = time.monotonic()
        kinds = [kind for _, kind in self._kinds]
        weights = [weight for weight, _ in self._kinds]
        while self.operations < operations:
            if self.step % _STEPS_PER_LOOK == 0:
                over = np.array([time.monotonic() - begin > seconds])
                if self.world.all_reduce(over, "max")[0]:
                    break
            self.step += 1
            self.draw.seed(self.seed << 32 | self.step)
            try:
                self.draw.choices(kinds, weights)[0]()
                self._wait_for(_WAITING_MAX)
            except Exception:
                place = f"seed {self.seed}, rank {self.world.rank}, step {self.step}: {self.what}"
                raise AssertionError(f"{place}\n{traceback.format_exc()}") from None
            self._forget_sometimes()
        self._wait_for(0)
        for team in self.teams[1:]:
            team.comm.close()
        return Done(self.operations, time.monotonic() - begin, self.forgotten)

    # What there is to run

    def one(self) -> None:
        """A collective, blocking or not."""
        team, word = self._team(), self._word()
        call, arguments, expected = self._drawn(team, word)
        background = self.draw.random() < 0.4 and word != "barrier"
        self._say(team, word, arguments)
        method = getattr(team.comm, call)
        if background:
            work = method(**arguments, async_op=True)
            self._waiting.append(lambda: self._check(work.wait(), expected))
        else:
            self._check(method(**arguments), expected)

    def listed(self) -> None:
        """An all_reduce of many arrays."""
        team, count = self._team(), self.draw.randint(1, 9)
        dtypes = self.draw.sample(oracle.DTYPES, self.draw.randint(1, 2))
        op = self.draw.choice(
            [op for op in oracle.OPS if all(op in oracle.ops_for(d) for d in dtypes)]
        )
        parts = [self._reduced(team, self.draw.choice(dtypes), op) for _ in range(count)]
        xs, expected = [x for x, _ in parts], [result for _, result in parts]
        out = self.draw.choice([None, xs, [np.empty_like(x) for x in xs]])
        self._say(team, "all_reduce of a list", {"op": op, "count": count})
        if self.draw.random() < 0.3:
            work = team.comm.all_reduce(xs, op, out=out, async_op=True)
            self._waiting.append(lambda: self._check_all(work.wait(), expected))
        else:
            self._check_all(team.comm.all_reduce(xs, op, out=out), expected)

    def grouped(self) -> None:
        """Several operations in a group, whose Works are asked behind it."""
        team, count = self._team(), self.draw.randint(1, 8)
        alike = self.draw.random() < 0.6
        dtype = self.draw.choice(oracle.DTYPES)
        found: list[tuple[Any, Any]] = []
        self._say(team, "group", {"count": count, "alike": alike})
        with team.comm.group():
            for _ in range(count):
                if alike:
                    x, expected = self._reduced(team, dtype, "sum")
                    found.append((team.comm.all_reduce(x, out=x), expected))
                    continue
                word = self._word()
                call, arguments, expected = self._drawn(team, word)
                self._say(team, f"{word} in a group of {count}", arguments)
                found.append((getattr(team.comm, call)(**arguments), expected))
        self.operations += count - 1
        for work, expected in found:
            self._check(work.wait(), expected)

    def bound(self) -> None:
        """A call that was bound before or is bound now, with other values in its arrays."""
        if len(self._bound) < _BOUND_MAX and self.draw.random() < 0.1:
            self._bind()
        if not self._bound:
            return
        bound = self.draw.choice(self._bound)
        for _ in range(self.draw.randint(1, 4)):
            check = bound.refresh()
            self._say(bound.team, bound.what, {})
            bound.call()
            check()

    def messages(self) -> None:
        """Around a ring: every rank sends to the next one."""
        team, tag = self._team(), self.draw.randint(0, 5)
        comm, size = team.comm, team.comm.size
        dtype = self.draw.choice(oracle.DTYPES)
        pool, (begin, end) = self._pool(dtype, "sum"), self._part()
        right, left = (comm.rank + 1) % size, (comm.rank - 1) % size
        mine = pool[self.world.rank, begin:end].copy()
        inbox = np.empty_like(mine)
        self._say(team, "messages", {"dtype": dtype, "count": end - begin})
        expected = pool[team.members[left], begin:end]
        if self.draw.random() < 0.3:
            with comm.group():
                sent, got = comm.send(mine, right, tag=tag), comm.recv(inbox, left, tag=tag)
        else:
            sent, got = comm.isend(mine, right, tag=tag), comm.irecv(inbox, left, tag=tag)
        self._check(got.wait(), expected)
        sent.wait()

    def split(self) -> None:
        """Makes a sub-group, and closes the oldest where there are enough."""
        self._wait_for(0)
        colors = [self.draw.randint(0, 1) for _ in self.teams[0].members]
        self._say(self.teams[0], "split", {"colors": colors})
        mine = colors[self.world.rank]
        members = tuple(rank for rank, color in enumerate(colors) if color == mine)
        made = self.world.split(mine)
        # Others may close another one at another time: of a sub-group only its own ranks know.
        self.teams.append(Team(made, members))
        if len(self.teams) > 3:
            gone = self.teams.pop(1)
            self._bound = [one for one in self._bound if one.team is not gone]
            gone.comm.close()

    # How operations are drawn

    def _team(self) -> Team:
        return self.teams[self.draw.randrange(len(self.teams))]

    def _word(self) -> str:
        return self.draw.choice([one.name.lower() for one in Collective])

    def _part(self) -> tuple[int, int]:
        """Elements of the pool; mostly few."""
        most = self.draw.choice([0, 1, 2, 8, 64, 64, 600, _POOL])
        count = self.draw.randint(0, most)
        begin = self.draw.randint(0, _POOL - count)
        return begin, begin + count

    def _pool(self, dtype: str, op: str) -> Array:
        found = self._inputs.get((dtype, op))
        if found is None:
            # Of all ranks at once, so that every part of them folds exactly.
            found = oracle.inputs(dtype, op, self.world.size, _POOL, self.seed)
            self._inputs[dtype, op] = found
        return found

    def _fold(self, dtype: str, op: str, members: tuple[int, ...]) -> Array:
        key = (dtype, op, members)
        found = self._folds.get(key)
        if found is None:
            found = self._folds[key] = oracle.fold(self._pool(dtype, op)[list(members)], op)
        return found

    def _reduced(self, team: Team, dtype: str, op: str) -> tuple[Array, Array]:
        """This rank's array, and what comes out."""
        begin, end = self._part()
        x = self._pool(dtype, op)[self.world.rank, begin:end].copy()
        return x, self._fold(dtype, op, team.members)[begin:end]

    def _drawn(self, team: Team, word: str) -> tuple[str, dict[str, Any], Any]:
        """Name, arguments and result of a collective; None as result is not looked at."""
        arguments: dict[str, Any] = {}
        if self.draw.random() < 0.2:
            names = list(TABLE[Collective[word.upper()]])
            arguments["algorithm"] = self.draw.choice(names)
        if word == "barrier":
            return word, arguments, None
        dtype = self.draw.choice(oracle.DTYPES)
        if word in ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan"):
            ops = [op for op in oracle.ops_for(dtype) if op != "avg" or not word.endswith("scan")]
            op = self.draw.choice(ops)
            return word, *self._folding(team, word, dtype, op, arguments)
        return word, *self._moving(team, word, dtype, arguments)

    def _folding(
        self, team: Team, word: str, dtype: str, op: str, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], Any]:
        place = team.comm.rank
        members = team.members
        if word == "scan":
            members = members[: place + 1]
        elif word == "exscan":
            members = members[:place]
        begin, end = self._part()
        x = self._pool(dtype, op)[self.world.rank, begin:end].copy()
        if members:
            result = self._fold(dtype, op, members)[begin:end]
        else:
            result = np.full(end - begin, oracle.identity(dtype, op), x.dtype)
        arguments |= {"x": x, "op": op, "deterministic": self.draw.choice([None, None, False])}
        if op == "sum" and word != "exscan" and self.draw.random() < 0.2:
            arguments["op"] = "soak_sum"
        out = self.draw.choice([None, None, x, np.empty_like(x)])
        if word == "reduce":
            arguments["root"] = self.draw.randrange(len(members))
            result = result if arguments["root"] == place else None
        if word == "reduce_scatter":
            rows, width = self._rows(end - begin)
            arguments["x"] = x[: rows * width].reshape(rows, width)
            bounds = oracle.bounds(rows, len(members))
            result = result[: rows * width].reshape(rows, width)[bounds[place] : bounds[place + 1]]
        elif result is not None and out is not None:
            arguments["out"] = out
        return arguments, result

    def _rows(self, count: int) -> tuple[int, int]:
        """Of a matrix with so many elements at most; there are thousands of widths."""
        width = self.draw.randint(1, max(1, count))
        return count // width, width

    def _moving(
        self, team: Team, word: str, dtype: str, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], Any]:
        place, size = team.comm.rank, team.comm.size
        begin, end = self._part()
        rows, width = self._rows(end - begin)
        every = self._pool(dtype, "sum")[list(team.members), begin : begin + rows * width]
        every = every.reshape(size, rows, width)
        root = self.draw.randrange(size)
        if word in ("broadcast", "gather", "scatter"):
            arguments["root"] = root
        if word == "broadcast":
            arguments["x"] = every[place].copy()
            return arguments, every[root]
        if word in ("all_gather", "gather"):
            # Not of equal length.
            lengths = [self.draw.randint(0, rows) for _ in range(size)]
            arguments["x"] = every[place][: lengths[place]].copy()
            whole = np.concatenate([one[:n] for one, n in zip(every, lengths, strict=True)])
            return arguments, whole if word == "all_gather" or root == place else None
        if word == "scatter":
            bounds = oracle.bounds(rows, size)
            arguments["x"] = every[root].copy() if root == place else None
            return arguments, every[root][bounds[place] : bounds[place + 1]]
        share = rows // size
        arguments["x"] = every[place][: share * size].copy()
        mine = slice(place * share, (place + 1) * share)
        return arguments, np.concatenate([one[mine] for one in every])

    def _bind(self) -> None:
        team = self._team()
        dtype = self.draw.choice(oracle.DTYPES)
        op = self.draw.choice(oracle.ops_for(dtype))
        count = self.draw.choice([1, 3, 50, 2000])
        x = np.empty(count, oracle.np_dtype(dtype))
        out = self.draw.choice([x, np.empty_like(x)])
        algorithm = self.draw.choice([None, None, *TABLE[Collective.ALL_REDUCE]])

        def refreshed() -> Callable[[], None]:
            begin = self.draw.randint(0, _POOL - count)
            x[...] = self._pool(dtype, op)[self.world.rank, begin : begin + count]
            expected = self._fold(dtype, op, team.members)[begin : begin + count]
            return lambda: self._check(out, expected)

        call = team.comm.all_reduce.bind(x, op, out=out, algorithm=algorithm)
        what = f"bound all_reduce of {count} {dtype} by {op} with algorithm {algorithm}"
        self._bound.append(_Bound(team, call, what, refreshed))

    # Records of the operations

    def _say(self, team: Team, word: str, arguments: dict[str, Any]) -> None:
        shown = {
            name: f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        }
        self.what = f"{word} of ranks {team.members} with {shown}"
        self.operations += 1

    def _check(self, found: Any, expected: Any) -> None:
        if expected is not None and not oracle.same_bits(found, expected):
            raise AssertionError(f"expected {expected!r}, found {found!r}")

    def _check_all(self, found: list[Any], expected: list[Any]) -> None:
        for one, other in zip(found, expected, strict=True):
            self._check(one, other)

    def _wait_for(self, most: int) -> None:
        """In an order of this rank's own."""
        while len(self._waiting) > most:
            self._waiting.pop(self.own.randrange(len(self._waiting)))()

    def _forget_sometimes(self) -> None:
        self.forget_in -= 1
        if self.forget_in > 0:
            return
        self.forget_in = self.own.choice([1, 10, 100, 1000, 10_000])
        self.forgotten += 1
        for team in self.teams:
            if self.own.random() < 0.7:
                _core.forget(team.comm)


def soak(world: Comm, seed: int, operations: int, seconds: float) -> Done:
    """What one rank runs."""
    pycoll.register_op("soak_sum", np.add)
    return Soak(world, seed).run(operations, seconds)


def main() -> None:
    """Both transports, one after the other, each for half of the time and of the operations."""
    from harness import ProcessWorld, succeeded

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=100.0, help="at most, in all")
    parser.add_argument("--operations", type=int, default=0, help="at most, in all; 0: no bound")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    most = options.operations or sys.maxsize
    for transports, ranks in (("shm", 2), ("tcp", 3)):
        print(f"soak: {ranks} ranks over {transports}, seed {options.seed}", flush=True)
        bounds = (options.seed, most // 2, options.seconds / 2)
        # By the module's name, which the ranks import; here it is __main__.
        world = ProcessWorld(ranks, import_module("soak").soak, *bounds, transports=transports)
        found = succeeded(world.outcomes(options.seconds / 2 + 120))
        print(f"  {text(found[0])}", flush=True)


def text(done: Done) -> str:
    """In words."""
    return (
        f"{done.operations} operations in {done.seconds:.1f} s, all exact; rank 0 forgot "
        f"{done.forgotten} times"
    )


if __name__ == "__main__":
    main()
