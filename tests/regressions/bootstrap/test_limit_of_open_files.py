"""Joining under a low limit of open files waited for its whole time before it named the limit, or
ended in an OSError of a module that was imported for the first time on the way to an error."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT

from pycoll import TransportError
from pycoll.bootstrap.discovery import limits
from pycoll.bootstrap.discovery.identity import Identity
from pycoll.config import Config

#: Every rank tries again with a higher limit until all have joined; joining may take 100 s.
_RANK = """
import resource, sys
import numpy as np, pycoll
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for limit in range(8, 80, 3):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        comm = pycoll.init(init_timeout_s=100)
    except pycoll.TransportError as error:
        assert "ulimit -n" in str(error), error
    else:
        total = comm.all_reduce(np.array([comm.rank]))
        print(f"rank {comm.rank} joined with {limit}: {total[0]}", flush=True)
        break
"""


@pytest.mark.parametrize("transports", ["shm", "tcp", "shm,tcp"])
def test_every_limit_that_is_too_low_is_named_at_once(transports: str) -> None:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "run", "-n", "4", sys.executable, "-c", _RANK],
        capture_output=True,
        text=True,
        env={**os.environ, "PYCOLL_TRANSPORTS": transports},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 90, "an attempt waited for its time"
    for rank in range(4):
        assert f"rank {rank} joined with " in done.stdout
    assert done.stdout.count(": 6") == 4, done.stdout


def identity(**facts: object) -> Identity:
    return Identity.mine(Config())._replace(**facts)


def test_all_ranks_name_the_one_whose_limit_is_too_low() -> None:
    ranks = [identity(process=str(rank), descriptors=1000) for rank in range(40)]
    limits.check_together(ranks)
    ranks[7] = ranks[7]._replace(descriptors=100, name="here:7")
    told = r"rank 7 \(here:7\) may open 100 more files, and to join 40 ranks takes 121: raise .*"
    with pytest.raises(TransportError, match=told + r"ulimit -n") as caught:
        limits.check_together(ranks)
    assert list(caught.value.ranks) == [7]


def test_ranks_of_one_process_share_its_limit() -> None:
    ranks = [identity(process="one", descriptors=50, transports=("tcp",)) for _ in range(4)]
    with pytest.raises(TransportError, match=r"rank 0 .* may open 50 more files"):
        limits.check_together(ranks)
    limits.check_together([one._replace(descriptors=200) for one in ranks])


def test_a_rank_that_can_never_join_says_so_before_it_waits() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        with pytest.raises(TransportError, match=r"rank 3 .* to join 64 ranks takes"):
            limits.check_alone(3, 64, Config(), serves=False, together=False)
        limits.check_alone(0, 1, Config(), serves=True, together=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Error paths import nothing


def imports_on_error_paths(text: str) -> list[str]:
    """Functions that import in an exception handler, for what they raise, or to make an error."""
    found = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inner = [n for n in ast.walk(function) if isinstance(n, ast.Import | ast.ImportFrom)]
        if not inner:
            continue
        names = {alias.asname or alias.name.partition(".")[0] for n in inner for alias in n.names}
        errors = function.returns is not None and "Error" in ast.unparse(function.returns)
        for node in ast.walk(function):
            within = list(ast.walk(node))
            handled = isinstance(node, ast.ExceptHandler) and any(n in inner for n in within)
            raised = isinstance(node, ast.Raise) and any(
                isinstance(n, ast.Name) and n.id in names for n in within
            )
            if handled or raised or (errors and node in inner):
                found.append(function.name)
                break
    return found


#: What these import is needed, and imported, before anything is refused.
_BEFORE = {
    "pycoll/__init__.py": ["__getattr__"],
    "pycoll/comm/world.py": ["local_world"],
    "pycoll/tools/cli.py": ["tune"],
}


def test_no_function_imports_on_its_way_to_an_error() -> None:
    handler = "def f():\n    try:\n        g()\n    except OSError:\n        import re\n"
    assert imports_on_error_paths(handler) == ["f"]
    assert imports_on_error_paths("def f():\n    import re\n    raise re.error") == ["f"]
    assert imports_on_error_paths("def f() -> FooError:\n    import re\n") == ["f"]
    assert imports_on_error_paths("def f():\n    import re\n    re.match()") == []
    found = {}
    for path in sorted((ROOT / "pycoll").rglob("*.py")):
        names = imports_on_error_paths(path.read_text())
        if names:
            found[str(path.relative_to(ROOT))] = names
    assert found == _BEFORE


#: Walks the errors of a world in a fresh process; prints what each of them imports.
_WALK = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np, pycoll

def on_all(comms, action):
    with ThreadPoolExecutor(len(comms)) as threads:
        return [future.exception() for future in [threads.submit(action, c) for c in comms]]

def world(transports):
    comms = pycoll.local_world(2, transports=transports, timeout_s=1.0)
    assert on_all(comms, lambda c: c.all_reduce(np.ones(3))) == [None] * 2
    return comms

def refused(**variables):
    os.environ.update(variables)
    try:
        pycoll.init()
    finally:
        for name in variables:
            del os.environ[name]

worlds = {kind: [world(kind) for _ in range(3)] for kind in ("shm", "tcp")}
one = worlds["shm"][0][0]
refused_by = [
    lambda: one.all_reduce(np.ones(3), op="summ"),
    lambda: one.all_reduce(np.ones(3), algorithm="rign"),
    lambda: one.all_reduce(np.array(["x"])),
    lambda: one.all_reduce(object()),
    lambda: one.all_reduce(np.ones(3), out=np.ones(4)),
    lambda: one.broadcast(np.ones(3), root=7),
    lambda: one.all_to_all(np.ones(3), splits=[1, 1]),
    lambda: one.split("x"),
    lambda: one.recv(np.ones(3), 9),
    lambda: one.explain("all_reduc", 8),
    lambda: pycoll.register_op("x", 1),
    lambda: pycoll.init(transports="shn"),
    lambda: pycoll.init(rank=0, size=2, address="x", secret="y" * 16),
    lambda: pycoll.init(rank=0, size=2, address="nowhere.invalid:1", secret="y" * 16),
    lambda: pycoll.init(rank=1, size=2, address="127.0.0.1:1", secret="y" * 16, init_timeout_s=0.1),
    lambda: refused(PYCOLL_TIMEOT_S="3"),
    lambda: refused(PYCOLL_TIMEOUT_S="x"),
    lambda: refused(PYCOLL_TUNING="/dev/null"),
]
for transports, (first, second, third) in worlds.items():
    refused_by += [
        first[0].barrier,
        first[0].barrier,
        lambda second=second: on_all(second, lambda c: c.all_reduce(np.ones(3 + c.rank))),
        lambda third=third: on_all(
            third, lambda c: c.close() if c.rank else c.all_reduce(np.ones(3))
        ),
        third[1].barrier,
    ]
before = set(sys.modules)
for number, action in enumerate(refused_by):
    try:
        told = action()
        assert any(told or []), f"{number} was not refused"
    except pycoll.PycollError:
        pass
    new = sorted(set(sys.modules) - before)
    assert not new, f"error {number} imports {new}"
print("walked", len(refused_by))
"""


def test_errors_import_no_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WALK],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "walked 28\n"
