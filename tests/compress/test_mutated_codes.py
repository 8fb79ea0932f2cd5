"""Codes that encode never makes are refused, and a Feedback serves one call at a time."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from harness import fresh_world, world_in_threads

import pycoll
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
    sparse,
)
from pycoll.errors import InvalidArgumentError, ReductionError

Array = Any
SEED = 20_261_127
RANKS = 3
HALVES = Custom(
    lambda x: x.astype(np.float16).tobytes(),
    lambda codes, count: np.frombuffer(codes[: len(codes) // 2 * 2], np.float16),
    "halves",
)
DENSE = [BF16(), FP8(), Block("int8"), Block("int4", 32), Sign()]
COMPOSED = [TopK(0.05), Threshold(1.5), RandomK(0.05, 1), PowerSGD(2), HALVES]


def damaged(draw: random.Random, codes: bytes) -> bytes:
    """Codes with one fault: other lengths, other bytes, words of 4 bytes that are swapped."""
    given = bytearray(codes)
    kind = draw.randrange(6)
    if kind == 0:
        return bytes(given[: draw.randrange(len(given) + 1)])
    if kind == 1:
        return bytes(given) + draw.randbytes(draw.randrange(1, 40))
    if kind == 2:
        return draw.randbytes(draw.randrange(2 * len(given) + 8))
    words = len(given) // 4
    if kind == 3 and words > 1:
        one, other = (4 * number for number in draw.sample(range(words), 2))
        given[one : one + 4], given[other : other + 4] = (
            given[other : other + 4],
            given[one : one + 4],
        )
    elif kind == 4 and words:
        place = 4 * draw.randrange(words)
        given[place : place + 4] = draw.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\xc0\x7f"])
    elif given:
        given[draw.randrange(len(given))] ^= 1 << draw.randrange(8)
    return bytes(given)


@pytest.mark.parametrize("codec", [*DENSE, *COMPOSED], ids=repr)
def test_damaged_codes_have_as_many_values_or_are_refused(codec: Any) -> None:
    draw, refused, tried = random.Random(f"{SEED} {codec!r}"), 0, 300
    x = np.random.default_rng(SEED).standard_normal((20, 25)).astype(np.float32)
    codes = bytes(codec.encode(x))
    for number in range(tried):
        mutant = damaged(draw, codes)
        try:
            with np.errstate(all="ignore"):
                found = codec.decode(mutant, x.size)
        except InvalidArgumentError:
            refused += 1
            continue
        why = f"seed {SEED}, number {number}: {mutant.hex()}"
        assert found.dtype == np.float32 and found.shape == (x.size,), why
    print(f"seed {SEED}: {refused} of {tried} damaged codes of {codec!r} were refused")
    assert refused > 30


@pytest.mark.parametrize("codec", [TopK(0.05), Threshold(1.5), HALVES], ids=repr)
def test_all_ranks_name_the_rank_that_sends_damaged_codes(
    codec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank encodes what it sends to the owners, and then the reply of its own part."""
    here, fault = threading.local(), {"rank": -1, "number": -1, "seed": ""}

    def mutated(codes: Array) -> Array:
        here.calls += 1
        if here.rank != fault["rank"] or here.calls != fault["number"]:
            return codes
        mutant = damaged(random.Random(str(fault["seed"])), bytes(codes))
        return np.frombuffer(mutant, np.uint8)

    pack_gaps, encode = sparse.pack_gaps, Custom.encode
    monkeypatch.setattr(sparse, "pack_gaps", lambda *given: mutated(pack_gaps(*given)))
    monkeypatch.setattr(Custom, "encode", lambda *given: mutated(encode(*given)))
    xs = [np.random.default_rng(rank).standard_normal(300).astype(np.float32) for rank in range(3)]

    def call(comm: pycoll.Communicator) -> Any:
        here.rank, here.calls = comm.rank, 0
        try:
            with np.errstate(all="ignore"):
                return comm.all_reduce(xs[comm.rank], "avg", compress=codec).tobytes()
        except ReductionError as error:
            assert error.operation == "all_reduce" and comm.all_reduce(1) == RANKS
            return error

    draw, refused, tried = random.Random(f"{SEED} {codec!r}"), 0, 60
    for number in range(tried):
        fault["rank"], fault["number"] = draw.randrange(RANKS), draw.randrange(1, RANKS + 2)
        fault["seed"] = f"{SEED} {number}"
        found = world_in_threads(RANKS).outcomes(call)
        errors = [one for one in found if isinstance(one, ReductionError)]
        if not errors:
            assert found == [found[0]] * RANKS, fault
            continue
        refused += 1
        assert [one.rank for one in errors] == [fault["rank"]] * RANKS, (fault, errors)
        assert f"rank {fault['rank']} sent codes that do not decode" in str(errors[0])
    print(f"seed {SEED}: {refused} of {tried} calls with damaged codes were refused")
    assert refused > 5


