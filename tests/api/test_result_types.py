"""What type checkers make of calls: results have the arrays' own types, and mistakes are found.

Both programs are checked by mypy --strict, in one run, and never started.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

GOOD = """
from typing import Any
import numpy as np
import numpy.typing as npt
import pycoll
from pycoll import Work

comm = pycoll.init()
x = np.ones(3)
f32: npt.NDArray[np.float32] = np.ones(3, np.float32)
a: npt.NDArray[np.float64] = comm.all_reduce(x)
a2: npt.NDArray[np.float32] = pycoll.all_reduce(f32, "max", out=f32, algorithm="ring")
n: int = comm.all_reduce(3)
fl: float = comm.all_reduce(1.5, "avg")
many: list[npt.NDArray[np.float64]] = comm.all_reduce([x, x])
tuples: list[npt.NDArray[np.float64]] = comm.all_reduce((x, x))
w: Work[npt.NDArray[np.float64]] = comm.all_reduce(x, async_op=True)
b: npt.NDArray[np.float64] = w.wait(timeout=3)
r: npt.NDArray[np.float64] | None = comm.reduce(x, root=0)
g: list[int] = comm.all_gather(3)
g2: npt.NDArray[Any] = comm.all_gather(np.float32(3))
g3: npt.NDArray[np.float64] | None = comm.gather(x, 0, [3])
s: npt.NDArray[np.float64] = comm.scatter(x if comm.rank == 0 else None)
s2: npt.NDArray[Any] = comm.scatter(root=1)
t: npt.NDArray[np.float64] = comm.all_to_all(x, [1] * comm.size)
rs: npt.NDArray[np.float64] = comm.reduce_scatter(x, splits=[3])
wn: Work[None] = comm.barrier(async_op=True)
rv: npt.NDArray[np.float64] = comm.recv(np.zeros(3), 0)
iw: Work[npt.NDArray[np.float64]] = comm.irecv(np.zeros(3), 0)
who: int = comm.irecv_any(np.zeros(3)).wait()
results: list[npt.NDArray[np.float64]] = pycoll.wait_all([w, w])
o: dict[str, int] = comm.broadcast_object({"a": 1})
words: list[str] = comm.all_gather_object("a")
p: int = comm.probe().nbytes
bare: Work = w
bound = comm.all_reduce.bind(x, out=x)
bound()
flag = bool(comm.rank)
dyn = comm.all_reduce(x, async_op=flag)
with comm.group():
    gw = comm.all_reduce(x, async_op=True)
with comm.dup() as other:
    other.barrier()
"""

#: Every line behind the blank one must be refused.
BAD = """
import numpy as np
import pycoll
comm = pycoll.init()
x = np.ones(3)
work = comm.all_reduce(x, async_op=True)
floats = np.zeros(3, np.float32)

z1: str = comm.all_reduce(x)
work.waitt()
z2: str = work.wait()
z3: int = pycoll.all_gather(3)
comm.all_reduce(x, opp="max")
comm.all_reduce(x, op=np.add)
z5: str = comm.all_reduce(x, out=np.zeros(3))
z6: str = comm.all_reduce([x, x])
comm.allreduce(x)
z7: str = comm.recv(x, 0)
z8: list[str] = pycoll.wait_all([work])
comm.barrier().wait()
comm.all_reduce(x).wait()
z9: str = comm.broadcast_object(3)
comm.send(x)
comm.reduce(x).shape
z10: "np.ndarray[tuple[int], np.dtype[np.float64]]" = comm.all_reduce(floats)
z11: str = comm.all_reduce.bind
comm.probe().bytes
"""


def test_types_of_results(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="no mypy: pip install -r tests/requirements.txt")
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "good.py", "bad.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not re.findall(r"^good.py.*", done.stdout, re.M), done.stdout
    refused = {int(number) for number in re.findall(r"^bad.py:(\d+): error", done.stdout, re.M)}
    lines = BAD.splitlines()
    begin = lines.index("", 1) + 1
    wanted = set(range(begin + 1, len(lines) + 1))
    assert refused == wanted, "\n".join(lines[one - 1] for one in wanted ^ refused) + done.stdout


def test_works_can_be_subscripted_while_programs_run() -> None:
    from pycoll import Work

    assert Work[int].__origin__ is Work
