"""The negotiation of the order of tensors alone: ranks are threads, the tests call the rounds."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from harness import Counting, fresh_world, world_in_threads

import pycoll
from pycoll.torch.horovod.negotiation import KNOWN_MAX, Negotiation, Round

Comm = pycoll.Communicator
PLAIN = json.dumps({"shape": [3], "joinable": True})
OTHER = json.dumps({"shape": [4], "joinable": True})


def negotiation_of(comm: Comm) -> Negotiation:
    return Negotiation(comm, range(comm.size))


def keys(found: Round) -> list[str]:
    return [one.key for one in found.ready]


def test_a_name_is_ready_when_the_last_rank_has_it() -> None:
    def rank(comm: Comm) -> list[list[str]]:
        negotiation = negotiation_of(comm)
        found = []
        for step in range(comm.size + 1):
            if step == comm.rank:
                negotiation.add("x", PLAIN, False)
            found.append(keys(negotiation.round()))
            assert negotiation.waits == (comm.rank <= step < comm.size - 1)
        return found

    assert world_in_threads(3).run(rank) == [[[], [], ["x"], []]] * 3


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_orders_settle_alike(size: int) -> None:
    """Names come again and again, in other orders and rounds, some with terms of the step."""

    def rank(comm: Comm) -> list[list[str]]:
        negotiation = negotiation_of(comm)
        mine = random.Random(f"{os.environ.get('TEST_SEED', '0')}/{comm.rank}")
        found: list[list[str]] = []
        for step in range(8):
            # Numbered and new names, one whose terms change, and one that is used only once.
            wanted = [(f"t{i}", PLAIN, False) for i in range(70)]
            wanted += [
                ("changes", OTHER if step % 3 else PLAIN, False),
                (f"once{step}", "{}", True),
            ]
            mine.shuffle(wanted)
            missing = len(wanted)
            while missing:
                for _ in range(min(len(wanted), mine.randrange(30))):
                    negotiation.add(*wanted.pop())
                ready = negotiation.round().ready
                assert all(not one.problem for one in ready), ready
                found.append([one.key for one in ready])
                missing -= len(ready)
        assert not negotiation.waits
        return found

    first, *others = world_in_threads(size).run(rank)
    assert all(other == first for other in others)
    assert sorted(key for keys in first for key in keys).count("t3") == 8


def test_known_names_travel_as_bits() -> None:
    def rank(comm: Comm) -> list[str]:
        counting: Any = Counting(comm)
        negotiation = Negotiation(counting, range(comm.size))
        for _ in range(3):
            negotiation.add("a", PLAIN, False)
            negotiation.add("b", PLAIN, False)
            assert sorted(keys(negotiation.round())) == ["a", "b"]
        calls: list[str] = counting.calls
        return calls

    wanted = ["all_reduce", "all_gather", "all_reduce", "all_reduce"]
    assert world_in_threads(2).run(rank) == [wanted] * 2


def test_other_terms_are_a_problem_told_alike() -> None:
    def rank(comm: Comm) -> list[str]:
        negotiation = negotiation_of(comm)
        texts = []
        for odd in (False, True, True, False):
            negotiation.add("x", OTHER if odd and comm.rank == 2 else PLAIN, False)
            while negotiation.waits:
                texts += [one.problem for one in negotiation.round().ready]
            negotiation.round()
        return texts

    text = "the ranks disagree about x: shape is [3] on ranks 0, 1, [4] on rank 2"
    assert world_in_threads(3).run(rank) == [["", text, text, ""]] * 3


@pytest.mark.parametrize("known", [False, True])
def test_who_is_waited_for_too_long_is_named(known: bool) -> None:
    def rank(comm: Comm) -> list[str]:
        negotiation = negotiation_of(comm)
        if known:
            negotiation.add("x", PLAIN, False)
            assert keys(negotiation.round()) == ["x"]
        comm.timeout_s = 0.2
        if comm.rank != 1:
            negotiation.add("x", PLAIN, False)
        comm.timeout_s = 30
        found: list[str] = []
        while not found:
            comm.barrier()
            found = [one.problem for one in negotiation.round().ready]
        assert not negotiation.waits
        return found

    world = fresh_world(3)
    try:
        told = world.run(rank)
    finally:
        world.close()
    assert told == [told[0]] * 3
    assert (
        told[0][0].startswith("x waited ") and "for rank 1, while ranks 0, 2 had it" in told[0][0]
    )


def test_joined_ranks_stand_aside() -> None:
    def rank(comm: Comm) -> list[tuple[list[str], int | None]]:
        negotiation = negotiation_of(comm)
        found = []
        negotiation.add("known", PLAIN, False)
        negotiation.round()
        if comm.rank == 0:
            negotiation.join()
        for step in range(3):
            if comm.rank == 1 and step == 2:
                negotiation.join()
            elif comm.rank == 1:
                negotiation.add(("known", "new")[step], PLAIN, False)
            told = negotiation.round()
            found.append((keys(told), told.last_joined))
        return found

    found, other = world_in_threads(2).run(rank)
    # Bits are sent before it is told who has joined, so the first name takes a round more.
    assert [(sorted(names), last) for names, last in found] == [
        ([], None),
        (["known", "new"], None),
        ([], 1),
    ]
    assert other == found


def test_names_beyond_the_limit_are_told_in_words() -> None:
    def rank(comm: Comm) -> int:
        negotiation = negotiation_of(comm)
        count = KNOWN_MAX + 5
        for _ in range(2):
            for number in range(count):
                negotiation.add(f"n{number}", "{}", False)
            assert sorted(keys(negotiation.round())) == sorted(f"n{i}" for i in range(count))
        return count

    assert world_in_threads(2).run(rank) == [KNOWN_MAX + 5] * 2


def test_what_waits_for_long_is_told_once_with_the_ranks_that_lack_it() -> None:
    """Also where the name has a number, so that only bits are known of it."""

    def rank(comm: Comm) -> list[tuple[list[int], str]]:
        negotiation = Negotiation(comm, [5, 6, 7], warn_after_s=0.0)
        told = []
        for _ in range(2):
            if comm.rank != 1:
                negotiation.add("x", PLAIN, False)
            for _ in range(4):
                told += negotiation.round().stalled
            if comm.rank == 1:
                negotiation.add("x", PLAIN, False)
            while negotiation.waits:
                told += negotiation.round().stalled
        return [(list(one.had), one.text) for one in told]

    found = world_in_threads(3).run(rank)
    text = "x has been waiting 0 s for rank 6, while ranks 5, 7 had it"
    assert found == [[([0, 2], text)] * 2] * 3
