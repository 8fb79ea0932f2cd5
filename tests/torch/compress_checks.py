"""Checks of codecs in training loops, run on every rank; see torch_ranks."""

from __future__ import annotations

import inspect
import io
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import free_port
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import raised

import pycoll
import pycoll.optim
import pycoll.torch as hvd
from pycoll.compress import BF16, FP8, Auto, Block, Feedback, PowerSGD, RandomK, Sign, TopK
from pycoll.torch import fsdp, hooks


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))


def backward(net: nn.Module, rank: int, step: int) -> None:
    torch.manual_seed(100 * step + rank)
    net(torch.randn(8, 32)).square().mean().backward()


def gradients_of_all(step: int, net: nn.Module) -> list[torch.Tensor]:
    """The averages over all ranks, computed here."""
    for parameter in net.parameters():
        parameter.grad = None
    for rank in range(hvd.size()):
        backward(net, rank, step)
    return [p.grad / hvd.size() for p in net.parameters()]


def far(found: Any, wanted: list[torch.Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def same_on_all(arrays: list[torch.Tensor]) -> None:
    for one in arrays:
        every = pycoll.world().all_gather(one.reshape(1, -1))
        assert all(torch.equal(row, every[0]) for row in every)


def check_horovods_optimizer_takes_codecs() -> None:
    wanted = gradients_of_all(0, network())
    for number, (codec, bound) in enumerate(
        ((BF16(), 0.01), (Block("int8"), 0.03), (TopK(1.0), 1e-6), (PowerSGD(16), 1e-4))
    ):
        for groups in (None, 1):
            net = network()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(net.parameters(), 0.1),
                [(f"{number}.{groups}.{name}", p) for name, p in net.named_parameters()],
                compression=codec,
                groups=groups,
            )
            backward(net, hvd.rank(), 0)
            optimizer.synchronize()
            found = [p.grad for p in net.parameters()]
            assert far(found, wanted) < bound, (codec, groups)
            same_on_all(found)


def check_horovods_optimizer_keeps_what_is_left_out() -> None:
    net = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.0),
        [(f"kept.{name}", p) for name, p in net.named_parameters()],
        compression=TopK(0.1),
    )
    sent = [torch.zeros_like(p) for p in net.parameters()]
    for _ in range(30):
        optimizer.zero_grad()
        backward(net, hvd.rank(), 0)
        optimizer.step()
        for total, parameter in zip(sent, net.parameters(), strict=True):
            total.add_(parameter.grad)
    wanted = gradients_of_all(0, network())
    assert far([one / 30 for one in sent], wanted) < 0.5
    assert far([parameter.grad for parameter in network_with(TopK(0.1))], wanted) > 0.5


def network_with(codec: Any) -> list[torch.nn.Parameter]:
    """Parameters with gradients that one all_reduce without feedback has averaged."""
    net = network()
    backward(net, hvd.rank(), 0)
    for parameter in net.parameters():
        parameter.grad = pycoll.world().all_reduce(parameter.grad, "avg", compress=codec)
    return list(net.parameters())


def check_horovods_optimizer_says_what_does_not_fit() -> None:
    net = network()

    def wrap(**words: Any) -> str:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        return raised(ValueError, hvd.DistributedOptimizer, optimizer, **words)

    assert "codecs take Average or Sum" in wrap(compression=Sign(), op=hvd.Max)
    assert "policy is 'dear' and compress is Sign" in wrap(compression=Sign(), policy="dear")
    assert "architecture is 'ps'" in wrap(compression=Sign(), policy="WFBP-PS")
    assert "expected one of hvd.Compression, a codec" in wrap(compression="int8")
    assert "and there is groups: they exclude each other" in wrap(compression="auto", groups=2)
    net = network().double()
    assert "'2.bias' is float64 and compress is Sign" in raised(
        ValueError,
        hvd.DistributedOptimizer,
        torch.optim.SGD(net.parameters(), 0.1),
        net.named_parameters(),
        compression=Sign(),
        policy="wfbp",
    )


