"""Policies with codecs: the bits of separate calls, nothing lost between plans, and the choice.

Values that codecs round are whole numbers whose sums float32 holds exactly, so that what was sent
plus what is left has to equal the gradients exactly.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from harness import world_in_threads

import pycoll
import pycoll.optim
from pycoll import InvalidArgumentError, MismatchError
from pycoll.compress import BF16, Auto, Block, Codec, Feedback, PowerSGD, RandomK, Sign, TopK
from pycoll.gradients.chooser import MERGING, decide
from pycoll.gradients.codec_choice import by_label
from pycoll.gradients.communication_plan import A2A, Gradient, Rate, Rates, check, label_of
from pycoll.gradients.measure import measure
from pycoll.gradients.scheduler import TIMED_STEPS
from pycoll.optim import POLICIES, Entry, Policy, Scheduler

Array = Any
ENTRIES = [
    Entry("head.weight", (300, 7)),
    Entry("head.bias", (7,)),
    Entry("empty", (0, 3)),
    Entry("middle", (9_000,)),
    Entry("scalar", ()),
    Entry("stem", (5, 5, 5)),
]
SMALL = {"bucket_bytes": 9000, "partition_bytes": 4096, "credit_bytes": 8192, "merge_bytes": 600}
NAMED = [Policy(name, **SMALL) for name in POLICIES if name != "dear"]
INT8 = Block("int8", block=64)


def gradient(entry: Entry, rank: int, step: int) -> Array:
    """Whole numbers below 2**12 of many magnitudes."""
    dice = np.random.default_rng([rank, step, *entry.name.encode()])
    return np.floor(2.0 ** (12 * dice.random(entry.shape))) * dice.choice((-1, 1), entry.shape)


def made(comm: pycoll.Communicator, **words: Any) -> Scheduler:
    """A scheduler that sees all gradients at once, so that plans do not depend on times."""
    return Scheduler(comm, ENTRIES, clock=lambda: 0.0, **words)


def told_rates(monkeypatch: pytest.MonkeyPatch, phases: Sequence[dict[str, Rate]]) -> None:
    """Make schedulers believe rates: one dict of labels ("" for none) for each plan in turn."""
    counts: Counter[int] = Counter()

    def pretended(comm: Any, *words: Any) -> Rates:
        told = phases[min(counts[comm.rank], len(phases) - 1)]
        counts[comm.rank] += 1
        coded = tuple((way, told.get(label_of(way), told[""])) for way, _ in words[-1])
        return Rates(told[""], told[""], told[""], coded=coded)

    monkeypatch.setattr("pycoll.gradients.scheduler.measure", pretended)


@pytest.fixture(autouse=True)
def rates_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes seconds."""
    told_rates(monkeypatch, [{"": Rate(1e-5, 1e-9)}])


def stepped(scheduler: Scheduler, rank: int, step: int) -> list[Array]:
    """The results of one step, copied."""
    views = scheduler.begin()
    for number in reversed(range(len(ENTRIES))):
        views[number][...] = gradient(ENTRIES[number], rank, step)
        scheduler.ready(number)
    scheduler.wait()
    return [np.array(view, np.float64) for view in views]


def ran(size: int, function: Callable[[pycoll.Communicator], Any]) -> list[Any]:
    return world_in_threads(size).run(function)


@pytest.mark.parametrize("codec", [INT8, Sign(32), BF16()])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_messages_have_the_bits_of_separate_calls(codec: Codec, op: str) -> None:
    def every(comm: pycoll.Communicator) -> None:
        for policy in (*NAMED, Policy("auto")):
            scheduler = made(comm, policy=policy, op=op, compress=codec)
            for step in range(TIMED_STEPS + 1):
                stepped(scheduler, comm.rank, step)
            step = TIMED_STEPS + 1
            layout, kept = scheduler._layout, scheduler._coded.residuals()
            # Between gradients there are zeros.
            values = np.zeros(layout.length("float32"), np.float32)
            residual = np.zeros_like(values)
            for number, entry in enumerate(ENTRIES):
                place = slice(layout.starts[number], layout.starts[number] + prod(entry.shape))
                values[place] = gradient(entry, comm.rank, step).reshape(-1)
                residual[place] = kept[number]
            found = stepped(scheduler, comm.rank, step)
            for place, message in enumerate(layout.comm_plan.messages):
                assert label_of(message.architecture) == codec.label
                part = slice(layout.spans[place].begin, None)
                part = slice(part.start, part.start + len(layout.spans[place].whole))
                feedback = Feedback()
                feedback.residuals.adopt(residual[part])
                words: dict[str, Any] = {"compress": codec, "feedback": feedback}
                values[part] = comm.all_reduce(values[part], "sum", **words)
            if op == "avg":
                values /= np.float32(comm.size)
            for number, entry in enumerate(ENTRIES):
                start = layout.starts[number]
                wanted = values[start : start + prod(entry.shape)].reshape(entry.shape)
                assert found[number].tobytes() == wanted.astype(np.float64).tobytes(), policy

    ran(3, every)


