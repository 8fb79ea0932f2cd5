"""New servers and workers of running stores: over real connections, and the text of each error."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_store_processes
from harness import ROOT, TIMEOUT_S, succeeded
from simulated_servers import World
from stores import Comm, run_store

from pycoll import InvalidArgumentError, PeerLostError, PycollError, TimeoutError, ps
from pycoll.bootstrap.rendezvous.meeting import SECRET_BYTES, Meeting
from pycoll.config import Config
from pycoll.ps.consistency import ASP
from pycoll.ps.membership import join_store
from pycoll.ps.membership.newcomers import make_ticket, read_ticket
from pycoll.ps.messages import Kind, Message
from pycoll.ps.server_threads import ServerThreads
from pycoll.ps.status import running_servers


def run(work: Callable[[ps.Store, str], Any], workers: int = 2, **terms: Any) -> Any:
    """Run a function with a ticket on the first worker of a store that the others keep calling."""
    over = threading.Event()

    def rank(store: ps.Store, comm: Comm) -> Any:
        store.init("x", np.zeros(4))
        if comm.rank > 0:
            # A worker connects with a server in its next call.
            while not over.wait(0.01):
                store.stats()
            return None
        try:
            return work(store, store.ticket())
        finally:
            over.set()

    return succeeded(run_store(rank, workers, **terms))[0]


def wait_for(store: ps.Store, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    until = time.monotonic() + TIMEOUT_S
    while not is_so(facts := store.stats()):
        assert time.monotonic() < until, facts
        time.sleep(0.01)
    return facts


@contextmanager
def serving(ticket: str) -> Iterator[list[int]]:
    """A new server in a thread; it gives the list of its results."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(ps.serve(ticket=ticket)))
    thread.start()
    yield results


def test_the_key_of_a_ticket_does_not_travel() -> None:
    def work(store: ps.Store, ticket: str) -> None:
        request = store._begin(Kind.TICKET, 0)
        store._wait([request], "ticket")
        assert request.answer is not None
        place = Meeting.from_bytes(bytes(request.answer.payload))
        meeting = Meeting.from_bytes(read_ticket(ticket)[1].encode())
        assert place.secret == b"" and len(meeting.secret) == SECRET_BYTES
        assert meeting._replace(secret=b"") == place

    run(work)


def test_a_server_closes_the_connection_of_a_worker_that_has_left() -> None:
    closed: list[int] = []
    connector = SimpleNamespace(config=Config())
    context: Any = SimpleNamespace(timeout_s=TIMEOUT_S, name="s", connector=connector)
    machine = World(1, ASP, workers=2, servers=1).servers[2]
    links: dict[int, Any] = {
        one: SimpleNamespace(peer=one, close=functools.partial(closed.append, one))
        for one in (0, 1)
    }
    server = ServerThreads(machine, links, context)
    machine.handle(1, Message(Kind.BYE))
    server._lose(links[1], True)
    assert closed == [1] and set(links) == {0}


def test_a_new_server_takes_shards_and_serves_until_the_store_ends() -> None:
    kept: list[list[int]] = []

    def work(store: ps.Store, ticket: str) -> None:
        store.push("x", np.ones(4))
        with serving(ticket) as results:
            kept.append(results)

            def holds(facts: dict[str, Any]) -> bool:
                chains = [one["chain"] for one in facts["shards"]]
                return any(5 in chain for chain in chains) and all(len(one) == 2 for one in chains)

            facts = wait_for(store, holds)
            assert set(facts["servers"]) == {2, 3, 4, 5}
            store.push("x", np.ones(4))
            assert store.pull("x").tolist() == [2.0] * 4
            store.drain(2)
            store.push("x", np.ones(4))
            assert store.pull("x").tolist() == [3.0] * 4

    run(work, servers=3, replicas=1, consistency="asp")
    until = time.monotonic() + TIMEOUT_S
    while not kept[0] and time.monotonic() < until:
        time.sleep(0.01)
    assert kept == [[0]]


def test_a_new_server_takes_half_of_many_shards() -> None:
    def work(store: ps.Store, ticket: str) -> None:
        store.init("rows", np.arange(8.0))
        with serving(ticket):

            def has_moved(facts: dict[str, Any]) -> bool:
                chains = [one["chain"] for one in facts["shards"]]
                return sorted(chains) == [[1]] * 3 + [[2]] * 3

            wait_for(store, has_moved)
            store.push("rows", np.ones(8))
            assert store.pull("rows").tolist() == list(np.arange(8.0) + 1)
            # Later keys go to the server with the fewest bytes.
            for key in range(4):
                store.init(f"k{key}", np.zeros(1 << key))
            chains = [one["chain"][0] for one in store.stats()["shards"]]
            assert len({chains[shard] for (shard,) in store.stats()["keys"].values()}) == 2

    run(work, workers=1, servers=1, consistency="asp", shards=6)


