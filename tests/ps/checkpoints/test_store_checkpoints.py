"""Checkpoints of stores over real connections: the same bits on other servers, and bad directories.

Each store runs in threads of this process; the last test kills and restarts processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import ROOT, TIMEOUT_S, free_port, succeeded
from stores import Comm, run_store

from pycoll import InvalidArgumentError, PycollError, TimeoutError, ps
from pycoll.ps.checkpoints import checkpoint_files, taking
from pycoll.ps.checkpoints.checkpoint_files import MANIFEST, CheckpointReader, CheckpointWriter
from pycoll.ps.messages import PART_BYTES_MAX

pytest.importorskip("safetensors", reason="no safetensors: pip install -r tests/requirements.txt")

SCRIPT = Path(__file__).resolve().with_name("checkpoint_rank").with_suffix(".py")
BIG = PART_BYTES_MAX // 4 + 999
JOB_S = 110.0
#: The types that checkpoints store as they are, and those for which NumPy has no name.
TYPES = ("int8", "uint64", "bool", "float16", "bfloat16", "float8_e4m3fn", "complex64")


# The same bits


def made_of(name: str) -> Any:
    kind = np.dtype(getattr(ml_dtypes, name, name))
    return np.random.default_rng(3).integers(0, 2, (2, 3)).astype(kind)


def init_all(store: ps.Store, is_restored: bool = False) -> tuple[ps.Table, ps.Table]:
    if not is_restored:
        store.set_optimizer(ps.Adam(0.01))
    store.init("w", np.linspace(-1, 1, BIG).astype(np.float32))
    store.init("half", np.ones((3, 5), ml_dtypes.bfloat16))
    store.init("mean/of it", np.zeros(7), update="mean")
    store.init("empty", np.zeros((0, 4), np.float32))
    for name in TYPES:
        store.init(name, made_of(name))
    store.set_optimizer(ps.SGD(0.5, momentum=0.9), "half")
    table = store.table("emb", dim=6, init="normal:0.1", seed=4)
    return table, store.table("counts", rows=1000, dim=2, dtype="int64")


def step_all(store: ps.Store, tables: tuple[ps.Table, ps.Table], step: int) -> None:
    draw = np.random.default_rng([step, store.rank])
    store.push("w", draw.standard_normal(BIG).astype(np.float32))
    store.push("half", draw.standard_normal((3, 5)).astype(ml_dtypes.bfloat16))
    store.push("mean/of it", draw.standard_normal(7))
    store.push("empty", np.zeros((0, 4), np.float32))
    ids = draw.integers(0, 400, 300)
    tables[0].push(ids, draw.standard_normal((300, 6)).astype(np.float32))
    tables[1].push(ids, draw.integers(-9, 9, (300, 2)))
    store.clock()


def bits_of(store: ps.Store, tables: tuple[ps.Table, ps.Table]) -> dict[str, bytes]:
    names = ["w", "half", "mean/of it", "empty", *TYPES]
    found = {name: store.pull(name).tobytes() for name in names}
    for table in tables:
        found[table.name] = table.pull(np.arange(500)).tobytes()
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], Any]:
    """Run six rounds with a checkpoint after the third; return it and the bits after 3 and 6."""
    path = tmp_path_factory.mktemp("reference") / "made" / "here"

    def work(store: ps.Store, comm: Comm) -> Any:
        tables = init_all(store)
        for step in range(3):
            step_all(store, tables, step)
        store.checkpoint(path)
        middle = bits_of(store, tables)
        for step in range(3, 6):
            step_all(store, tables, step)
        return middle, bits_of(store, tables)

    # Many small files and pieces, so that each loop has several turns.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "FILE_BYTES", 10_000)
        patch.setattr(taking, "_ROWS_BYTES", 4000)
        first, second = succeeded(run_store(work))
    assert first == second
    assert len(list(path.glob("*.safetensors"))) > 5
    return path, *first


@pytest.mark.parametrize(("servers", "replicas"), [(1, 0), (2, 1), (3, 0)])
def test_training_goes_on_bit_for_bit_on_other_servers(
    reference: Any, servers: int, replicas: int
) -> None:
    path, middle, end = reference

    def work(store: ps.Store, comm: Comm) -> None:
        assert store.restore(path) == 3
        tables = init_all(store, True)
        assert bits_of(store, tables) == middle
        for step in range(3, 6):
            step_all(store, tables, step)
        found = bits_of(store, tables)
        assert [name for name in end if found[name] != end[name]] == []
        assert {one["version"] for one in store.stats()["shards"]} == {6}

    succeeded(run_store(work, servers=servers, replicas=replicas))


def test_a_job_is_started_again_with_another_number_of_servers(tmp_path: Path) -> None:
    """By the command line alone: the program names the checkpoint, and the launcher the servers."""
    pytest.importorskip("sklearn", reason="no scikit-learn: pip install -r tests/requirements.txt")
    from safetensors.numpy import load_file

    def run_steps(steps: int, servers: int, path: Path) -> Any:
        words = [sys.executable, "-m", "pycoll", "run", "-n", "2", "--servers", str(servers)]
        script = str(ROOT / "examples" / "servers_digits.py")
        words += [sys.executable, script, "--consistency", "bsp", "--steps", str(steps)]
        done = subprocess.run(
            [*words, "--checkpoint", str(path)],
            # A loaded machine may need a minute for the imports of the example.
            env=dict(os.environ, PYCOLL_INIT_TIMEOUT_S=str(JOB_S)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=JOB_S,
            check=False,
        )
        assert done.returncode == 0 and "2 workers, bsp" in done.stdout, done.stdout
        (file,) = path.glob("*.safetensors")
        found = load_file(file)
        assert json.loads((path / MANIFEST).read_text())["round"] == steps
        return found["values/weights"], found["state0/weights"]

    plain, halves = tmp_path / "plain", tmp_path / "halves"
    expected = run_steps(30, 1, plain)
    run_steps(12, 1, halves)
    for one, other in zip(run_steps(30, 3, halves), expected, strict=True):
        assert one.any() and one.tobytes() == other.tobytes()


def test_arrays_can_be_read_without_pycoll(reference: Any) -> None:
    from safetensors.numpy import load_file

    path, middle, _ = reference
    found = {}
    for file in path.glob("*.safetensors"):
        found.update(load_file(file))
    assert found["values/w"].tobytes() == middle["w"] and found["values/w"].shape == (BIG,)
    assert found["state0/w"].shape == found["state1/w"].shape == (BIG,)
    assert found["values/half"].dtype == np.uint16
    assert found["values/complex64"].shape == (2, 3, 2)
    ids = np.concatenate([one for name, one in found.items() if name.startswith("row_ids/emb/")])
    assert len(ids) == len(set(ids)) > 300


def test_the_next_worker_writes_when_the_first_one_has_left(tmp_path: Path) -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        store.init("w", np.zeros(4))
        store.push("w", np.full(4, 1.0 + comm.rank))
        if comm.rank == 0:
            return
        store.checkpoint(tmp_path)

    succeeded(run_store(work, workers=3, consistency="asp"))
    facts = CheckpointReader(tmp_path).facts
    assert facts["clocks"] == [None, 0, 0]

    def read(store: ps.Store, comm: Comm) -> Any:
        store.restore(tmp_path)
        store.init("w", np.zeros(4))
        return store.pull("w").tolist()

    assert succeeded(run_store(read, workers=1)) == [[6.0] * 4]


@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_goes_on_from_the_common_round(
    reference: Any, workers: int
) -> None:
    path, middle, _ = reference

    def work(store: ps.Store, comm: Comm) -> None:
        assert store.restore(path) == 3
        tables = init_all(store, True)
        assert bits_of(store, tables) == middle
        step_all(store, tables, 3)
        assert store.stats()["shards"][0]["version"] == 4

    succeeded(run_store(work, workers=workers))


def test_each_worker_goes_on_from_its_own_clock(tmp_path: Path) -> None:
    def first(store: ps.Store, comm: Comm) -> None:
        store.init("w", np.zeros(2, np.int64))
        for _ in range(1 + 2 * comm.rank):
            store.push("w", np.eye(2, dtype=np.int64)[comm.rank])
            store.clock()
        works = [store.push("w", np.eye(2, dtype=np.int64)[comm.rank], async_op=True)]
        store.checkpoint(tmp_path)
        works.append(store.push("w", np.full(2, 100), async_op=True))
        for one in works:
            one.wait()

    def second(store: ps.Store, comm: Comm) -> Any:
        assert store.restore(tmp_path) == 1 + 2 * comm.rank
        with pytest.raises(InvalidArgumentError, match="call it once, ahead of init"):
            store.restore(tmp_path)
        store.init("w", np.ones(2, np.int64))
        with pytest.raises(InvalidArgumentError, match=r"key 'v' is not in the checkpoint .*new_k"):
            store.init("v", np.ones(2))
        with pytest.raises(InvalidArgumentError, match="table 'w' is not in the checkpoint"):
            store.table("w", dim=2)
        with pytest.raises(
            InvalidArgumentError, match=r"'w' with .*int32.*: the store has .*int64"
        ):
            store.init("w", np.ones(2, np.int32))
        return store.pull("w").tolist()

    succeeded(run_store(first, consistency=ps.SSP(4)))
    assert succeeded(run_store(second, consistency=ps.SSP(4))) == [[2, 4]] * 2


def test_a_late_worker_comes_to_a_checkpoint_with_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends its rounds while the others wait for it, and all go on in the same round."""
    monkeypatch.setenv("PYCOLL_STORE_CHECKS", "1")
    turn = threading.Barrier(3, timeout=TIMEOUT_S)

    def first(store: ps.Store, comm: Comm) -> None:
        store.init("w", np.zeros(2, np.int64))
        store.init("mean", np.zeros(2), update="mean")
        if comm.rank == 2:
            turn.wait()
        for step in range(4):
            store.push("w", np.ones(2, np.int64))
            store.push("mean", np.full(2, 10.0 * comm.rank + step))
            store.clock()
        if comm.rank < 2:
            turn.wait()
        store.checkpoint(tmp_path)
        assert store.dropped == (2 if comm.rank == 2 else 0), "its first pushes came too late"
        # No pull tells the round ahead of this push.
        store.push("w", np.ones(2, np.int64))
        assert store.pull("mean").tolist() == [23.0] * 2, "the last round was its own"
        turn.wait()
        store.clock()
        assert store.pull("w").tolist() == [2 * 4 + 3 + 3] * 2, "nobody is late behind a checkpoint"
        turn.wait()

    def second(store: ps.Store, comm: Comm) -> None:
        assert store.restore(tmp_path) == 8
        store.init("w", np.zeros(2, np.int64))
        store.push("w", np.ones(2, np.int64))
        turn.wait()
        store.clock()
        assert store.pull("w").tolist() == [11 + 3] * 2
        turn.wait()

    backup: dict[str, Any] = {"workers": 3, "consistency": ps.Backup(0.6)}
    succeeded(run_store(first, **backup))
    facts = CheckpointReader(tmp_path).facts
    assert facts["round"] == facts["clocks"][2] == 8 and facts["clocks"][:2] == [4, 4]
    succeeded(run_store(second, **backup))