def left(scheduler: Scheduler) -> list[Array]:
    kept = scheduler.state_dict()["residuals"]
    return [np.asarray(kept.get(one.name, 0.0), np.float64).reshape(-1) for one in ENTRIES]


def summed(comm: pycoll.Communicator, arrays: Sequence[Array]) -> list[Array]:
    return [comm.all_reduce(one.reshape(-1)) for one in arrays]


class Conserved:
    """What was sent plus what is left, over all ranks, is the sum of all gradients, exactly."""

    def __init__(self, comm: pycoll.Communicator) -> None:
        self._comm, self.step = comm, 0
        self._given = [np.zeros(prod(one.shape)) for one in ENTRIES]
        self._got = [np.zeros(prod(one.shape)) for one in ENTRIES]

    def run(self, scheduler: Scheduler, steps: int) -> None:
        for _ in range(steps):
            found = stepped(scheduler, self._comm.rank, self.step)
            for number, entry in enumerate(ENTRIES):
                self._given[number] += gradient(entry, self._comm.rank, self.step).reshape(-1)
                self._got[number] += found[number].reshape(-1)
            self.step += 1
        given, rest = summed(self._comm, self._given), summed(self._comm, left(scheduler))
        for entry, wanted, got, lacks in zip(ENTRIES, given, self._got, rest, strict=True):
            assert np.array_equal(got + lacks, wanted), (entry.name, self.step)


@pytest.mark.parametrize("codec", [TopK(0.1), RandomK(0.3, 5), BF16()])
def test_what_is_left_out_is_sent_later(codec: Codec) -> None:
    """By every policy, over plans made anew, and from one scheduler to another."""

    def every(comm: pycoll.Communicator) -> None:
        for policy in NAMED:
            sums = Conserved(comm)
            scheduler = made(comm, policy=policy, compress=codec)
            sums.run(scheduler, TIMED_STEPS + 2)
            assert any(one.any() for one in left(scheduler))
            scheduler.replan()
            sums.run(scheduler, TIMED_STEPS + 2)
            other = made(comm, policy="wfbp", compress=Auto([INT8]))
            other.load_state_dict(scheduler.state_dict())
            assert any(one.any() for one in left(other))
            sums.run(other, 1)
            assert not any(one.any() for one in left(other)), "timed steps go whole"

    ran(2, every)


@pytest.mark.parametrize("codec", [TopK(0.05), RandomK(0.1, 5), PowerSGD(2), INT8], ids=repr)
def test_a_restart_goes_on_bit_by_bit(codec: Codec) -> None:
    """By wfbp, whose bits do not depend on the plan: residuals, Q and draws go on."""

    def every(comm: pycoll.Communicator) -> None:
        words: dict[str, Any] = {"policy": "wfbp", "compress": codec}
        usual, steps = made(comm, **words), TIMED_STEPS + 6
        wanted = [stepped(usual, comm.rank, step) for step in range(steps)]
        for stop in (1, TIMED_STEPS, TIMED_STEPS + 2):
            first, second = made(comm, **words), made(comm, **words)
            found = [stepped(first, comm.rank, step) for step in range(stop)]
            state = pickle.loads(pickle.dumps(first.state_dict()))
            assert state["step"] == stop
            assert sorted(state["factors"]) == (
                ["head.weight", "stem"] if codec == PowerSGD(2) else []
            )
            second.load_state_dict(state)
            found += [stepped(second, comm.rank, step) for step in range(stop, steps)]
            for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
                pairs = zip(one, other, strict=True)
                assert all(np.array_equal(a, b) for a, b in pairs), (stop, step)
            assert second.state_dict()["step"] == steps

    ran(2, every)


