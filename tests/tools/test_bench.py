"""``pycoll bench``: its results are checked, its checks find errors, its words are understood."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from click.testing import CliRunner
from harness import world_in_threads

import pycoll
from pycoll.schedule.collectives import REDUCING, Collective
from pycoll.schedule.topology import Topology, single_host
from pycoll.tools.bench import inputs, measuring, report
from pycoll.tools.bench.case import Case
from pycoll.tools.bench.command import Follower, Wishes
from pycoll.tools.bench.measuring import BenchOptions
from pycoll.tools.bench.metrics import Measurement, bus_factor, percentile
from pycoll.tools.cli import COLLECTIVES, main

REDUCED = [name for name in COLLECTIVES if Collective[name.upper()] in REDUCING]
MOVING = [name for name in COLLECTIVES if name not in REDUCED]


def count_wrong(options: BenchOptions, nbytes: int, size: int = 3) -> list[int]:
    def rank(comm: pycoll.Communicator) -> int:
        return Case(comm, options, nbytes).count_wrong(None)

    return world_in_threads(size).run(rank)


@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_result_is_checked_and_right(collective: str, dtype: str) -> None:
    ops = oracle.ops_for(dtype) if collective in REDUCED else ["sum"]
    if collective in ("scan", "exscan"):
        ops.remove("avg")
    for op in ops:
        for in_place in (True, False):
            options = BenchOptions(collective, dtype=dtype, op=op, root=1, in_place=in_place)
            assert count_wrong(options, 1000) == [0, 0, 0], (op, in_place)
            assert count_wrong(options, 1) == [0, 0, 0], (op, in_place)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_wrong_element_is_found(collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Case.run

    def run_and_spoil(self: Case, algorithm: str | None) -> None:
        run(self, algorithm)
        self._out[len(self._out) // 2] += 1

    monkeypatch.setattr(Case, "run", run_and_spoil)
    found = count_wrong(BenchOptions(collective, op="sum"), 600)
    assert found == ([1, 0, 0] if collective in ("reduce", "gather") else [1, 1, 1])


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_an_operation_that_does_nothing_is_found(
    collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: pycoll.Communicator) -> int:
        case = Case(comm, BenchOptions(collective, root=1), 6000)
        right = case.count_wrong(None)
        assert right == 0
        case._method = lambda *args, **words: None
        return case.count_wrong(None)

    found = world_in_threads(3).run(rank)
    idle = {"broadcast": 1, "scan": 0, "exscan": 0}.get(collective)  # has its result beforehand
    for number, wrong in enumerate(found):
        has_result = collective not in ("reduce", "gather") or number == 1
        assert (wrong > 100) == (has_result and number != idle), (number, wrong)


# Samples


def test_who_is_done_waits_until_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(comm: pycoll.Communicator) -> tuple[float, float]:
        case = Case(comm, BenchOptions("all_reduce"), 64)
        pause = 0.5 if comm.rank == 0 else 0.0
        monkeypatch.setattr(case, "run", lambda algorithm: time.sleep(pause))
        begin = time.perf_counter()
        return case.time(None, 1), time.perf_counter() - begin

    (slow, _), (quick, until_all_were_done) = world_in_threads(2).run(rank)
    assert quick < 0.4 < slow <= until_all_were_done


class Warming:
    """An operation that is slow so many times, then quick."""

    def __init__(self, slow: int, slow_s: float, quick_s: float) -> None:
        self._left, self._slow_s, self._quick_s = slow, slow_s, quick_s
        self.batches: list[int] = []

    def fill(self) -> None:
        pass

    def time(self, algorithm: str | None, batch: int) -> float:
        slow = min(self._left, batch)
        self._left -= slow
        self.batches.append(batch)
        return (slow * self._slow_s + (batch - slow) * self._quick_s) / batch


@pytest.mark.parametrize("quick_s", [1e-7, 1e-5, 0.1])
def test_what_comes_first_does_not_say_how_long_samples_are(quick_s: float) -> None:
    def rank(comm: pycoll.Communicator) -> float:
        # Plans are made, pages and caches filled.
        case: Any = Warming(2, 1e-3 + 10 * quick_s, quick_s)
        return measuring._single_s(comm, case, None)

    assert world_in_threads(1).run(rank) == [pytest.approx(quick_s)]


def test_the_operation_behind_a_fill_does_not_count() -> None:
    def rank(comm: pycoll.Communicator) -> list[int]:
        case: Any = Warming(0, 0.0, 1e-5)
        options = BenchOptions(samples=3, budget_s=60.0)
        times, batches = measuring._in_rotation(comm, case, [None], options)
        assert times == [[1e-5] * 3] and batches == [50]
        return case.batches[-6:]

    assert world_in_threads(1).run(rank) == [[1, 50] * 3]


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_inputs_differ_per_rank_and_element(dtype: str) -> None:
    for op in oracle.ops_for(dtype):
        rows = [inputs.contribution(dtype, op, rank, 4, 500) for rank in range(4)]
        for rank, row in enumerate(rows):
            assert all(np.any(row != other) for other in rows[rank + 1 :]), op
            assert np.any(row[1:] != row[:-1]), op


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("reduce_scatter", 4) == bus_factor("all_to_all", 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("reduce", 9) == 1
    assert bus_factor("all_reduce", 1) == 1
    assert measurement(median_s=1e-3, bytes=4_000_000).algbw == pytest.approx(4)
    assert measurement(median_s=1e-3, bytes=4_000_000, ranks=4).busbw == pytest.approx(6)
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0


def measurement(**words: Any) -> Measurement:
    line: dict[str, Any] = {
        **{"collective": "all_reduce", "algorithm": "ring", "transport": "shm", "ranks": 2},
        **{"bytes": 8, "count": 2, "dtype": "float32", "op": "sum", "root": 0},
        **{"median_s": 1e-6, "p99_s": 2e-6, "wrong": 0, "iterations": 30},
    }
    return Measurement(**{**line, **words})


def test_tables_fit_100_columns() -> None:
    names = (n for c in COLLECTIVES for n in BenchOptions(c, algorithms=["all"]).names(one_host(8)))
    longest = max(names, key=len)
    huge = {"bytes": 1 << 30, "count": 1 << 30, "median_s": 12.0, "p99_s": 12.5, "wrong": 1 << 28}
    for dtype in oracle.DTYPES:
        line = measurement(dtype=dtype, algorithm=longest, **huge)
        rows = [report.row(line, True), *report.header(line, BenchOptions(), True)]
        assert all(len(row) <= 100 for row in rows), rows
        assert len(report.row(line, True).split()) == 11


def one_host(size: int) -> Topology:
    return single_host(size)


def test_all_algorithms_are_those_that_run() -> None:
    options = BenchOptions("all_reduce", algorithms=["all"])
    assert "hierarchical" not in options.names(one_host(4))
    assert "hierarchical" in options.names(Topology.even(4, 2))
    assert {"ring", "tree", "one_shot"} <= set(options.names(one_host(4)))


def test_wrong_results_are_told_by_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    follower = Follower(BenchOptions(), [], 2)
    follower.take(measurement())
    assert follower.finish(Wishes(json_path=tmp_path / "right.json")) == 0
    follower.take(measurement(wrong=3))
    assert follower.finish(Wishes()) == 1
    assert "3 FAILED" in capsys.readouterr().out
    assert json.loads((tmp_path / "right.json").read_text())["results"][0]["wrong"] == 0


def command(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    line = [*launcher, sys.executable, "-m", "pycoll", *words]
    env = {name: v for name, v in os.environ.items() if not name.startswith("PYCOLL_")}
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=env, check=False)


SHORT = ("-b", "8", "-e", "8K", "-f", "32", "--samples", "5")


@pytest.mark.parametrize(
    "words",
    [
        ("all_reduce", "-n", "3", "--algorithm", "all"),
        ("all_gather", "-n", "2", "--dtype", "bfloat16"),
        ("reduce", "-n", "2", "--root", "1", "--op", "max", "--out-of-place"),
        ("all_to_all", "-n", "2", "--algorithm", "bruck", "--algorithm", "direct"),
        ("scan", "-n", "2", "--transport", "tcp"),
    ],
)
def test_a_range_of_sizes_from_the_command_line(words: tuple[str, ...], tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    done = command("bench", *words, *SHORT, "--json", str(figures), "--plot", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(figures.read_text())["results"]
    rows = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(rows) == len(results)
    assert all(len(row) <= 100 for row in done.stdout.splitlines()[1:])
    assert {one["wrong"] for one in results} == {0}
    assert len({one["bytes"] for one in results}) == 3
    assert all(one["p99_s"] >= one["median_s"] > 0 for one in results)
    asked = [name for flag, name in itertools.pairwise(words) if flag == "--algorithm"]
    used = {one["algorithm"] for one in results}
    if asked == ["all"]:
        assert used == set(BenchOptions("all_reduce", algorithms=["all"]).names(one_host(3)))
    elif asked:
        assert used == set(asked)
    assert {one["transport"] for one in results} == {"tcp" if "tcp" in words else "shm"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "0 OK" in done.stdout


@pytest.mark.parametrize("launcher", ["pycoll run", "mpiexec.hydra"])
def test_inside_a_job_its_ranks_are_measured(launcher: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    if launcher == "pycoll run":
        start = (sys.executable, "-m", "pycoll", "run", "-n", "2", "--")
    else:
        start = (str(Path(sys.executable).parent / launcher), "-n", "2")
        assert Path(start[0]).exists(), "pip install -r tests/requirements.txt brings mpich"
    words = ("bench", "broadcast", *SHORT, "--algorithm", "all", "--transport", "tcp")
    done = command(*words, "--json", str(figures), launcher=start)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("0 OK") == 1, "rank 0 alone reports"
    results = json.loads(figures.read_text())["results"]
    assert {(one["ranks"], one["transport"], one["wrong"]) for one in results} == {(2, "tcp", 0)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("all_reduse",), "is not one of 'all_reduce'"),
        (("all_reduce", "-b", "1M", "-e", "1K"), "first size, 1048576, is above the last, 1024"),
        (("all_reduce", "-b", "many"), "'many' is not a number of bytes"),
        (("all_reduce", "--dtype", "float31"), "dtype is 'float31'; there are bool, int8"),
        (("all_reduce", "--op", "mean"), "op is 'mean' (pycoll calls it 'avg'); there are sum"),
        (("all_reduce", "--op", "bxor"), "op 'bxor' is not defined for float32"),
        (("scan", "--op", "avg"), "op 'avg' is not defined for scan"),
        (("broadcast", "--root", "2"), "root is 2: expected a rank below 2"),
        (("all_reduce", "--algorithm", "rink"), "did you mean 'ring'"),
        (("all_reduce", "--transport", "ucx"), "'ucx' is no transport"),
        (("all_reduce", "--json", "/nowhere/f.json"), "--json: '/nowhere/f.json' is no file"),
        (("all_reduce", "--plot", "out.bmp"), "must end in one of .png, .pdf, .svg"),
        (("all_reduce", "--ranks", "0"), "0 is not in the range"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(main, ["bench", *words])
    assert done.exit_code != 0
    assert said in " ".join(done.output.split())
    assert "Traceback" not in done.output
