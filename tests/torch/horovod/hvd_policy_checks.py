"""Checks of DistributedOptimizer with a policy, run on every rank; see torch_ranks.

Random gradients, whose sums depend on the order of folding, must give the same parameters bit for
bit by every policy; gradients of whole numbers those of one process that has the data of all.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from hvd_optimizer_checks import expected, loss_of, network, same, sgd
from torch import nn
from torch_ranks import raised

import pycoll.torch as hvd
from pycoll.gradients.scheduler import TIMED_STEPS
from pycoll.optim import POLICIES, Policy
from pycoll.tools import overlaps, timelines

STEPS = TIMED_STEPS + 3
#: So small that there are several messages, and cuts within gradients.
SMALL = {"bucket_bytes": 5000, "partition_bytes": 1024, "credit_bytes": 2048, "merge_bytes": 300}
EVERY = [*(Policy(name, **SMALL) for name in POLICIES), Policy("auto")]


def mixed_network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 40).double(),
        nn.Linear(40, 3).double(),
    )


def run_on(net: Any, x: torch.Tensor) -> torch.Tensor:
    inner = net[:4](x).double()
    found: torch.Tensor = net[5](torch.tanh(net[4](inner)))
    return found.square().sum()


def trained(policy: Any, steps: int = STEPS, **words: Any) -> tuple[list[torch.Tensor], Any]:
    """Parameters after steps on random data of this rank's own."""
    net = mixed_network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(net.parameters(), lr=0.01),
        net.named_parameters(),
        policy=policy,
        **words,
    )
    torch.manual_seed(hvd.rank())
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        run_on(net, torch.randn(2, 1, 8, 8)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()], optimizer


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def check_all_policies_give_the_same_bits() -> None:
    first, _ = trained(EVERY[0])
    every = hvd.allgather_object([parameter.numpy() for parameter in first])
    assert all((a == b).all() for one in every for a, b in zip(one, every[0], strict=True))
    for policy in EVERY[1:]:
        found, optimizer = trained(policy)
        assert equal(found, first), policy
        assert hvd.size() == 1 or policy.name in optimizer.explain(), optimizer.explain()
    more: dict[str, dict[str, Any]] = {
        "BSP-PS": {},
        "WFBP-A2A": {},
        "auto": {"architecture": "auto"},
    }
    for name, words in more.items():
        found, optimizer = trained(name, **words)
        assert equal(found, first), name
        alone = hvd.size() == 1 or name != "WFBP-A2A"
        assert alone or "wfbp" in optimizer.explain(), optimizer.explain()


def check_timelines_have_the_steps() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.json")
        hvd.start_timeline(str(path))
        trained(Policy("dear", bucket_bytes=5000))
        hvd.stop_timeline()
        heads = [one for one in json.loads(path.read_text()) if one.get("name") == "thread_name"]
        steps = overlaps.steps_of(timelines.merge([path]))
    if hvd.size() == 1:
        # There is nothing to reduce, nor to record.
        assert steps == []
        return
    names = [name for name, _ in mixed_network().named_parameters()]
    rows = {one["args"]["name"] for one in heads}
    assert {"backward pass", "wire", "waits", *names} <= rows
    assert [(one.rank, one.number, one.policy) for one in steps] == [
        (hvd.rank(), number, "dear") for number in range(STEPS)
    ]
    for one in steps:
        assert len(one.ready) == len(names) and 0 <= one.hidden <= 1
        whats = [what.partition(" ")[0] for _, what in one.wires]
        assert whats.count("reduce_scatter") == whats.count("all_gather") == len(whats) / 2 > 1
        assert all(end > begin for (begin, end), _ in one.wires)


def check_steps_are_those_of_one_process() -> None:
    for words in (
        {},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"backward_passes_per_step": 3},
        {"named_parameters": None},
    ):
        for policy in ("mg_wfbp", "dear", Policy("bytescheduler", partition_bytes=64)):
            net = network()
            optimizer = hvd.DistributedOptimizer(
                sgd(net), **{"named_parameters": net.named_parameters(), **words}, policy=policy
            )
            passes = int(words.get("backward_passes_per_step", 1))  # type: ignore[call-overload]
            for step in range(STEPS):
                optimizer.zero_grad()
                for number in range(passes):
                    loss_of(net, hvd.rank(), step * passes + number).backward()
                optimizer.step()
            same(net, expected(STEPS, passes, average=words.get("op") != hvd.Sum))


def check_compression() -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        first, _ = trained("bsp", 2, compression=compression)
        assert equal(trained("wfbp", 2, compression=compression)[0], first)
        exact, _ = trained("bsp", 2)
        assert all(torch.allclose(a, b, atol=0.03) for a, b in zip(first, exact, strict=True))


