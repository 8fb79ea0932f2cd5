"""The scheduler on ranks that are threads: the same bits by every policy, and errors that speak.

The oracle is one all_reduce per gradient, folded in rank order. Values are random floats, whose
sums depend on the order of folding, so that equal bits mean something.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from harness import fresh_world, world_in_threads

import pycoll
from pycoll import InvalidArgumentError, MismatchError
from pycoll.compress import Block
from pycoll.gradients.measure import LENGTHS, _in_turns, _rate, _seconds, fit_rate, measure
from pycoll.gradients.scheduler import TIMED_STEPS
from pycoll.optim import POLICIES, Bucket, Entry, Policy, Scheduler

ENTRIES = [
    Entry("head.weight", (300, 7)),
    Entry("head.bias", (7,)),
    Entry("half", (1001,), "float16"),
    Entry("empty", (0, 3)),
    Entry("middle", (40_000,)),
    Entry("narrow", (513,), "bfloat16"),
    Entry("scalar", ()),
    Entry("double", (99,), "float64"),
    Entry("stem", (5, 5, 5)),
]
#: Small figures, so that there are several messages and gradients are cut in parts.
SMALL = {"bucket_bytes": 9000, "partition_bytes": 4096, "credit_bytes": 8192, "merge_bytes": 600}
EVERY = [*(Policy(name, **SMALL) for name in POLICIES), Policy("auto")]
STEPS = TIMED_STEPS + 2


def gradient(entry: Entry, rank: int, step: int) -> Any:
    dice = np.random.default_rng([rank, step, *entry.name.encode()])
    return dice.standard_normal(entry.shape)


def order_of(rank: int, step: int) -> list[int]:
    """Ranks and steps differ in the order in which gradients come."""
    numbers = list(range(len(ENTRIES)))
    swap = (rank + step) % (len(numbers) - 1)
    numbers[swap], numbers[swap + 1] = numbers[swap + 1], numbers[swap]
    return numbers


def train(comm: pycoll.Communicator, scheduler: Scheduler, oracle: bool) -> list[bytes]:
    """The reduced gradients of all steps."""
    found = []
    for step in range(STEPS):
        views = scheduler.begin()
        for number in order_of(comm.rank, step):
            views[number][...] = gradient(ENTRIES[number], comm.rank, step)
            scheduler.ready(number)
        scheduler.wait()
        found += [view.tobytes() for view in views]
        if oracle:
            for view, entry in zip(views, ENTRIES, strict=True):
                mine = np.empty(entry.shape, view.dtype)
                mine[...] = gradient(entry, comm.rank, step)
                wanted = comm.all_reduce(mine, "avg", deterministic=True)
                assert view.tobytes() == np.asarray(wanted).tobytes(), entry
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_policies_give_the_same_bits(size: int) -> None:
    def every(comm: pycoll.Communicator) -> list[list[bytes]]:
        return [
            train(comm, Scheduler(comm, ENTRIES, policy=policy, op="avg"), policy.name == "bsp")
            for policy in EVERY
        ]

    results = world_in_threads(size).run(every)
    assert all(one == results[0][0] for rank in results for one in rank)


@pytest.mark.parametrize("size", [1, 3])
def test_both_architectures_give_the_same_bits(size: int) -> None:
    pairs = [(policy, "ps") for policy in EVERY if policy.name != "dear"]
    pairs += [(Policy("bsp"), "a2a"), (Policy("auto"), "auto"), (Policy("wfbp"), "auto")]

    def every(comm: pycoll.Communicator) -> list[list[bytes]]:
        found = []
        for policy, architecture in pairs:
            words: dict[str, Any] = {"policy": policy, "architecture": architecture, "op": "avg"}
            scheduler = Scheduler(comm, ENTRIES, **words)
            found.append(train(comm, scheduler, policy.name == "bsp"))
            used = {message.architecture for message in scheduler.comm_plan.messages}
            assert architecture == "auto" or used == {architecture}
        return found

    results = world_in_threads(size).run(every)
    assert all(one == results[0][0] for rank in results for one in rank)


def test_servers_apart_give_the_same_bits() -> None:
    """Three workers with two servers that are threads of this process."""
    worlds = pycoll.local_world(3, servers=2)
    found: list[list[list[bytes]]] = [[] for _ in worlds]
    ways: list[dict[str, Any]] = [{"policy": "bsp", "architecture": "a2a"}, {"policy": "WFBP-PS"}]

    def run(comm: pycoll.Communicator) -> None:
        for words, architecture in zip([*ways, {}], ("a2a", "ps", "auto"), strict=True):
            scheduler = Scheduler(comm, ENTRIES, op="avg", **words)
            assert scheduler.architecture == architecture
            found[comm.rank].append(train(comm, scheduler, False))

    threads = [threading.Thread(target=run, args=(comm,)) for comm in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    closing = [threading.Thread(target=comm.close) for comm in worlds]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    assert all(len(each) == 3 for each in found), "a rank failed"
    assert all(one == found[0][0] for each in found for one in each)


def test_servers_sum_between_hosts_in_rank_order_as_well() -> None:
    def run(comm: pycoll.Communicator) -> list[bytes]:
        return train(comm, Scheduler(comm, ENTRIES, policy="WFBP-PS", op="avg"), True)

    results = world_in_threads(4, "shm,tcp", (0, 0, 1, 1)).run(run)
    assert results[1:] == results[:-1]


def test_rank_order_is_what_keeps_the_bits_between_hosts() -> None:
    """There the fastest algorithms fold by hosts, unless asked not to."""

    def every(comm: pycoll.Communicator, strict: bool) -> list[list[bytes]]:
        policies = [Policy("bsp"), Policy("wfbp"), Policy("fixed", bucket_bytes=9000)]
        return [
            train(
                comm,
                Scheduler(comm, ENTRIES, policy=one, op="avg", deterministic=strict),
                strict,
            )
            for one in policies
        ]

    world = world_in_threads(4, "shm,tcp", (0, 0, 1, 1))
    strict = world.run(lambda comm: every(comm, True))
    assert all(one == strict[0][0] for rank in strict for one in rank)
    loose = world.run(lambda comm: every(comm, False))
    assert all(rank == loose[0] for rank in loose), "ranks agree all the same"
    assert loose[0][0] != strict[0][0], "this test would not see another order"


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_bits_do_not_depend_on_the_transport(transports: str) -> None:
    def run(comm: pycoll.Communicator) -> list[bytes]:
        policy = Policy("dear", bucket_bytes=9000)
        return train(comm, Scheduler(comm, ENTRIES, policy=policy, op="avg"), True)

    results = world_in_threads(3, transports).run(run)
    assert results[1:] == results[:-1]


def test_messages_are_those_of_the_policy_and_alike_on_all_ranks() -> None:
    def run(comm: pycoll.Communicator, policy: Policy) -> Any:
        scheduler = Scheduler(comm, ENTRIES, policy=policy)
        train(comm, scheduler, False)
        return scheduler.comm_plan, scheduler.explain()

    lengths = {}
    for policy in EVERY:
        comm_plan, why = world_in_threads(2).run(lambda comm, p=policy: run(comm, p))[0]
        lengths[policy.name] = len(comm_plan.messages)
        assert (policy.name in ("auto", comm_plan.policy)) and str(policy.name) in why
    kinds = len({entry.kind for entry in ENTRIES})
    assert lengths["bsp"] == kinds and lengths["wfbp"] == len(ENTRIES)
    assert kinds <= lengths["mg_wfbp"] <= lengths["wfbp"] < lengths["bytescheduler"]


def test_the_order_of_arrival_becomes_the_order_of_messages() -> None:
    """Gradients come from the last to the first, by a clock that everybody reads alike."""

    def run(comm: pycoll.Communicator) -> list[int]:
        ticks = itertools.count()
        scheduler = Scheduler(comm, ENTRIES, policy="wfbp", clock=lambda: float(next(ticks)))
        for _ in range(TIMED_STEPS + 1):
            scheduler.begin()
            for number in reversed(range(len(ENTRIES))):
                scheduler.ready(number)
            scheduler.wait()
        return [members[0] for members in scheduler._layout.members]

    assert world_in_threads(2).run(run) == [list(reversed(range(len(ENTRIES))))] * 2


def test_times_are_those_without_what_sending_takes() -> None:
    class Dear:
        """A communicator to which it takes five seconds to hand over a message."""

        def __init__(self, comm: pycoll.Communicator) -> None:
            self._comm, self.now = comm, 0.0

        def __getattr__(self, name: str) -> Any:
            self.now += 5.0
            return getattr(self._comm, name)

    def run(comm: pycoll.Communicator) -> list[list[float]]:
        dear = Dear(comm)
        scheduler = Scheduler(dear, ENTRIES, policy="wfbp", clock=lambda: dear.now)
        for _ in range(2):
            scheduler.begin()
            for number in range(len(ENTRIES)):
                dear.now += 1.0
                scheduler.ready(number)
            scheduler.wait()
        return scheduler._timed

    assert world_in_threads(2).run(run) == [[[n + 1.0 for n in range(len(ENTRIES))]] * 2] * 2


def test_messages_go_while_others_are_not_there_yet() -> None:
    def run(comm: pycoll.Communicator) -> None:
        scheduler = Scheduler(comm, ENTRIES, policy="wfbp")
        views = scheduler.begin()
        for number in range(4):
            views[number][...] = 1
            scheduler.ready(number)
        deadline = time.monotonic() + 10
        while not all(work.done() for work in scheduler._works[:4]):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert scheduler._works[4] is None
        assert np.all(views[0] == comm.size)
        scheduler.wait()

    world_in_threads(2).run(run)


def test_single_gradients_can_be_waited_for() -> None:
    def run(comm: pycoll.Communicator, policy: Policy) -> None:
        scheduler = Scheduler(comm, ENTRIES, policy=policy, overlaps=True)
        for step in range(STEPS):
            views = scheduler.begin()
            for number, view in enumerate(views):
                view[...] = number + step
                scheduler.ready(number)
            scheduler.flush()
            for number in reversed(range(len(ENTRIES))):
                scheduler.wait(number)
                assert np.all(np.asarray(views[number], np.float64) == 2 * (number + step))
            scheduler.wait()
            scheduler.wait()

    for policy in EVERY:
        world_in_threads(2).run(lambda comm, p=policy: run(comm, p))


def test_what_never_comes_counts_as_zeros() -> None:
    def run(comm: pycoll.Communicator) -> None:
        scheduler = Scheduler(comm, ENTRIES, policy="mg_wfbp")
        for step in range(STEPS):
            views = scheduler.begin()
            for number, view in enumerate(views):
                view[...] = 7
                if number % comm.size == comm.rank:
                    scheduler.ready(number)
            scheduler.wait()
            assert all(np.all(np.asarray(view, np.float64) == 7) for view in views), step

    world_in_threads(3).run(run)


@pytest.mark.parametrize(
    "words", [{"policy": "WFBP-A2A"}, {"policy": "WFBP-PS"}, {"policy": "dear"}]
)
def test_a_gradient_that_never_comes_ends_in_a_deadline(words: dict[str, Any]) -> None:
    """The other ranks name the one whose backward pass stands still, and none hangs."""
    worlds = pycoll.local_world(2, servers=1, timeout_s=1.0)
    told: list[str] = []
    waited = threading.Event()

    def run(comm: pycoll.Communicator) -> None:
        scheduler = Scheduler(comm, ENTRIES, **words)
        for number, view in enumerate(scheduler.begin()):
            view[...] = 1
            if comm.rank == 0 or number != 4:
                scheduler.ready(number)
        if comm.rank == 1:
            assert waited.wait(30)
            return
        begin = time.monotonic()
        try:
            scheduler.wait()
        except pycoll.TimeoutError as error:
            told.append(str(error))
        assert time.monotonic() - begin < 15
        waited.set()

    threads = [threading.Thread(target=run, args=(comm,)) for comm in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in worlds:
        comm.close()
    assert len(told) == 1 and "rank 1" in told[0], told


# Wrong requests


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([Entry("a", (1,)), Entry("a", (2,))], "names twice: a"),
        ([Entry("", (1,))], "entry 0 has the name ''"),
        ([Entry("a", (1,), "float31")], "'a' has type 'float31'; there are bool, "),
        ([Entry("a", (-1,))], "'a' has shape"),
    ],
)
def test_wrong_entries_are_refused(entries: list[Entry], text: str) -> None:
    def run(comm: pycoll.Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match=text):
            Scheduler(comm, entries)

    world_in_threads(1).run(run)


def test_what_is_wrong_within_a_step_is_told() -> None:
    def run(comm: pycoll.Communicator) -> None:
        scheduler = Scheduler(comm, ENTRIES)
        with pytest.raises(InvalidArgumentError, match=r"ready\(0\) outside of a step"):
            scheduler.ready(0)
        scheduler.begin()
        scheduler.ready(1)
        with pytest.raises(InvalidArgumentError, match=r"'head\.bias' was ready twice"):
            scheduler.ready(1)
        with pytest.raises(InvalidArgumentError, match="number is 9: expected 0 to 8"):
            scheduler.ready(9)
        with pytest.raises(InvalidArgumentError, match="within a step"):
            scheduler.begin()
        scheduler.wait()
        scheduler.begin()
        scheduler.wait()
        with pytest.raises(InvalidArgumentError, match="policy is 'fast'"):
            Scheduler(comm, ENTRIES, policy="fast")
        with pytest.raises(InvalidArgumentError, match="max"):
            Scheduler(comm, [Entry("a", (1,), "complex64")], op="max")

    world_in_threads(1).run(run)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda entries: [*entries[:4], *entries[5:]], "'middle'"),
        (lambda entries: entries[:-1], "8 and 9, the first without a match being .*stem"),
        (lambda entries: [entries[0]._replace(shape=(300, 8)), *entries[1:]], r"\[300, 7\]"),
        (lambda entries: [*entries[:-1], entries[-1]._replace(kind="float64")], "float64"),
    ],
)
def test_ranks_with_other_gradients_are_told(
    change: Callable[[Sequence[Entry]], list[Entry]], text: str
) -> None:
    def run(comm: pycoll.Communicator) -> None:
        entries = change(ENTRIES) if comm.rank == 1 else ENTRIES
        with pytest.raises(MismatchError, match=f"of rank 1 differ from .* 0: .*{text}"):
            Scheduler(comm, entries)
        assert comm.all_reduce(1) == comm.size, "the communicator is as good as before"

    world_in_threads(3).run(run)


@pytest.mark.parametrize("odd", [[0], [2], [0, 3]])
def test_the_ranks_that_differ_from_most_others_are_named(odd: list[int]) -> None:
    def run(comm: pycoll.Communicator) -> None:
        codec = Block("int4" if comm.rank in odd else "int8")
        text = f"the gradients of rank {odd[0]} differ from those of rank {int(odd[0] == 0)}: "
        with pytest.raises(MismatchError, match=text + ".*int4.*int8") as found:
            Scheduler(comm, [Entry("a", (64,))], compress=codec)
        assert (found.value.rank, found.value.ranks) == (odd[0], tuple(odd))

    world_in_threads(5).run(run)


def test_ranks_with_other_policies_are_told() -> None:
    def run(comm: pycoll.Communicator) -> None:
        with pytest.raises(MismatchError, match="'bsp' and 'wfbp'"):
            Scheduler(comm, ENTRIES, policy="bsp" if comm.rank else "wfbp")

    world_in_threads(2).run(run)


def test_architectures_are_alike_and_stay() -> None:
    def run(comm: pycoll.Communicator) -> None:
        with pytest.raises(MismatchError, match="'ps' and 'a2a'"):
            Scheduler(comm, ENTRIES, policy="bsp", architecture="ps" if comm.rank else None)
        with pytest.raises(InvalidArgumentError, match="'mesh': expected one of a2a, ps, auto"):
            Scheduler(comm, ENTRIES, architecture="mesh")
        scheduler = Scheduler(comm, ENTRIES, policy="BSP-PS")
        assert scheduler.architecture == "ps" and scheduler.policy.name == "bsp"
        with pytest.raises(InvalidArgumentError, match=r"'ps' for all steps .* become 'a2a'"):
            scheduler.architecture = "a2a"
        train(comm, scheduler, False)

    world_in_threads(2).run(run)


def test_a_communicator_that_closes_under_way_ends_the_step() -> None:
    world = fresh_world(2)

    def run(comm: pycoll.Communicator) -> str:
        scheduler = Scheduler(comm, ENTRIES, policy="wfbp")
        scheduler.begin()
        if comm.rank == 0:
            scheduler.ready(0)
            comm.close()
        with pytest.raises(pycoll.PycollError) as caught:
            scheduler.wait()
        return type(caught.value).__name__

    assert world.run(run) == ["ClosedError", "PeerLostError"]
    world.close()


# Buckets and rates


def test_arrays_of_a_bucket_share_its_memory() -> None:
    bucket = Bucket([(2, 3), (0,), (17,), ()], "int16")
    assert [view.shape for view in bucket.views] == bucket.shapes
    for number, view in enumerate(bucket.views):
        assert not view.any() and view.ctypes.data % 64 == 0
        view[...] = number + 1
    assert bucket.flat.sum() == 6 * 1 + 17 * 3 + 4
    assert bucket.neighbours(2, 3).sum() == 17 * 3 + 4

    def run(comm: pycoll.Communicator) -> None:
        mine = Bucket([(2, 3), (17,)], flat=np.zeros(99, np.float32))
        mine.views[1][...] = comm.rank
        comm.all_reduce(mine.flat, out=mine.flat)
        assert mine.flat.sum() == 17 * 3

    world_in_threads(3).run(run)
    for flat in (np.zeros(3, np.float32), np.zeros((10, 10), np.float32)):
        with pytest.raises(InvalidArgumentError, match="expected one axis of at least 16"):
            Bucket([(4,)], flat=flat)


def test_the_fit_finds_the_line() -> None:
    rate = fit_rate(LENGTHS, [3e-6 + n / 5e9 for n in LENGTHS])
    assert rate.alpha == pytest.approx(3e-6) and rate.beta == pytest.approx(1 / 5e9)
    assert fit_rate([4096], [2e-3]) == (2e-3, 0.0)
    assert fit_rate([1000, 2000], [1e-3, 3e-3]).alpha == 0, "a start that costs less than nothing"
    assert fit_rate([1000, 2000], [3e-3, 1e-3]).beta == 0, "the longer the sooner"


def test_what_a_wire_takes_faster_after_a_pause_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    sent = 0

    def call() -> None:
        nonlocal now, sent
        sent += 1
        now += 1e-5 if sent < 100 else 1e-4

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    (comm,) = pycoll.local_world(1)
    with comm:
        assert _seconds(comm, call) == pytest.approx(1e-4)
        now = 0.0
        assert _seconds(comm, lambda: None) == 0


def test_calls_that_return_early_count_with_those_that_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    sent = 0

    def call() -> None:
        nonlocal now, sent
        sent += 1
        now += 1e-3 if sent % 10 == 0 else 1e-5

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    (comm,) = pycoll.local_world(1)
    with comm:
        assert _seconds(comm, call) == pytest.approx(1.09e-4, rel=0.1)


def test_a_short_message_that_was_held_up_takes_no_longer_than_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    took = iter([9e-3, 1e-4, 2e-4, 1e-3, 4e-3, 8e-3])
    monkeypatch.setattr("pycoll.gradients.measure._seconds", lambda *_: next(took))
    rate = _rate(None, np.zeros(LENGTHS[-1] // 4), lambda part: lambda: None)
    assert rate == fit_rate(LENGTHS, [1e-4, 1e-4, 2e-4, 1e-3, 4e-3, 8e-3])


def test_two_lengths_are_measured_however_slow_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a byte of the slowest messages would cost nothing."""
    took = iter([0.1, 0.7])
    monkeypatch.setattr("pycoll.gradients.measure._seconds", lambda *_: next(took))
    rate = _rate(None, np.zeros(LENGTHS[-1] // 4), lambda part: lambda: None)
    assert rate == fit_rate(LENGTHS[:2], [0.1, 0.7]) and rate.beta > 0


def test_messages_that_are_measured_take_turns_in_memory() -> None:
    memory, seen = np.arange(40), []
    call = _in_turns(memory, 12, lambda part: lambda: seen.append(part[0]))
    for _ in range(5):
        call()
    assert seen == [0, 12, 24, 0, 12]


def test_a_device_that_computes_loses_nothing_to_messages() -> None:
    rates, _ = world_in_threads(2).run(lambda comm: measure(comm, accelerated=True))
    assert rates.host_s == rates.slowed == 0 < rates.all_reduce.seconds(1 << 20)


def test_rates_are_alike_on_all_ranks() -> None:
    first, second = world_in_threads(2).run(measure)
    assert first == second
    rates = [first.all_reduce, first.reduce_scatter, first.all_gather]
    assert all(one.alpha >= 0 and one.beta >= 0 for one in rates)
    assert first.host_s >= 0 and 0 <= first.slowed <= 1 and first.await_s == 0
    assert first.push_pull == () and first.architectures == ("a2a",)
    served, other = world_in_threads(2).run(lambda comm: measure(comm, push_pull_by=("direct",)))
    assert served == other and served.architectures == ("a2a", "ps")
    assert served.push_pull_by == "direct"
    out, back = served.push_pull
    assert (out.resources, back.resources) == (("out",), ("in",)) and out.rate == back.rate
    assert out.behind_s is None and back.behind_s is not None and back.behind_s >= 0
    assert served.busy("ps") == out.rate > (0.0, 0.0)
    alone_s = served.alone_s("ps", 1 << 20)
    assert alone_s == out.rate.seconds(1 << 20) + back.behind_s
