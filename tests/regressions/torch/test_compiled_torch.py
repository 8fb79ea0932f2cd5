"""torch.compile traced pycoll instead of leaving it alone: collectives in compiled functions took
their tensor for the communicator, and parameters whose step was to come ended the compiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from harness import python, world_in_processes

import pycoll

pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
SIZE = 2
NAMES = ["method", "module", "bound", "work", "list", "gather", "group", "message", "horovod"]


def _functions(comm: pycoll.Communicator) -> dict[str, Callable[[Any], Any]]:
    import torch

    import pycoll.torch as hvd

    bound = comm.all_reduce.bind(torch.ones(3), "max")

    def in_group(x: Any) -> Any:
        with comm.group():
            both = comm.all_reduce(x), comm.all_reduce(x, "max")
        return both[0].wait() + both[1].wait()

    def message(x: Any) -> Any:
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(x, 0)
        comm.barrier()
        return x + comm.rank + pycoll.rank()

    return {
        "method": lambda x: comm.all_reduce(x * 2) + 1,
        "module": lambda x: pycoll.all_reduce(x * 2) + 1,
        "bound": lambda x: bound() + x,
        "work": lambda x: comm.all_reduce(x * 2, async_op=True).wait() + 1,
        "list": lambda x: comm.all_reduce([x, x * 2])[1] + 1,
        "gather": lambda x: comm.all_gather(x * 2).sum() + x,
        "group": in_group,
        "message": message,
        "horovod": lambda x: hvd.allreduce(x * 2, op=hvd.Sum) + 1,
    }


def _steps_with_model(when: int) -> tuple[bool, list[str], str]:
    """Six steps with model=, of which those from ``when`` on are compiled."""
    import torch

    import pycoll.torch as hvd

    torch.manual_seed(0)
    pair = [
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        for _ in range(2)
    ]
    ours, plain = pair
    plain.load_state_dict(ours.state_dict())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(ours.parameters(), lr=0.1),
            ours.named_parameters(),
            policy="fixed",
            model=ours,
        )
        wanted = torch.optim.Adam(plain.parameters(), lr=0.1)
        forward: Any = ours
        for step in range(6):
            if step == when:
                # It calls no module, whose hooks would make the parameters step.
                forward = torch.compile(
                    lambda x: torch.nn.functional.linear(
                        torch.relu(torch.nn.functional.linear(x, ours[0].weight, ours[0].bias)),
                        ours[2].weight,
                        ours[2].bias,
                    ),
                    backend="aot_eager",
                )
            x = torch.arange(8.0).reshape(2, 4) + step
            for net, one in ((forward, optimizer), (plain, wanted)):
                one.zero_grad()
                net(x).square().mean().backward()
                one.step()
    same = all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True)
    )
    texts = [str(one.message) for one in told if "torch.compile" in str(one.message)]
    explanation = optimizer.explain()
    return same, texts, explanation


def compile_all(comm: pycoll.Communicator) -> dict[str, Any]:
    """One rank, where torch is imported after pycoll."""
    import torch

    import pycoll.torch as hvd

    hvd.init()
    found: dict[str, Any] = {"steps": [_steps_with_model(when=2), _steps_with_model(when=0)]}
    for name, function in _functions(comm).items():
        compiled = torch.compile(function, backend="eager")
        results = []
        for _ in range(3):
            x = torch.arange(3.0) + comm.rank
            results.append((compiled(x.clone()).tolist(), function(x.clone()).tolist()))
        found[name] = results
    compiled = torch.compile(lambda x: comm.all_reduce(x) + 1, backend="eager", fullgraph=True)
    try:
        compiled(torch.ones(3))
    except Exception as error:
        found["whole"] = f"{type(error).__name__}: {error}"
    hvd.shutdown()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return world_in_processes(SIZE, compile_all)


def test_steps_do_not_wait_where_there_is_compiled_code(found: list[dict[str, Any]]) -> None:
    for one in found:
        for same, texts, explanation in one["steps"]:
            assert same
            assert len(texts) == 1 and "step() steps all parameters at once" in texts[0], texts
            assert explanation.startswith("parameters step at once, since torch.compile")


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_function_gives_what_it_gives_uncompiled(
    found: list[dict[str, Any]], name: str
) -> None:
    for one in found:
        assert all(compiled == plain for compiled, plain in one[name]), one[name]


def test_a_graph_without_breaks_is_refused_by_name(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert "Unsupported" in one["whole"] and "all_reduce" in one["whole"], one["whole"]


def test_the_rule_is_given_where_the_tracer_is_there_already() -> None:
    text = python(
        "import torch._dynamo, sys, pycoll.comm.world\n"
        "from torch._dynamo import trace_rules\n"
        "print(sum('pycoll' in one for one in trace_rules.SKIP_DIRS))\n"
        "print(any(type(one).__module__ == 'pycoll.comm.dynamo' for one in sys.meta_path))\n"
        "(comm,) = pycoll.local_world(1)\n"
        "f = torch.compile(lambda x: comm.all_reduce(x * 2) + 1, backend='eager')\n"
        "print(f(torch.ones(2)).tolist())"
    )
    assert text.splitlines() == ["1", "False", "[3.0, 3.0]"], text