def test_a_new_plan_goes_on_with_q() -> None:
    """Also a plan in whose messages the matrix has another place."""

    def every(comm: pycoll.Communicator) -> None:
        scheduler = made(comm, policy="bsp", compress=PowerSGD(2))
        other = made(comm, policy="wfbp", compress=PowerSGD(2))
        for step in range(2):
            stepped(scheduler, comm.rank, step)
        state = scheduler.state_dict()
        other.load_state_dict(state)
        kept = other.state_dict()["factors"]
        assert kept.keys() == state["factors"].keys() != set()
        assert all(np.array_equal(one, kept[name]) for name, one in state["factors"].items())
        old = {"form": 1, "residuals": state["residuals"]}
        other.load_state_dict(old)
        found = other.state_dict()
        assert (found["step"], found["factors"]) == (0, {}), "a state of an earlier version"

    ran(2, every)


def test_a_mean_counts_what_is_left_as_a_sum_does() -> None:
    def mean(comm: pycoll.Communicator) -> None:
        words: dict[str, Any] = {"policy": "fixed", "compress": BF16()}
        one = made(comm, op="avg", **words)
        two = made(comm, op="sum", **words)
        for step in range(TIMED_STEPS + 2):
            found, wanted = stepped(one, comm.rank, step), stepped(two, comm.rank, step)
            assert all(np.array_equal(4 * a, b) for a, b in zip(found, wanted, strict=True))
        pairs = zip(left(one), left(two), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)

    ran(4, mean)


