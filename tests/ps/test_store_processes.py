"""Stores in processes of their own: servers and workers that are killed or stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, free_port
from store_rank import share_of

SCRIPT = Path(__file__).resolve().with_name("store_rank").with_suffix(".py")
JOB_S = 110.0
#: Within this time a dead server's shard is served again, also on a machine whose cores other tests
#: keep busy. One test and bench/ps.py compare with the promise of docs/failures.md, ``PROMISED_S``.
FAILOVER_S = 10.0
PROMISED_S = 2.0
#: How often a process waits for a core, at most, between the end of a server and the answer of the
#: next one: the others notice it, agree on a view by two messages each way, tell it to the workers,
#: and these send several parts again, which pass the chain.
HANDOVERS = 20


class WakeDelay:
    """Measures how late this machine wakes a thread that sleeps for 10 ms.

    ``most_s``: the largest delay within the ``with`` block, in seconds.
    """

    SLEEP_S = 0.01

    def __init__(self) -> None:
        self.most_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def _measure(self) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            time.sleep(self.SLEEP_S)
            self.most_s = max(self.most_s, time.monotonic() - begun - self.SLEEP_S)

    def __enter__(self) -> WakeDelay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class Job:
    """Ranks as processes. ``lines``: by rank what they have printed."""

    def __init__(
        self, size: int, servers: list[int], words: tuple[str, ...], limit: int, silence: int
    ) -> None:
        address = f"127.0.0.1:{free_port()}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYCOLL_")}
        environment = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment["PYCOLL_TIMEOUT_S"] = str(limit)
        environment["PYCOLL_SERVER_SILENCE_S"] = str(silence)
        self.lines: list[list[str]] = [[] for _ in range(size)]
        self.ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, str(SCRIPT), str(rank), str(size), address),
                    *(",".join(map(str, servers)), *words),
                ],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        self.readers = [
            threading.Thread(target=self.read, args=(rank,), daemon=True) for rank in range(size)
        ]
        for reader in self.readers:
            reader.start()

    def read(self, rank: int) -> None:
        stream = self.ranks[rank].stdout
        assert stream is not None
        for line in stream:
            self.lines[rank].append(line.strip())

    def wait_ready(self, ranks: list[int]) -> None:
        until = time.monotonic() + JOB_S
        while not all("ready" in self.lines[rank] for rank in ranks):
            assert time.monotonic() < until, self.lines
            time.sleep(0.02)

    def results(self, ranks: list[int]) -> list[dict[str, Any]]:
        for rank in ranks:
            self.ranks[rank].wait(JOB_S)
            self.readers[rank].join()
        return [json.loads(self.lines[rank][-1]) for rank in ranks]

    def steps(self, rank: int) -> int:
        return self.lines[rank].count("step")

    def wait_for_steps(self, rank: int, count: int) -> None:
        until = time.monotonic() + JOB_S
        while self.steps(rank) < count:
            assert time.monotonic() < until, (rank, count, self.steps(rank), self.lines[rank][-1:])
            time.sleep(0.02)

    @contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        """Stop a process, and let it go on at the end of the block."""
        os.kill(self.ranks[rank].pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.ranks[rank].pid, signal.SIGCONT)


@contextmanager
def job(
    size: int, servers: list[int], *words: str, limit: int = 30, silence: int = 30
) -> Iterator[Job]:
    made = Job(size, servers, words, limit, silence)
    try:
        yield made
    finally:
        for rank in made.ranks:
            rank.kill()
            rank.wait()


def check_counts(results: list[dict[str, Any]]) -> None:
    for one in results:
        assert "error" not in one, one
        assert one["held"] == [one["acknowledged"]] * 2, one
        assert one["acknowledged"] > 3, one


@pytest.mark.parametrize(
    ("transport", "killed", "replicas"),
    [("shm", 3, 1), ("tcp", 2, 1), ("tcp", 2, 2), ("tcp", 3, 2)],
)
def test_a_killed_server_is_replaced_and_no_push_is_lost(
    transport: str, killed: int, replicas: int
) -> None:
    """Within the promised time, and what the machine itself takes to wake processes meanwhile.

    With two replicas each server is the first, the middle and the last one of a chain.
    """
    with job(5, [2, 3, 4], str(replicas), "asp", "2.0", transport) as ranks:
        ranks.wait_ready([0, 1])
        with WakeDelay() as delay:
            time.sleep(0.5)
            ranks.ranks[killed].kill()
            results = ranks.results([0, 1])
        check_counts(results)
        assert all(one["view"] >= 2 and one["transports"] == [transport] for one in results)
        most_s = PROMISED_S + HANDOVERS * delay.most_s
        assert all(one["longest"] < most_s for one in results), (most_s, results)
        left = [rank for rank in (2, 3, 4) if rank != killed]
        chains = [sorted(chain) for one in results for chain in one["chains"]]
        assert all(killed not in one and (replicas == 1 or one == left) for one in chains), chains
        assert all(one.get("served") for one in ranks.results(left))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_first_worker_and_the_view_manager_are_killed_at_once(transport: str) -> None:
    # Server 3 is half of the servers without the first one: it goes on as that one has ended.
    with job(4, [2, 3], "1", "asp", "1.5", transport) as ranks:
        ranks.wait_ready([0, 1])
        time.sleep(0.3)
        ranks.ranks[0].kill()
        ranks.ranks[2].kill()
        results = ranks.results([1])
        check_counts(results)
        assert results[0]["longest"] < FAILOVER_S and results[0]["gone"] == [0], results
        assert all(one.get("served") for one in ranks.results([3]))


@pytest.mark.parametrize(("keys", "transport"), [(0, "shm"), (10, "tcp")])
def test_without_replicas_a_lost_server_is_named_with_its_keys_and_tables(
    keys: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_KEYS", str(keys))
    with job(3, [1, 2], "0", "asp", "30", transport) as ranks:
        ranks.wait_ready([0])
        ranks.ranks[2].kill()
        (result,) = ranks.results([0])
        assert result["error"] == "PeerLostError" and result["at"] == 2
        held = "keys 'count', 'done'"
        if keys:
            # The other ones are small, so the first worker puts them on the emptier server.
            held += ", 'key 0', 'key 1', 'key 2', 'key 3', 'key 4', 'key 5' and 4 more"
            held += " and rows of table 'rows'"
        way = "no server that is left holds them: restore() a checkpoint in a new store"
        assert result["text"].endswith(
            f"server rank 2 is lost, which held parts of {held}; {way}"
        ), result


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("consistency", ["SSP(2)", "Backup(0.6)"])
def test_a_killed_worker_leaves_the_minimum_and_the_others_go_on(
    consistency: str, transport: str
) -> None:
    with job(4, [3], "0", consistency, "1.5", transport) as ranks:
        ranks.wait_ready([0, 1, 2])
        time.sleep(0.3)
        ranks.ranks[1].kill()
        for one in ranks.results([0, 2]):
            assert "error" not in one and 1 in one["gone"], one
            # Each of the two parts of a push may be dropped.
            assert sum(one["held"]) == 2 * one["acknowledged"] - one["dropped"], one
            assert one["acknowledged"] > 3 and (consistency != "SSP(2)" or one["dropped"] == 0), one
        assert all(one.get("served") for one in ranks.results([3]))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_bulk_synchronous_workers_learn_which_one_died(transport: str) -> None:
    with job(4, [3], "0", "bsp", "30", transport) as ranks:
        ranks.wait_ready([0, 1, 2])
        ranks.ranks[2].kill()
        for result in ranks.results([0, 1]):
            assert result["error"] == "PeerLostError" and result["at"] == 2
            assert "worker rank 2 is gone, and bsp needs all" in result["text"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("consistency", ["asp", "Backup(0.6)"])
def test_the_others_go_on_while_a_worker_is_stopped(
    consistency: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards the servers hold all that it pushed, but for what Backup has told as dropped."""
    monkeypatch.setenv("STORE_TELLS", "1")
    with job(4, [3], "0", consistency, "4.0", transport) as ranks:
        for rank in (0, 1, 2):
            ranks.wait_for_steps(rank, 1)
        with ranks.stopped(1):
            time.sleep(0.2)
            before = [ranks.steps(rank) for rank in (0, 1, 2)]
            for rank in (0, 2):
                ranks.wait_for_steps(rank, before[rank] + 5)
            assert ranks.steps(1) == before[1]
        ranks.wait_for_steps(1, before[1] + 1)
        for one in ranks.results([0, 1, 2]):
            assert "error" not in one, one
            # Each of the two parts of a push may be dropped.
            assert sum(one["held"]) == 2 * one["acknowledged"] - one["dropped"], one
            assert consistency != "asp" or one["dropped"] == 0, one


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_workers_wait_for_a_stopped_one_within_the_staleness(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_TELLS", "1")
    with job(4, [3], "0", "SSP(2)", "3.0", transport) as ranks:
        for rank in (0, 1, 2):
            ranks.wait_for_steps(rank, 2)
        with ranks.stopped(1):
            time.sleep(1.5)
            # The clock that it was telling may have arrived.
            most = ranks.steps(1) + 1 + 2
            assert all(ranks.steps(rank) <= most for rank in (0, 2)), ranks.lines
        for rank in (0, 1, 2):
            ranks.wait_for_steps(rank, most + 1)
        check_counts(ranks.results([0, 1, 2]))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_worker_that_stays_stopped_is_named_with_its_clock(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_TELLS", "1")
    with job(4, [3], "0", "SSP(2)", "60", transport, limit=4) as ranks:
        for rank in (0, 1, 2):
            ranks.wait_for_steps(rank, 1)
        with ranks.stopped(1):
            results = ranks.results([0, 2])
            steps = ranks.steps(1)
        for one in results:
            assert one["error"] == "TimeoutError" and one["at"] == 1, one
            found = re.search(r"rank 1 is the slowest worker, at clock (\d+)", one["text"])
            assert found is not None and int(found[1]) in (steps, steps + 1), one


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_elastic_rounds_end_without_a_killed_worker(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round has the means and sums of all workers, or of those that live, and no others."""
    monkeypatch.setenv("STORE_ROUNDS", "60")
    monkeypatch.setenv("STORE_PAUSE_S", "0.01")
    with job(5, [3, 4], "1", "BSP(elastic=True)", "0", transport) as ranks:
        ranks.wait_ready([0, 1, 2])
        time.sleep(0.3)
        ranks.ranks[1].kill()
        results = ranks.results([0, 2])
        assert all(one.get("served") for one in ranks.results([3, 4]))
    for one in results:
        assert "error" not in one and one["gone"] == [1] and one["longest"] < FAILOVER_S, one
        assert one["means"] == results[0]["means"] and one["sums"] == results[0]["sums"]
    everybody, left = (sum(map(share_of, who)) / len(who) for who in ((0, 1, 2), (0, 2)))
    for part in zip(*results[0]["means"], strict=True):
        count = part.count(everybody)
        assert list(part) == [everybody] * count + [left] * (60 - count)
        assert count < 60, "the worker died behind the last round"
    with_it = [sums[1] for sums in results[0]["sums"]]
    assert with_it == [min(step + 1, with_it[-1]) for step in range(60)]
    assert all(sums[:3:2] == [step + 1] * 2 for step, sums in enumerate(results[0]["sums"]))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stopped_server_ends_calls_with_a_timeout(transport: str) -> None:
    with job(2, [1], "0", "asp", "60", transport, limit=4) as ranks:
        ranks.wait_ready([0])
        os.kill(ranks.ranks[1].pid, signal.SIGSTOP)
        (result,) = ranks.results([0])
        assert result["error"] == "TimeoutError" and result["at"] == 1
        assert "server rank 1 has not answered" in result["text"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_broken_connection_of_two_servers_costs_one_of_them(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_CUT", "3:4")
    with job(5, [2, 3, 4], "1", "asp", "2.0", transport) as ranks:
        ranks.wait_ready([0, 1])
        time.sleep(0.3)
        os.kill(ranks.ranks[3].pid, signal.SIGUSR1)
        results = ranks.results([0, 1])
        check_counts(results)
        assert all(one["view"] >= 2 and one["longest"] < FAILOVER_S for one in results), results
        ends = ranks.results([2, 3, 4])
        assert ends[0].get("served"), ends
        out = [one for one in ends[1:] if "error" in one]
        assert len(out) == 1 and out[0]["error"] == "PeerLostError", ends
        rank = out[0]["rank"]
        assert f"server rank {rank} takes part in store " in out[0]["text"]
        assert "the other servers go on without it" in out[0]["text"]
        assert all(rank not in chain for one in results for chain in one["chains"]), results


@pytest.mark.parametrize(("transport", "stopped"), [("shm", 2), ("tcp", 3)])
def test_a_server_that_is_stopped_for_long_is_left_out(transport: str, stopped: int) -> None:
    """Server 2 is the manager. The process that goes on ends with an error that says so."""
    with job(5, [2, 3, 4], "1", "asp", "9.0", transport, silence=3) as ranks:
        ranks.wait_ready([0, 1])
        time.sleep(0.3)
        os.kill(ranks.ranks[stopped].pid, signal.SIGSTOP)
        time.sleep(7.0)
        os.kill(ranks.ranks[stopped].pid, signal.SIGCONT)
        results = ranks.results([0, 1])
        check_counts(results)
        assert all(one["longest"] < FAILOVER_S for one in results), results
        assert all(stopped not in chain for one in results for chain in one["chains"]), results
        (end,) = ranks.results([stopped])
        assert end["error"] == "PeerLostError" and "go on without it" in end["text"]
        left = [rank for rank in (2, 3, 4) if rank != stopped]
        assert all(one.get("served") for one in ranks.results(left))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_server_that_is_stopped_for_a_moment_serves_on(transport: str) -> None:
    with job(5, [2, 3, 4], "1", "asp", "7.0", transport, silence=8) as ranks:
        ranks.wait_ready([0, 1])
        os.kill(ranks.ranks[3].pid, signal.SIGSTOP)
        time.sleep(5.0)
        os.kill(ranks.ranks[3].pid, signal.SIGCONT)
        results = ranks.results([0, 1])
        check_counts(results)
        assert all(one["view"] == 1 for one in results), results
        assert all(one.get("served") for one in ranks.results([2, 3, 4]))


def test_the_command_line_shows_running_stores() -> None:
    with job(4, [2, 3], "1", "SSP(8)", "6.0", "shm") as ranks:
        ranks.wait_ready([0, 1])
        done = subprocess.run(
            [sys.executable, "-m", "pycoll", "ps", "--over", "0.2"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=JOB_S,
            check=True,
        )
        lines = done.stdout.splitlines()
        for rank in (2, 3):
            assert f"  server rank {rank} (pid {ranks.ranks[rank].pid})" in lines
        text = ", SSP(8), view 1, view manager rank 2"
        assert any(line.endswith(text) for line in lines), lines
        text = "shard 0: chain 2 -> 3; 4194304 bytes in parts: 1; "
        assert any(text in line for line in lines), lines
        assert any("clocks 0: " in line and "pulls/s; " in line for line in lines), lines
        text = "busiest, by pushes and pulls: 'count' part 0: "
        assert any(text in line for line in lines), lines
        check_counts(ranks.results([0, 1]))
