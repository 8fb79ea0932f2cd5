"""SlowMo, AdaComm, DiLoCo: the oracle's bits, degenerate cases, fragments under way, restarts."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from harness import fresh_world, world_in_threads
from local_oracle import mean, oracle

import pycoll
from pycoll import InvalidArgumentError, PeerLostError
from pycoll.compress import (
    BF16,
    FP8,
    Block,
    Custom,
    Feedback,
    PowerSGD,
    RandomK,
    Sign,
    Threshold,
    TopK,
)
from pycoll.optim import AdaComm, LocalState, LocalUpdates, PostLocal

LR = 2.0**-3
SHAPES = [(3, 4), (), (5,), (2, 2), (7,)]
#: Cut by elements: 12 + 1 + 5 + 4 + 7 = 29 in two and in three parts.
PARTS = {1: [range(5)], 2: [range(3), range(3, 5)], 3: [range(1), range(1, 4), range(4, 5)]}
NESTEROV = {"lr": 0.75, "momentum": 0.5, "nesterov": True}
HEAVY = {"lr": 0.5, "momentum": 0.25}
HALVES = Custom(lambda x: x.astype(np.float16).tobytes(), lambda b, n: np.frombuffer(b, "f2"), "f2")
Arrays = list[Any]


def start_of(kind: Any) -> Arrays:
    return [np.asarray(np.arange(np.prod(s)).reshape(s) * 8 - 16, kind) for s in SHAPES]


def curved(rank: int, step: int, params: Arrays) -> Arrays:
    """Inner steps whose values are rounded."""
    return [
        np.asarray(p - np.sin(p + np.float32(rank + step)) * np.float32(0.1), p.dtype)
        for p in params
    ]


def whole(rank: int, step: int, params: Arrays) -> Arrays:
    """Inner steps by whole numbers."""
    return [
        np.asarray(
            p - (np.arange(p.size).reshape(p.shape) * 7 + rank * 4 + step * 3) % 64 * 4 * LR,
            p.dtype,
        )
        for p in params
    ]


def trained(
    comm: Any, updates: LocalUpdates, steps: int, step_of: Any = curved, kind: Any = np.float32
) -> Arrays:
    params, state = updates.begin(start_of(kind), comm)
    for step in range(1, steps + 1):
        params, state = updates.advance(step_of(comm.rank, step, params), state, lr=LR)
    return params


def same(found: Arrays, wanted: Arrays) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def triple(outer: Any) -> tuple[float, float, bool]:
    if outer is None:
        return 1, 0, False
    return outer["lr"], outer["momentum"], outer.get("nesterov", False)


@pytest.mark.parametrize("outer", [None, NESTEROV, HEAVY])
@pytest.mark.parametrize("fragments", [1, 2, 3])
@pytest.mark.parametrize(("delay", "mix"), [(0, 0.0), (1, 0.0), (1, 0.5), (0, 0.25), (1, 1.0)])
def test_fragments_delay_and_mix_have_the_bits_of_the_oracle(
    outer: Any, fragments: int, delay: int, mix: float
) -> None:
    updates = LocalUpdates(7, outer, fragments, delay, mix)
    for kind, size in ((np.float32, 3), (np.float64, 2)):
        wanted = oracle(
            *(start_of(kind), size, 20, curved, [7], triple(outer)),
            fragments=PARTS[fragments],
            delay=delay,
            mix=mix,
        )

        def run(comm: pycoll.Communicator, kind: Any = kind) -> Arrays:
            return trained(comm, updates, 20, kind=kind)

        for found, expected in zip(world_in_threads(size).run(run), wanted, strict=True):
            same(found, expected)


def test_degenerate_cases_are_equal_bit_by_bit() -> None:
    def run(comm: pycoll.Communicator) -> None:
        local = trained(comm, LocalUpdates(4), 12)
        for outer in ({"lr": 1.0, "momentum": 0.0}, {"lr": 1, "in_inner_rate": True}, {}):
            same(trained(comm, LocalUpdates(4, outer), 12), local)
        same(trained(comm, LocalUpdates(4, None, 1, 0, 0), 12), local)
        same(trained(comm, LocalUpdates(PostLocal(0, 4)), 12), local)
        # Rate 1 is the average also where the change is computed and taken away again.
        whole_local = trained(comm, LocalUpdates(1), 12, whole, np.float64)
        params = start_of(np.float64)
        for step in range(1, 13):
            every = [whole(rank, step, params) for rank in range(comm.size)]
            changes = [mean([a - x for x in one]) for a, *one in zip(params, *every, strict=True)]
            params = [np.asarray(a - d) for a, d in zip(params, changes, strict=True)]
        same(whole_local, params)
        # A rate of 2**-3 scales the velocity without rounding it.
        slow = LocalUpdates(4, {**HEAVY, "in_inner_rate": True})
        same(trained(comm, slow, 12), trained(comm, LocalUpdates(4, HEAVY), 12))
        # A share of 1 keeps the local values.
        alone = start_of(np.float32)
        for step in range(1, 13):
            alone = curved(comm.rank, step, alone)
        same(trained(comm, LocalUpdates(4, NESTEROV, 2, 1, 1.0), 12), alone)

    world_in_threads(2).run(run)


def test_slow_momentum_survives_a_change_of_the_inner_rate() -> None:
    updates = LocalUpdates(2, {"lr": 0.5, "momentum": 0.5, "in_inner_rate": True})

    def run(comm: pycoll.Communicator) -> list[float]:
        params, state = updates.begin([np.zeros(1)], comm)
        found = []
        for step, rate in enumerate([0.5, 0.5, 0.25, 0.25, 0.25, 0.0], 1):
            change = rate * (step + comm.rank)
            params, state = updates.advance([params[0] - change], state, lr=[rate])
            found.append(float(params[0][0]))
        return found

    anchor, velocity, wanted = 0.0, 0.0, []
    for rate, change in ((0.5, 0.5 * (1.5 + 2.5)), (0.25, 0.25 * (3.5 + 4.5)), (0.25, 0.25 * 5.5)):
        velocity = 0.5 * velocity + change / rate
        anchor -= 0.5 * rate * velocity
        wanted.append(anchor)
    for found in world_in_threads(2).run(run):
        assert found[1::2] == wanted


def test_adacomm_shortens_rounds_as_the_loss_falls() -> None:
    schedule = AdaComm(first=8, period=8, least=2)
    last = schedule.first_round()
    assert last.steps == 8
    lengths, steps = [], 0
    for loss in (4.0, 4.0, 1.0, 1.0, 1.0, 0.01, 0.01):
        steps += last.steps
        last = schedule.following(steps, loss, last)
        lengths.append(last.steps)
    # First loss; no lower, half; sqrt(1/4) 8 = 4 is no shorter: half of it; then the least.
    assert lengths == [8, 4, 4, 2, 2, 2, 2]
    assert schedule.shortest == 2 and schedule.needs_loss
    assert (
        math.ceil(math.sqrt(0.5) * 8)
        == AdaComm(8, 1).following(16, 2.0, last._replace(steps=8, memory=(4.0, 8))).steps
    )


@pytest.mark.parametrize("fragments", [1, 2])
def test_adacomm_takes_the_mean_loss_of_all_ranks(fragments: int) -> None:
    losses = [4.0] * 6 + [1.0] * 30

    def run(comm: pycoll.Communicator) -> tuple[Arrays, list[int]]:
        updates = LocalUpdates(PostLocal(0, AdaComm(6, 4, least=2)), None, fragments)
        params, state = updates.begin(start_of(np.float64), comm)
        ends = []
        for step, loss in enumerate(losses, 1):
            mine = loss * 2 if comm.rank else 0.0
            moved = curved(comm.rank, step, params)
            params, state = updates.advance(moved, state, loss=mine)
            if state.synchronized:
                ends.append(step)
        return params, ends

    # The first loss is 4; then it is 1: sqrt(1/4) 6 = 3, then half, rounded up: 2.
    rounds = [6, 6, 3, 3, 2, 2]
    ends = [6, 12, 15, 18, *range(20, 37, 2)]
    wanted = oracle(start_of(np.float64), 2, 36, curved, rounds, fragments=PARTS[fragments])
    for rank, (found, told) in enumerate(world_in_threads(2).run(run)):
        assert told == ends
        same(found, wanted[rank])


@pytest.mark.parametrize("stopped", range(1, 12))
def test_a_restart_goes_on_bit_by_bit_with_a_fragment_under_way(stopped: int) -> None:
    updates = LocalUpdates(6, NESTEROV, 2, 2, 0.5)

    def run(comm: pycoll.Communicator) -> tuple[Arrays, Arrays, bool]:
        params, state = updates.begin(start_of(np.float32), comm)
        for step in range(1, stopped + 1):
            params, state = updates.advance(curved(comm.rank, step, params), state)
        saved = pickle.dumps((params, state.state_dict()))
        under_way = state.pending is not None
        for step in range(stopped + 1, 20):
            params, state = updates.advance(curved(comm.rank, step, params), state)
        again, loaded = pickle.loads(saved)
        again, state = updates.resume(again, LocalState.load(loaded), comm)
        for step in range(stopped + 1, 20):
            again, state = updates.advance(curved(comm.rank, step, again), state)
        return params, again, under_way

    for params, again, under_way in world_in_threads(2).run(run):
        same(again, params)
        assert under_way == (stopped % 3 in (0, 1) and stopped >= 3)


@pytest.mark.parametrize("codec", [TopK(0.25), Threshold(40.0), RandomK(0.25, 1)], ids=repr)
@pytest.mark.parametrize("delay", [0, 1])
def test_what_a_codec_leaves_out_of_a_round_is_sent_in_a_later_one(codec: Any, delay: int) -> None:
    """Whole numbers times powers of two, so that every sum is exact. A restart loses nothing."""
    updates = LocalUpdates(2, {"lr": 0.5}, delay=delay, mix=1.0 if delay else 0.0, compress=codec)

    def run(comm: pycoll.Communicator) -> tuple[Arrays, Arrays]:
        params, state = updates.begin(start_of(np.float32), comm)
        for step in range(1, 10):
            params, state = updates.advance(whole(comm.rank, step, params), state)
            if step in (4, 5):
                state = LocalState.load(pickle.loads(pickle.dumps(state.state_dict())))
                params, state = updates.resume(params, state, comm)
        assert state.anchors is not None
        return list(state.anchors), list(state.residuals)

    common = start_of(np.float32)
    mine = [start_of(np.float32) for _ in range(2)]
    held = [[np.zeros_like(one) for one in common] for _ in range(2)]
    for number in range(4):
        sent = []
        for rank in range(2):
            for step in (2 * number + 1, 2 * number + 2):
                mine[rank] = whole(rank, step, mine[rank])
            given = [a - x + e for a, x, e in zip(common, mine[rank], held[rank], strict=True)]
            # RandomK draws by the step in which the fragment is due.
            sent.append([kept_of(codec, one, 2 * number + 2 + delay) for one in given])
            held[rank] = [one - gone for one, gone in zip(given, sent[rank], strict=True)]
        common = [a - mean(d) * np.float32(0.5) for a, *d in zip(common, *sent, strict=True)]
        if not delay:
            mine = [list(common) for _ in range(2)]
    for rank, (anchors, residuals) in enumerate(world_in_threads(2).run(run)):
        same(anchors, [np.asarray(one) for one in common])
        same(residuals, [np.asarray(one) for one in held[rank]])
        assert any(one.any() for one in residuals)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize(
    "codec",
    [PowerSGD(1), Sign(block=32), HALVES, BF16(), FP8(32), Block("int8", 32), Block("int4", 32)],
    ids=repr,
)
def test_a_round_has_the_bits_of_an_all_reduce_with_the_codec(codec: Any, kind: Any) -> None:
    """With the residuals and factors of the rounds before, by fragments, also after a restart."""
    if isinstance(codec, Custom):
        kind = np.float32
    fragments = PARTS[2]

    def run(comm: pycoll.Communicator) -> tuple[Any, Arrays]:
        updates = LocalUpdates(2, HEAVY, fragments=2, compress=codec)
        params, state = updates.begin(start_of(kind), comm)
        for step in range(1, 9):
            params, state = updates.advance(curved(comm.rank, step, params), state)
            if step == 4:
                state = LocalState.load(pickle.loads(pickle.dumps(state.state_dict())))
                params, state = updates.resume(params, state, comm)
        return state, params

    def by_hand(comm: pycoll.Communicator) -> tuple[Arrays, Arrays]:
        x, a, v = start_of(kind), start_of(kind), [np.zeros(s, kind) for s in SHAPES]
        kept = [Feedback(), Feedback()]
        for step in range(1, 9):
            x = curved(comm.rank, step, x)
            fragment = (step - 1) % 2
            kept[fragment].step = step
            part = fragments[fragment]
            words = {"compress": codec, "feedback": kept[fragment], "deterministic": True}
            averages = comm.all_reduce([a[n] - x[n] for n in part], "avg", **words)
            for n, average in zip(part, averages, strict=True):
                v[n] = np.asarray(v[n] * HEAVY["momentum"] + average, kind)
                a[n] = np.asarray(a[n] - v[n] * HEAVY["lr"], kind)
                x[n] = a[n].copy()
        return x, [one for feedback in kept for one in feedback.residual]

    for (state, params), (x, held) in zip(
        world_in_threads(2).run(run), world_in_threads(2).run(by_hand), strict=True
    ):
        same(params, x)
        same(list(state.residuals), held)
        assert any(one.any() for one in held)
        assert any(one is not None for one in state.factors) == isinstance(codec, PowerSGD)


@pytest.mark.parametrize("loaded", ["all", "behind", "without"])
def test_ranks_that_meet_have_the_same_factors(loaded: str) -> None:
    """A rank that is behind takes them; where one lacks them, all begin anew."""

    def run(comm: pycoll.Communicator) -> tuple[Any, Any, Arrays]:
        updates = LocalUpdates(1, HEAVY, compress=PowerSGD(1))
        params, state = updates.begin(start_of(np.float32), comm)
        for step in range(1, 7):
            before = (params, state)
            params, state = updates.advance(curved(comm.rank, step, params), state)
        if comm.rank == 1 and loaded == "behind":
            params, state = before
        saved = state.state_dict()
        if comm.rank == 1 and loaded == "without":
            del saved["factors"]
        params, met = updates.resume(params, LocalState.load(saved), comm)
        factors = met.factors
        return state.factors, factors, updates.advance(curved(comm.rank, 7, params), met)[0]

    found = world_in_threads(3).run(run)
    wanted = [one for one in found[0][0] if one is not None]
    assert wanted
    for _, factors, params in found:
        same(params, found[0][2])
        if loaded == "without":
            assert factors == ()
        else:
            same([one for one in factors if one is not None], wanted)


def kept_of(codec: Any, x: Any, step: int) -> Any:
    """The values that a codec sends; the others are 0."""
    flat, found = np.reshape(x, -1), np.zeros(np.size(x), np.float32)
    places = codec.chosen(flat, step)
    found[places] = flat[places]
    return found.reshape(np.shape(x))


def test_in_place_steps_do_not_reach_a_fragment_under_way() -> None:
    def run(comm: pycoll.Communicator) -> Arrays:
        updates = LocalUpdates(4, None, 1, 2, 0.5)
        params, state = updates.begin(start_of(np.float64), comm)
        for step in range(1, 12):
            for one, moved in zip(params, curved(comm.rank, step, params), strict=True):
                one[...] = moved
            params, state = updates.advance(params, state)
        return params

    wanted = oracle(start_of(np.float64), 2, 11, curved, [4], delay=2, mix=0.5)
    for found, expected in zip(world_in_threads(2).run(run), wanted, strict=True):
        same(found, expected)


@pytest.mark.parametrize("outer", [None, NESTEROV])
def test_finish_ends_what_is_under_way(outer: Any) -> None:
    def run(comm: pycoll.Communicator) -> Arrays:
        updates = LocalUpdates(6, outer, 2, 2, 0.5)
        params, state = updates.begin(start_of(np.float32), comm)
        for step in range(1, 8):
            params, state = updates.advance(curved(comm.rank, step, params), state)
        assert state.pending is not None
        params, state = updates.finish(params, state)
        assert state.pending is None and state.synchronized
        again, _ = updates.finish(params, state)
        return [*params, *again]

    first, second = world_in_threads(2).run(run)
    same(first, second)
    if outer is not None:
        same(first[:5], first[5:])


@pytest.mark.parametrize("lost_at", [3, 4, 5])
def test_a_rank_lost_with_a_fragment_under_way(lost_at: int) -> None:
    """The rest send their shares again in a new world, and end with its averages."""
    updates = LocalUpdates(6, NESTEROV, 2, 2, 0.5)
    world = fresh_world(3)
    spare = dict(zip((0, 2), pycoll.local_world(2, timeout_s=30), strict=True))

    def run(comm: pycoll.Communicator) -> Any:
        params, state = updates.begin(start_of(np.float32), comm)
        step, failed = 0, 0
        while step < 15:
            if comm.rank == 1 and step == lost_at - 1:
                comm.close()
                return None
            moved = curved(comm.rank, step + 1, params)
            before = [one.copy() for one in moved]
            try:
                params, state = updates.advance(moved, state)
                step += 1
            except PeerLostError:
                failed += 1
                same(moved, before)
                params, state = updates.resume(moved, state, spare[comm.rank])
                # The step that failed is behind its inner step.
                params, state = updates.advance(params, state)
                step = state.step
        params, state = updates.finish(params, state)
        return params, state.step, failed

    found = world.run(run)
    world.close()
    for comm in spare.values():
        comm.close()
    same(found[0][0], found[2][0])
    assert found[0][1] == found[2][1] == 15
    assert found[0][2] == found[2][2] == 1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"every": 0}, "every is 0: expected a number of inner steps of at least 1, or a schedule"),
    ({"every": True}, "every is True: expected a number of inner steps"),
    ({"every": 1.5}, "every is 1.5: expected a number of inner steps"),
    ({"every": 4, "fragments": 0}, "fragments is 0: expected a whole number of at least 1"),
    ({"every": 4, "fragments": 5}, "fragments is 5 and a round has 4 steps"),
    ({"every": AdaComm(8, least=2), "fragments": 3}, "fragments is 3 and a round has 2 steps"),
    ({"every": 4, "delay": -1}, "delay is -1: expected a whole number of at least 0"),
    ({"every": 4, "delay": 4}, "delay is 4 and fragments are 4 steps apart"),
    (
        {"every": 9, "fragments": 4, "delay": 2},
        "delay is 2 and fragments are 2 steps apart .9 steps, 4 fragments.: expected less",
    ),
    ({"every": 4, "mix": -0.1}, "mix is -0.1: expected a number from 0 to 1"),
    ({"every": 4, "mix": 1.1}, "mix is 1.1: expected a number from 0 to 1"),
    ({"every": 4, "mix": math.nan}, "mix is nan: expected a number from 0 to 1"),
    ({"every": 4, "outer": 0.7}, "outer is 0.7: expected a dict such as"),
    ({"every": 4, "outer": {"beta": 1}}, "outer has 'beta': expected lr, momentum, nesterov"),
    ({"every": 4, "outer": {"lr": 0}}, "outer lr is 0: expected a number above 0"),
    ({"every": 4, "outer": {"lr": math.inf}}, "outer lr is inf: expected a finite number above 0"),
    ({"every": 4, "outer": {"momentum": 1}}, "outer momentum is 1: expected a number from 0 to"),
    ({"every": 4, "outer": {"nesterov": 1}}, "outer nesterov is 1: expected a bool"),
    ({"every": 4, "outer": {"nesterov": True}}, "nesterov is True and momentum is 0"),
]


@pytest.mark.parametrize(("words", "text"), WRONG)
def test_wrong_arguments_are_refused(words: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        LocalUpdates(**words)


WRONG_SCHEDULES: list[tuple[Any, str]] = [
    (lambda: PostLocal(-1, 8), "start is -1: expected a whole number of at least 0"),
    (lambda: PostLocal(1, 0), "every is 0: expected a number of inner steps"),
    (lambda: PostLocal(1, PostLocal(1, 2)), "a PostLocal takes a number of steps or an AdaComm"),
    (lambda: AdaComm(0), "first is 0: expected a whole number of at least 1"),
    (lambda: AdaComm(8, 0), "period is 0: expected a whole number of at least 1"),
    (lambda: AdaComm(8, decay=1), "decay is 1: expected between 0 and 1"),
    (lambda: AdaComm(8, decay=math.nan), "decay is nan: expected a number between 0 and 1"),
    (lambda: AdaComm(8, least=9), "least is 9 and first is 8: expected at most first"),
    (lambda: AdaComm(8).following(8, math.nan, AdaComm(8).first_round()), "loss is nan on the"),
    (lambda: AdaComm(8).following(8, -1.0, AdaComm(8).first_round()), "loss is -1.0 on the"),
]


@pytest.mark.parametrize(("make", "text"), WRONG_SCHEDULES)
def test_wrong_schedules_are_refused(make: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        make()


def test_wrong_arrays_and_states_are_refused() -> None:
    def run(comm: pycoll.Communicator) -> None:
        def refused(text: str, updates: LocalUpdates, params: Any, **words: Any) -> None:
            with pytest.raises(InvalidArgumentError, match=text):
                params, state = updates.begin(params, comm)
                updates.advance(params, state, **words)

        refused("params has no array", LocalUpdates(2), [])
        refused("b has dtype int64: local updates average float16", LocalUpdates(2), {"b": 3})
        refused("a has dtype bool", LocalUpdates(2), {"a": np.ones(2, bool)})
        refused("0 is a memoryview", LocalUpdates(2), [memoryview(np.ones(2))])
        refused("there are 1 parameters", LocalUpdates(2, fragments=2), [np.ones(9)])
        refused("loss is None and every is", LocalUpdates(AdaComm(2)), [np.ones(2)])
        slow = LocalUpdates(2, {"momentum": 0.5, "in_inner_rate": True})
        refused("lr is None: SlowMo needs", slow, [np.ones(2)])
        with pytest.raises(InvalidArgumentError, match="has met no ranks: call resume"):
            LocalUpdates(2).advance([np.ones(2)], LocalState())
        with pytest.raises(InvalidArgumentError, match="saved state has form None: expected 1"):
            LocalState.load({})

    world_in_threads(2).run(run)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"every": 4}, r"\['schedule', 'every', 2\] and \['schedule', 'every', 4\]"),
        ({"outer": {"lr": 0.5}}, r"\['outer', 0.25, 0.0, False, False\] and \['outer', 0.5"),
        ({"fragments": 1}, r"\['fragments', 2\] and \['fragments', 1\]"),
        ({"delay": 1}, r"\['delay', 2\] and \['delay', 1\]"),
        ({"mix": 0.5}, r"\['mix', 0.25\] and \['mix', 0.5\]"),
        ({"compress": Block("int8")}, r"\['compress', .*int4.*\] and \['compress', .*int8"),
    ],
)
@pytest.mark.parametrize(("size", "odd"), [(2, 1), (3, 0), (4, 0), (4, 2)])
def test_ranks_that_differ_are_named(words: dict[str, Any], text: str, size: int, odd: int) -> None:
    others = {"outer": {"lr": 0.25}, "mix": 0.25, "compress": Block("int4")}

    def run(comm: pycoll.Communicator) -> None:
        (name, value), *_ = words.items()
        if comm.rank == odd:
            value = others.get(name, 2)
        given = {"every": 8, name: value}
        if name == "compress":
            given["outer"] = {"momentum": 0.5}
        updates = LocalUpdates(**given)
        start = f"the local updates of rank {odd} differ from those of rank {int(odd == 0)}: "
        with pytest.raises(pycoll.MismatchError, match=start + text) as found:
            updates.begin([np.ones(3), np.ones(2)], comm)
        assert (found.value.rank, found.value.ranks) == (odd, (odd,))

    world_in_threads(size).run(run)