@pytest.mark.parametrize("consistency", ["asp", ps.SSP(2), ps.Backup(0.5), "bsp"])
def test_a_new_worker_is_counted_from_an_agreed_clock(consistency: Any) -> None:
    def work(store: ps.Store, ticket: str) -> None:
        for _ in range(3):
            store.push("x", np.ones(4))
            store.clock()
        with ps.connect(ticket=ticket, consistency=consistency) as new:
            assert (new.rank, new.stats()["clock"]) == (3, 3)
            new.init("x", np.zeros(4))
            new.push("x", np.full(4, 10.0))
            works = [one.clock(async_op=True) for one in (new, store)]
            for one in works:
                one.wait()
            assert new.pull("x").tolist() == [13.0] * 4
            shards = store.stats()["shards"]
            assert [one["clocks"] for one in shards] == [{"0": 4, "3": 4}] * 2

    run(work, workers=1, consistency=consistency)


def test_a_new_worker_makes_the_mean_of_one_more() -> None:
    def work(store: ps.Store, ticket: str) -> None:
        store.init("mean", np.zeros(2), update="mean")
        store.push("mean", np.ones(2))
        store.clock()
        with ps.connect(ticket=ticket) as new:
            new.init("mean", np.zeros(2), update="mean")
            store.push("mean", np.full(2, 1.0))
            new.push("mean", np.full(2, 4.0))
            for one in [one.clock(async_op=True) for one in (new, store)]:
                one.wait()
            assert store.pull("mean").tolist() == new.pull("mean").tolist() == [2.5, 2.5]

    run(work, workers=1, consistency="bsp")


def test_a_worker_comes_back_with_its_rank_and_twice_is_refused() -> None:
    def work(store: ps.Store, ticket: str) -> None:
        new = ps.connect(ticket=ticket)
        with pytest.raises(InvalidArgumentError, match=r"worker is 3, which takes part already"):
            ps.connect(ticket=ticket, worker=3)
        new.close()
        wait_for(store, lambda facts: all(one["gone"] == [3] for one in facts["shards"]))
        with ps.connect(ticket=ticket, worker=3) as back:
            assert back.rank == 3
            back.init("x", np.zeros(4))
            back.push("x", np.ones(4))
            assert back.pull("x").tolist() == [1.0] * 4
            assert all(one["gone"] == [] for one in store.stats()["shards"])
            with pytest.raises(InvalidArgumentError, match=r"or by a worker that joined it"):
                back.restore("nowhere")

    run(work, workers=1, consistency="asp")


def test_bulk_synchronous_stores_refuse_what_would_break_their_rounds() -> None:
    def work(store: ps.Store, ticket: str) -> None:
        store.push_pull("x", np.ones(4))
        with pytest.raises(InvalidArgumentError, match=r"needs rounds that clock\(\) ends for all"):
            ps.connect(ticket=ticket)
        store.clock()
        # One that has only joined may leave again.
        ps.connect(ticket=ticket).close()
        wait_for(store, lambda facts: all(4 in one["gone"] for one in facts["shards"]))
        with ps.connect(ticket=ticket) as new:
            assert new.rank == 5
            new.init("x", np.zeros(4))
            new.push("x", np.ones(4))
        with pytest.raises(PeerLostError, match=r"worker rank 5 is gone, and bsp needs all"):
            store.clock()
        with pytest.raises(InvalidArgumentError, match=r"rank 5 is gone, and bsp needs all: open"):
            ps.connect(ticket=ticket)

    run(work, workers=1, consistency="bsp")


def test_workers_come_back_to_an_elastic_store() -> None:
    """What a worker pushed in a round that has not ended goes with it."""
    elastic = ps.BSP(elastic=True)

    def work(store: ps.Store, ticket: str) -> None:
        first = ps.connect(ticket=ticket, consistency=elastic)
        rank = first.rank
        first.init("x", np.zeros(4))
        first.push("x", np.full(4, 100.0))
        first.close()
        wait_for(store, lambda facts: all(rank in one["gone"] for one in facts["shards"]))
        store.push("x", np.ones(4))
        store.clock()
        assert store.pull("x").tolist() == [1.0] * 4
        assert sum(one["dropped"] for one in store.stats()["shards"]) == 1
        with ps.connect(ticket=ticket, worker=rank) as back:
            back.init("x", np.zeros(4))
            assert back.stats()["clock"] == 1
            back.push("x", np.full(4, 10.0))
            ended = store.clock(async_op=True)
            back.clock()
            ended.wait()
            assert store.pull("x").tolist() == [11.0] * 4
        store.push_pull("x", np.ones(4))
        text = r"the store is BSP\(elastic=True\), and push_pull\(\) ended rounds of some keys"
        with pytest.raises(InvalidArgumentError, match=text):
            ps.connect(ticket=ticket, worker=rank)

    run(work, workers=1, consistency=elastic)


def test_what_the_store_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(store: ps.Store, ticket: str) -> None:
        for words, text in (
            ({"consistency": "bsp"}, r"the store has replicas=1 and consistency asp, this process"),
            ({"replicas": 0}, r"expects replicas=0: leave them out"),
            ({"worker": 7}, r"worker is 7: expected a rank that has worked in this store, one of "),
            ({"worker": 2}, r"worker is 2: expected a rank that has worked in this store, one of "),
        ):
            with pytest.raises(InvalidArgumentError, match=text):
                ps.connect(ticket=ticket, **words)
        monkeypatch.setattr(join_store, "VERSION", 1)
        with pytest.raises(InvalidArgumentError, match=r"the store speaks version 2 .*version 1"):
            ps.connect(ticket=ticket)

    run(work, replicas=1, consistency="asp")