def check_gradients_live_where_they_are_sent_from() -> None:
    net = network()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), policy="bsp")
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(net, hvd.rank(), step).backward()
        optimizer.step()
    same(net, expected(STEPS))
    if hvd.size() > 1:
        grads = [parameter.grad for parameter in net.parameters()]
        assert len({one.untyped_storage().data_ptr() for one in grads if one is not None}) == 1


def check_backward_orders_may_differ_and_gradients_be_missing() -> None:
    for policy in EVERY:
        left, right = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()
        parameters = [*left.named_parameters("l"), *right.named_parameters("r")]
        for number, (_, parameter) in enumerate(parameters):
            nn.init.constant_(parameter, number + 1.0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p for _, p in parameters], lr=0.5), parameters, policy=policy
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.ones(1, 2).double()
            if (step + hvd.rank()) % 3 == 0:
                out = left(x)
            else:
                out = left(right(x)) if hvd.rank() % 2 else right(left(x))
            out.sum().backward()
            if step % 2:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        told = hvd.allgather_object([p.detach().tolist() for _, p in parameters])
        assert all(one == told[0] for one in told), policy


def check_wrong_requests_are_told() -> None:
    net = network()

    def made(**words: Any) -> Any:
        return hvd.DistributedOptimizer(sgd(net), net.named_parameters(), **words)

    assert "policy is 'quick'" in raised(ValueError, made, policy="quick")
    assert "policy is 3" in raised(ValueError, made, policy=3)
    assert "architecture is 'mesh'" in raised(ValueError, made, policy="bsp", architecture="mesh")
    assert "policy is not given" in raised(ValueError, made, architecture="ps")
    fixed = made(policy="WFBP-PS")
    told = raised(ValueError, setattr, fixed, "architecture", "a2a")
    assert fixed.architecture == "ps" and "cannot become 'a2a'" in told
    assert "groups" in raised(ValueError, made, policy="bsp", groups=2)
    assert "op=Adasum" in raised(ValueError, made, policy="bsp", op=hvd.Adasum)
    if hvd.size() == 1:
        return
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), policy="bsp"
    )
    loss = table(torch.tensor([1])).sum()
    assert "'weight' is sparse" in raised(ValueError, loss.backward)
    optimizer = made(policy="bsp")
    loss_of(net, 0, 0).backward()
    assert "computed more than" in raised(AssertionError, loss_of(net, 0, 0).backward)
    assert "while gradients are being" in raised(AssertionError, optimizer.zero_grad)
    optimizer.synchronize()
    assert "its steps need all ranks" in raised(ValueError, hvd.join)


def check_sparse_gradients_travel_as_dense_ones() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0),
        table.named_parameters(),
        op=hvd.Sum,
        sparse_as_dense=True,
        policy="wfbp",
    )
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([hvd.rank() % 4])).sum().backward()
        optimizer.step()
    wanted = [-2.0 * len([r for r in range(hvd.size()) if r % 4 == row]) for row in range(4)]
    assert table.weight[:, 0].tolist() == wanted


def check_ranks_that_disagree_are_told() -> None:
    if hvd.size() == 1:
        return
    net = network()
    policy = "bsp" if hvd.rank() == 0 else "wfbp"
    hvd.DistributedOptimizer(sgd(net), net.named_parameters(), policy=policy)
    text = raised(hvd.HorovodInternalError, loss_of(net, 0, 0).backward)
    assert '"bsp" on rank 0' in text and '"wfbp" on rank' in text, text
    net = network()
    named = [(f"{'x' if hvd.rank() else 'y'}.{name}", p) for name, p in net.named_parameters()]
    hvd.DistributedOptimizer(sgd(net), named, policy="bsp")
    text = raised(hvd.HorovodInternalError, loss_of(net, 0, 0).backward)
    # Of two ranks the first one counts as the usual one.
    odd, usual = (1, 0) if hvd.size() == 2 else (0, 1)
    name = "y.2.bias" if odd == 0 else "x.2.bias"
    start = f"the gradients of rank {odd} differ from those of rank {usual}: "
    assert f"{start}['{name}'" in text, text


def check_reductions_run_during_the_backward_pass() -> None:
    """The last layer's gradient is there and reduced while the first one is still computed."""
    if hvd.size() == 1:
        return
    net = network()
    optimizer = hvd.DistributedOptimizer(
        sgd(net), net.named_parameters(), op=hvd.Sum, policy="wfbp"
    )
    optimizer.zero_grad()
    last = net[2].bias
    seen: list[bool] = []

    def first_layer_is_slow(grad: torch.Tensor) -> None:
        scheduler = optimizer._gradients._scheduler
        deadline = time.monotonic() + 10
        while not scheduler._works[0].done() and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(scheduler._works[0].done() and scheduler._works[-1] is None)

    net[0].weight.register_hook(first_layer_is_slow)
    loss_of(net, hvd.rank(), 0).backward()
    assert seen == [True]
    assert last.grad is not None and last.grad.tolist() == [2.0 * hvd.size()] * 2
    optimizer.step()
