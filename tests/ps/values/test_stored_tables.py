"""Tables and optimizers over real connections: two workers, two servers, and wrong arguments."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import TIMEOUT_S, succeeded
from stores import Comm, run_store

from pycoll import InvalidArgumentError, MismatchError, ps
from pycoll.ps.messages import PART_BYTES_MAX
from pycoll.ps.values.row_index import shards_of
from pycoll.ps.values.row_terms import first_rows


@pytest.mark.parametrize("replicas", [0, 1])
def test_rows_of_all_workers_are_added_once(replicas: int) -> None:
    count = 2 * (PART_BYTES_MAX // 264) + 999

    def work(store: ps.Store, comm: Comm) -> None:
        table = store.table("emb", dim=64, init="uniform:1", seed=3)
        counts = store.table("counts", rows=50, dim=1, dtype="int64")
        draw = np.random.default_rng(comm.rank)
        ids = draw.integers(0, 1 << 40, count) if comm.rank else np.arange(count)
        begun = table.pull(ids)
        assert begun.tobytes() == first_rows(table.terms, ids).tobytes()
        table.push(ids, np.ones((count, 64), np.float32))
        repeated = draw.integers(0, 50, 1000)
        pushing = counts.push(repeated, np.ones((1000, 1), np.int64), priority=1, async_op=True)
        assert pushing.wait() is None
        store.push("arrived", np.eye(2)[comm.rank])
        while store.pull("arrived").sum() < 2:
            pass
        assert counts.pull(np.arange(50)).sum() == 2000
        known, times = np.unique(ids, return_counts=True)
        out = np.empty((len(known), 64), np.float32)
        work = table.pull(known, out=out, async_op=True)
        assert work.wait() is out
        expected = first_rows(table.terms, known) + times[:, None].astype(np.float32)
        assert (out == expected).all()

    def begin(store: ps.Store, comm: Comm) -> None:
        store.init("arrived", np.zeros(2))
        work(store, comm)

    succeeded(run_store(begin, replicas=replicas, consistency="asp"))


def test_torch_rows_and_rounds_by_an_optimizer() -> None:
    torch = pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")

    def work(store: ps.Store, comm: Comm) -> None:
        store.set_optimizer(ps.SGD(lr=0.5))
        table = store.table("emb", dim=2)
        store.init("w", np.ones(3, np.float32))
        ids = torch.tensor([4, 4, 9 + comm.rank])
        table.push(ids, torch.ones(3, 2))
        store.push("w", np.full(3, 1.0 + comm.rank, np.float32))
        store.clock()
        rows = table.pull(torch.tensor([4, 9, 10, 11]))
        # Both workers sum two ones for row 4; the other rows are pushed by one of two workers.
        assert isinstance(rows, torch.Tensor) and rows.dtype == torch.float32
        assert rows[:, 0].tolist() == [-1.0, -0.25, -0.25, 0.0]
        assert store.pull("w").tolist() == [0.25] * 3
        store.set_optimizer(ps.SGD(lr=2.0), "w")
        store.push("w", np.ones(3, np.float32))
        store.clock()
        assert store.pull("w").tolist() == [-1.75] * 3
        assert table.hot(1) == [(4, 3)]

    succeeded(run_store(work))


def test_wrong_rows_are_named_and_nothing_is_applied() -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        table = store.table("t", rows=10, dim=2)
        assert store.table("t", rows=10, dim=2) is table
        store.init("w", np.zeros(2, np.int64))
        ones = np.ones((2, 2), np.float32)
        word: Any = "high"
        half: Any = 1.5
        one, endless = ones[:1], store.table("endless", dim=2)
        wrong: list[tuple[str, Any]] = [
            (r"ids\[1\] is -1: expected 0 to 9", lambda: table.push([1, -1], ones)),
            (r"ids\[0\] is 10: expected 0 to 9", lambda: table.pull([10, 2])),
            (r"ids\[1\] is 10: expected 0 to 9", lambda: table.push([2, 10], ones)),
            (r"ids\[0\] is -7: expected 0 to 9", lambda: table.pull([-7])),
            (r"ids\[0\] is -1: expected 0 to 4611686018427387903", lambda: endless.pull([-1])),
            (r"ids\[0\] is 4611686018427387904: exp", lambda: endless.push([1 << 62], ones[:1])),
            ("ids has dtype float64 and shape .2,.*of one axis", lambda: table.pull(np.ones(2))),
            ("ids has dtype int64 and shape .1, 2.", lambda: table.pull(np.array([[1, 2]]))),
            (
                "grads has dtype float32 and shape .2, 2.: .*3 ids",
                lambda: table.push([1] * 3, ones),
            ),
            ("grads has dtype float32 and shape .1, 2.: .*2 ids", lambda: table.push([1, 2], one)),
            ("ids has dtype bool and shape .2,", lambda: table.push(np.ones(2, bool), ones)),
            ("grads has dtype int64", lambda: table.push([1, 2], np.ones((2, 2), np.int64))),
            ("out has shape", lambda: table.pull([1], out=np.ones((2, 2), np.float32))),
            (
                "table 't' with .*rows=9.*: the store has .*rows=10",
                lambda: store.table("t", rows=9, dim=2),
            ),
            (
                "dtype is 'float16': expected one of 'int32'",
                lambda: store.table("v", dim=1, dtype="float16"),
            ),
            ("priority is 'high'", lambda: table.push([1, 2], ones, priority=word)),
            ("priority is 1.5", lambda: table.pull([1], priority=half)),
            ("priority is True", lambda: table.pull([1], priority=True)),
            ("dim is 0", lambda: store.table("v", dim=0)),
            ("key is 'w', which no optimizer", lambda: store.set_optimizer(ps.SGD(0.1), "w")),
            ("key 'x' is not known", lambda: store.set_optimizer(ps.SGD(0.1), "x")),
        ]
        not_one: Any = "sgd"
        wrong.append(("optimizer is 'sgd': expected", lambda: store.set_optimizer(not_one)))
        for text, call in wrong:
            with pytest.raises(InvalidArgumentError, match=text):
                call()
        assert not table.pull(np.arange(10)).any() and not endless.pull([1, 2]).any()
        assert table.pull([]).shape == (0, 2)
        table.push([], np.empty((0, 2), np.float32))

    succeeded(run_store(work, workers=1, servers=1, consistency="asp"))


def test_workers_with_other_terms_are_told() -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        if comm.rank == 0:
            store.table("t", dim=2)
        else:
            with pytest.raises(
                MismatchError, match=r"table 't' with .*dim=3.*: the store has .*dim=2"
            ):
                store.table("t", dim=3)

    succeeded(run_store(work, consistency="asp"))


def test_small_batches_of_a_zipf_trace_load_the_servers_evenly() -> None:
    draw = np.random.default_rng(1)
    weights = 1 / np.arange(1, 100_001) ** 1.1
    loads = np.zeros(4)
    for _ in range(200):
        batch = draw.choice(100_000, 1024, p=weights / weights.sum())
        # A worker sends each different id once.
        loads += np.bincount(shards_of(np.unique(batch), 4), minlength=4)
    assert loads.max() / loads.mean() <= 1.1


# Examples: two or three workers and servers, each a process

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run_example(workers: int, servers: int, *words: str) -> str:
    pytest.importorskip("sklearn", reason="no scikit-learn: pip install -r tests/requirements.txt")
    command = [sys.executable, "-m", "pycoll", "run", "-n", str(workers), "--servers", str(servers)]
    return subprocess.run(
        [*command, str(EXAMPLES / words[0]), *words[1:]],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * 4,
        check=True,
    ).stdout


@pytest.mark.parametrize("words", [("--consistency", "asp"), ("--hogwild",)])
def test_asynchronous_workers_learn_digits(words: tuple[str, ...]) -> None:
    found = re.search(r"3 workers, asp: (\S+)% of", run_example(3, 1, "servers_digits.py", *words))
    assert found is not None and float(found[1]) > 90


def test_rows_of_two_servers_learn_vectors() -> None:
    said = run_example(2, 2, "servers_embedding.py")
    found = re.search(r"squared error (\S+) at first, (\S+) at last", said)
    assert found is not None and float(found[2]) < float(found[1]) / 10


def test_workers_that_take_steps_alone_learn_digits() -> None:
    said = run_example(3, 1, "servers_downpour.py", "--every", "5", "--pushes", "100")
    found = re.search(r"3 workers, 5 steps between pushes: (\S+)% of", said)
    assert found is not None and float(found[1]) > 85


def test_workers_change_few_rows_of_one_table_and_none_is_lost() -> None:
    said = run_example(2, 1, "servers_hogwild.py")
    found = re.search(r"2 workers, asp: (\S+)% of .*; (\d+) of (\d+) changes were applied", said)
    assert found is not None and float(found[1]) > 80
    assert int(found[2]) == int(found[3]) == 2 * 400 * 32 * 10