def test_a_store_that_has_ended_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = run(lambda store, ticket: ticket, workers=1, consistency="asp")
    monkeypatch.setenv("PYCOLL_INIT_TIMEOUT_S", "0.5")
    with pytest.raises(TimeoutError, match=r"no server of store .* answers within 0.5 s: the "):
        ps.connect(ticket=ticket)
    with pytest.raises(TimeoutError, match=r"the store has ended, or the server that gave"):
        ps.serve(ticket=ticket)


@pytest.mark.parametrize("ticket", ["nonsense", "", 5, make_ticket("store", "{}")])
def test_texts_that_are_no_tickets(ticket: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"the ticket .*(cannot be read|names no place)"):
        ps.connect(ticket=ticket)


def test_arguments_that_do_not_fit_a_ticket() -> None:
    ticket = make_ticket("a store", "a place")
    assert read_ticket(ticket) == ("a store", "a place")
    with pytest.raises(InvalidArgumentError, match=r"serve\(\) was given size and a ticket"):
        ps.serve(ticket=ticket, size=3)
    with pytest.raises(InvalidArgumentError, match=r"worker is 1 without a ticket"):
        ps.connect(worker=1)
    for worker in (-1, True, "one", 1 << 40):
        with pytest.raises(InvalidArgumentError, match=r"worker is .*: expected None, or the rank"):
            ps.connect(ticket=ticket, worker=worker)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"replicas is 5: expected 0 to 2"):
        ps.connect(ticket=ticket, replicas=5)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_processes_join_and_come_back(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_PAUSE_S", "0.05")
    with test_store_processes.job(4, [2, 3], "1", "SSP(8)", "12.0", transport) as ranks:
        ranks.wait_ready([0, 1])
        ticket = printed_ticket(ranks.ranks[2].pid)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYCOLL_")}
        environment = {**clean, "PYTHONPATH": str(ROOT), "PYCOLL_TICKET": ticket}
        environment["PYCOLL_TRANSPORTS"] = transport
        script = str(test_store_processes.SCRIPT)
        server = begin(environment, "-m", "pycoll.ps")
        ranks.ranks[1].kill()
        environment["PYCOLL_TICKET"] = ticket_of(ranks)
        back = begin(environment, script, "1", "2.0")
        try:
            told, _ = back.communicate(timeout=test_store_processes.JOB_S)
            found = json.loads(told.splitlines()[-1])
            (first,) = ranks.results([0])
            test_store_processes.check_counts([found, first])
            assert found["rank"] == 1 and 1 not in found["gone"]
            assert any(4 in chain for chain in first["chains"]), first
            assert found["transports"] == first["transports"] == [transport]
            assert server.wait(test_store_processes.JOB_S) == 0
        finally:
            for one in (server, back):
                one.kill()
                one.wait()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_newcomer_hears_at_once_of_a_process_that_has_ended(transport: str) -> None:
    """Worker 1 is stopped, so the new server waits for it, and then killed."""
    with test_store_processes.job(4, [2, 3], "1", "asp", "12.0", transport) as ranks:
        ranks.wait_ready([0, 1])
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYCOLL_")}
        environment = {**clean, "PYTHONPATH": str(ROOT), "PYCOLL_TICKET": ticket_of(ranks)}
        environment["PYCOLL_TRANSPORTS"] = transport
        os.kill(ranks.ranks[1].pid, signal.SIGSTOP)
        pids = [one.pid for one in ranks.ranks]
        line = [sys.executable, "-m", "pycoll.ps"]
        with subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True) as server:
            until = time.monotonic() + test_store_processes.JOB_S
            # The second view lets the new server in, which then waits for worker 1.
            while any(one["view"] < 2 for one in running_servers() if one["pid"] in pids):
                assert server.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            ranks.ranks[1].kill()
            _, told = server.communicate(timeout=test_store_processes.JOB_S)
        assert server.returncode != 0
        assert "rank 1 of the store has ended before it connected with this process" in told
        assert "start it again" in told
        test_store_processes.check_counts(ranks.results([0]))


def begin(environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    line = [sys.executable, *words]
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True)


def printed_ticket(server: int) -> str:
    """The ticket that ``pycoll ps ticket`` prints for the store of the server with this pid."""
    store = next(one["store"] for one in running_servers() if one["pid"] == server)
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "ps", "ticket", store],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=test_store_processes.JOB_S,
        check=True,
    )
    return done.stdout.strip()


def ticket_of(ranks: test_store_processes.Job) -> str:
    until = time.monotonic() + test_store_processes.JOB_S
    while time.monotonic() < until:
        for line in ranks.lines[0]:
            if line.startswith("ticket "):
                return line.split()[1]
        time.sleep(0.02)
    raise PycollError(f"no ticket in {ranks.lines[0]}")
