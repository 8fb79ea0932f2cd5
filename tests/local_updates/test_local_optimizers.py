"""The wrappers of torch's optimizers: the oracle's bits, restarts, schedulers, hooks, errors."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import world_in_threads
from local_oracle import oracle

import pycoll
import pycoll.optim
from pycoll import InvalidArgumentError, MismatchError
from pycoll.optim import AdaComm, DiLoCo, LocalSGD, PostLocal, SlowMo

torch = pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")

LR = 2.0**-3
SHAPES = [(3, 4), (), (5,), (2, 2)]


def model_of(rank: int) -> list[Any]:
    return [
        torch.nn.Parameter(torch.arange(math.prod(s), dtype=torch.float64).reshape(s) * 8 + rank)
        for s in SHAPES
    ]


def gradient(rank: int, step: int, like: Any) -> Any:
    numbers = np.arange(math.prod(like.shape)).reshape(like.shape)
    return np.asarray((numbers * 7 + rank * 4 + step * 3) % 64 * 4, np.float64)


def inner(rank: int, step: int, params: list[Any]) -> list[Any]:
    return [np.asarray(p - gradient(rank, step, p) * LR) for p in params]


def give(rank: int, step: int, model: list[Any]) -> None:
    for p in model:
        if p.requires_grad:
            p.grad = torch.from_numpy(gradient(rank, step, p))


def values(model: list[Any]) -> list[Any]:
    return [p.detach().numpy().copy() for p in model]


def trained(
    comm: Any, wrap: Callable[..., Any], first: int, last: int, model: Any = None, opt: Any = None
) -> tuple[list[Any], Any]:
    model = model or model_of(comm.rank)
    opt = opt or wrap(torch.optim.SGD(model, LR), comm=comm)
    for step in range(first, last + 1):
        give(comm.rank, step, model)
        opt.step()
        opt.zero_grad()
    return model, opt


def same(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_local_sgd_has_the_bits_of_the_oracle(size: int, every: int) -> None:
    def run(comm: pycoll.Communicator) -> Any:
        model, opt = trained(comm, lambda o, comm: LocalSGD(o, every, comm=comm), 1, 10)
        assert opt.synchronized == (10 % every == 0) and type(opt).__name__ == "SGD"
        assert isinstance(opt, torch.optim.SGD)
        opt.finish()
        assert opt.synchronized
        return values(model)

    wanted = oracle(values(model_of(0)), size, 10, inner, [every])
    end = [sum(one) / size for one in zip(*wanted, strict=True)]
    for found in world_in_threads(size).run(run):
        same(found, end)


def test_post_local_begins_like_synchronous_training_with_any_optimizer() -> None:
    """Adam on averaged gradients; averages of parameters would have other bits."""

    def run(comm: pycoll.Communicator) -> None:
        model = model_of(comm.rank)
        opt = LocalSGD(torch.optim.Adam(model, LR), PostLocal(5, 2), comm=comm)
        twin = model_of(0)
        plain = torch.optim.Adam(twin, LR)
        for step in range(1, 6):
            give(comm.rank, step, model)
            for p in twin:
                total = sum(gradient(rank, step, p) for rank in range(comm.size))
                p.grad = torch.from_numpy(np.asarray(total / comm.size))
            opt.step()
            plain.step()
            same(values(model), values(twin))
            assert opt.synchronized
        give(comm.rank, 6, model)
        opt.step()
        assert not opt.synchronized
        mine = np.concatenate([one.ravel() for one in values(model)])
        assert len({bytes(one) for one in comm.all_gather(mine[None])}) == comm.size

    world_in_threads(2).run(run)


def test_gradients_that_a_rank_lacks_count_as_zeros() -> None:
    def run(comm: pycoll.Communicator) -> Any:
        model = model_of(0)[:2]
        opt = LocalSGD(torch.optim.SGD(model, 1.0), PostLocal(2, 2), comm=comm)
        give(comm.rank, 1, model)
        if comm.rank == 0:
            model[1].grad = None
        opt.step(lambda: torch.tensor(3.0))
        return values(model)

    first, second = world_in_threads(2).run(run)
    same(first, second)
    assert float(first[1]) == -float(gradient(1, 1, first[1])) / 2


@pytest.mark.parametrize("stopped", range(1, 6))
def test_a_restart_goes_on_bit_by_bit(stopped: int) -> None:
    def run(comm: pycoll.Communicator) -> None:
        def wrap(opt: Any, comm: Any) -> Any:
            return LocalSGD(opt, PostLocal(2, 3), comm=comm)

        def adam(model: Any) -> Any:
            return wrap(torch.optim.Adam(model, 0.1), comm)

        model = model_of(comm.rank)
        opt = adam(model)
        trained(comm, wrap, 1, stopped, model, opt)
        saved = pickle.dumps((values(model), copy.deepcopy(opt.state_dict())))
        trained(comm, wrap, stopped + 1, 9, model, opt)
        numbers, state = pickle.loads(saved)
        again = [torch.nn.Parameter(torch.from_numpy(one)) for one in numbers]
        twin = adam(again)
        twin.load_state_dict(state)
        trained(comm, wrap, stopped + 1, 9, again, twin)
        same(values(again), values(model))
        assert twin.local_state.numbers() == opt.local_state.numbers()
        # From the state of a bare optimizer it begins anew.
        twin.load_state_dict({k: v for k, v in state.items() if k != "local_updates"})
        assert twin.local_state is None

    world_in_threads(2).run(run)


def test_schedulers_hooks_and_closures_work_as_before() -> None:
    def run(comm: pycoll.Communicator) -> None:
        model = model_of(0)
        bare = torch.optim.SGD(model, 1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(bare, 1, 0.5)
        opt = LocalSGD(bare, 2, comm=comm)
        calls: list[str] = []
        opt.register_step_post_hook(lambda *_: calls.append("post"))
        opt.load_state_dict(opt.state_dict())
        for step in range(1, 3):
            give(comm.rank, step, model)
            assert opt.step(lambda: 7.0) == 7.0
            bare._opt_called = True  # or the scheduler warns
            scheduler.step()
        assert calls == ["post"] * 2 and opt.param_groups[0]["lr"] == 0.25
        later = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        give(comm.rank, 3, model)
        opt.step()
        later.step()
        assert opt.param_groups[0]["lr"] == 0.125 and calls == ["post"] * 3
        assert opt.local_state.step == 3

    world_in_threads(2).run(run)


def test_frozen_parameters_stay() -> None:
    def run(comm: pycoll.Communicator) -> Any:
        model = model_of(comm.rank)
        model[0].requires_grad_(False)
        trained(comm, lambda o, comm: LocalSGD(o, 1, comm=comm), 1, 2, model)
        return values(model)

    first, second = world_in_threads(2).run(run)
    same(first[1:], second[1:])
    same(first[:1], values(model_of(0))[:1])
    same(second[:1], values(model_of(1))[:1])


def test_a_rank_that_joins_has_the_state_of_the_inner_optimizer() -> None:
    def run(comm: pycoll.Communicator) -> Any:
        pair = comm.split(0 if comm.rank > 0 else None)

        model = model_of(comm.rank)
        opt = LocalSGD(torch.optim.Adam(model, LR), 2, comm=pair or comm)
        if pair is not None:
            trained(comm, LocalSGD, 1, 3, model, opt)
            opt._comm = comm
            pair.close()
        give(1, 4, model)
        opt.step()
        return values(model), opt.state_dict()["state"][0]["step"].item()

    found = world_in_threads(3).run(run)
    for params, steps in found:
        same(params, found[0][0])
        assert steps == 4


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda model: DiLoCo(torch.optim.SGD(model), fragments=5),
        "fragments is 5 and there are 4 parameters: expected at most as many",
    ),
    (lambda model: DiLoCo(torch.optim.SGD(model), 4, delay=4), "delay is 4 and fragments are 4"),
    (lambda model: SlowMo(torch.optim.SGD(model), momentum=1), "outer momentum is 1: expected"),
    (lambda model: LocalSGD(model, 2), "optimizer is a list: expected an optimizer of torch"),
    (
        lambda model: LocalSGD(LocalSGD(torch.optim.SGD(model), 2), 2),
        "optimizer is a SGD that updates locally already",
    ),
    (
        lambda model: LocalSGD(torch.optim.LBFGS(model), PostLocal(3, 2)),
        "optimizer is an LBFGS, which computes several gradients in a step",
    ),
]


@pytest.mark.parametrize(("make", "text"), WRONG)
def test_wrong_arguments_are_refused_at_once(make: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        make(model_of(0))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PostLocalSGDOptimizer", "pycoll has LocalSGD.optimizer, every=PostLocal.start, every.. "),
        ("PeriodicModelAverager", "pycoll has LocalSGD.optimizer, every., or LocalUpdates for "),
        ("DiLoCoOptimizer", "pycoll has DiLoCo.optimizer, every, fragments=, delay=. for it"),
        ("DistributedOptimizer", "pycoll has pycoll.torch.DistributedOptimizer for it"),
        ("Unknown", "module 'pycoll.optim' has no attribute 'Unknown'$"),
    ],
)
def test_names_of_other_libraries_have_an_answer(name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=text):
        getattr(pycoll.optim, name)


def test_a_distributed_optimizer_is_refused() -> None:
    from pycoll.torch.optimizers.wrapped_optimizers import Wrapped

    made: Any = type("SGD", (Wrapped, torch.optim.SGD), {})
    with pytest.raises(InvalidArgumentError, match="averages the gradients of every step"):
        LocalSGD(made.__new__(made), 2)


def test_wrong_parameters_and_different_ranks_are_named_before_anything_moves() -> None:
    def run(comm: pycoll.Communicator) -> list[str]:
        told = []
        model = model_of(comm.rank)
        opt = LocalSGD(torch.optim.SGD(model, LR), 2 + comm.rank, comm=comm)
        before = values(model)
        give(comm.rank, 1, model)
        with pytest.raises(MismatchError) as error:
            opt.step()
        told.append(str(error.value))
        same(values(model), before)
        more = model[: 3 + comm.rank]
        with pytest.raises(MismatchError) as error:
            LocalSGD(torch.optim.SGD(more, LR), 2, comm=comm).step()
        told.append(str(error.value))
        whole = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        fitting = LocalSGD(torch.optim.SGD([whole, *model], LR), 2, comm=comm)
        fitting.step()
        with pytest.raises(InvalidArgumentError, match="comes after the first step"):
            fitting.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.deepcopy(fitting)
        return told

    for told in world_in_threads(2).run(run):
        assert told[0] == (
            "the local updates of rank 1 differ from those of rank 0: ['schedule', 'every', 3] and "
            "['schedule', 'every', 2]"
        )
        assert "parameter 3" in told[1]


def test_sparse_gradients_are_refused_where_gradients_are_averaged() -> None:
    def run(comm: pycoll.Communicator) -> None:
        table = torch.nn.Embedding(4, 2, sparse=True)
        table(torch.tensor([comm.rank])).sum().backward()
        opt = LocalSGD(torch.optim.SGD(table.parameters(), 1.0), PostLocal(1, 2), comm=comm)
        with pytest.raises(InvalidArgumentError, match="gradient of parameter 0 is sparse"):
            opt.step()

    world_in_threads(2).run(run)


def test_diloco_and_slowmo_of_torch_have_the_bits_of_the_oracle() -> None:
    def run(comm: pycoll.Communicator) -> Any:
        outer = {"lr": 0.5, "momentum": 0.5, "nesterov": True}

        def diloco(o: Any, comm: Any) -> Any:
            return DiLoCo(o, 4, outer=outer, fragments=2, delay=1, mix=0.5, comm=comm)

        def slowmo(o: Any, comm: Any) -> Any:
            return SlowMo(o, 4, lr=0.5, momentum=0.25, comm=comm)

        def average(o: Any, comm: Any) -> Any:
            return SlowMo(o, 4, lr=1, momentum=0, comm=comm)

        return [values(trained(comm, wrap, 1, 11)[0]) for wrap in (diloco, slowmo, average)]

    start = values(model_of(0))
    wanted = [
        oracle(
            *(start, 2, 11, inner, [4], (0.5, 0.5, True)),
            fragments=[range(1), range(1, 4)],
            delay=1,
            mix=0.5,
        ),
        oracle(start, 2, 11, inner, [4], (0.5, 0.25, False)),
        oracle(start, 2, 11, inner, [4]),
    ]
    for rank, found in enumerate(world_in_threads(2).run(run)):
        for one, expected in zip(found, wanted, strict=True):
            same(one, expected[rank])


@pytest.mark.parametrize("stopped", [3, 4, 5, 6])
def test_a_restart_with_a_fragment_under_way(stopped: int) -> None:
    def run(comm: pycoll.Communicator) -> None:
        def wrap(opt: Any, comm: Any) -> Any:
            return DiLoCo(opt, 8, fragments=2, delay=2, mix=0.5, comm=comm)

        model, opt = trained(comm, wrap, 1, stopped)
        assert (opt.local_state.pending is None) == (stopped in (3, 6))
        saved = pickle.dumps((values(model), opt.state_dict()))
        trained(comm, wrap, stopped + 1, 13, model, opt)
        numbers, state = pickle.loads(saved)
        again = [torch.nn.Parameter(torch.from_numpy(one)) for one in numbers]
        twin = wrap(torch.optim.SGD(again, LR), comm)
        twin.load_state_dict(state)
        trained(comm, wrap, stopped + 1, 13, again, twin)
        same(values(again), values(model))

    world_in_threads(2).run(run)


def test_adacomm_needs_the_loss_before_the_inner_step() -> None:
    def run(comm: pycoll.Communicator) -> None:
        model = model_of(0)
        opt = LocalSGD(torch.optim.SGD(model, LR), AdaComm(2, 1), comm=comm)
        give(comm.rank, 1, model)
        before = values(model)
        with pytest.raises(InvalidArgumentError, match="loss is None and every is AdaComm"):
            opt.step()
        same(values(model), before)
        opt.step(loss=torch.tensor(4.0))
        opt.step(lambda: 4.0)
        for loss in (4.0, 4.0):
            opt.step(loss=loss)
        assert opt.local_state.round.steps == 1 and opt.local_state.step == 4

    world_in_threads(2).run(run)
