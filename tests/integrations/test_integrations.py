"""Adapters of engines, without the engines: what they import, how their ranks meet, what they
refuse. tests/launchers runs them with the engines themselves."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import python
from joining import run_all

import pycoll
from pycoll import InvalidArgumentError, PeerLostError, TimeoutError
from pycoll.comm import world
from pycoll.integrations import dask
from pycoll.integrations.dask_store import DaskStore
from pycoll.integrations.ray_store import RayStore
from pycoll.integrations.store_meeting import EngineStore, meet

ENGINES = "ray distributed dask pyspark torch"


def test_adapters_import_no_engine() -> None:
    code = """
import sys
import pycoll.integrations, pycoll.integrations.dask, pycoll.integrations.ray
import pycoll.integrations.spark, pycoll.integrations.ray_store, pycoll.integrations.dask_store
print(*(name.partition(".")[0] for name in sys.modules))
"""
    assert set(python(code).split()).isdisjoint(ENGINES.split())


def test_init_without_a_place_joins_the_engine_s_world() -> None:
    asked: list[dict[str, Any]] = []

    def engine(**words: Any) -> pycoll.Communicator:
        asked.append(words)
        return pycoll.init(rank=0, size=1, **words)

    world.join_by(engine)
    try:
        comm = pycoll.init(timeout_s=7)
        assert pycoll.world() is comm
        with pytest.raises(InvalidArgumentError, match="called twice"):
            pycoll.init()
        pycoll.finalize()
        pycoll.init(rank=0, size=1)
        pycoll.finalize()
        assert [one["timeout_s"] for one in asked] == [7], "a given place wins"
        world.join_by(None)
        assert pycoll.init().size == 1
        assert len(asked) == 1
    finally:
        pycoll.finalize()
        world.join_by(None)


# Stores of engines


class FakeStore(SimpleNamespace):
    """``ray.experimental.internal_kv`` over a dict."""

    def __init__(self) -> None:
        self.data: dict[tuple[bytes, str], bytes] = {}
        self.lock = threading.Lock()
        super().__init__(
            _internal_kv_get=lambda key, *, namespace: self.data.get((namespace, key)),
            _internal_kv_put=self.put,
            _internal_kv_del=self.delete,
        )

    def put(self, key: str, value: str | bytes, overwrite: bool, *, namespace: bytes) -> None:
        assert overwrite
        self.data[namespace, key] = value.encode() if isinstance(value, str) else value

    def delete(self, prefix: str, *, del_by_prefix: bool, namespace: bytes) -> None:
        assert del_by_prefix
        with self.lock:
            for space, key in list(self.data):
                if space == namespace and key.startswith(prefix):
                    del self.data[space, key]


class FakeClient:
    """The metadata of a client of Dask, over a dict; texts and bytes come back as they were set."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}

    def set_metadata(self, keys: list[str], value: Any) -> None:
        found = self.data
        for key in keys[:-1]:
            if not isinstance(found.get(key), dict):
                found[key] = {}
            found = found[key]
        found[keys[-1]] = value

    def get_metadata(self, keys: list[str], default: Any) -> Any:
        found: Any = self.data
        for key in keys:
            if not isinstance(found, dict) or key not in found:
                return default
            found = found[key]
        return found


Rest = Callable[[], Any]


@pytest.fixture(params=["ray", "dask"])
def store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[EngineStore, Rest]:
    """A store, and what is in it."""
    if request.param == "dask":
        client = FakeClient()
        return DaskStore(client, "job"), lambda: client.data["pycoll"]["job"]
    fake = FakeStore()
    monkeypatch.setitem(sys.modules, "ray.experimental.internal_kv", fake)
    return RayStore("job"), lambda: fake.data or None


def members(store: EngineStore, size: int, ranks: list[int], limit_s: float) -> list[Any]:
    """What each rank gathered in two rounds, or raised."""
    together = threading.Barrier(len(ranks))

    def one(rank: int) -> Any:
        rounds: list[list[bytes]] = []

        def make(all_gather: Any) -> Any:
            rounds.extend(all_gather(b"%d of round %d" % (rank, number)) for number in range(2))
            return SimpleNamespace(barrier=lambda: together.wait(20), close=lambda: None)

        meet(store, rank, size, limit_s, make)
        return rounds

    return run_all([lambda rank=rank: one(rank) for rank in ranks])