def check_policies_take_codecs() -> None:
    """In the timed steps and behind them; what is left out comes later. A choice has a policy."""
    wanted = gradients_of_all(0, network())
    for policy, codec, bound in (
        ("fixed", Block("int8"), 0.02),
        ("bytescheduler", BF16(), 0.01),
        ("mg_wfbp", TopK(0.3), 0.5),
        ("auto", Auto([BF16(), Block("int8")]), 0.02),
        ("auto", "auto", 0.02),
        (None, "auto", 0.02),
        (None, Auto([BF16()]), 0.01),
    ):
        net = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), 0.0),
            net.named_parameters(),
            compression=codec,
            policy=policy,
        )
        sent = [torch.zeros_like(p) for p in net.parameters()]
        for _ in range(12):
            optimizer.zero_grad()
            backward(net, hvd.rank(), 0)
            optimizer.step()
            for total, parameter in zip(sent, net.parameters(), strict=True):
                total.add_(parameter.grad)
        assert far([one / 12 for one in sent], wanted) < bound, (policy, codec)
        same_on_all([p.grad for p in net.parameters()])
        if policy in ("auto", None):
            assert " predicted, " in optimizer.explain(), optimizer.explain()


CODED_TRAININGS: list[dict[str, Any]] = [
    {"compression": TopK(0.1)},
    {"compression": Block("int4", 32), "groups": 2},
    {"compression": PowerSGD(2), "groups": 1},
    {"compression": RandomK(0.2, 3)},
    {"compression": TopK(0.1), "policy": "wfbp"},
    {"compression": Block("int4", 32), "policy": "wfbp"},
    {"compression": PowerSGD(2), "policy": "wfbp"},
    {"compression": RandomK(0.2, 3), "policy": "wfbp", "overlaps": True},
]


class CodedTraining:
    """Momentum SGD by an optimizer with these arguments; two ranks, so the order of sums is one."""

    def __init__(self, words: dict[str, Any], seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
        number, rest = CODED_TRAININGS.index(words), {**words}
        if rest.pop("overlaps", False):
            rest["model"] = self.net
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9),
            [(f"coded{number}.{name}", p) for name, p in self.net.named_parameters()],
            **rest,
        )

    def run(self, steps: Iterable[int]) -> CodedTraining:
        for step in steps:
            self.optimizer.zero_grad()
            backward(self.net, hvd.rank(), step)
            self.optimizer.step()
        return self

    def saved(self) -> Any:
        """Model and optimizer as torch.load returns them by default."""
        file = io.BytesIO()
        torch.save((self.net.state_dict(), self.optimizer.state_dict()), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved: Any) -> CodedTraining:
        self.net.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        return self

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]

    def residuals(self) -> dict[str, torch.Tensor]:
        found = self.optimizer.state_dict()["compression"]["residuals"]
        return {name: one.reshape(-1).clone() for name, one in found.items()}


