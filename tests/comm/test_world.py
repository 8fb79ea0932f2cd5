"""Worlds: joining, splitting, leaving; ranks as processes; forks, deaths, what is left behind."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from harness import ROOT, ProcessWorld, fresh_world, python, world_in_processes, world_in_threads

import pycoll

Comm = pycoll.Communicator


# ---- processes


def many_things(comm: Comm, seed: int) -> dict[str, Any]:
    """Run by every rank of a world of processes."""
    inputs = oracle.inputs("float32", "sum", comm.size, 30_000, seed)
    mine = inputs[comm.rank]
    return {
        "identity": (comm.rank, comm.size, pycoll.rank(), pycoll.size(), pycoll.local_size()),
        "media": comm.transport_names(),
        "all_reduce": pycoll.all_reduce(mine),
        "reduce_scatter": comm.reduce_scatter(mine),
        "all_gather": comm.all_gather(mine[: comm.rank]),
        "broadcast": comm.broadcast(mine, root=comm.size - 1),
        "all_to_all": comm.all_to_all(mine[: 40 * comm.size]),
        "split": comm.split(comm.rank % 2).all_reduce(comm.rank),
        "scan": pycoll.scan(comm.rank + 1, "prod"),
    }


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_that_are_processes(size: int, transports: str) -> None:
    found = world_in_processes(size, many_things, 3, transports=transports)
    inputs = oracle.inputs("float32", "sum", size, 30_000, 3)
    total = oracle.fold(inputs, "sum")
    ends = oracle.bounds(30_000, size)
    for rank, one in enumerate(found):
        assert one["identity"] == (rank, size, rank, size, size)
        assert one["media"] == ("self" if size == 1 else transports)
        assert oracle.same_bits(one["all_reduce"], total)
        assert oracle.same_bits(one["reduce_scatter"], total[ends[rank] : ends[rank + 1]])
        joined = np.concatenate([row[:r] for r, row in enumerate(inputs)])
        assert oracle.same_bits(one["all_gather"], joined)
        assert oracle.same_bits(one["broadcast"], inputs[-1])
        rows = inputs[:, 40 * rank : 40 * rank + 40].reshape(-1)
        assert oracle.same_bits(one["all_to_all"], rows)
        assert one["split"] == sum(r for r in range(size) if r % 2 == rank % 2)
        assert one["scan"] == np.prod(np.arange(1, rank + 2))


def die_in_the_middle(comm: Comm, victim: int) -> Any:
    comm.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        for _ in range(10_000):
            comm.all_reduce(np.ones(1000))
    except pycoll.PeerLostError as error:
        waited = time.monotonic() - begin
        assert error.how and str(error).endswith(error.how)
        return error.rank, error.ranks, error.host, error.operation, str(error), waited
    return None


def started_here() -> set[int]:
    """This process, and those that it has started and that run still."""
    parents = {}
    for one in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(one.parent.name)] = int(one.read_text().rsplit(")", 1)[1].split()[1])
    found, size = {os.getpid()}, 0
    while size < len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


def open_files(pid: int) -> set[str]:
    """What the descriptors of a process refer to; a socket is socket:[INODE]."""
    found = set()
    with contextlib.suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(one))
    return found


def named_things() -> set[str]:
    """What a crash could leave behind that has a name: shared memory, files, bound sockets.

    An abstract socket lasts as long as a process has it open. Other tests run in other processes.
    """
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    files = {str(one) for folder in folders for one in folder.iterdir()}
    own = set().union(*map(open_files, started_here()))
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    named = [words for words in sockets if len(words) > 7]
    paths = {w[7] for w in named if not w[7].startswith("@") or f"socket:[{w[6]}]" in own}
    return {one for one in files | paths if "pycoll" in one.lower()}


def left_behind(before: set[str]) -> set[str]:
    """What is new and stays. Worlds of other tests come and go, and last up to a minute."""
    new = named_things() - before
    end = time.monotonic() + 60
    while new and time.monotonic() < end:
        time.sleep(0.2)
        new &= named_things()
    return new


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_survivors_name_the_rank_that_was_killed(transports: str) -> None:
    before = named_things()
    outcomes = ProcessWorld(3, die_in_the_middle, 1, transports=transports).outcomes()
    assert not left_behind(before)
    assert isinstance(outcomes[1], AssertionError) and "status -9" in str(outcomes[1])
    for rank in (0, 2):
        culprit, ranks, host, operation, text, waited = outcomes[rank]
        assert (culprit, ranks, operation) == (1, (1,), "all_reduce"), outcomes[rank]
        assert host and "rank 1" in text and waited < 2.0


def leave_early(comm: Comm) -> str:
    if comm.rank == 0:
        pycoll.finalize()
        return ""
    try:
        comm.all_reduce(np.ones(3))
    except pycoll.PycollError as error:
        return f"{type(error).__name__} {error.ranks}"
    return "nothing"


def test_leaving_while_others_still_work_is_told() -> None:
    assert world_in_processes(2, leave_early)[1] == "PeerLostError (0,)"


# ---- init and finalize


def test_init_twice_and_finalize_and_again() -> None:
    out = python(
        "import pycoll\n"
        "c = pycoll.init()\n"
        "assert c is pycoll.world() and pycoll.is_initialized()\n"
        "try: pycoll.init()\n"
        "except pycoll.InvalidArgumentError as e: print(e)\n"
        "pycoll.finalize(); pycoll.finalize()\n"
        "assert not pycoll.is_initialized()\n"
        "for call in (pycoll.world, pycoll.rank, pycoll.barrier):\n"
        "    try: call()\n"
        "    except pycoll.ClosedError as e: print(e)\n"
        "try: c.barrier()\n"
        "except pycoll.ClosedError as e: print(e)\n"
        "print(pycoll.init(rank=0, size=1).all_reduce(3))\n"
    )
    lines = out.splitlines()
    assert "pycoll.init() was called twice" in lines[0]
    assert lines[1:4] == ["pycoll is not initialised: call pycoll.init() first"] * 3
    assert "closed" in lines[4] and lines[5] == "3"


def test_the_world_alone_has_size_one() -> None:
    code = (
        "import pycoll as p; p.init();"
        "print(p.rank(), p.size(), p.local_rank(), p.local_size(), p.cross_rank(), p.cross_size())"
    )
    assert python(code) == "0 1 0 1 0 1"


def test_settings_come_from_variables_and_arguments_win() -> None:
    code = "import pycoll; print(pycoll.init({}).timeout_s)"
    assert python(code.format(""), PYCOLL_TIMEOUT_S="7.5") == "7.5"
    assert python(code.format("timeout_s=2"), PYCOLL_TIMEOUT_S="7.5") == "2.0"


def test_unknown_variables_are_refused_with_the_nearest_name() -> None:
    code = "import pycoll\ntry: pycoll.init()\nexcept pycoll.InvalidArgumentError as e: print(e)"
    assert "PYCOLL_TIMEOUT_S" in python(code, PYCOLL_TIMEOT_S="3")


def test_nothing_is_left_after_close() -> None:
    """Threads, descriptors and mappings of a world of threads, over both media."""

    def census() -> tuple[int, int, int]:
        own = Path("/proc/self")
        maps = (own / "maps").read_text()
        return (
            len(list((own / "task").iterdir())),
            len(list((own / "fd").iterdir())),
            maps.count("memfd"),
        )

    for transports in ("shm", "tcp"):
        fresh_world(2, transports).close()
        before = census()
        for _ in range(3):
            world = fresh_world(3, transports)
            world.run(lambda c: [c.all_reduce(np.ones(1000)), c.barrier(async_op=True).wait()])
            world.run(lambda c: c.split(0).close())
            world.close()
        del world
        # The kernel takes threads that have been joined off the list a moment later.
        limit = time.monotonic() + 5
        while any(a > b for a, b in zip(census(), before, strict=True)):
            assert time.monotonic() < limit, (transports, census(), before)
            time.sleep(0.01)


def test_dropped_communicators_clean_up() -> None:
    code = (
        "import pycoll, os, gc, threading\n"
        "def fds(): return len(os.listdir('/proc/self/fd'))\n"
        "pycoll.local_world(2); gc.collect(); before = fds()\n"
        "for _ in range(3):\n"
        "    w = pycoll.local_world(3)\n"
        "    works = [c.all_reduce(1, async_op=True) for c in w]\n"
        "    print([x.wait() for x in works])\n"
        "    del w, works; gc.collect()\n"
        "print(fds() - before, threading.active_count())"
    )
    assert python(code).splitlines() == ["[3, 3, 3]"] * 3 + ["0 1"]


def test_exit_without_finalize_is_clean() -> None:
    code = (
        "import pycoll, numpy as np\n"
        "w = pycoll.local_world(2)\n"
        "pycoll.init()\n"
        "works = [c.all_reduce(np.ones(9), async_op=True) for c in w]\n"
        "lost = w[0].all_reduce(1, async_op=True)\n"
        "print(works[0].wait()[0])"
    )
    assert python(code) == "2.0"


# ---- forks


def test_a_forked_child_gets_a_clear_error_and_leaves_the_parent_alone() -> None:
    code = """