def test_new_keys_can_be_added_to_a_restored_store(tmp_path: Path) -> None:
    def first(store: ps.Store, comm: Comm) -> None:
        assert store.restore(tmp_path / "none", missing_ok=True) is None
        store.init("w", np.arange(4))
        store.checkpoint(tmp_path)
        store.checkpoint(tmp_path)

    def second(store: ps.Store, comm: Comm) -> Any:
        store.restore(tmp_path, missing_ok=True, new_keys=True)
        store.init("v", np.full(3, 7))
        store.init("w", np.zeros(4, np.int64))
        return [*store.pull("w"), *store.pull("v"), *store.table("t", dim=1).pull([1])]

    succeeded(run_store(first))
    assert len(list(tmp_path.glob("values-*"))) == 1, "the files of the first one are removed"
    assert succeeded(run_store(second, servers=1)) == [[0, 1, 2, 3, 7, 7, 7, 0]] * 2


# Bad input


def test_a_wrong_directory_is_told_to_all_workers(tmp_path: Path, reference: Any) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path, text in (
        (tmp_path / "none", "it is not there; expected a directory of Store.checkpoint"),
        (file, "it is a file; expected"),
        (tmp_path, f"there is no {MANIFEST}: no checkpoint was completed"),
        (3, "path is 3: expected the name of a directory"),
    ):

        def restores(store: ps.Store, comm: Comm, path: Any = path, text: str = text) -> None:
            with pytest.raises(InvalidArgumentError, match=text):
                store.restore(path)

        succeeded(run_store(restores, servers=1))

    def checkpoints(store: ps.Store, comm: Comm) -> None:
        store.init("w", np.zeros(2))
        with pytest.raises(InvalidArgumentError, match=r"path is .*: .*(exists|directory)"):
            store.checkpoint(file if comm.rank == 0 else tmp_path)
        with pytest.raises(InvalidArgumentError, match="path is 4"):
            store.checkpoint(4 if comm.rank == 1 else tmp_path)
        store.push("w", np.ones(2))
        with pytest.raises(InvalidArgumentError, match="a round that has not ended: all workers"):
            store.checkpoint(tmp_path)
        store.clock()
        assert store.pull("w").tolist() == [2, 2], "the store goes on"

    succeeded(run_store(checkpoints, servers=1))
    assert os.listdir(tmp_path) == ["file"]

    def other(store: ps.Store, comm: Comm) -> None:
        with pytest.raises(InvalidArgumentError, match=r"'mean/of it' has update 'mean'.*is asp"):
            store.restore(reference[0])

    succeeded(run_store(other, servers=1, consistency="asp"))