def alike(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def check_a_restart_goes_on_with_what_codecs_keep() -> None:
    for words in CODED_TRAININGS:
        wanted = CodedTraining(words).run(range(9)).values()
        for stop in (2, 5):
            saved = CodedTraining(words).run(range(stop)).saved()
            assert set(saved[1]) == {"state", "param_groups", "compression"}
            other = CodedTraining(words, seed=2).load(saved)
            entry = other.optimizer.state_dict()["compression"]
            residuals = entry["residuals"]
            assert sorted(residuals) == sorted(saved[1]["compression"]["residuals"])
            assert any(bool(one.any()) for one in residuals.values()), words
            assert alike(other.run(range(stop, 9)).values(), wanted), (words, stop)
        del saved[1]["compression"]
        other = CodedTraining(words, seed=2).load(saved)
        assert not other.residuals()
        assert not alike(other.run(range(5, 9)).values(), wanted), words


def check_a_restore_takes_back_what_codecs_keep() -> None:
    for words in CODED_TRAININGS:
        training = CodedTraining(words).run(range(3))
        state = hvd.elastic.TorchState(training.net, training.optimizer)
        wanted = training.run(range(3, 6)).values()
        state.restore()
        training.optimizer.zero_grad()
        assert alike(training.run(range(3, 6)).values(), wanted), words
        state.restore()
        if "policy" in words:
            backward(training.net, hvd.rank(), 7)  # a step that is given up
            state.restore()
        assert alike(training.run(range(3, 6)).values(), wanted), words


def check_a_sync_takes_draws_and_q_and_keeps_each_ranks_residuals() -> None:
    for words in CODED_TRAININGS:
        wanted = CodedTraining(words).run(range(6)).values()
        training = CodedTraining(words).run(range(4))
        held = training.residuals()
        hvd.elastic.TorchState(training.net, training.optimizer).sync()
        after = training.residuals()
        assert held.keys() == after.keys()
        assert all(torch.equal(one, after[name]) for name, one in held.items()), words
        every = pycoll.world().all_gather(torch.cat(list(held.values())).reshape(1, -1))
        assert not torch.equal(every[0], every[-1])
        assert alike(training.run(range(4, 6)).values(), wanted), words
        # A newcomer has left nothing out, and draws what the others draw.
        training = CodedTraining(words).run(range(3))
        if hvd.rank() == 1:
            training = CodedTraining(words, seed=2)
        hvd.elastic.TorchState(training.net, training.optimizer).sync()
        assert bool(training.residuals()) == (hvd.rank() == 0)
        if hvd.rank() == 0 and "policy" in words:
            training.optimizer._gradients._home = None  # as in a new world
        same_on_all(training.run(range(3, 7)).values())


def check_states_of_optimizers_without_a_codec_stay_what_they_were() -> None:
    plain = CodedTraining(CODED_TRAININGS[0]).run(range(2))
    saved = plain.saved()
    net = network()
    for policy in (None, "wfbp"):
        bare = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
            [(f"bare.{policy}.{name}", p) for name, p in net.named_parameters()],
            policy=policy,
        )
        assert set(bare.state_dict()) == {"state", "param_groups"}
        bare.load_state_dict(saved[1])
        assert set(bare.state_dict()) == {"state", "param_groups"}
    error = pycoll.InvalidArgumentError
    scheduled = CodedTraining(CODED_TRAININGS[4]).run(range(2))
    text = "that of an optimizer with no policy, and this one has one"
    assert text in raised(error, scheduled.load, saved)
    assert "with a policy, and this one has none" in raised(error, plain.load, scheduled.saved())
    saved[1]["compression"]["residuals"]["other"] = torch.zeros(3)
    assert "has a residual of 'other' with shape (3,), and no" in raised(error, plain.load, saved)
    for training in (plain, scheduled):
        training.optimizer.zero_grad()
        backward(training.net, hvd.rank(), 5)
        assert "while gradients are being reduced by a codec" in raised(
            RuntimeError, training.optimizer.state_dict
        )
        training.optimizer.step()


def check_structures_are_averaged_with_a_codec() -> None:
    comm = pycoll.world()
    tree = {"w": np.full((40, 40), float(comm.rank), np.float32), "b": [np.ones(3, np.float32)]}
    mean = (comm.size - 1) / 2
    feedback = Feedback()
    for codec in (Block("int8"), PowerSGD(1), TopK(1.0), RandomK(1.0, 1)):
        feedback.reset()
        found = pycoll.optim.average_gradients(tree, comm=comm, compress=codec, feedback=feedback)
        assert np.allclose(found["w"], mean, rtol=0.01) and np.allclose(found["b"][0], 1)
    assert feedback.step == 1


