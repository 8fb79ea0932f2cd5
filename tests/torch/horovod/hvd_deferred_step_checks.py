"""Checks of steps that wait for the next forward pass, run on every rank; see torch_ranks.

The oracle is the same training without ``model=`` by the policy bsp: values, gradients and the
optimizer's state must be the same bits whenever a program looks.
"""

from __future__ import annotations

import copy
import io
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hvd_optimizer_checks import network
from hvd_policy_checks import EVERY, equal, mixed_network, run_on
from torch import nn
from torch_ranks import raised

import pycoll.torch as hvd
from pycoll.gradients.scheduler import TIMED_STEPS, Scheduler
from pycoll.optim import Policy
from pycoll.torch.memory.deferred_parameter import DeferredParameter

STEPS = TIMED_STEPS + 3
WORDS: list[dict[str, Any]] = [
    {},
    {"backward_passes_per_step": 2},
    {"gradient_predivide_factor": 2.0},
    {"compression": hvd.Compression.fp16},
]
#: Those that are made for the next forward pass.
LATE = [Policy("dear", bucket_bytes=5000), Policy("bytescheduler", partition_bytes=1024)]


class Kept(torch.autograd.Function):
    """Keeps its second argument for the backward pass without a look at it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, factor = ctx.saved_tensors
        return grads[0] * factor, (grads[0] * x).sum().reshape(1) + factor


class Odd(nn.Module):
    """A module used twice, weights that are shared, one that another module reads, and a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(6, 8)
        self.twice = nn.Linear(8, 8)
        self.inner = nn.Linear(8, 8, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.table.weight
        self.never = nn.Linear(3, 3)
        self.factors = nn.ParameterList([torch.ones(1), torch.ones(1)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.table(rows))))
        x = nn.functional.linear(x, self.inner.weight)
        x = self.attention(x, x, x)[0]
        for factor in self.factors:
            x = Kept.apply(x, factor)
        found: torch.Tensor = self.head(x)
        return found.square().mean()


def made(net: nn.Module, kind: Any, policy: Any, waits: bool, **words: Any) -> Any:
    optimizer = kind(net.parameters())
    late = {"model": net} if waits else {}
    return hvd.DistributedOptimizer(
        optimizer, net.named_parameters(), policy=policy, **late, **words
    )


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def run_mixed(net: Any) -> torch.Tensor:
    return run_on(net, torch.randn(2, 1, 8, 8))


def run_odd(net: Any) -> torch.Tensor:
    loss: torch.Tensor = net(torch.randint(0, 6, (3, 4)))
    return loss


def trained(
    make: Callable[[], nn.Module],
    run: Callable[[Any], torch.Tensor],
    kind: Any,
    policy: Any,
    waits: bool,
    between: Callable[[Any, Any, int], None] = lambda net, optimizer, step: None,
    zero: Callable[[Any, Any, int], None] = lambda net, o, step: o.zero_grad(step % 2 == 0),
    steps: int = STEPS,
    **words: Any,
) -> list[torch.Tensor]:
    """Parameters, gradients and states at the end."""
    net = make()
    optimizer = made(net, kind, policy, waits, **words)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    torch.manual_seed(hvd.rank())
    for step in range(steps):
        zero(net, optimizer, step)
        for _ in range(words.get("backward_passes_per_step", 1)):
            run(net).backward()
        optimizer.step()
        schedule.step()
        between(net, optimizer, step)
    values = [one.detach().clone() for one in net.parameters()]
    values += [one.grad.clone() for one in net.parameters() if one.grad is not None]
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        values += [one for one in state.values() if isinstance(one, torch.Tensor)]
    return values


def check_steps_that_wait_give_the_same_bits() -> None:
    for kind in (adam, momentum):
        wanted = trained(mixed_network, run_mixed, kind, "bsp", False)
        for policy in EVERY:
            assert equal(trained(mixed_network, run_mixed, kind, policy, True), wanted), policy


def check_all_ways_to_reduce() -> None:
    for words in WORDS:
        wanted = trained(mixed_network, run_mixed, adam, "bsp", False, **words)
        for policy in LATE:
            found = trained(mixed_network, run_mixed, adam, policy, True, **words)
            assert equal(found, wanted), (policy, words)


def check_modules_used_twice_shared_weights_and_such_that_others_read() -> None:
    wanted = trained(Odd, run_odd, adam, "bsp", False)
    for policy in (*LATE, "wfbp"):
        assert equal(trained(Odd, run_odd, adam, policy, True), wanted), policy