import os, sys, pycoll, threading
w = pycoll.local_world(2)
pycoll.init()
def both(f):
    ts = [threading.Thread(target=f, args=(c,)) for c in w]
    [t.start() for t in ts]; [t.join() for t in ts]
both(lambda c: c.barrier())
w[0].barrier(async_op=True); w[1].barrier(async_op=True).wait()
pid = os.fork()
if pid == 0:
    for call in (w[0].barrier, lambda: w[1].all_reduce(1), lambda: pycoll.all_reduce(1)):
        try:
            call()
        except pycoll.ClosedError as error:
            print("fork" in str(error), flush=True)
    pycoll.finalize()
    del w
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
sums = []
both(lambda c: sums.append(c.all_reduce(2)))
print(*sums)
"""
    assert python(code).split() == ["True", "True", "True", "0", "4", "4"]


def test_a_forked_child_may_join_a_world_of_its_own() -> None:
    code = """
import os, pycoll
pycoll.init()
if os.fork() == 0:
    assert not pycoll.is_initialized()
    print(pycoll.init().all_reduce(5), flush=True)
    os._exit(0)
os.wait()
print(pycoll.all_reduce(6))
"""
    assert python(code).split() == ["5", "6"]


# ---- Ctrl-C


def test_ctrl_c_stops_a_waiting_rank_at_once() -> None:
    code = """