def check_diloco_sends_codes() -> None:
    def trained(codec: Any) -> list[torch.Tensor]:
        net = network()
        optimizer = pycoll.optim.DiLoCo(
            torch.optim.SGD(net.parameters(), 0.1), every=2, fragments=2, compress=codec
        )
        for step in range(6):
            optimizer.zero_grad()
            backward(net, hvd.rank(), step)
            optimizer.step()
        optimizer.finish()
        return [p.detach() for p in net.parameters()]

    plain = trained(None)
    bounds = ((BF16(), 0.01), (Block("int8"), 0.02), (Block("int4"), 0.2), (TopK(0.5), 0.5))
    bounds += ((PowerSGD(4), 0.8),)
    for codec, bound in bounds:
        found = trained(codec)
        same_on_all(found)
        assert 0 < far(found, plain) < bound if hvd.size() > 1 else True
    for words, text in (
        ({"compress": "int8"}, "compress is 'int8': expected a codec of pycoll.compress"),
        ({"compress": BF16(), "outer": {"lr": 1.0}}, "a codec would round the parameters"),
    ):
        optimizer = torch.optim.SGD(network().parameters(), 0.1)
        error = pycoll.InvalidArgumentError
        assert text in raised(error, pycoll.optim.DiLoCo, optimizer, 4, **words)


def local_training(codec: Any) -> tuple[Any, nn.Module, Any]:
    """An optimizer in its second round, its model, and a function that steps it once."""
    net = network()
    optimizer = pycoll.optim.DiLoCo(torch.optim.SGD(net.parameters(), 0.1), every=3, compress=codec)
    steps = iter(range(100))

    def step() -> Any:
        optimizer.zero_grad()
        backward(net, hvd.rank(), next(steps))
        optimizer.step()
        return optimizer.local_state

    for _ in range(4):
        step()
    return optimizer, net, step


def check_a_sync_of_states_keeps_what_each_rank_has_left_out() -> None:
    for codec in (Block("int4", 32), TopK(0.1)):
        optimizer, net, step = local_training(codec)
        state = hvd.elastic.TorchState(net, optimizer)
        held = [one.copy() for one in optimizer.local_state.residuals]
        others = pycoll.world().all_gather(held[0][None])
        assert any(one.any() for one in held) and not np.array_equal(others[0], others[-1])
        state.sync()
        after = optimizer.local_state
        assert all(map(np.array_equal, after.residuals, held)), codec
        assert (after.step, after.progress) == (4, 3)
        step()
        hvd.broadcast_optimizer_state(optimizer, 0)  # in a world that stays, too
        found = step()
        assert found.synchronized
        same_on_all([p.detach() for p in net.parameters()])


def check_a_newcomer_takes_the_state_and_nobodys_residuals() -> None:
    optimizer, net, _ = local_training(TopK(0.1))
    held = [one.copy() for one in optimizer.local_state.residuals]
    if hvd.rank() == 1:
        net = network()
        optimizer = pycoll.optim.DiLoCo(
            torch.optim.SGD(net.parameters(), 0.1), every=3, compress=TopK(0.1)
        )
    hvd.elastic.TorchState(net, optimizer).sync()
    found = optimizer.local_state
    assert (found.step, found.progress) == (4, 3)
    assert bool(found.residuals) == (hvd.rank() == 0)
    assert hvd.rank() == 1 or all(map(np.array_equal, found.residuals, held))
    anchors = [one.clone() for one in found.anchors]
    same_on_all(anchors)
    optimizer.finish()
    same_on_all([p.detach() for p in net.parameters()])


def check_a_rank_that_is_behind_in_steps_keeps_its_residuals() -> None:
    for sync in (True, False):
        optimizer, net, step = local_training(TopK(0.1))
        held = [one.copy() for one in optimizer.local_state.residuals]
        saved = optimizer.state_dict()
        step()
        if hvd.rank() == 1:
            optimizer.load_state_dict(saved)
        if sync:
            hvd.elastic.TorchState(net, optimizer).sync()
            assert optimizer.local_state.step == 5
        elif hvd.rank() == 0:
            optimizer.meet_again()
        optimizer._meet()
        assert optimizer.local_state.step == 5
        assert all(map(np.array_equal, optimizer.local_state.residuals, held))
        optimizer.finish()