def same_with(looks: list[torch.Tensor], ways: Sequence[Callable[..., None]]) -> None:
    """What happens in between sees the same, and leaves the same, as without steps that wait.

    The ways take turns, so that each, where their number is even, has two with messages that stay:
    one before gradients become zeros and one before they become None.
    """
    count = len(ways)

    def between(net: Any, optimizer: Any, step: int) -> None:
        turn = step - TIMED_STEPS
        ways[(turn + (turn >= count)) % count](net, optimizer)

    steps = TIMED_STEPS + 2 * count
    wanted = trained(mixed_network, run_mixed, adam, "bsp", False, between, steps=steps)
    seen = list(looks)
    for policy in LATE:
        looks.clear()
        found = trained(mixed_network, run_mixed, adam, policy, True, between, steps=steps)
        assert equal(found, wanted) and equal(looks, seen), policy
    looks.clear()


def check_whoever_looks_in_between_sees_whole_steps() -> None:
    looks: list[torch.Tensor] = []
    x = torch.ones(2, 1, 8, 8)

    def evaluate(net: Any, optimizer: Any) -> None:
        net.eval()
        with torch.inference_mode():
            looks.append(run_on(net, x).clone())
        net.train()

    def save(net: Any, optimizer: Any) -> None:
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        file.seek(0)
        looks.extend(torch.load(file).values())

    def state(net: Any, optimizer: Any) -> None:
        for _, one in sorted(optimizer.state_dict()["state"].items()):
            looks.extend(v.clone() for v in one.values() if isinstance(v, torch.Tensor))

    def own_state(net: Any, optimizer: Any) -> None:
        looks.append(optimizer.state[net[0].weight]["exp_avg"].clone())

    def gradients(net: Any, optimizer: Any) -> None:
        looks.append(nn.utils.clip_grad_norm_(net.parameters(), 1e9))

    def copied(net: Any, optimizer: Any) -> None:
        other = copy.deepcopy(net)
        assert all(type(one) is nn.Parameter for one in other.parameters())
        looks.extend(other.parameters())

    def told(net: Any, optimizer: Any) -> None:
        looks.append(torch.tensor([float(len(str(one))) for one in net.parameters()]))

    def flat(net: Any, optimizer: Any) -> None:
        looks.append(nn.utils.parameters_to_vector(net.parameters()).clone())

    same_with(looks, (evaluate, save, state, own_state, gradients, copied, told, flat))