def test_ranks_meet_over_a_store_and_leave_nothing(store: tuple[EngineStore, Rest]) -> None:
    for _ in range(2):  # a name may be used again
        for found in members(store[0], 4, [0, 1, 2, 3], 20):
            assert found == [[b"%d of round %d" % (r, n) for r in range(4)] for n in range(2)]
        assert store[1]() is None


def test_ranks_that_did_not_start_are_named(store: tuple[EngineStore, Rest]) -> None:
    for error in members(store[0], 4, [0, 2], 1.0):
        assert isinstance(error, TimeoutError)
        assert error.ranks == (1, 3)


def test_a_rank_that_fails_is_told_to_the_others(store: tuple[EngineStore, Rest]) -> None:
    def one(rank: int) -> Any:
        def make(all_gather: Any) -> Any:
            all_gather(b"first")
            if rank == 1:
                raise KeyError("no memory")
            return all_gather(b"second")

        return meet(store[0], rank, 2, 20, make)

    first, second = run_all([lambda rank=rank: one(rank) for rank in range(2)])
    assert isinstance(second, KeyError)
    assert "rank 1 broke off" in str(first)


# Spark's barrier

PYSPARK = """
import os, time
from pathlib import Path

class Context:
    rounds = 0
    def partitionId(self):
        return int(os.environ["RANK"])
    def getTaskInfos(self):
        return [None] * int(os.environ["WORLD_SIZE"])
    def allGather(self, text):
        assert isinstance(text, str)
        self.rounds += 1
        names = [f"{self.rounds}-{rank}" for rank in range(len(self.getTaskInfos()))]
        own = Path("." + names[self.partitionId()])
        own.write_text(text)
        own.rename(names[self.partitionId()])
        while not all(Path(name).exists() for name in names):
            time.sleep(0.01)
        return [Path(name).read_text() for name in names]

class BarrierTaskContext:
    get = Context
"""


def test_tasks_of_a_barrier_stage_meet(tmp_path: Path) -> None:
    (tmp_path / "pyspark.py").write_text(PYSPARK)
    (tmp_path / "rank.py").write_text(
        "from pycoll.integrations import spark\n"
        "comm = spark.init(timeout_s=20)\n"
        "print(comm.rank, comm.size, comm.all_reduce(comm.rank + 1), flush=True)\n"
    )
    command = [sys.executable, "-m", "pycoll", "run", "-n", "3", "rank.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert sorted(done.stdout.splitlines()) == [f"{rank} 3 6" for rank in range(3)], done.stderr


# Dask's workers


def client(*workers: str) -> Any:
    return SimpleNamespace(scheduler_info=lambda n_workers: {"workers": dict.fromkeys(workers)})


@pytest.mark.parametrize(
    ("known", "chosen", "text"),
    [
        ((), None, "the client has no workers"),
        (("tcp://a:1",), ["tcp://b:1"], "'tcp://b:1', which is no worker of this client"),
        (("tcp://a:1",), ["tcp://a:1", "tcp://a:1"], "names one worker twice"),
        (("inproc://127.0.0.1/5/1",), None, "is a thread of this process"),
    ],
)
def test_workers_that_cannot_be_ranks(known: tuple[str, ...], chosen: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        dask.run(client(*known), print, workers=chosen)
    assert text in str(caught.value)


def test_workers_are_ranks_by_host() -> None:
    names = ("tcp://10.0.0.2:7", "tcp://10.0.0.1:9", "tcp://10.0.0.2:5")
    assert dask._choose_workers(client(*names), None) == [names[1], names[2], names[0]]


def test_a_task_whose_worker_has_left_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask, "_LOOK_S", 0.1)
    pending = SimpleNamespace(status="pending", exception=lambda: None)
    with pytest.raises(PeerLostError, match="the worker of rank 0, tcp://a:1, has left"):
        dask._watch(client("tcp://b:1"), [pending], ["tcp://a:1"])