@contextmanager
def process_group(backend: str, comm: pycoll.Communicator | None = None) -> Iterator[None]:
    """A default group of the ranks of ``comm``, by default all."""
    comm = comm or pycoll.world()
    port = comm.broadcast_object(free_port() if comm.rank == 0 else None, 0)
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.size
    )
    try:
        yield
    finally:
        comm.barrier()
        dist.destroy_process_group()


def steps_of(hook: Any, state: Any, steps: int = 5) -> tuple[list[torch.Tensor], nn.Module]:
    net = DistributedDataParallel(network())
    if hook is not None:
        net.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        backward(net, dist.get_rank(), step)
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()], net


def check_hooks_of_ddp_train_like_ddp() -> None:
    with process_group("pycoll"):
        plain, _ = steps_of(None, None)
        state = hooks.State(None, Block("int8"), start=2, min_bytes=0)
        topk = hooks.State(None, TopK(0.5), start=2, min_bytes=0)
        cases = (
            (hooks.compress, state, 0.01),
            (hooks.compress, topk, 0.2),
            (hooks.compress, hooks.State(None, Sign(), start=2), 1e-6),
            (hooks.powerSGD_hook, hooks.PowerSGDState(None, 4, start_powerSGD_iter=2), 0.3),
            (hooks.fp16_compress_hook, None, 0.01),
            (hooks.compress, hooks.State(None, BF16(), start=2, min_bytes=0), 0.02),
            (hooks.quantization_pertensor_hook, None, 0.05),
            (hooks.quantization_perchannel_hook, None, 0.05),
        )
        for hook, given, bound in cases:
            found, _ = steps_of(hook, given)
            same_on_all(found)
            assert far(found, plain) < bound, (hook, given, far(found, plain))
        assert state.step == topk.step == 5 and state.feedbacks[0].step == 3
        assert topk.feedbacks[0].norm() > 0
        other = hooks.State(None, TopK(0.5), start=2, min_bytes=0)
        other.load_state_dict(topk.state_dict())
        assert other.step == 5 and other.feedbacks[0].norm() == topk.feedbacks[0].norm()


def check_hooks_have_the_arguments_of_torchs() -> None:
    def told(function: Any) -> list[Any]:
        found = inspect.signature(function).parameters.values()
        return [(one.name, one.kind, one.default) for one in found]

    modules = [default_hooks, post_localSGD_hook, powerSGD_hook, quantization_hooks]
    alike = [name for name in hooks.__all__ if any(hasattr(module, name) for module in modules)]
    assert sorted(set(hooks.__all__) - set(alike)) == ["State", "compress"]
    for name in alike:
        theirs = next(getattr(module, name) for module in modules if hasattr(module, name))
        assert told(getattr(hooks, name)) == told(theirs), name
    state = hooks.PowerSGDState(None, 2, 5, 3, False, False, 0, 7, 10_000, False)
    assert (state.codec, state.start) == (PowerSGD(2, 7, 3.0), 5)


def check_warm_start_and_feedback_of_powersgd_are_apart() -> None:
    with process_group("pycoll"):
        for keeps, warm in itertools.product((False, True), repeat=2):
            state = hooks.PowerSGDState(None, 1, 2, 1, keeps, warm)
            found, _ = steps_of(hooks.powerSGD_hook, state)
            same_on_all(found)
            # What the next call begins with.
            feedback = state.feedback_of(0)
            assert (feedback.norm() > 0, feedback.factors.get(1) is not None) == (keeps, warm)
            assert feedback.step == 3, "a Q that is drawn anew follows from it"