def check_whoever_acts_in_between_acts_on_whole_steps() -> None:
    looks: list[torch.Tensor] = []

    def changed(net: Any, optimizer: Any) -> None:
        with torch.no_grad():
            net[0].weight.mul_(0.5)
            net[4].bias.data = net[4].bias.data + 1

    def rate(net: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    def synchronized(net: Any, optimizer: Any) -> None:
        run_mixed(net).backward()
        optimizer.synchronize()
        looks.append(net[0].weight.grad.clone())
        with optimizer.skip_synchronize():
            optimizer.step()

    def twice(net: Any, optimizer: Any) -> None:
        optimizer.step()

    same_with(looks, (changed, rate, synchronized, twice))


def check_all_ways_to_zero_gradients() -> None:
    def by_model(net: Any, optimizer: Any, step: int) -> None:
        net.zero_grad(set_to_none=step % 2 == 0)

    def by_hand(net: Any, optimizer: Any, step: int) -> None:
        for parameter in net.parameters():
            parameter.grad = None

    def twice(net: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        optimizer.zero_grad(set_to_none=step % 2 == 1)

    def never(net: Any, optimizer: Any, step: int) -> None:
        """Gradients add up over steps."""

    # An odd number: each has a turn in even and in odd steps.
    ways = (by_model, by_hand, twice, never, never)
    words: dict[str, Any] = {
        "zero": lambda net, optimizer, step: ways[step % len(ways)](net, optimizer, step),
        "steps": TIMED_STEPS + 2 * len(ways),
    }
    wanted = trained(mixed_network, run_mixed, momentum, "bsp", False, **words)
    for policy in LATE:
        assert equal(trained(mixed_network, run_mixed, momentum, policy, True, **words), wanted)


def check_the_forward_pass_begins_before_all_gradients_are_there() -> None:
    """The first layer runs while the last layer's step is still to come; what waits is named."""
    if hvd.size() == 1:
        return
    net = network()
    optimizer = made(net, lambda p: torch.optim.SGD(p, lr=0.25), "dear", True)
    assert "when the next forward pass needs them" in optimizer.explain()
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.ones(1, 4).double()).sum().backward()
        optimizer.step()
        assert all(type(one) is DeferredParameter for one in net.parameters())
        assert all(isinstance(one, nn.Parameter) for one in net.parameters())
        assert net[0].weight.shape == (3, 4) and type(net[0].weight) is DeferredParameter
        seen: list[bool] = []
        handle = net[1].register_forward_hook(
            lambda *_, seen=seen: seen.extend(
                type(one) is DeferredParameter for one in net.parameters()
            )
        )
        net(torch.ones(1, 4).double())
        handle.remove()
        assert seen == [False, False, True, True]
        assert all(type(one) is nn.Parameter for one in net.parameters())


def check_auto_steps_at_once_where_waiting_singly_takes_too_long() -> None:
    """Whatever this machine measures, here it takes a second for each parameter."""
    if hvd.size() == 1:
        return
    wanted = trained(mixed_network, run_mixed, adam, "bsp", False)
    measured: list[float] = []
    real = Scheduler.note_awaiting

    def slow(self: Scheduler, seconds: float) -> None:
        measured.append(seconds)
        real(self, 1.0)

    def between(net: Any, optimizer: Any, step: int) -> None:
        deferred = [type(one) is DeferredParameter for one in net.parameters()]
        assert (all(deferred), any(deferred)) == ((False, False) if step >= 2 else (True, True))
        if step == STEPS - 1:
            told = optimizer.explain()
            assert (
                told.startswith("parameters step at once\nauto takes ") and ", all at once" in told
            )
            assert "to wait for a gradient by itself takes 1 s from the next forward pass" in told

    Scheduler.note_awaiting = slow  # type: ignore[method-assign]
    try:
        found = trained(mixed_network, run_mixed, adam, "auto", True, between)
    finally:
        Scheduler.note_awaiting = real  # type: ignore[method-assign]
    assert equal(found, wanted)
    assert len(measured) == 1 and 0 <= measured[0] < 1


def check_other_threads_may_look() -> None:
    net = mixed_network()
    optimizer = made(net, adam, "dear", True)
    for _ in range(STEPS):
        run_mixed(net).backward()
        optimizer.step()
        sums: list[float] = []

        def look(sums: list[float] = sums) -> None:
            sums.append(sum(float(one.detach().sum()) for one in net.parameters()))

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(sums)) == 1 and len(sums) == 3
        optimizer.zero_grad()


def check_a_graph_from_before_the_step() -> None:
    """What its backward pass adds is not lost, and does not disturb what is under way."""

    def run(waits: bool) -> list[torch.Tensor]:
        net = nn.Linear(3, 2).double()
        nn.init.constant_(net.weight, 1.0)
        nn.init.constant_(net.bias, 1.0)
        optimizer = made(net, lambda p: torch.optim.SGD(p, lr=0.5), "wfbp", waits)
        late = net.bias.sum() * (2.0 + hvd.rank())
        net(torch.ones(1, 3).double() + hvd.rank()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        late.backward()
        optimizer.step()
        return [net.weight.detach(), net.bias.detach()]

    assert equal(run(True), run(False))


def check_leaving_completes_steps() -> None:
    def run(waits: bool) -> list[torch.Tensor]:
        net = mixed_network()
        optimizer = made(net, adam, "dear", waits)
        torch.manual_seed(hvd.rank())
        run_mixed(net).backward()
        optimizer.step()
        hvd.shutdown()
        found = [one.detach().clone() for one in net.parameters()]
        hvd.init()
        optimizer.zero_grad()
        run_mixed(net).backward()
        optimizer.step()
        return [*found, *(one.detach() for one in net.parameters())]

    assert equal(run(True), run(False))


def check_a_rank_that_left_is_told_to_whoever_looks() -> None:
    """Rank 0 leaves without a step of its own: the others' step cannot be done."""
    if hvd.size() == 1:
        return
    net = network()
    optimizer = made(net, lambda p: torch.optim.SGD(p, lr=0.25), "dear", True)
    net(torch.ones(1, 4).double()).sum().backward()
    optimizer.step()
    before = [one.detach().clone() for one in net.parameters()]
    optimizer.zero_grad()
    if hvd.rank() == 0:
        time.sleep(0.2)
    else:
        net(torch.ones(1, 4).double()).sum().backward()
        optimizer.step()
        raised(hvd.HorovodInternalError, net, torch.ones(1, 4).double())
        # It is told once; whoever goes on has whole parameters, some of them from before the step.
        assert [one.shape for one in net.parameters()] == [one.shape for one in before]
        assert all(type(one) is nn.Parameter for one in net.parameters())
    hvd.shutdown()
    hvd.init()
