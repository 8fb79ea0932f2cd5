"""Python ends a thread that takes the GIL after the interpreter's end by unwinding its stack, which
aborted the process in native frames; and an import that was cut off there kept its lock for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BEGIN = """
import contextlib, threading, time, weakref
import numpy as np
import pycoll

def daemon(work):
    def again():
        # A traceback that a daemon thread prints while Python ends aborts the process by itself.
        with contextlib.suppress(pycoll.PycollError):
            while True:
                work()
    threading.Thread(target=again, daemon=True).start()

comm = pycoll.init()
other = 1 - comm.rank
"""
#: The world is closed before the interpreter ends; sub-groups are not, so that threads wait there.
WAITS = {
    "recv": "sub.recv(np.zeros(4), other, tag=9)",
    "barrier": "sub.barrier()",
    "method": "barrier()",
    "array": "sub.all_reduce(np.ones(3000))",
    "work": "sub.all_reduce(np.ones(3), async_op=True).wait()",
    "list": "sub.all_reduce([np.ones(3), np.ones(300_000)])",
    "reduction": "sub.all_reduce(np.ones(2), 'slow')",
    "group": "grouped()",
}
THREADS = f"""{BEGIN}
def slow(a, b):
    time.sleep(0.005)
    return a + b

pycoll.register_op("slow", slow)

def start(way):
    sub = comm.split(0)
    barrier = sub.barrier

    def grouped():
        with sub.group():
            sub.all_reduce(np.ones(30_000))
            sub.barrier()

    daemon(lambda: eval(WAITS[way], {{**globals(), **locals()}}))
    return sub

WAITS = {WAITS!r}
"""

#: The first barrier imports a module slowly; the finaliser wants the same one.
CUT_OFF = f"""
import gc, sys, time

class Slow:
    def find_spec(self, name, path, target=None):
        if name == "pycoll.plan.lowering":
            time.sleep(0.5)

sys.meta_path.insert(0, Slow())
{BEGIN}
class Last:
    def __init__(self, comm, x):
        self.comm, self.x, self.me = comm, x, self  # a cycle: the last collection finds it

    def __del__(self):
        print("reduces", flush=True)
        self.comm.all_reduce(self.x, out=self.x)

gc.set_threshold(0)  # none before that
Last(comm, np.ones(2))
def meet():
    with contextlib.suppress(pycoll.PycollError):
        comm.barrier()

threading.Thread(target=meet, daemon=True).start()
time.sleep(0.2)
"""


def outputs(code: str, transports: str) -> str:
    """Of two ranks, each of which must end by itself and well."""
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "run", "-n", "2", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYCOLL_TRANSPORTS": transports, "PYTHONPATH": str(ROOT)},
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "terminate called" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_threads_that_wait_when_the_interpreter_ends(transports: str) -> None:
    """One of each kind in one process: each would have aborted it."""
    outputs(f"{THREADS}\nkept = [start(way) for way in WAITS]\ntime.sleep(0.5)", transports)


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_thread_that_waits_in_the_world(transports: str) -> None:
    """atexit closes the world: the thread hears of it, or parks."""
    code = f"{BEGIN}\ndaemon(lambda: comm.recv(np.zeros(4), other))"
    outputs(f"{code}\ntime.sleep(0.2)", transports)


def test_an_import_that_the_end_would_cut_off() -> None:
    """It is waited for, so that the finaliser finds its lock free. What that does so late is open:
    Python has taken modules away."""
    assert outputs(CUT_OFF, "shm").count("reduces") == 2


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_finaliser_that_atexit_runs_reduces(transports: str) -> None:
    code = f"""{BEGIN}
kept = pycoll.rank
weakref.finalize(kept, lambda: print("total", comm.all_reduce(np.ones(2)).tolist(), flush=True))
daemon(lambda sub=comm.split(0): sub.recv(np.zeros(4), other))
"""
    assert outputs(code, transports).count("total [2.0, 2.0]") == 2


def test_only_one_file_touches_the_gil() -> None:
    """Whoever takes it elsewhere is ended there, and unwinds what is not made for it."""
    words = ("gil_scoped_", "PyGILState_Ensure", "PyEval_RestoreThread", "PyEval_AcquireThread")
    files = [path for path in (ROOT / "bindings").rglob("*.*") if path.stem != "gil"]
    assert [path.name for path in files if any(word in path.read_text() for word in words)] == []