def test_a_worker_that_does_not_call_is_named(tmp_path: Path) -> None:
    done = threading.Event()

    def work(store: ps.Store, comm: Comm) -> None:
        store.init("w", np.zeros(2))
        if comm.rank == 1:
            done.wait(TIMEOUT_S)
            return
        store.timeout_s = 0.5
        with pytest.raises(TimeoutError, match=r"waited 0.5 s: rank 1 has not called checkpoint"):
            store.checkpoint(tmp_path)
        done.set()

    succeeded(run_store(work, consistency="asp"))


def small(path: Path, value: int) -> None:
    writer = CheckpointWriter(path)
    with checkpoint_files.abandon_on_error(writer):
        writer.add("values/w", np.full(10, value))
        facts: dict[str, Any] = {"consistency": "bsp", "round": value, "clocks": [value]}
        writer.finish({**facts, "optimizer": "", "keys": [], "tables": []})


def read_small(path: Path) -> int:
    reader = CheckpointReader(path)
    (value,) = set(reader.array("values/w", 80).view(np.int64))
    assert reader.facts["round"] == value
    return int(value)


class KilledError(BaseException):
    """Stands for the end of the process: what follows on the way out is not run."""


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_write_that_ends_anywhere_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Each call of the system that changes the disk is the last one in its turn."""
    if is_killed:
        monkeypatch.setattr(CheckpointWriter, "abandon", lambda self: None)
    small(tmp_path, 1)
    value = 1
    for last in range(100):
        calls = 0

        def counted(call: Callable[..., Any], last: int = last) -> Callable[..., Any]:
            def counting(*given: Any, **words: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > last:
                    raise KilledError if is_killed else OSError(28, "No space left on device")
                return call(*given, **words)

            return counting

        before = value
        with monkeypatch.context() as patch:
            for name in ("replace", "fsync"):
                patch.setattr(os, name, counted(getattr(os, name)))
            if is_killed:
                patch.setattr(os, "unlink", counted(os.unlink))
            patch.setattr(Path, "mkdir", counted(Path.mkdir))
            try:
                small(tmp_path, value + 1)
                value += 1
            except KilledError:
                pass
            except (PycollError, InvalidArgumentError) as error:
                assert "No space left" in str(error)
        assert read_small(tmp_path) in {before, before + 1}
        value = read_small(tmp_path)
        if calls <= last:
            break
    assert calls > 4 and value > 1
    small(tmp_path, 77)
    names = [name for name in os.listdir(tmp_path) if name != MANIFEST]
    assert len(names) == 1, "what a killed write left is removed by the next one"


def test_damaged_checkpoints_are_refused_with_the_place(tmp_path: Path) -> None:
    small(tmp_path, 5)
    manifest = tmp_path / MANIFEST
    text = manifest.read_text()
    (values,) = tmp_path.glob("*.safetensors")
    data = values.read_bytes()

    def refused(why: str) -> None:
        with pytest.raises(InvalidArgumentError, match=why) as caught:
            CheckpointReader(tmp_path)
        assert str(tmp_path) in str(caught.value)
        manifest.write_text(text)
        values.write_bytes(data)

    facts = json.loads(text)
    for word, wrong, why in (
        ("version", 2, "has version 2: this pycoll reads 1"),
        ("format", "other", "does not describe a checkpoint"),
        ("round", 6, "is damaged: its digest is another one"),
        ("keys", 3, "is damaged: keys is 3: expected list"),
    ):
        manifest.write_text(json.dumps({**facts, word: wrong}))
        refused(why)
    manifest.write_text(text[: len(text) // 2])
    refused("cannot be read")
    values.write_bytes(data[:-1])
    refused(f"is damaged: {len(data) - 1} bytes, not {len(data)}")
    for place in range(0, len(data), 7):
        values.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        refused("is damaged: its sha256 is")
    values.unlink()
    refused("cannot be read: No such file")
    assert read_small(tmp_path) == 5
    with pytest.raises(InvalidArgumentError, match="no file holds 'values/v'"):
        CheckpointReader(tmp_path).array("values/v", 80)
    with pytest.raises(InvalidArgumentError, match="has 80 bytes: expected 81"):
        CheckpointReader(tmp_path).array("values/w", 81)


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for use in (CheckpointWriter, CheckpointReader):
        with pytest.raises(InvalidArgumentError, match=r"pip install '.\[checkpoint\]'"):
            use(tmp_path)


# Processes


def start(size: int, servers: list[int], path: Path, transport: str) -> list[Any]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYCOLL_")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**clean, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    words = [str(size), f"127.0.0.1:{free_port()}", ",".join(map(str, servers)), str(path)]
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), *words, transport],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def test_a_job_that_is_killed_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """Two workers checkpoint again and again; all are killed, and restart twice with others."""
    done = 0
    for servers, transport in (([2, 3], "shm"), ([2, 3, 4], "tcp"), ([2], "shm")):
        ranks = start(2 + len(servers), servers, tmp_path, transport)
        try:
            lines = [json.loads(one.stdout.readline()) for one in ranks[:2]]
            for rank, line in enumerate(lines):
                # A worker pushes three times between two checkpoints.
                assert line["held"][rank] == 3 * line["clock"] >= 3 * done, line
            assert lines[0]["held"] == lines[1]["held"]
            for _ in range(4):
                done = json.loads(ranks[0].stdout.readline())["clock"]
            time.sleep(0.05)
        finally:
            for one in ranks:
                one.send_signal(signal.SIGKILL)
            for one in ranks:
                one.wait(JOB_S)
                one.stdout.close()
    assert done >= 12
