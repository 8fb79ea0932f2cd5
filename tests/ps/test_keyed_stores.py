"""Stores over real connections: values, consistency, frameworks, and the text of each error."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stores
from click.testing import CliRunner
from docstring_parts import examples_of, run_examples
from foreign_arrays import Bare, Foreign
from harness import TIMEOUT_S, each, succeeded
from stores import Comm, Run

import pycoll
from pycoll import InvalidArgumentError, MismatchError, TimeoutError, ps
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import listen_in_range
from pycoll.bootstrap.rendezvous.meeting import Meeting
from pycoll.comm.start_tuning import tuning_text
from pycoll.config import Config
from pycoll.ps import status
from pycoll.ps.consistency import consistency_from, consistency_of
from pycoll.ps.messages import HEAD_BYTES, PART_BYTES_MAX, Kind, Message, pack_into, unpack
from pycoll.ps.placement import KeyPlacement, PartPlacer, ranges_of
from pycoll.ps.server_links import INLINE_BYTES, Connector, Link, has_ended, meeting_text
from pycoll.ps.status import running_servers
from pycoll.tools.cli import main

BIG = PART_BYTES_MAX // 4 + 999


def run_store(work: Run, workers: int = 3, **terms: Any) -> list[Any]:
    """Run a function on each worker of a new store; return the results and errors."""
    return stores.run_store(work, workers, **terms)


def values(rank: int, dtype: Any, count: int) -> Any:
    draw = np.random.default_rng([rank, count])
    if np.issubdtype(dtype, np.integer):
        return draw.integers(-50, 100, count).astype(dtype)
    return (draw.standard_normal(count) * 10.0 ** draw.integers(-2, 3, count)).astype(dtype)


@pytest.mark.parametrize("hosts", [None, [0, 0, 1, 2, 3]])
@pytest.mark.parametrize("consistency", ["bsp", ps.SSP(0), ps.Backup(1.0)])
def test_rounds_have_the_bits_of_a_deterministic_all_reduce(
    hosts: list[int] | None, consistency: Any
) -> None:
    if hosts is not None and consistency != "bsp":
        return
    plain = pycoll.local_world(3)
    expected = {}
    for dtype in (np.float32, np.int16, ml_dtypes.bfloat16):
        for count in (0, 1, 1000, BIG if dtype == np.float32 else 70_000):
            for op in ("sum", "avg"):
                works = [
                    comm.all_reduce(
                        values(comm.rank, dtype, count), op, deterministic=True, async_op=True
                    )
                    for comm in plain
                ]
                expected[np.dtype(dtype).name, count, op] = works[0].wait()
                for one in works[1:]:
                    one.wait()
    for comm in plain:
        comm.close()

    def work(store: ps.Store, comm: Comm) -> None:
        for (name, count, op), right in expected.items():
            key = f"{name} {count} {op}"
            x = values(comm.rank, right.dtype, count)
            store.init(key, np.zeros_like(x), update="sum" if op == "sum" else "mean")
            assert store.push_pull(key, x).tobytes() == right.tobytes(), key
            store.push(key, x)
            store.clock()
            assert store.pull(key).tobytes() == right.tobytes(), key
            again = x.copy()
            assert store.push_pull(key, again, out=again, async_op=True).wait() is again
            assert again.tobytes() == right.tobytes(), key

    replicas = 1 if consistency == "bsp" else 0
    succeeded(run_store(work, hosts=hosts, consistency=consistency, replicas=replicas))


def test_pushes_add_up_in_any_order() -> None:
    def work(store: ps.Store, comm: Comm) -> Any:
        store.init("a", np.arange(5))
        store.init("b", np.zeros((300, 1000)))
        works = []
        for number in range(40):
            push = np.full((300, 1000), 1.0)
            works.append(store.push("b", push, priority=number % 3, async_op=True))
            works.append(store.push("a", np.full(5, comm.rank), async_op=True))
        pulled = store.pull("b", async_op=True)
        assert [work.wait() for work in works] == [None] * 80
        assert works[0].done()
        # A pull sees what its worker has pushed before.
        assert pulled.wait().min() >= 40
        store.clock()

    def both(store: ps.Store, comm: Comm) -> list[int]:
        work(store, comm)
        store.init("done", np.zeros(1, np.int64))
        store.push("done", np.ones(1, np.int64))
        while store.pull("done")[0] < 3:
            time.sleep(0.01)
        assert (store.pull("b") == 120).all()
        return list(store.pull("a"))

    found = succeeded(run_store(both, consistency="asp"))
    assert found == [[number + 40 * 3 for number in range(5)]] * 3


def test_no_value_of_eight_bytes_is_torn() -> None:
    """Both halves of each element count the same pushes, in each pull while others push."""
    one = np.full(BIG, 1 + (1 << 32))

    def work(store: ps.Store, comm: Comm) -> int:
        store.init("c", np.zeros_like(one))
        pushed = []
        for _ in range(15):
            pushed.append(store.push("c", one, async_op=True))
            found = store.pull("c")
            assert (found >> 32 == found & 0xFFFFFFFF).all()
        for each_push in pushed:
            each_push.wait()
        return int(found.min()) & 0xFFFFFFFF

    own = succeeded(run_store(work, consistency="asp"))
    assert min(own) >= 15, "a pull sees what its worker has pushed"
    assert max(own) > 15, "no worker pulled what others had pushed"


def test_arrays_of_other_frameworks_come_back_as_they_are() -> None:
    torch = pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")

    def work(store: ps.Store, comm: Comm) -> None:
        tensor = torch.ones(3, 4, dtype=torch.bfloat16)
        store.init("t", tensor)
        result = store.push_pull("t", tensor.t().contiguous().t())
        assert isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16
        assert (result == 2).all() and result.shape == (3, 4)
        out = torch.zeros(3, 4, dtype=torch.bfloat16)
        assert store.pull("t", out=out) is out and (out == 2).all()
        store.init("number", 2.5)
        assert store.push_pull("number", 1.5) == 4.0
        store.init("bytes", bytearray(b"\x01\x02"))
        assert store.push_pull("bytes", bytearray(b"\x01\x01")) == bytearray(b"\x02\x03")
        strided = np.ones((6, 6), np.float32)[::2, ::3]
        store.init("strided", strided)
        assert (store.push_pull("strided", strided) == 2).all()

    succeeded(run_store(work, workers=1))


def test_jax_arrays_come_back_as_they_are() -> None:
    jax = pytest.importorskip("jax", reason="no jax: pip install -r tests/requirements.txt")
    jnp = jax.numpy

    def work(store: ps.Store, comm: Comm) -> None:
        x = jnp.ones((2, 3), jnp.bfloat16)
        for name in ("j", "j again"):
            store.init(name, x)
            for found, right in ((store.pull(name), 1), (store.push_pull(name, x), 2)):
                assert isinstance(found, jax.Array) and found.dtype == x.dtype
                assert found.devices() == x.devices() and found.tolist() == [[right] * 3] * 2
        with pytest.raises(InvalidArgumentError, match="out is a JAX array, which is immutable"):
            store.pull("j", out=x)
        store.init("scalar", jnp.float32(2.5))
        assert float(store.pull("scalar")) == 2.5

        table = store.table("rows", dim=2)
        ids = jnp.array([3, 5], jnp.int32)
        table.push(ids, jnp.ones((2, 2)))
        rows = table.pull(ids)
        assert isinstance(rows, jax.Array) and rows.tolist() == [[1, 1], [1, 1]]
        with pytest.raises(InvalidArgumentError, match="out is a JAX array, which is immutable"):
            table.pull(ids, out=rows)
        if not jax.config.jax_enable_x64:
            wide = store.table("wide", dim=2, dtype="float64")
            with pytest.raises(
                InvalidArgumentError, match="is float64, and this JAX would make it"
            ):
                wide.pull(ids)

    succeeded(run_store(work, workers=1, consistency="asp"))


def test_arrays_with_nothing_but_dlpack_come_back_as_they_are() -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        store.init("f", Foreign(np.arange(3)))
        for found in (store.pull("f"), store.pull("f", async_op=True).wait()):
            assert isinstance(found, Foreign) and found.memory.tolist() == [0, 1, 2]
        found = store.push_pull("f", Foreign(np.ones(6, int)[::2]))
        assert isinstance(found, Foreign) and found.memory.tolist() == [1, 2, 3]
        out = Foreign(np.zeros(3, int))
        assert store.pull("f", out=out) is out and out.memory.tolist() == [1, 2, 3]
        table = store.table("rows", dim=2)
        table.push(Foreign(np.array([9])), Foreign(np.ones((1, 2), np.float32)))
        rows = table.pull(Foreign(np.array([9, 5])))
        assert isinstance(rows, Foreign) and rows.memory.tolist() == [[1, 1], [0, 0]]

        store.init("b", Bare(np.ones(2)))
        plain = store.push_pull("b", Bare(np.ones(2)))
        assert isinstance(plain, np.ndarray) and plain.tolist() == [2, 2]
        plain[0] = 5

    succeeded(run_store(work, workers=1, consistency="asp"))


@pytest.mark.parametrize("hosts", [None, [0, 1]])
def test_a_peer_that_does_not_receive_holds_up_no_sender(hosts: list[int] | None) -> None:
    comms = pycoll.local_world(2, hosts=hosts, timeout_s=TIMEOUT_S)
    one, other = (Link(comm, 1 - comm.rank) for comm in comms)
    sizes = [0, 1, INLINE_BYTES, INLINE_BYTES + 1, 3 << 16] * 8
    for seq, size in enumerate(sizes):
        one.send(Message(Kind.PUSH, seq=seq, payload=np.full(size, seq, np.uint8)))

    def received(link: Link) -> Message:
        message = link.receive(TIMEOUT_S, lambda message, nbytes: None)
        assert message is not None
        return message

    for seq, size in enumerate(sizes):
        message = received(other)
        assert message.seq == seq
        assert bytes(message.payload if size else b"") == bytes([seq]) * size
        # An answer tells what this end has taken.
        other.send(Message(Kind.DONE, seq=seq))
    for seq in range(len(sizes)):
        assert received(one).seq == seq
    for link in (one, other):
        link.release_sent()
        assert not link._sending
        link.close()


def test_staleness_bounds_a_fast_worker_and_names_the_slow_one() -> None:
    done = threading.Event()

    def work(store: ps.Store, comm: Comm) -> Any:
        store.init("w", np.zeros(2))
        if comm.rank == 0:
            for _ in range(3):
                store.clock()
            done.wait(TIMEOUT_S)
            return None
        for _ in range(5):
            store.push("w", np.ones(2))
            store.clock()
        store.timeout_s = 0.5
        try:
            store.clock()
        finally:
            done.set()

    first, second = run_store(work, workers=2, servers=1, consistency=ps.SSP(2))
    assert first is None
    assert isinstance(second, TimeoutError) and second.rank == 0
    assert "clock waited 0.5 s: rank 0 is the slowest worker, at clock 3" in str(second)


def test_backup_workers_drop_late_pushes_and_count_them() -> None:
    turn = threading.Barrier(3)

    def work(store: ps.Store, comm: Comm) -> Any:
        store.init("w", np.zeros(1), update="mean")
        turn.wait(TIMEOUT_S)
        if comm.rank == 2:
            turn.wait(TIMEOUT_S)
            store.push("w", np.full(1, 100.0))
            assert store.dropped == 1
            # The worker goes on in the round of the others.
            late = store.pull("w")[0]
            turn.wait(TIMEOUT_S)
            return late
        result = store.push_pull("w", np.full(1, 1.0 + comm.rank))[0]
        turn.wait(TIMEOUT_S)
        turn.wait(TIMEOUT_S)
        return result

    assert succeeded(run_store(work, consistency=ps.Backup(0.6))) == [1.5, 1.5, 1.5]


def test_a_late_backup_worker_ends_its_steps_when_the_others_have_left() -> None:
    """With as many steps as others it has rounds left, which end without them."""
    turn = threading.Barrier(3)

    def work(store: ps.Store, comm: Comm) -> tuple[int, float]:
        store.init("w", np.zeros(1))
        turn.wait(TIMEOUT_S)
        if comm.rank == 2:
            turn.wait(TIMEOUT_S)
        for _ in range(4):
            store.push("w", np.ones(1))
            store.clock()
        found = store.dropped, store.pull("w")[0]
        if comm.rank < 2:
            turn.wait(TIMEOUT_S)
        return found

    *_, late = succeeded(run_store(work, consistency=ps.Backup(0.6)))
    assert late == (1, 2 * 4 + 3), "its first push came too late, and the others are applied"


def test_stats_and_explain_tell_clocks_and_counts() -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        store.init("w", np.zeros(4))
        store.push_pull("w", np.ones(4))
        facts = store.stats()
        assert facts["consistency"] == "bsp" and facts["view"] == 1
        assert facts["keys"] == {"w": [0]}
        assert [one["chain"] for one in facts["shards"]] == [[1, 2], [2, 1]]
        assert facts["shards"][0]["pushes"] == 1 and facts["shards"][1]["pushes"] == 0
        table = store.table("rows", dim=2)
        table.pull([7, 7, 8])
        first = store.stats()["shards"][0]
        assert first["busy"][0] == {"name": "w", "key": 0, "part": 0, "uses": 2}
        assert first["pulls"] >= 1 and first["waiting"] == {}
        text = store.explain()
        assert text.startswith("store: bsp, 1 worker, 2 shards\n")
        assert "shard 0: rank 1 -> rank 2; 2 parts; 1 pushes, 0 dropped; clocks 0: 0; 0 w" in text
        nbytes = sum(one["bytes"] for one in store.stats()["shards"])
        assert nbytes >= 32
        for rank in (1, 2):
            assert f"server rank {rank}: {nbytes} bytes in 2 shards" in text
        assert "busiest, by pushes and pulls of parts: 'w': 2; table 'rows': " in text
        assert "table 'rows': busiest rows of this worker, by uses: 7: 2; 8: 1" in text

    succeeded(run_store(work, workers=1, replicas=1))


def test_requests_that_wait_are_counted_by_the_clocks_that_they_lack() -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        store.init("w", np.zeros(2))
        if comm.rank > 0:
            waiting = [store.clock(async_op=True) for _ in range(2 + comm.rank)]
            waiting.append(store.pull("w", async_op=True))
            for one in waiting:
                one.wait()
            return
        until = time.monotonic() + TIMEOUT_S
        while store.stats()["shards"][0]["waiting"] != {"1": 2, "2": 3}:
            assert time.monotonic() < until, store.stats()
            time.sleep(0.01)
        assert "5 wait, of them 2 for 1 clock, 3 for 2 clocks" in store.explain()
        for _ in range(4):
            store.clock()
        assert store.stats()["shards"][0]["waiting"] == {}

    succeeded(run_store(work, workers=3, servers=1, consistency=ps.SSP(2)))


def test_a_status_that_is_too_long_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status, "_STATUS_BYTES_MAX", 600)

    def work(store: ps.Store, comm: Comm) -> None:
        for number in range(9):
            store.init(f"key {number}", np.zeros(2))
        found = next(one for one in running_servers() if one["pid"] == os.getpid())
        assert found["shards"] == [] and found["rank"] == 1
        done = CliRunner().invoke(main, ["ps", "--over", "0.01"])
        text = f"server rank 1 (pid {os.getpid()}): shards left out, since its status has "
        assert text in done.output and " bytes, more than 600" in done.output, done.output

    succeeded(run_store(work, workers=1, servers=1))


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_drained_server_holds_nothing_while_pushes_go_on(replicas: int) -> None:
    drained, seen = threading.Event(), threading.Event()

    def work(store: ps.Store, comm: Comm) -> Any:
        store.init("w", np.zeros(BIG, np.float32))
        store.init("count", np.zeros(2, np.int64))
        own = np.zeros(2, np.int64)
        own[comm.rank] = 1
        pushed = 0
        if comm.rank == 0:
            for _ in range(5):
                store.push("w", np.ones(BIG, np.float32))
            store.drain(3)
            drained.set()
        while not (drained.is_set() and pushed > 20):
            store.push("count", own)
            pushed += 1
        assert (store.pull("w") == 5).all() or comm.rank == 1
        assert store.pull("count")[comm.rank] == pushed
        facts = store.stats()
        assert all(3 not in one["chain"] for one in facts["shards"]), facts
        if comm.rank == 0:
            seen.set()
        elif seen.wait(TIMEOUT_S):
            # Any worker may ask for it.
            with pytest.raises(InvalidArgumentError, match="server is 3: expected one of several"):
                store.drain(3)
            with pytest.raises(InvalidArgumentError, match=r"server is 2: expected .* was drained"):
                store.add(2)
            store.add(3)
            if replicas:
                # Each of the others held all three shards.
                while not any(3 in one["chain"] for one in store.stats()["shards"]):
                    time.sleep(0.01)
            assert (store.pull("w") == 5).all()
        return True

    found = run_store(work, workers=2, servers=3, consistency="asp", replicas=replicas)
    assert succeeded(found) == [True, True]


def test_the_command_line_drains_and_adds_a_server() -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        store.init("w", np.arange(3))
        name = next(one["store"] for one in running_servers() if one["pid"] == os.getpid())
        for words, text in (
            (["drain", name, "2"], ""),
            (["drain", name, "2"], "server is 2: expected one of several servers"),
            (["add", name, "2"], ""),
            (["add", name, "2"], "server is 2: expected a server that was drained"),
        ):
            done = CliRunner().invoke(main, ["ps", *words])
            assert (done.exit_code == 0) == (text == "") and text in done.output, done.output
            is_added, until = words[0] == "add", time.monotonic() + TIMEOUT_S
            # Rank 1 held both shards, and gives one of them back.
            while any(2 in one["chain"] for one in store.stats()["shards"]) != is_added:
                assert words[0] == "add" and time.monotonic() < until
                time.sleep(0.01)
        done = CliRunner().invoke(main, ["ps", "drain", "other", "2"])
        assert "store is 'other': no process of yours on this host" in done.output
        assert store.pull("w").tolist() == [0, 1, 2]

    succeeded(run_store(work, workers=1, servers=2))


def test_the_command_line_prints_a_ticket_to_the_owner_of_the_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        store.init("w", np.arange(3))
        name = next(one["store"] for one in running_servers() if one["pid"] == os.getpid())
        done = CliRunner().invoke(main, ["ps", "ticket", name])
        assert done.exit_code == 0, done.output
        with ps.connect(ticket=done.output.strip()) as new:
            new.init("w", np.zeros(3, int))
            assert new.pull("w").tolist() == [0, 1, 2]
        other_user = os.geteuid() + 1
        monkeypatch.setattr(status, "peer_of", lambda sock: (os.getpid(), other_user, 0))
        done = CliRunner().invoke(main, ["ps", "ticket", name])
        assert done.exit_code != 0 and "no process of yours on this host" in done.output
        monkeypatch.undo()

    succeeded(run_store(work, workers=1, servers=2, consistency="asp"))


def test_silence_is_no_sign_of_the_end_of_a_server() -> None:
    signs = (
        "process 7 on this host is gone",
        "10.0.0.1:5 closed the connection without a goodbye: its process has ended",
        "connection reset by 10.0.0.1:5",
    )
    assert all(has_ended(pycoll.PeerLostError("", how=sign)) for sign in signs)
    silence = "no answer from 10.0.0.1:5 for 4 s: its host is down or cannot be reached"
    for how in (silence, "connection to 10.0.0.1:5 failed: Connection timed out", None):
        assert not has_ended(pycoll.PeerLostError("", how=how))


def test_the_next_worker_makes_keys_when_the_first_one_has_left() -> None:
    def work(store: ps.Store, comm: Comm) -> Any:
        store.init("w", np.full(3, comm.rank))
        if comm.rank == 0:
            return None
        # One of the others waits already when the first worker leaves, and both have other values.
        store.init("late", np.full(5, comm.rank))
        table = store.table("rows", dim=2, dtype="int64")
        table.push([comm.rank], np.full((1, 2), comm.rank))
        store.push("w", np.ones(3, np.int64))
        store.push("late", np.ones(5, np.int64))
        # Pushes are acknowledged, so a worker whose push to "late" is there has done its others.
        while (store.pull("late") != 3).any():
            time.sleep(0.01)
        return [store.pull("w").tolist(), table.pull([1, 2]).tolist()]

    found = run_store(work, workers=3, servers=2, consistency="asp")
    values = [[2, 2, 2], [[1, 1], [2, 2]]]
    assert succeeded(found) == [None, values, values]


def run_examples_of(methods: Sequence[Callable[..., Any]], servers: int) -> int:
    """Run the examples of docstrings, in this order, as the only worker; returns how many."""

    def work(store: ps.Store, comm: Comm) -> int:
        scope: dict[str, Any] = {"store": store, "np": np, "pycoll": pycoll}
        for method in methods:
            run_examples(method, scope)
        return sum(len(examples_of(method)) for method in methods)

    (examples,) = succeeded(run_store(work, workers=1, servers=servers))
    return int(examples)


def test_examples_of_docstrings_do_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "safetensors", reason="no safetensors: pip install -r tests/requirements.txt"
    )
    monkeypatch.chdir(tmp_path)
    names = ["restore", "init", "push", "pull", "push_pull", "clock", "checkpoint", "stats"]
    methods = [getattr(ps.Store, name) for name in [*names, "explain", "table", "set_optimizer"]]
    methods += [getattr(ps.Table, name) for name in ("pull", "push", "hot")]
    methods += [ps.SGD, ps.Adagrad, ps.Adam, ps.SSP, ps.Backup, ps.Store.close]
    assert run_examples_of(methods, servers=1) == 31
    assert (tmp_path / "checkpoint" / "manifest.json").exists()


def test_examples_of_servers_that_come_and_go() -> None:
    assert run_examples_of([ps.Store.ticket, ps.Store.drain, ps.Store.add], servers=2) == 3


def test_a_guest_that_comes_ahead_of_its_turn_waits_for_it() -> None:
    config = Config()
    with listen_in_range(None, None) as listener:
        meetings = {2: Meeting.from_bytes(meeting_text(config, listener))}
        tuning = tuning_text(config)

        def links(rank: int) -> list[int]:
            connector = Connector(rank, config, b"a key", tuning, 1.0, meetings)
            limit = Deadline(TIMEOUT_S)
            if rank == 0:
                time.sleep(0.3)
            guests = (0, 1) if rank == 2 else (rank,)
            made = [connector.link(2, one, "a link", listener, limit) for one in guests]
            found = [one.all_reduce(rank) for one in made]
            for one in made:
                one.close()
            return found

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(links, range(3))) == [[2], [3], [2, 3]]


# A job with servers of its own


@pytest.mark.parametrize("consistency", [None, "asp"])
def test_the_servers_of_a_job_hold_stores_and_run_schedules(consistency: Any) -> None:
    comms = pycoll.local_world(2, servers=2, timeout_s=TIMEOUT_S)

    def rank(comm: Comm) -> None:
        with ps.connect(comm, consistency=consistency) as one, ps.connect(comm) as two:
            assert comm.all_reduce(comm.rank + 1, algorithm="ps") == 3
            for store in (one, two):
                store.init("w", np.zeros(3))
                store.push("w", np.ones(3))
                store.clock()
            assert (two.pull("w") == 2).all()
            assert comm.all_reduce(comm.rank, algorithm="ps") == 1
            assert one.stats()["consistency"] == (consistency or "bsp")

    with ThreadPoolExecutor(2) as pool:
        succeeded(each(pool, rank, comms))
    for comm in comms:
        comm.close()


def test_workers_that_name_other_terms_are_told() -> None:
    comms = pycoll.local_world(2, servers=1, timeout_s=TIMEOUT_S)

    def rank(comm: Comm) -> None:
        terms = r"servers=\[2\], replicas=0, "
        text = rf"rank 1 opens a store with {terms}bsp, shards=1, rank 0 with {terms}asp, shards=1"
        with pytest.raises(MismatchError, match=text):
            ps.connect(comm, consistency="asp" if comm.rank == 0 else "bsp")
        with pytest.raises(InvalidArgumentError, match=r"rank 1: replicas is 4: expected 0 to 0"):
            ps.connect(comm, replicas=4 if comm.rank == 1 else 0)
        assert comm.all_reduce(1, algorithm="ps") == 2, "the job goes on"

    with ThreadPoolExecutor(2) as pool:
        succeeded(each(pool, rank, comms))
    for comm in comms:
        comm.close()


@pytest.mark.parametrize(
    ("words", "odd", "first"),
    [
        (["asp", "bsp", "bsp"], 0, "2 ranks, among them rank 1,"),
        (["bsp", "bsp", "asp"], 2, "2 ranks, among them rank 0,"),
        (["bsp", "asp", "SSP"], 1, "rank 0"),
        (["asp", "bsp", "asp", "SSP", "bsp"], 1, "2 ranks, among them rank 0,"),
        (["SSP(2)", "SSP(2)", "SSP(1)"], 2, "2 ranks, among them rank 0,"),
        (["Backup(0.5)", "Backup(0.75)"], 1, "rank 0"),
    ],
)
def test_the_rank_with_other_terms_than_most_is_named(
    words: list[str], odd: int, first: str
) -> None:
    comms = pycoll.local_world(len(words), servers=1, timeout_s=TIMEOUT_S)
    terms: list[Any] = [consistency_from("SSP(1)" if one == "SSP" else one) for one in words]

    def rank(comm: Comm) -> None:
        with pytest.raises(MismatchError) as caught:
            ps.connect(comm, consistency=terms[comm.rank])
        text = str(caught.value)
        assert caught.value.rank == odd and text.startswith(f"rank {odd} opens a store with ")
        assert f", {terms[odd]}, shards=1, {first} with servers" in text, text

    with ThreadPoolExecutor(len(comms)) as pool:
        succeeded(each(pool, rank, comms))
    for comm in comms:
        comm.close()


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"consistency": ps.SSP(1)}, "replicas=0, SSP(1), shards=3"),
        ({"replicas": 1}, "replicas=1, SSP(2), shards=3"),
        ({"shards": 6}, "replicas=0, SSP(2), shards=6"),
    ],
)
def test_the_server_with_other_terms_than_most_is_named(odd: dict[str, Any], words: str) -> None:
    comms = pycoll.local_world(4, timeout_s=TIMEOUT_S)
    servers = [1, 2, 3]

    def rank(comm: Comm) -> None:
        with pytest.raises(MismatchError) as caught:
            if comm.rank in servers:
                terms = {"consistency": ps.SSP(2)} | (odd if comm.rank == 2 else {})
                ps.serve_store(comm, servers, **terms)
            else:
                ps.connect(comm)
        assert caught.value.rank == 2
        assert str(caught.value) == (
            f"rank 2 opens a store with servers={servers}, {words}, 2 ranks, among them rank 1, "
            f"with servers={servers}, replicas=0, SSP(2), shards=3"
        )
        assert comm.all_reduce(1) == 4, "the communicator goes on"

    with ThreadPoolExecutor(len(comms)) as pool:
        succeeded(each(pool, rank, comms))
    for comm in comms:
        comm.close()


# Bad input


def test_wrong_arguments_are_named_before_anything_is_sent() -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        wrong: list[tuple[str, Callable[[], Any]]] = [
            (
                "key 'w' is not known here: call init first; known keys: none",
                lambda: store.pull("w"),
            ),
            ("key is '': expected a text of 1 to 1024 bytes", lambda: store.init("", np.ones(1))),
            ("update is 'max': expected one of 'add'", lambda: store.init("w", np.ones(1), "max")),
            (
                "update is 'mean', which replaces the value once a round",
                lambda: store.init("w", np.ones(1), "mean"),
            ),
        ]
        for text, call in wrong:
            with pytest.raises(InvalidArgumentError) as caught:
                call()
            assert text in str(caught.value)
        store.init("w", np.ones(3, np.float32))
        x = np.zeros(3, np.float32)
        store.init("w", x)
        assert (store.pull("w") == 1).all(), "the second identical init changes nothing"
        wrong = [
            (
                "init of 'w' with dtype float32 and shape (4,), update 'add': the store has dtype "
                "float32 and shape (3,)",
                lambda: store.init("w", np.ones(4, np.float32)),
            ),
            (
                "init of 'w' with dtype float64 and shape (3,), update 'add': the store has dtype "
                "float32 and shape (3,)",
                lambda: store.init("w", np.ones(3)),
            ),
            (
                "x has dtype float64 and shape (3,), but 'w' has dtype float32 and shape (3,)",
                lambda: store.push("w", np.ones(3)),
            ),
            ("priority is 1.5: expected", lambda: store.pull("w", priority=1.5)),  # type: ignore
            ("priority is 'high'", lambda: store.push("w", x, priority="high")),  # type: ignore
            ("priority is None", lambda: store.push_pull("w", x, priority=None)),  # type: ignore
            (
                "out has shape (2,), but the result has (3,)",
                lambda: store.pull("w", out=np.ones(2, np.float32)),
            ),
            ("out is read-only", lambda: store.pull("w", out=np.broadcast_to(np.float32(1), 3))),
        ]
        unknown = "key 'v' is not known here: call init first; known keys: 'w'"
        wrong += [(unknown, lambda: store.push("v", x)), (unknown, lambda: store.pull("v"))]
        wrong.append((unknown, lambda: store.push_pull("v", x)))
        for text, call in wrong:
            with pytest.raises(InvalidArgumentError) as caught:
                call()
            assert text in str(caught.value)
        assert (store.pull("w") == 1).all()
        store.close()
        with pytest.raises(pycoll.ClosedError, match="the store is closed"):
            store.pull("w")

    succeeded(run_store(work, workers=1, servers=1, consistency="asp"))


def test_ids_and_grads_of_other_forms_are_named() -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        table = store.table("rows", dim=2)
        grads = np.ones((2, 2), np.float32)
        wrong: list[tuple[str, Any, Any]] = [
            ("ids is a list whose members are of different lengths: exp", [[1, 2], [3]], grads),
            ("ids is a list whose members are of different lengths: exp", [[], 1], grads),
            ("ids is a tuple whose members are of different lengths: exp", ([1], 2), grads),
            ("ids has dtype int64 and shape (1, 2): expected whole numbers", [[1, 2]], grads),
            ("grads is <class 'list'>, which is no array", [1, 2], [[1.0, 2.0], [3.0]]),
        ]
        for text, ids, given in wrong:
            with pytest.raises(InvalidArgumentError) as caught:
                table.push(ids, given)
            assert text in str(caught.value)
            if given is grads:
                with pytest.raises(InvalidArgumentError) as caught:
                    table.pull(ids)
                assert text in str(caught.value)
        assert not table.pull([1, 2, 3]).any()

    succeeded(run_store(work, workers=1, servers=1, consistency="asp"))


def test_workers_whose_terms_differ_from_the_first_ones() -> None:
    seen = threading.Barrier(3)

    def work(store: ps.Store, comm: Comm) -> None:
        count, dim = (3, 2) if comm.rank == 0 else (4, 5)
        if comm.rank == 0:
            store.init("w", np.zeros(count))
            store.table("rows", dim=dim)
        else:
            text = "'w' with dtype float64 and shape .4,., update 'add': the store has .*3"
            with pytest.raises(MismatchError, match=f"^rank {comm.rank}: init of {text}") as caught:
                store.init("w", np.zeros(count))
            assert caught.value.rank == comm.rank
            text = f"^rank {comm.rank}: table 'rows' with .*: the store has .*, as the first worker"
            with pytest.raises(MismatchError, match=text) as caught:
                store.table("rows", dim=dim)
            assert caught.value.rank == comm.rank
            store.timeout_s = 0.3
            text = "init of 'v', which the first worker begins, waited"
            with pytest.raises(TimeoutError, match=text):
                store.init("v", np.zeros(4))
        seen.wait(TIMEOUT_S)

    succeeded(run_store(work, workers=3, servers=1, consistency="asp"))


@pytest.mark.parametrize(
    ("text", "servers", "terms"),
    [
        (r"servers is \[7\]: expected different ranks from 0 to 2", [7], {}),
        (r"servers is \[2, 2\]: expected different", [2, 2], {}),
        (r"servers is \[0, 1, 2\]: all 3 ranks", [0, 1, 2], {}),
        (r"servers is \[1\] without rank 2, which called serve_store", [1], {}),
        (r"replicas is 1: expected 0 to 0, since there are 1 servers", [2], {"replicas": 1}),
        (r'consistency is \'ssp\': expected "bsp", "asp"', [2], {"consistency": "ssp"}),
        (r"shards is 0: expected 1 to 1024, since there are 1 servers", [2], {"shards": 0}),
        (r"shards is True: expected 1 to 1024", [2], {"shards": True}),
        (
            r"shards is 3: expected a multiple of the 2 servers, up to 1024, .*; pass 2 or 4",
            [1, 2],
            {"shards": 3},
        ),
        (r"shards is 1025: expected 2 to 1024", [1, 2], {"shards": 1025}),
    ],
)
def test_wrong_terms_are_told_to_all_ranks(text: str, servers: Any, terms: Any) -> None:
    comms = pycoll.local_world(3, timeout_s=TIMEOUT_S)

    def rank(comm: Comm) -> None:
        with pytest.raises(InvalidArgumentError, match=text):
            if comm.rank == 2:
                ps.serve_store(comm, servers, **terms)
            else:
                ps.connect(comm)
        assert comm.all_reduce(1) == 3, "the communicator goes on"

    with ThreadPoolExecutor(3) as pool:
        succeeded(each(pool, rank, comms))
    for comm in comms:
        comm.close()


def test_a_store_without_servers_says_how_to_serve_one() -> None:
    (comm,) = pycoll.local_world(1)
    with pytest.raises(
        InvalidArgumentError, match=r"no rank serves this store: call .*serve_store"
    ):
        ps.connect(comm)
    with pytest.raises(InvalidArgumentError, match=r"pass them to serve_store"):
        ps.connect(comm, consistency="asp")
    with pytest.raises(InvalidArgumentError, match=r"pass them to serve_store"):
        ps.connect(comm, shards=2)
    comm.close()


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "3", 1 << 21])
def test_staleness_outside_its_bounds_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ps.SSP(wrong)
    assert str(caught.value) == f"staleness is {wrong!r}: expected a whole number from 0 to 1048576"


@pytest.mark.parametrize("wrong", [0, -0.5, 1.01, True, "1", float("nan")])
def test_shares_outside_their_bounds_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ps.Backup(wrong)
    assert str(caught.value) == f"share is {wrong!r}: expected a number above 0, at most 1"


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_elastic_is_true_or_false(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ps.BSP(elastic=wrong)
    assert str(caught.value) == f"elastic is {wrong!r}: expected True or False"


# Forms


def test_a_consistency_is_read_back_from_its_text() -> None:
    for one in ("bsp", "asp", ps.SSP(3), ps.Backup(1 / 3), ps.SSP(0), ps.BSP(elastic=True)):
        made = consistency_of(one)
        assert consistency_from(str(made)) == made
    assert [ps.Backup(0.9).needed(count) for count in (1, 2, 9, 10, 11)] == [1, 2, 9, 9, 10]
    assert ps.BSP() == consistency_of("bsp") and str(ps.BSP()) == "bsp"
    assert ps.BSP(elastic=True).needed(3) == 3
    for wrong in ("SSP(x)", "BSP(elastic=False)"):
        with pytest.raises(ValueError, match=r"expected .*pycoll\.ps\.BSP\(elastic=True\)"):
            consistency_from(wrong)


def test_parts_are_spread_within_a_part_of_the_mean() -> None:
    draw = np.random.default_rng(5)
    for servers, shards in ((1, 1), (2, 2), (3, 3), (7, 7), (3, 12), (4, 9)):
        placement = PartPlacer(shards)
        heads = [shard % servers for shard in range(shards)]
        largest = 0
        for size in draw.integers(0, 3_000_000, 60):
            terms = ps.array_memory.Terms(11, (int(size),))
            placed = placement.place(terms, "add", 0, heads)
            assert KeyPlacement.from_text(placed.to_text(), shards) == placed
            ranges = ranges_of(terms)
            assert ranges[0][0] == 0 and ranges[-1][1] == size * 4
            assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
            largest = max(largest, *(end - begin for begin, end in ranges))
        assert largest <= PART_BYTES_MAX
        loads = [sum(placement.loads[one::servers]) for one in range(servers)]
        assert max(loads) <= sum(loads) / servers + largest


def test_headers_keep_their_fields_and_refuse_other_bytes() -> None:
    message = Message(Kind.PUSH, 3, 4, 5, 6, 7, 1 << 40, 9, 1 << 50, 1 << 39, 3, 0x0B02)
    head = bytearray(HEAD_BYTES)
    pack_into(head, message, 12345, True, 1 << 31)
    assert unpack(head) == (message, 12345, True, 1 << 31)
    assert message.with_payload(b"x") == message._replace(payload=b"x")
    for place in range(4):
        bad = bytearray(head)
        bad[place] ^= 0xF0
        if place != 3:
            with pytest.raises(ValueError, match="begins with"):
                unpack(bytes(bad))
    with pytest.raises(ValueError, match="expected 60"):
        unpack(head[:-1])
    pack_into(head, message, PART_BYTES_MAX + 1, True, 0)
    with pytest.raises(ValueError, match="at most"):
        unpack(head)
    for text in (b"{}", b"[", b'{"number": 1}'):
        with pytest.raises(ValueError):
            KeyPlacement.from_text(text, 2)