def check_powersgd_takes_a_bucket_as_one_matrix() -> None:
    with process_group("pycoll"):
        plain, _ = steps_of(None, None)
        for rank, bound in ((1, 1.0), (32, 1e-3)):
            state = hooks.PowerSGDState(None, rank, 2, 1)
            found, _ = steps_of(hooks.batched_powerSGD_hook, state)
            same_on_all(found)
            assert far(found, plain) < bound, (rank, far(found, plain))
        assert state.feedbacks[0].residual.shape[0] == state.feedbacks[0].residual.shape[1]


def check_wrappers_of_16_bits_and_bfloat16() -> None:
    with process_group("pycoll"):
        plain, _ = steps_of(None, None)
        for hook, state in (
            (hooks.compress, hooks.State(None, Block("int8"), start=2, min_bytes=0)),
            (hooks.powerSGD_hook, hooks.PowerSGDState(None, 16, 2, 1)),
        ):
            found, _ = steps_of(hooks.fp16_compress_wrapper(hook), state)
            same_on_all(found)
            assert far(found, plain) < 0.05
        wrapper = hooks.bf16_compress_wrapper(hooks.powerSGD_hook)
        for hook in (hooks.bf16_compress_hook, wrapper):
            assert "BF16" in raised(TypeError, steps_of, hook, None), "on devices only"


def check_post_local_sgd_over_the_backend() -> None:
    """Gradients of all in the first steps, then of each rank alone, and averaged parameters."""
    with process_group("pycoll"):
        alone, _ = dist.new_subgroups(1)
        state = hooks.PostLocalSGDState(None, alone, start_localSGD_iter=3)
        model = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        net = DistributedDataParallel(model)
        net.register_comm_hook(state, hooks.post_localSGD_hook)
        inner = torch.optim.SGD(net.parameters(), 0.5)
        averager = PeriodicModelAverager(period=2, warmup_steps=3)
        optimizer = PostLocalSGDOptimizer(inner, averager)
        rank, size = hvd.rank(), hvd.size()
        alike, mine = 0.0, 0.0
        for step in range(6):
            optimizer.zero_grad()
            (net(torch.ones(1, 2).double()) * 4.0 * (rank + step)).sum().backward()
            average = 4.0 * (sum(range(size)) / size + step)
            wanted = average if step < 3 else 4.0 * (rank + step)
            assert model.weight.grad.tolist() == [[wanted] * 2], (step, model.weight.grad)
            optimizer.step()
            alike, mine = alike - 0.5 * average, mine - 0.5 * wanted
            if step < 3 or (step - 3) % 2 == 0:
                mine = alike  # parameters are averaged
            assert model.weight.tolist() == [[mine] * 2], (step, model.weight)


def sharded() -> nn.Sequential:
    net = network()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    return net


def sharded_steps(steps: int, **words: Any) -> tuple[list[torch.Tensor], Any]:
    """The whole parameters after some steps of an FSDP2 model, and what ``compress`` returned."""
    net = sharded()
    codecs = fsdp.compress(net, **words) if words else None
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        backward(net, dist.get_rank(), step)
        optimizer.step()
    return [p.full_tensor().detach() for p in net.parameters()], codecs


def check_fsdp2_sends_codes() -> None:
    with process_group("pycoll"):
        plain, _ = sharded_steps(5)
        for words, bound in (
            ({"gradients": Block("int8")}, 0.01),
            ({"parameters": BF16()}, 0.03),
            ({"gradients": Block("int4"), "parameters": Block("int8"), "feedback": False}, 0.2),
            ({"gradients": Sign(), "parameters": FP8()}, 0.6),
        ):
            found, codecs = sharded_steps(5, **words)
            same_on_all(found)
            assert 0 < far(found, plain) < bound, (words, far(found, plain))
            names = ["0", "2"] if "gradients" in words and "feedback" not in words else []
            assert list(codecs.feedbacks) in (names, ["", *names]), words
            assert all(codecs.feedbacks[name].step == 5 for name in names)


