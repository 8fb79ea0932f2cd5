"""Groups whose members change by torch's reconfigure(): ranks are threads with torch's options."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import each, succeeded
from torch_processes import run_ranks

from pycoll.torch.c10d.group_setup import make_group

RANKS = 3
#: torch 2.13 has no ReconfigureOptions; these have the fields of 2.14's.
Options = getattr(dist, "ReconfigureOptions", None) or getattr(
    torch._C._distributed_c10d, "ReconfigureOptions", None
)


def options(uuid: int, handles: Any, seconds: float = 20, **hints: str) -> Any:
    made = SimpleNamespace() if Options is None else Options()
    made.uuid, made.handles, made.hints = uuid, handles, hints
    made.timeout = datetime.timedelta(seconds=seconds)
    return made


def group(rank: int, size: int = RANKS, seconds: float = 20, enabled: bool = True) -> Any:
    """What torch asks of the backend in init_process_group(enable_reconfigure=...)."""
    asked = SimpleNamespace(
        timeout=datetime.timedelta(seconds=seconds),
        group_rank=rank,
        group_size=size,
        store=dist.HashStore(),
        group_id="test",
        global_ranks_in_group=[],
        enable_reconfigure=enabled,
    )
    return make_group(asked, None)


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    made = [group(rank) for rank in range(RANKS)]
    yield made
    for one in made:
        one.shutdown()


def on_all(function: Callable[[Any], Any], members: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(members)) as pool:
        return each(pool, function, members)


def configure(uuid: int, members: Sequence[Any], as_set: bool = False) -> None:
    handles = [one.get_reconfigure_handle() for one in members]
    given: Any = set(handles) if as_set else handles
    succeeded(on_all(lambda one: one.reconfigure(options(uuid, given)).wait(), members))


def total(one: Any) -> list[float]:
    mine = torch.tensor([float(one.rank()), 1.0])
    one.allreduce([mine]).wait()
    return mine.tolist()


def expect_members(members: Sequence[Any]) -> None:
    size = len(members)
    assert [(one.rank(), one.size()) for one in members] == [(r, size) for r in range(size)]
    assert succeeded(on_all(total, members)) == [[sum(range(size)), size]] * size


def test_members_leave_and_come_back_in_any_order(groups: list[Any]) -> None:
    assert all(one.supports_reconfigure for one in groups)
    handles = [one.get_reconfigure_handle() for one in groups]
    configure(1, groups)
    expect_members(groups)
    # The middle one is left out; its old communicator ends when the others leave it.
    configure(2, [groups[0], groups[2]])
    expect_members([groups[0], groups[2]])
    text = str(on_all(total, [groups[1]])[0])
    assert "was lost" in text and "closed its communicator" in text
    for number, one in enumerate(groups, 10):
        configure(number, [one])
        expect_members([one])
    configure(3, [groups[2], groups[0], groups[1]])
    expect_members([groups[2], groups[0], groups[1]])
    assert [one.get_reconfigure_handle() for one in groups] == handles


def test_a_set_of_handles_gives_every_member_another_rank(groups: list[Any]) -> None:
    configure(1, groups, as_set=True)
    expect_members(sorted(groups, key=lambda one: one.rank()))


def test_a_group_without_members_says_so(groups: list[Any]) -> None:
    one = groups[0]
    assert (one.rank(), one.size()) == (0, RANKS)
    with pytest.raises(dist.DistBackendError, match="it has not been configured yet; call recon"):
        one.allreduce([torch.ones(1)])
    configure(1, groups)
    one.abort()
    with pytest.raises(dist.DistBackendError, match="it was aborted; call reconfigure"):
        one.barrier()
    # The others learn of it, in what they do next.
    for error in on_all(total, groups[1:]):
        assert isinstance(error, dist.DistBackendError) and "was lost" in str(error)
    configure(2, groups)
    expect_members(groups)


def test_operations_under_way_end_where_a_member_moves_on(groups: list[Any]) -> None:
    configure(1, groups)
    waiting = groups[1].allreduce([torch.ones(4)])
    future = waiting.get_future()
    configure(2, [groups[0], groups[2]])
    with pytest.raises(dist.DistBackendError, match="was lost"):
        waiting.wait()
    with pytest.raises(Exception, match="was lost"):
        future.wait()
    expect_members([groups[0], groups[2]])


@pytest.mark.parametrize(
    ("uuid", "handles", "hints", "text"),
    [
        (1, "all", {}, "uuid 1 was already used by this process"),
        (2, "none", {}, "handles has 0 entries: expected one per rank"),
        (2, "others", {}, "handles lacks the handle of this process"),
        (2, "twice", {}, "handles names a rank twice"),
        (2, "all", {"quick": "yes"}, "hints is {'quick': 'yes'}: the backend pycoll has none"),
    ],
)
def test_wrong_options_leave_the_group_as_it_is(
    groups: list[Any], uuid: int, handles: str, hints: dict[str, str], text: str
) -> None:
    configure(1, groups)
    every = [one.get_reconfigure_handle() for one in groups]
    lists = {"all": every, "none": [], "others": every[1:], "twice": [*every, every[0]]}
    with pytest.raises(RuntimeError) as caught:
        groups[0].reconfigure(options(uuid, lists[handles], **hints))
    assert text in str(caught.value)
    assert not any(handle in str(caught.value) for handle in every), "handles are secret"
    expect_members(groups)


def test_what_is_no_handle_is_told(groups: list[Any]) -> None:
    mine = groups[0].get_reconfigure_handle()
    with pytest.raises(RuntimeError, match=r"handles\[0\] is no handle of this backend"):
        groups[0].reconfigure(options(1, ["tcp://host:1", mine]))
    with pytest.raises(dist.DistBackendError, match="reconfigure with uuid 1 has failed"):
        groups[0].allreduce([torch.ones(1)])


def test_a_member_that_does_not_come_is_named_in_time(groups: list[Any]) -> None:
    configure(1, groups)
    handles = [one.get_reconfigure_handle() for one in groups]
    began = time.monotonic()
    some = groups[:2]
    for error in on_all(lambda one: one.reconfigure(options(2, handles, 1.0)), some):
        assert isinstance(error, dist.DistBackendError)
        assert "Timed out" in str(error) and "rank 2" in str(error)
    assert time.monotonic() - began < 10
    configure(3, some)
    expect_members(some)


def test_a_member_waits_for_the_first_one_which_is_in_an_earlier_meeting(
    groups: list[Any],
) -> None:
    handles = [one.get_reconfigure_handle() for one in groups]
    caught: list[BaseException] = []

    def first() -> None:
        try:
            groups[0].reconfigure(options(1, handles, 1.0))
        except RuntimeError as error:
            caught.append(error)
        groups[0].reconfigure(options(2, handles[:2]))

    thread = threading.Thread(target=first)
    thread.start()
    groups[1].reconfigure(options(2, handles[:2]))
    thread.join()
    assert len(caught) == 1
    expect_members(groups[:2])


def test_members_with_different_lists_form_no_group(groups: list[Any]) -> None:
    a, b, c = [one.get_reconfigure_handle() for one in groups]
    lists = {0: [a, b, c], 1: [a, b]}

    def call(number: int) -> Any:
        return groups[number].reconfigure(options(1, lists[number], 1.0))

    found = on_all(call, [0, 1])
    assert "Timed out" in str(found[0])
    assert "has other handles" in str(found[1])


def test_an_ordinary_group_keeps_its_members() -> None:
    one = group(0, 1, enabled=False)
    assert not one.supports_reconfigure
    for call in (one.get_reconfigure_handle, lambda: one.reconfigure(options(1, [""]))):
        with pytest.raises(dist.DistBackendError, match="enable_reconfigure=True"):
            call()
    one.shutdown()


def test_parts_of_a_group_are_ordinary_groups(groups: list[Any]) -> None:
    configure(1, groups)
    parts = succeeded(on_all(lambda one: one.split_group([0, 1]), groups))
    assert parts[2] is None
    assert not parts[0].supports_reconfigure
    expect_members(parts[:2])
    configure(2, groups)
    expect_members(parts[:2])
    for part in parts[:2]:
        part.shutdown()


def train(rank: int, size: int, folder: str) -> None:
    """Trains with DDP; rank 1 dies, the others go on, and rank 3 comes in."""
    store = dist.FileStore(f"{folder}/store", -1)

    def meet(name: str, ranks: Sequence[int]) -> list[str]:
        store.set(f"{name}/{rank}", dist._get_reconfigure_handle())
        return [store.get(f"{name}/{one}").decode() for one in ranks]

    dist.init_process_group(
        "pycoll",
        store=dist.PrefixStore("own", store),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=20),
        enable_reconfigure=True,
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    place = rank

    def step() -> None:
        model.weight.grad = torch.full_like(model.weight, float(rank + 1))
        dist.all_reduce(model.weight.grad)
        with torch.no_grad():
            model.weight -= model.weight.grad

    if rank < 3:
        dist._reconfigure(1, meet("first", [0, 1, 2])).wait()
        step()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            step()
        except dist.DistBackendError as error:
            assert "rank 1" in str(error), error
        dist._reconfigure(2, meet("second", [0, 2])).wait()
        step()
    dist._reconfigure(3, meet("third", [0, 2, 3])).wait()
    dist.broadcast(model.weight.data, group_src=0)
    step()
    place = dist.get_rank()
    assert dist.get_world_size() == 3
    # Sums of 1 + 2 + 3, of 1 + 3, and of 1 + 3 + 4.
    assert model.weight.tolist() == [[-18.0] * 4], model.weight
    Path(folder, f"{rank}").write_text(str(place))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(
    Options is None, reason="torch 2.14 has reconfigure(), and this is 2.13: make test-torch"
)
def test_training_goes_on_without_a_killed_process_and_with_a_new_one(tmp_path: Path) -> None:
    codes = run_ranks(4, train, str(tmp_path))
    assert codes == [0, -signal.SIGKILL, 0, 0]
    places = {name: (tmp_path / name).read_text() for name in ("0", "2", "3")}
    assert places == {"0": "0", "2": "1", "3": "2"}
