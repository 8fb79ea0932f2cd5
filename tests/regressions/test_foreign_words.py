"""A word of mpi4py, torch, Horovod, NCCL, NumPy or JAX gave an error that did not say what pycoll
calls it, and errors about arguments named classes that users never see."""

from __future__ import annotations

import operator
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import pycoll
from pycoll import InvalidArgumentError
from pycoll.foreign_words import CALLS
from pycoll.tools.cli import main


@pytest.fixture
def comm() -> Any:
    (only,) = pycoll.local_world(1)
    yield only
    only.close()


def test_calls_of_neighbours_name_ours(comm: pycoll.Communicator) -> None:
    assert len(CALLS) > 80
    for name, here in CALLS.items():
        for owner in (comm, pycoll):
            if not hasattr(owner, name):
                with pytest.raises(AttributeError, match=f"{name}.*: pycoll calls it {here[:5]}"):
                    getattr(owner, name)
        assert name not in dir(comm) or hasattr(comm, name)
    with pytest.raises(AttributeError, match=r"^module 'pycoll' has no attribute 'nothing'$"):
        _ = pycoll.nothing


def test_what_the_table_names_is_there(comm: pycoll.Communicator) -> None:
    for here in set(CALLS.values()):
        word = here.partition("(")[0]
        assert hasattr(comm, word) or hasattr(pycoll, word) or " " in word, here


@pytest.mark.parametrize(
    ("op", "here"),
    [
        ("mean", "avg"),
        ("SUM", "sum"),
        (np.add, "sum"),
        (np.multiply, "prod"),
        (np.minimum, "min"),
        (np.bitwise_xor, "bxor"),
        (operator.and_, "band"),
        (sum, "sum"),
        (max, "max"),
    ],
)
def test_reductions_of_neighbours_name_ours(comm: pycoll.Communicator, op: Any, here: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^op is .* \(pycoll calls it '{here}'\); "):
        comm.all_reduce(np.ones(2), op)
    with pytest.raises(InvalidArgumentError, match=r"^op is 'middle'; there are sum"):
        comm.all_reduce(np.ones(2), "middle")


def test_reductions_of_torch_and_mpi4py_name_ours(comm: pycoll.Communicator) -> None:
    distributed = pytest.importorskip(
        "torch.distributed", reason="no torch: pip install -r tests/requirements.txt"
    )
    ops = [(distributed.ReduceOp.SUM, "sum"), (distributed.ReduceOp.AVG, "avg")]
    # mpi4py is not imported, as it would start an MPI: its operations do not know their names.
    fake: Any = SimpleNamespace(Op=complex, SUM=1j, MAX=2j)
    before = sys.modules.get("mpi4py.MPI")
    sys.modules["mpi4py.MPI"] = fake
    try:
        for op, here in [*ops, (1j, "sum"), (2j, "max")]:
            with pytest.raises(InvalidArgumentError, match=f"pycoll calls it '{here}'"):
                comm.all_reduce(np.ones(2), op)
    finally:
        del sys.modules["mpi4py.MPI"]
        if before is not None:
            sys.modules["mpi4py.MPI"] = before


def test_errors_about_arguments_name_the_communicator(comm: pycoll.Communicator) -> None:
    methods = [n for n in pycoll.__all__ if hasattr(getattr(comm, n, None), "bind")]
    assert len(methods) >= 16
    for name in methods:
        for owner in (comm, pycoll.Communicator):
            assert getattr(owner, name).__qualname__ == f"Communicator.{name}"
        with pytest.raises(TypeError, match=rf"^Communicator\.{name}\(\) got an unexpected "):
            getattr(comm, name)(no_such_word=1)
        # Groups refuse sendrecv before its words are read.
        refused = InvalidArgumentError, "^sendrecv inside a group"
        wrong = (TypeError, rf"^Communicator\.{name}\(\)") if name != "sendrecv" else refused
        with comm.group(), pytest.raises(wrong[0], match=wrong[1]):
            getattr(comm, name)(no_such_word=1)


def test_frames_and_series_name_what_to_pass(comm: pycoll.Communicator) -> None:
    frame = type("DataFrame", (), {"__module__": "pandas.core.frame", "to_numpy": None})()
    with pytest.raises(InvalidArgumentError, match=r"x is a pandas DataFrame.*x\.to_numpy\(\)"):
        comm.all_reduce(frame)


def test_traced_values_name_pycoll_jax(comm: pycoll.Communicator) -> None:
    jax = pytest.importorskip("jax", reason="no jax: pip install -r tests/requirements.txt")
    with pytest.raises(InvalidArgumentError, match=r"traced JAX value: .* of pycoll\.jax"):
        jax.jit(comm.all_reduce)(np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("bench all_reduce --dtype float", "pycoll calls it float32"),
        ("bench all_reduce -g 2", "the number of ranks is -n N"),
        ("bench all_reduce -n 2 -o max", "the reduction is --op WORD"),
        ("bench all_reduce -n 2 -d half", "the element type is --dtype WORD"),
        ("bench allreduce -n 2", "pycoll calls it all_reduce"),
        ("explain Bcast", "pycoll calls it broadcast"),
        ("run --host a:2,b:2 -n 4 x.py", "the hosts are -H host:slots,host:slots or --hostfile"),
        ("run --machinefile hosts -n 4 x.py", "the file of the hosts is --hostfile FILE"),
        ("run -n 4 --master-addr a x.py", "the place where nodes meet is --address HOST:PORT"),
        ("run --nproc-per-node=4 x.py", "the number of ranks is -n N"),
    ],
)
def test_options_of_neighbours_name_ours(line: str, told: str) -> None:
    done = CliRunner().invoke(main, line.split())
    assert done.exit_code != 0
    assert told in done.output


def test_element_types_of_neighbours_name_ours(comm: pycoll.Communicator) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'half' .pycoll calls it float16"):
        comm.choice("all_reduce", 8, "half")
    with pytest.raises(InvalidArgumentError, match="'allreduce': pycoll calls it all_reduce"):
        comm.choice("allreduce", 8)