@pytest.mark.parametrize("policy", ["auto", "wfbp", "mg_wfbp"])
@pytest.mark.parametrize(
    ("codec", "other"), [(TopK(0.1), BF16()), (TopK(0.01), TopK(0.1))], ids=repr
)
def test_changes_of_a_codec_lose_nothing(
    policy: str, codec: Codec, other: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the codecs are two densities of one; all ranks change between the same steps."""
    one, two = codec.label, other.label
    cheap, dear = Rate(1e-6, 1e-10), Rate(1e-3, 1e-7)
    phases = [
        {"": dear, one: cheap, two: dear},
        {"": cheap, one: dear, two: dear},
        {"": dear, one: dear, two: cheap},
        {"": dear, one: cheap, two: dear},
    ]
    told_rates(monkeypatch, phases)

    def every(comm: pycoll.Communicator) -> list[Any]:
        sums, plans = Conserved(comm), []
        compress = Auto([codec, other], every=TIMED_STEPS + 1)
        scheduler = made(comm, policy=policy, compress=compress)
        sums.run(scheduler, TIMED_STEPS)
        assert {message.architecture for message in scheduler.comm_plan.messages} == {A2A}
        for label in (one, "", two, one):
            # The first step of a plan, then those after which it is made anew.
            for steps in (1, TIMED_STEPS):
                sums.run(scheduler, steps)
                used = {label_of(message.architecture) for message in scheduler.comm_plan.messages}
                assert used == {label}, scheduler.explain()
                assert any(rest.any() for rest in left(scheduler)) is bool(label)
            word = label or "whole"
            assert f"middle: {word}, in a message of" in scheduler.explain()
            plans.append(scheduler.comm_plan)
            sums.run(scheduler, TIMED_STEPS)
        return plans

    first, second, third = ran(3, every)
    assert first == second == third


def test_small_layers_go_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec with a long start and few bytes: each layer takes what is shorter for it."""
    told_rates(monkeypatch, [{"": Rate(1e-6, 1e-8), "int8": Rate(50e-6, 1e-9)}])

    def layers(comm: pycoll.Communicator) -> None:
        scheduler = made(comm, policy="wfbp", compress=Auto([INT8]))
        for step in range(TIMED_STEPS + 1):
            stepped(scheduler, comm.rank, step)
        text = scheduler.explain()
        for entry in ENTRIES:
            word = "int8" if entry.nbytes > 49e-6 / 9e-9 else "whole"
            assert f"  {entry.name}: {word}, in a message of " in text
        assert "  middle: int8, in a message of 35.2 KiB, 86 us predicted, 361 us a2a" in text

    ran(2, layers)


def test_other_types_go_whole_by_choice_and_ranks_plan_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pycoll.gradients.scheduler.measure", measure)
    entries = [Entry("wide", (1000,), "float64"), Entry("half", (99,), "float16"), *ENTRIES]

    def every(comm: pycoll.Communicator) -> Any:
        scheduler = Scheduler(comm, entries, op="avg", compress="auto", overlaps=True)
        for step in range(TIMED_STEPS + 1):
            views = scheduler.begin()
            for number, entry in enumerate(entries):
                views[number][...] = gradient(entry, comm.rank, step)
                scheduler.ready(number)
            scheduler.wait()
            for number in (0, 1):
                mine = gradient(entries[number], comm.rank, step).astype(views[number].dtype)
                assert np.array_equal(views[number], comm.all_reduce(mine, "avg"))
        assert "wide: whole, in a message of" in scheduler.explain()
        assert "since codecs do not take float64" in scheduler.explain()
        names = [label_of(name) for name, _ in scheduler.rates.coded]
        assert names == ["bf16", "int8"]
        return scheduler.comm_plan, scheduler.rates, scheduler.explain()

    first, second = ran(2, every)
    assert first == second


def test_sparse_codecs_and_powersgd_take_whole_gradients() -> None:
    """Each gradient has its own largest values, and matrices stay matrices."""

    def every(comm: pycoll.Communicator) -> None:
        scheduler = made(comm, policy="bsp", compress=TopK(0.01))
        found = stepped(scheduler, comm.rank, 0)
        for entry, one in zip(ENTRIES, found, strict=True):
            count = np.count_nonzero(one)
            assert (
                -(-prod(entry.shape) // 100) <= count <= comm.size * (prod(entry.shape) / 100 + 1)
            )
        scheduler = made(comm, policy="bsp", compress=PowerSGD(1))
        weight = stepped(scheduler, comm.rank, 0)[0]
        assert np.linalg.matrix_rank(weight, tol=1e-3 * np.abs(weight).max()) == 1

    ran(2, every)


def test_structures_are_averaged_by_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    told_rates(monkeypatch, [{"": Rate(1.0, 1e-6), "bf16": Rate(1e-6, 1e-10)}])

    def every(comm: pycoll.Communicator) -> None:
        tree = {"a": np.full(700, 1.0 + 2.0**-12 * (comm.rank + 1), np.float32), "b": [np.ones(3)]}
        seen = []
        for _ in range(TIMED_STEPS + 2):
            words: dict[str, Any] = {"comm": comm, "compress": Auto([BF16()])}
            mean = pycoll.optim.average_gradients(tree, **words)
            seen.append(float(mean["a"][0]))
            assert mean["b"][0].tolist() == [1, 1, 1]
        assert seen[0] == 1 + 2.0**-12 * 1.5 and seen[-1] != seen[0]
        text = "there is a feedback: the scheduler keeps"
        with pytest.raises(InvalidArgumentError, match=text):
            pycoll.optim.average_gradients(tree, feedback=Feedback(), **words)

    ran(2, every)


def test_measured_codecs_are_alike_on_all_ranks() -> None:
    ways = [("a2a+int8", INT8), ("a2a+topk", TopK(0.01))]
    first, second = ran(2, lambda comm: measure(comm, codecs=ways))
    assert first == second and [name for name, _ in first.coded] == ["a2a+int8", "a2a+topk"]
    assert first.holding == ("a2a+topk",)
    # How a byte's cost compares with none depends on what else the cores do.
    assert all(rate.seconds(1 << 20) > 0 for _, rate in first.coded)


def test_bad_arguments_are_named() -> None:
    def every(comm: pycoll.Communicator) -> None:
        def refused(text: str, entries: Sequence[Entry] = ENTRIES, **words: Any) -> None:
            with pytest.raises(InvalidArgumentError, match=text):
                Scheduler(comm, entries, **words)

        refused("compress is 'int8': expected a codec of pycoll.compress", compress="int8")
        refused("compress is <class '.*Block'>: expected a codec", compress=Block)
        refused("op is 'max' and compress is Block", op="max", compress=INT8)
        refused("policy is 'dear' and compress is Block", policy="dear", compress=INT8)
        refused("architecture is 'ps' and compress is 'auto'", architecture="ps", compress="auto")
        wide = [*ENTRIES, Entry("wide", (3,), "float64")]
        refused(
            "'wide' is float64 and compress is Block.* lets other types go", wide, compress=INT8
        )
        refused("'wide' is float64 and compress is Auto", wide[-1:], compress=Auto())
        scheduler = Scheduler(comm, ENTRIES, compress=INT8)
        scheduler.begin()
        for call in (scheduler.replan, scheduler.state_dict, lambda: scheduler.load_state_dict({})):
            with pytest.raises(InvalidArgumentError, match=r"within a step: wait\(\) ends it"):
                call()
        scheduler.wait()
        with pytest.raises(InvalidArgumentError, match="without form 1: expected what"):
            scheduler.load_state_dict({})
        strange = {"form": 1, "residuals": {"other": np.zeros(3, np.float32)}}
        with pytest.raises(InvalidArgumentError, match="has 3 values of 'other', and no entry"):
            scheduler.load_state_dict(strange)
        with pytest.raises(
            MismatchError, match=r"differ from those of rank 0: .*int4.* and .*int8"
        ):
            Scheduler(comm, ENTRIES, compress=Block("int8" if comm.rank == 0 else "int4"))

    ran(2, every)
    for codecs, text in (
        ([], r"codecs is \[\]: expected a list of at least one codec"),
        (INT8, "codecs is Block"),
        ([INT8, "int4"], r"codecs\[1\] is 'int4': expected a codec"),
        ([INT8, Block], r"codecs\[1\] is <class"),
        ([INT8, Auto()], r"codecs\[1\] is Auto"),
        ([INT8, BF16(), INT8], "codecs has Block.* twice"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            Auto(codecs)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidArgumentError, match="every is -1"):
        Auto(every=-1)
    assert list(by_label([INT8, Block("int4")])) == ["int8", "int4"]
    assert list(by_label([INT8, Block("int8")])) == [repr(INT8), repr(Block("int8"))]


def test_the_choice_is_never_worse_than_one_codec_for_all() -> None:
    """1,000 random steps: each policy with a choice for each message, against each way alone."""
    ways = ("a2a", "a2a+one", "a2a+two")
    for seed in range(1000):
        dice = random.Random(seed)
        count = dice.randrange(1, 9)
        ready = itertools.accumulate(dice.choice((0.0, 0.5, 2.0)) for _ in range(count))
        gradients = [
            Gradient(
                dice.choice((64, 640, 6400, 64_000)) * dice.randrange(1, 9),
                ready_s,
                dice.choice(("float32", "float32", "float32", "float64")),
            )
            for ready_s in ready
        ]
        nbytes = sum(one.nbytes for one in gradients)
        plain = Rate(dice.choice((0.0, 0.05)), dice.choice((0.3, 1.0, 3.0)) * count / nbytes)
        coded = tuple(
            (way, Rate(plain.alpha * dice.choice((1, 3, 10)), plain.beta * dice.uniform(0.1, 1.5)))
            for way in ways[1:]
        )
        half = Rate(0.6 * plain.alpha, plain.beta / 2)
        rates = Rates(plain, half, half, host_s=dice.choice((0.0, 0.01)), coded=coded)
        rates = rates._replace(holding=dice.choice(((), ways[2:])))
        forward_s = [0.5] * count if dice.random() < 0.3 else None
        policy = dice.choice([*NAMED, Policy("auto")])
        found = decide(policy, gradients, rates, forward_s, A2A)
        check(found.comm_plan, gradients)
        named = [policy] if policy.name != "auto" else MERGING
        bare = rates._replace(coded=())
        alone = [decide(one, gradients, bare, forward_s, A2A) for one in named]
        if any(one.kind == "float32" for one in gradients):
            alone += [
                decide(one, gradients, rates, forward_s, way) for one in named for way in ways[1:]
            ]
        best_s = min(one.exposed_s for one in alone)
        step_s = 1.0 + gradients[-1].ready_s
        assert found.exposed_s <= best_s + 1e-9 * step_s, f"seed {seed}, {policy}"
        again = decide(policy, gradients, rates, forward_s, A2A)
        assert again == found, f"seed {seed}"