import os, signal, threading, time, pycoll
w = pycoll.local_world(2)
begin = time.monotonic()
try:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    w[0].all_reduce(1)
except KeyboardInterrupt:
    print(time.monotonic() - begin < 10)
"""
    assert python(code) == "True"


# ---- the package


def test_the_package_offers_what_it_lists() -> None:
    import pycoll.comm.world

    # run() starts processes, so the modules of communicators do not have it.
    assert pycoll.__all__ == sorted([*pycoll.comm.world.__all__, "run"])
    for name in pycoll.__all__:
        assert getattr(pycoll, name).__doc__, name
    assert set(pycoll.__all__) < set(dir(pycoll))
    with pytest.raises(AttributeError, match="no attribute 'all_redice'"):
        pycoll.all_redice  # noqa: B018


@pytest.mark.parametrize("name", ["all_reduce", "send", "split", "barrier"])
def test_functions_of_the_module_have_the_parameters_of_methods_without_self(name: str) -> None:
    method = inspect.signature(getattr(Comm, name))
    function = inspect.signature(getattr(pycoll, name))
    assert [*function.parameters.values()] == [*method.parameters.values()][1:]


def test_explain_names_the_choice() -> None:
    comm = world_in_threads(3).communicators[0]
    text = comm.explain("all_reduce", 1 << 20)
    assert comm.choice("all_reduce", 1 << 20) in text and "3 ranks" in text


def test_communicators_show_themselves() -> None:
    comm = world_in_threads(2).communicators[1]
    assert repr(comm) == "<pycoll.Communicator 'local_world': rank 1 of 2>"
    assert comm.names[0].endswith(f":{os.getpid()}") and comm.hosts == ((0, 1),)
    assert (comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size) == (1, 2, 0, 1)


def test_the_stub_describes_the_native_module() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy.stubtest",
            "pycoll._core",
            "--concise",
            "--allowlist",
            str(Path(__file__).with_name("stubtest_allowlist.txt")),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
