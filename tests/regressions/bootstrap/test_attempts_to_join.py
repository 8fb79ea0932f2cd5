"""Ranks counted their attempts to join, each its own, so that a rank which stayed away from one, or
was started again next to keys of a dead world, met the others never again."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from joining import SECRET, FolderStore, run_all

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import listen_tcp
from pycoll.bootstrap.rendezvous.exchange import Exchange, MpiExchange
from pycoll.bootstrap.rendezvous.store import join_store
from pycoll.bootstrap.rendezvous.store_server import StoreServer
from pycoll.bootstrap.rendezvous.torch_store import TorchStoreExchange

#: An attempt, by rank and seconds; the place is what it takes from its environment.
Attempt = Callable[[int, float], list[bytes]]


def attempt(make: Callable[[], Exchange], word: bytes, rounds: int = 2) -> list[bytes]:
    exchange = make()
    try:
        for _ in range(rounds):
            found = exchange.all_gather(word)
    except BaseException:
        exchange.abandon()
        raise
    exchange.close()
    return found


@pytest.fixture(params=["torch", "launcher"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A store for 3 ranks that outlives attempts."""
    if request.param == "torch":
        store = FolderStore(str(tmp_path))

        def at_torch(rank: int, seconds: float) -> list[bytes]:
            make = functools.partial(TorchStoreExchange, store, rank, 3, Deadline(seconds))
            return attempt(make, bytes([rank]))

        yield at_torch
        return
    listener = listen_tcp("127.0.0.1")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    key = SECRET.encode()
    server = StoreServer(listener, 3, key, "j", "the launcher")
    server.start()

    def at_launcher(rank: int, seconds: float) -> list[bytes]:
        limit = Deadline(seconds)
        make = functools.partial(join_store, address, key, "j", rank, 3, limit, launcher=True)
        return attempt(make, bytes([rank]))

    yield at_launcher
    server.close()


def at_once(place: Attempt, ranks: Sequence[int], seconds: float = 20.0) -> list[Any]:
    return run_all([functools.partial(place, rank, seconds) for rank in ranks])


EXPECTED = [[b"\0", b"\1", b"\2"]] * 3


@pytest.mark.parametrize("absent", range(3))
def test_a_rank_that_stayed_away_from_one_attempt_meets_the_others(
    place: Attempt, absent: int
) -> None:
    present = [rank for rank in range(3) if rank != absent]
    for error in at_once(place, present, 0.5):
        assert isinstance(error, errors.TimeoutError), error
        assert list(error.ranks) == [absent]
    assert at_once(place, range(3)) == EXPECTED
    assert at_once(place, range(3)) == EXPECTED


def test_a_rank_that_tried_alone_again_and_again_meets_the_others(place: Attempt) -> None:
    for _ in range(3):
        assert isinstance(at_once(place, [1], 0.2)[0], errors.TimeoutError)
    assert at_once(place, range(3)) == EXPECTED


def test_a_rank_that_comes_first_to_the_next_attempt_waits_for_it(place: Attempt) -> None:
    """Also for the rank for whose sake the attempt before failed."""
    at_once(place, [0, 1], 0.3)

    def later(rank: int, after_s: float) -> list[bytes]:
        time.sleep(after_s)
        return place(rank, 20.0)

    jobs = [functools.partial(later, rank, 0.3 * (2 - rank)) for rank in range(3)]
    assert run_all(jobs) == EXPECTED


def test_ranks_that_try_at_other_times_meet_as_soon_as_all_wait(place: Attempt) -> None:
    """Their first attempts are too short to meet any others, and may end those of others."""

    def persistent(rank: int) -> list[bytes]:
        time.sleep(0.4 * rank)
        for seconds in (0.1, 0.2, *[20.0] * 10):
            with contextlib.suppress(errors.PycollError):
                return place(rank, seconds)
        raise AssertionError("the ranks never met")

    assert run_all([functools.partial(persistent, rank) for rank in range(3)]) == EXPECTED


_RANK = """
import sys, time
from joining import FolderStore
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.rendezvous.torch_store import TorchStoreExchange
rank, rounds = int(sys.argv[2]), int(sys.argv[3])
exchange = TorchStoreExchange(FolderStore(sys.argv[1]), rank, 3, Deadline(60))
for _ in range(rounds):
    print("gathered", exchange.all_gather(b"from %d" % rank), flush=True)
print("sits", flush=True)
time.sleep(60)
"""


def start(folder: Path, rank: int, rounds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _RANK, str(folder), str(rank), str(rounds)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])},
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("rounds", [0, 1])
def test_processes_started_again_do_not_meet_a_dead_world(tmp_path: Path, rounds: int) -> None:
    """Ranks killed where they sat, or in the middle of the rounds; then all start again."""
    told = "gathered [b'from 0', b'from 1', b'from 2']"
    dead = [start(tmp_path, rank, rounds) for rank in range(3)]
    alive: list[subprocess.Popen[str]] = []
    try:
        for process in dead:
            if rounds:
                assert line_of(process) == told
            assert line_of(process) == "sits"
        for process in dead:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        alive = [start(tmp_path, rank, 2) for rank in range(3)]
        for process in alive:
            assert [line_of(process) for _ in range(3)] == [told, told, "sits"]
    finally:
        for process in [*dead, *alive]:
            process.kill()
            process.communicate()


def test_a_process_on_another_host_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    """Nobody here can ask whether that one still runs; two that do are told on both sides."""
    store = FolderStore(str(tmp_path))
    first = TorchStoreExchange(store, 1, 2, Deadline(20))
    first._me["process"] = "elsewhere 1 2 3"
    first._sit(first._nonce)
    second = TorchStoreExchange(store, 1, 2, Deadline(20))
    with pytest.raises(errors.InvalidArgumentError, match="two processes claim rank 1"):
        first.all_gather(b"")  # it runs after all
    with pytest.raises(errors.PycollError, match="two processes claim rank 1"):
        second.all_gather(b"")


class _Silent:
    """A communicator of mpi4py whose other rank never comes."""

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def Get_size(self) -> int:  # noqa: N802
        return 2

    def Iallgather(self, *buffers: Any) -> Any:  # noqa: N802
        return self

    def Test(self) -> bool:  # noqa: N802
        return False


def test_an_mpi_communicator_serves_no_attempt_after_one_that_timed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.SimpleNamespace(BYTE=None))
    comm = _Silent()
    with pytest.raises(errors.TimeoutError, match=r"did not call pycoll.init\(comm=...\)"):
        MpiExchange(comm, Deadline(0.01)).all_gather(b"")
    with pytest.raises(errors.InvalidArgumentError, match="a gather under way"):
        MpiExchange(comm, Deadline(0.01))
    MpiExchange(_Silent(), Deadline(0.01))


def test_a_failure_of_one_rank_reaches_those_that_wait_in_the_rounds(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    made = run_all(
        [functools.partial(TorchStoreExchange, store, rank, 2, Deadline(20)) for rank in range(2)]
    )
    assert run_all([functools.partial(one.all_gather, b"x") for one in made]) == [[b"x", b"x"]] * 2
    timer = threading.Timer(0.2, made[1].alarm, ("rank 1 has no memory",))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(errors.TransportError, match="rank 1 has no memory") as caught:
        made[0].all_gather(b"y")
    assert time.monotonic() - begin < 15, "it waited for its deadline"
    assert list(caught.value.ranks) == [1]
    timer.join()