@pytest.mark.parametrize("codec", COMPOSED, ids=repr)
@pytest.mark.parametrize("name", ["broadcast", "all_gather", "reduce_scatter"])
def test_collectives_of_blocks_refuse_damaged_codes_on_all_ranks(
    name: str, codec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RandomK and PowerSGD too, whose all_reduce sends numbers that add up, and no codes."""
    here, fault = threading.local(), {"rank": -1, "number": -1, "seed": ""}
    encode_block = type(codec).encode_block

    def mutated(*given: Any) -> Array:
        codes = encode_block(*given)
        here.calls += 1
        if here.rank != fault["rank"] or here.calls != fault["number"]:
            return codes
        mutant = damaged(random.Random(str(fault["seed"])), bytes(codes))
        return np.frombuffer(mutant, np.uint8)

    monkeypatch.setattr(type(codec), "encode_block", mutated)
    xs = [np.random.default_rng(r).standard_normal((12, 25)).astype(np.float32) for r in range(3)]
    root = 1
    words = {"root": root} if name == "broadcast" else {}

    def call(comm: pycoll.Communicator) -> Any:
        here.rank, here.calls = comm.rank, 0
        feedback = Feedback() if isinstance(codec, RandomK) else None
        try:
            with np.errstate(all="ignore"):
                run = getattr(comm, name)
                return run(xs[comm.rank], compress=codec, feedback=feedback, **words).tobytes()
        except (InvalidArgumentError, ReductionError) as error:
            assert error.operation == name and comm.all_reduce(1) == RANKS
            return error

    draw, refused, tried = random.Random(f"{SEED} {codec!r} {name}"), 0, 40
    for number in range(tried):
        fault["rank"] = root if name == "broadcast" else draw.randrange(RANKS)
        fault["number"] = draw.randrange(1, RANKS) if name == "reduce_scatter" else 1
        fault["seed"] = f"{SEED} {number}"
        found = world_in_threads(RANKS).outcomes(call)
        errors = [one for one in found if isinstance(one, Exception)]
        if not errors:
            assert name == "reduce_scatter" or found == [found[0]] * RANKS, fault
            continue
        refused += 1
        assert len(errors) == RANKS, (fault, found)
        assert all(one.rank in (fault["rank"], None) for one in errors), (fault, errors)
        assert all(one.rank == fault["rank"] for r, one in enumerate(errors) if r != fault["rank"])
    print(f"seed {SEED}: {refused} of {tried} calls of {name} with {codec!r} were refused")
    assert refused > 5


@pytest.mark.parametrize("codec", COMPOSED, ids=repr)
def test_a_feedback_serves_one_call_at_a_time(codec: Any) -> None:
    text = "feedback serves a call with async_op whose Work has not been waited for .call 1."

    def call(comm: pycoll.Communicator) -> None:
        x = np.random.default_rng(comm.rank).standard_normal((20, 20)).astype(np.float32)
        usual, feedback = Feedback(), Feedback()
        wanted = [comm.all_reduce(x, compress=codec, feedback=usual) for _ in range(2)]
        work = comm.all_reduce(x, compress=codec, feedback=feedback, async_op=True)
        with pytest.raises(InvalidArgumentError, match=text):
            comm.all_reduce(x, compress=codec, feedback=feedback)
        # One rank forgets to wait, and all ranks raise.
        if comm.rank != 1:
            assert work.wait().tobytes() == wanted[0].tobytes()
        with pytest.raises(InvalidArgumentError, match=text) as caught:
            comm.all_reduce(x, compress=codec, feedback=feedback)
        assert caught.value.rank == (None if comm.rank == 1 else 1)
        assert work.wait().tobytes() == wanted[0].tobytes()
        again = comm.all_reduce(x, compress=codec, feedback=feedback)
        assert again.tobytes() == wanted[1].tobytes() and feedback.step == 2

    world_in_threads(RANKS).run(call)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "list"])
def test_a_feedback_of_each_dense_collective_serves_one_call_at_a_time(collective: str) -> None:
    codec = Block("int4")

    def call(comm: pycoll.Communicator) -> None:
        x: Any = np.random.default_rng(comm.rank).standard_normal(600).astype(np.float32)
        x = [x, x[:99]] if collective == "list" else x
        run = getattr(comm, "all_reduce" if collective == "list" else collective)
        feedback = Feedback()
        for _ in range(2):
            work = run(x, compress=codec, feedback=feedback, async_op=True)
            with pytest.raises(InvalidArgumentError, match="whose Work has not been waited for"):
                run(x, compress=codec, feedback=feedback)
            work.wait()
        run(x, compress=codec, feedback=feedback)
        assert feedback.step == 3 and feedback.norm() > 0

    world_in_threads(RANKS).run(call)


@pytest.mark.parametrize(("half", "wanted"), [(TopK(0.5), 24.0), (BF16(), 16.0)], ids=repr)
def test_a_feedback_is_free_once_its_communicator_has_ended(half: Any, wanted: float) -> None:
    feedbacks = [Feedback() for _ in range(2)]

    def start(comm: pycoll.Communicator) -> None:
        x = np.ones(8, np.float32)
        comm.all_reduce(x, compress=half, feedback=feedbacks[comm.rank], async_op=True)
        comm.close()

    world = fresh_world(2)
    world.run(start)
    world.close()

    def call(comm: pycoll.Communicator) -> Any:
        x = np.ones(8, np.float32)
        return comm.all_reduce(x, compress=TopK(1.0), feedback=feedbacks[comm.rank]).sum()

    # Each rank of TopK held back half of its values.
    assert world_in_threads(2).run(call) == [wanted, wanted]
