"""What fails first, if anything does: each step alone, told as it goes, from one rank on.

Run as a script; ``--count-max`` limits its arrays, ``--protocol`` says which protocols are tried.
LL128 is tried only so, since no driver tells where it is sound, and nothing chooses it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import pycoll
from pycoll.compress import BF16, FP8, Block, Feedback, Sign
from pycoll.tools.bench.cuda import Array, Stream, array

#: Of an operation; a rank that never comes is told of after so long.
TIMEOUT_S = 10.0
#: What stands for nothing in slots of the protocol Pattern (csrc/device/kernels/protocols.h).
NOTHING = 0xFFD37FE5FFA97FB7


class Rank:
    def __init__(self, comm: pycoll.Communicator) -> None:
        self.comm = comm
        self.stream = Stream()

    def reduce(self, algorithm: str | None, count: int) -> bool:
        """Whether the sum is right, of exact numbers."""
        with self.stream:
            x = array(np.arange(count, dtype=np.float32) % 97 + self.comm.rank)
            self.comm.barrier()
            made: Array = self.comm.all_reduce(x, algorithm=algorithm)
            size = self.comm.size
            expected = np.arange(count) % 97 * size + size * (size - 1) / 2
            return bool((made.get() == expected).all())

    def reduce_nothing(self, count: int) -> bool:
        """The same of what the protocol Pattern cannot send as it is; several times, since its
        first segments are sent otherwise anyway."""
        with self.stream:
            values = np.full(count, NOTHING, np.uint64)
            x = array(values)
            self.comm.barrier()
            made = [self.comm.all_reduce(x, algorithm="one_shot") for _ in range(6)]
            expected = values * np.uint64(self.comm.size)
            return all(bool((one.get() == expected).all()) for one in made)

    def reduce_codes(self, count: int) -> bool:
        """Whether a list of two arrays has the bits of arrays in host memory, with each codec."""
        with self.stream:
            values = np.arange(count, dtype=np.float32) % 97 + self.comm.rank
            for codec in (BF16(), FP8(), Block("int8"), Block("int4"), Sign()):
                arrays = [values, values[1:]]
                expected = [self.comm.all_reduce(one, compress=codec) for one in arrays]
                given = [array(one) for one in arrays]
                self.comm.barrier()
                made = self.comm.all_reduce(given, compress=codec, feedback=Feedback())
                pairs = zip(made, expected, strict=True)
                if not all(bool((one.get() == right).all()) for one, right in pairs):
                    return False
            return True

    def replay(self) -> bool:
        with self.stream:
            x = array(np.ones(100, np.float32))
            self.comm.all_reduce(x)
            self.stream.synchronize()
            self.comm.barrier()
            with self.stream.capture() as graph:
                self.comm.all_reduce(x, out=x)
            self.comm.barrier()
            for _ in range(5):
                graph.launch()
            return bool((x.get() == float(self.comm.size**5)).all())


def told(what: str, outcomes: list[Any], begin: float) -> bool:
    good = all(one is True for one in outcomes)
    print(f"{'ok' if good else 'FAILED':<7}{what:<44}{time.monotonic() - begin:6.2f} s", flush=True)
    for rank, one in enumerate(outcomes):
        if one is not True:
            print(f"  rank {rank}: {'wrong result' if one is False else repr(one)}", flush=True)
    return good


def each(pool: ThreadPoolExecutor, what: str, ranks: list[Rank], call: Any) -> bool:
    begin = time.monotonic()
    futures = [pool.submit(call, rank) for rank in ranks]
    return told(what, [one.exception() or one.result() for one in futures], begin)


def steps_of(protocol: str, most: int) -> list[tuple[str, Any]]:
    """Short messages first, and what the protocol alone can get wrong behind them."""
    if protocol == "simple":
        return [
            ("direct", lambda one: one.reduce("direct", min(most, 1 << 20))),
            ("tree", lambda one: one.reduce("tree", min(most, 300_000))),
        ]
    steps: list[tuple[str, Any]] = [
        ("one_shot", lambda one: one.reduce("one_shot", 1000)),
        ("ring", lambda one: one.reduce("ring", min(most, 10_001))),
    ]
    if protocol == "pattern":
        steps.append(("data like nothing", lambda one: one.reduce_nothing(min(most, 1000))))
    return steps


def check(size: int, protocol: str, steps: list[tuple[str, Any]]) -> bool:
    """The steps on so many ranks; ends at the first that fails."""
    os.environ["PYCOLL_DEVICE_PROTOCOL"] = protocol
    with ThreadPoolExecutor(size) as pool:
        comms = pycoll.local_world(size, timeout_s=TIMEOUT_S)
        ranks = [Rank(comm) for comm in comms]
        name = f"{size} ranks" if protocol == "auto" else f"{size} ranks, {protocol}"
        good = all(each(pool, f"{name}, {what}", ranks, call) for what, call in steps)
        for comm in comms:
            comm.close()
        return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count-max", type=int, default=1 << 20, help="elements of an array")
    parser.add_argument("--protocol", action="append", help="pattern, ll and simple if not given")
    words = parser.parse_args()
    chosen = [
        ("8 B", lambda one: one.reduce(None, 2)),
        ("graph", Rank.replay),
        ("codecs", lambda one: one.reduce_codes(10_001)),
    ]
    outcomes = []
    for size in (1, 2, 4):
        outcomes.append(check(size, "auto", chosen))
        for protocol in words.protocol or ("pattern", "ll", "simple"):
            if size == 1:
                continue
            outcomes.append(check(size, protocol, steps_of(protocol, words.count_max)))
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
