"""A tensor that requires grad went through a collective of the core, whose new result had no
history, so that its gradient was lost without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import world_in_threads

import pycoll
import pycoll.optim

torch = pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
SIZE = 2
COUNT = 4
TEXT = (
    "requires grad, and no gradient flows.*call allreduce, .*of pycoll.torch, which differentiate"
)
#: What other ranks hear of it.
TOLD = "rank 0 .* has refused .*: x requires grad, and no gradient flows"

Call = Callable[[pycoll.Communicator, Any], Any]
CALLS: dict[str, Call] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_reduce of a list": lambda comm, x: comm.all_reduce([x.detach(), x])[1],
    "all_reduce, async": lambda comm, x: comm.all_reduce(x, async_op=True).wait(),
    "all_reduce, bound": lambda comm, x: comm.all_reduce.bind(x)(),
    "reduce": lambda comm, x: comm.reduce(x, 0),
    "broadcast": lambda comm, x: comm.broadcast(x, 1),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_gather of lengths": lambda comm, x: comm.all_gather(x, lengths=[COUNT] * SIZE),
    "gather": lambda comm, x: comm.gather(x, 1),
    "gather of lengths": lambda comm, x: comm.gather(x, 1, lengths=[COUNT] * SIZE),
    "scatter": lambda comm, x: comm.scatter(x if comm.rank == 0 else x.detach(), 0),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "all_to_all with splits": lambda comm, x: comm.all_to_all(x, [COUNT // SIZE] * SIZE),
    "scan": lambda comm, x: comm.scan(x),
    "exscan": lambda comm, x: comm.exscan(x),
    "average_gradients": lambda comm, x: pycoll.optim.average_gradients({"w": x}, comm=comm)["w"],
}


@pytest.mark.parametrize("name", CALLS)
def test_new_results_of_such_tensors_are_refused(name: str) -> None:
    call = CALLS[name]

    def run(comm: pycoll.Communicator) -> None:
        leaf = torch.arange(float(COUNT), requires_grad=True)
        for _ in range(2):  # the second time, native code knows the call
            wanted = call(comm, leaf.detach())
            for x in (leaf, leaf * 1, torch.nn.Parameter(leaf.detach())):
                # The others hear of the root's refusal, as far as it fits into a notice.
                told = name == "scatter" and comm.rank != 0
                with pytest.raises(pycoll.InvalidArgumentError, match=TOLD if told else TEXT):
                    call(comm, x)
                with torch.no_grad():
                    found = call(comm, x)
                assert wanted is None or (torch.equal(found, wanted) and not found.requires_grad)

    world_in_threads(SIZE).run(run)


def test_groups_refuse_them_at_the_call() -> None:
    def run(comm: pycoll.Communicator) -> None:
        leaf = torch.ones(COUNT, requires_grad=True)
        for _ in range(2):
            comm.all_reduce(leaf.detach())
            with pytest.raises(pycoll.InvalidArgumentError, match=TEXT), comm.group():
                comm.all_reduce(leaf)

    world_in_threads(SIZE).run(run)


def test_memory_of_the_caller_is_taken_as_it_is() -> None:
    def run(comm: pycoll.Communicator) -> None:
        for _ in range(2):
            leaf, out = torch.ones(COUNT, requires_grad=True), torch.zeros(COUNT)
            assert comm.all_reduce(leaf, out=out) is out and out.tolist() == [2.0] * COUNT
            assert comm.all_reduce(leaf, out=leaf) is leaf and leaf.tolist() == [2.0] * COUNT
            comm.all_reduce([leaf], out=[out])
            assert out.tolist() == [4.0] * COUNT
            comm.broadcast(leaf, out=leaf)
            comm.all_gather(leaf[:1], out=out[:2])
            assert out.tolist() == [2.0, 2.0, 4.0, 4.0]

    world_in_threads(SIZE).run(run)