def check_the_collectives_of_fsdp2_have_the_bits_of_the_communicators() -> None:
    comm, codec = pycoll.world(), Block("int4", block=64)
    with process_group("pycoll"):
        for kind in (torch.float32, torch.bfloat16, torch.float64):
            x = (torch.randn(400 * comm.size) * (comm.rank + 1)).to(kind)
            kept, other = Feedback(), Feedback()
            reduce_scatter = fsdp.CodedReduceScatter(codec, kept)
            for op, word in ((dist.ReduceOp.AVG, "avg"), (dist.ReduceOp.SUM, "sum")):
                share = reduce_scatter.allocate((400,), dtype=kind, device=x.device)
                reduce_scatter(share, x, dist.group.WORLD, op)
                wanted = comm.reduce_scatter(x, word, compress=codec, feedback=other)
                assert torch.equal(share, wanted)
                assert np.array_equal(kept.residual, other.residual)
            whole = torch.empty_like(x)
            whole[comm.rank * 400 :][:400] = share
            work = fsdp.CodedAllGather(codec)(
                whole, whole[comm.rank * 400 :][:400], dist.group.WORLD, async_op=True
            )
            assert work is not None and work.wait()
            assert torch.equal(whole, comm.all_gather(share, compress=codec))


def check_fsdp2_says_what_does_not_fit() -> None:
    error = pycoll.InvalidArgumentError
    assert "without FSDP2 modules: call" in raised(error, fsdp.compress, network(), Sign())
    with process_group("pycoll"):
        net = sharded()
        assert "gradients is TopK(density=0.5): expected BF16, FP8, Block or Sign" in raised(
            error, fsdp.compress, net, TopK(0.5)
        )
        assert "parameters is 'int8'" in raised(error, fsdp.compress, net, None, "int8")
        assert "feedback is 3" in raised(error, fsdp.compress, net, Sign(), feedback=3)
        _, codecs = sharded_steps(2, gradients=Sign())
        saved = codecs.state_dict()
        _, other = sharded_steps(1, gradients=Sign())
        other.load_state_dict(saved)
        assert [one.norm() for one in other.feedbacks.values()] == [
            one.norm() for one in codecs.feedbacks.values()
        ]
        assert "without form 1" in raised(error, other.load_state_dict, {})
        del saved["feedbacks"]["2"]
        assert "only the model has residuals of module '2'" in raised(
            error, other.load_state_dict, saved
        )


def check_hooks_say_what_does_not_fit() -> None:
    error = pycoll.InvalidArgumentError
    assert "codec is 'int8': expected a codec" in raised(error, hooks.State, None, "int8")
    assert "start is 1: expected a whole number of at least 2" in raised(
        error, hooks.State, None, Sign(), start=1
    )
    for words, text in (
        ({"min_compression_rate": 0.5}, "min_compression_rate is 0.5: expected a number of at"),
        ({"matrix_approximation_rank": 0}, "matrix_approximation_rank is 0: expected a whole"),
        ({"start_powerSGD_iter": 1}, "start_powerSGD_iter is 1: expected a whole number of at"),
        ({"start_powerSGD_iter": 1, "warm_start": False}, "start_powerSGD_iter is 1"),
        ({"start_powerSGD_iter": 1, "use_error_feedback": False}, "start_powerSGD_iter is 1"),
        ({"orthogonalization_epsilon": 1e-8}, "orthogonalization_epsilon is 1e-08: expected 0"),
        ({"compression_stats_logging_frequency": 5}, "frequency is 5: expected 10000"),
        ({"batch_tensors_with_same_shape": True}, "same_shape is True: expected False"),
    ):
        assert text in raised(error, hooks.PowerSGDState, None, **words)
    # A group for each rank: gloo's end waits for a peer that the refused step has left.
    with pycoll.world().split(hvd.rank()) as alone, process_group("gloo", alone):
        text = raised(Exception, steps_of, hooks.compress, hooks.State(None, Sign()))
        assert "backend 'gloo' for tensors in host memory" in text
