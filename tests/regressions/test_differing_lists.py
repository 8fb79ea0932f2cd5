"""A MismatchError of a list or a group said that arrays differ, but not which."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import ThreadWorld, fresh_world, world_in_processes

import pycoll

Arrays = list[Any]
HEAD = "ranks disagree about operation 1: "
FIVE = np.float32


def listed(comm: pycoll.Communicator, xs: Arrays) -> Any:
    return comm.all_reduce(xs)


def listed_later(comm: pycoll.Communicator, xs: Arrays) -> Any:
    return comm.all_reduce(xs, async_op=True).wait()


def listed_by_bound_call(comm: pycoll.Communicator, xs: Arrays) -> Any:
    return comm.all_reduce.bind(xs)()


def listed_in_place(comm: pycoll.Communicator, xs: Arrays) -> Any:
    return comm.all_reduce(xs, out=xs)


def grouped(comm: pycoll.Communicator, xs: Arrays) -> Any:
    with comm.group():
        for x in xs:
            comm.all_reduce(x, out=x)


def grouped_by_python(comm: pycoll.Communicator, xs: Arrays) -> Any:
    """Native code does not read memoryviews, so Python adds the calls."""
    with comm.group():
        for x in xs:
            comm.all_reduce(x if x.ndim == 0 else memoryview(x))


def grouped_as_list(comm: pycoll.Communicator, xs: Arrays) -> Any:
    with comm.group():
        comm.all_reduce(xs)


GROUPS = [grouped, grouped_by_python, grouped_as_list]
WAYS = [listed, listed_later, listed_by_bound_call, listed_in_place, *GROUPS]


def text_of(world: ThreadWorld, call: Callable[[pycoll.Communicator], Any]) -> str:
    """The text that all ranks raise."""
    texts = set()
    for error in world.outcomes(call):
        assert isinstance(error, pycoll.MismatchError), error
        # A list has several messages. A rank that begins the second one after it has learned of the
        # disagreement is told that the communicator has failed, and why.
        texts.add(str(error).removeprefix("the communicator has failed: "))
    assert len(texts) == 1, texts
    return texts.pop()


def text_of_fresh(size: int, transports: str, call: Callable[[pycoll.Communicator], Any]) -> str:
    world = fresh_world(size, transports)
    try:
        return text_of(world, call)
    finally:
        world.close()


def parts(text: str) -> dict[str, str]:
    """The arrays that a text names, by the ranks that passed them."""
    assert text.startswith(HEAD), text
    found = {}
    for part in text.removeprefix(HEAD).split("; "):
        match = re.fullmatch(
            r"(ranks? [\d ,and]+) called all_reduce of \d+ \w+, op \w+, (.*)", part
        )
        assert match, text
        found[match[1]] = match[2]
    return found


#: What rank 0 and rank 1 pass, and what the text says of each.
CASES: dict[str, tuple[Arrays, Arrays, str, str]] = {
    "shapes": (
        [np.ones((3, 2), FIVE), np.ones(4, FIVE)],
        [np.ones((2, 3), FIVE), np.ones(4, FIVE)],
        "arrays[0] of 2: float32, op sum, shape (3, 2)",
        "arrays[0] of 2: float32, op sum, shape (2, 3)",
    ),
    "counts": (
        [np.ones(4, FIVE), np.ones(5, FIVE), np.ones((), FIVE)],
        [np.ones(4, FIVE), np.ones(6, FIVE), np.ones((), FIVE)],
        "arrays[1] of 3: float32, op sum, shape (5,)",
        "arrays[1] of 3: float32, op sum, shape (6,)",
    ),
    "dtypes": (
        [np.ones(4, FIVE), np.ones(5, FIVE)],
        [np.ones(4, FIVE), np.ones(5)],
        "arrays[1] of 2: float32, op sum, shape (5,)",
        "arrays[1] of 2: float64, op sum, shape (5,)",
    ),
    "numbers": (
        [np.ones(4, FIVE), np.ones(5, FIVE)],
        [np.ones(4, FIVE), np.ones(5, FIVE), np.ones((2, 1), FIVE)],
        "2 arrays, no arrays[2]",
        "arrays[2] of 3: float32, op sum, shape (2, 1)",
    ),
    "cut elsewhere": (
        [np.ones(2, FIVE), np.ones(3, FIVE)],
        [np.ones(3, FIVE), np.ones(2, FIVE)],
        "arrays[0] of 2: float32, op sum, shape (2,)",
        "arrays[0] of 2: float32, op sum, shape (3,)",
    ),
    "long": (
        [np.ones(100_000, FIVE), np.ones((200, 500), FIVE)],
        [np.ones(100_000, FIVE), np.ones((500, 200), FIVE)],
        "arrays[1] of 2: float32, op sum, shape (200, 500)",
        "arrays[1] of 2: float32, op sum, shape (500, 200)",
    ),
}


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("way", "case"),
    [
        (way, case)
        for way in WAYS
        for case in CASES
        # A group sends a long array as a call of its own: see the next test.
        if case != "long" or way not in GROUPS
    ],
)
def test_the_array_is_named_on_both_sides(way: Any, case: str, transports: str) -> None:
    first, second, mine, other = CASES[case]

    def call(comm: pycoll.Communicator) -> Any:
        return way(comm, [x.copy() for x in (second if comm.rank else first)])

    text = text_of_fresh(2, transports, call)
    assert parts(text) == {"rank 0": mine, "rank 1": other}, text


@pytest.mark.parametrize("native", [True, False])
def test_a_long_array_of_a_group_is_named(native: bool) -> None:
    """The group's second call differs, since the first long array travels alone."""

    def call(comm: pycoll.Communicator) -> Any:
        xs = [np.ones(100_000, FIVE), np.ones((5, 9) if comm.rank else (9, 5), FIVE)]
        with comm.group():
            for x in xs:
                comm.all_reduce(x if native else memoryview(x))

    text = text_of_fresh(2, "shm", call)
    assert "about operation 2: rank 0" in text, text
    assert "arrays[1] of 2: float32, op sum, shape (9, 5); rank 1" in text, text
    assert text.endswith("arrays[1] of 2: float32, op sum, shape (5, 9)"), text


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("way", WAYS)
def test_the_third_rank_is_at_fault(way: Any, transports: str) -> None:
    def call(comm: pycoll.Communicator) -> Any:
        shape = (2, 3) if comm.rank == 2 else (3, 2)
        return way(comm, [np.ones(7), np.ones(shape), np.ones(1)])

    world = fresh_world(3, transports)
    try:
        errors = world.outcomes(call)
    finally:
        world.close()
    assert {error.rank for error in errors if isinstance(error, pycoll.MismatchError)} == {2}
    (text,) = {str(error) for error in errors}
    assert parts(text) == {
        "ranks 0 and 1": "arrays[1] of 3: float64, op sum, shape (3, 2)",
        "rank 2": "arrays[1] of 3: float64, op sum, shape (2, 3)",
    }


def test_three_kinds_of_lists_are_all_named() -> None:
    def call(comm: pycoll.Communicator) -> Any:
        return comm.all_reduce([np.ones(4), np.ones(5 + comm.rank)])

    assert parts(text_of_fresh(3, "shm", call)) == {
        f"rank {rank}": f"arrays[1] of 2: float64, op sum, shape ({5 + rank},)" for rank in range(3)
    }


@pytest.mark.parametrize("by_python", [False, True])
def test_operations_of_a_group_are_named(by_python: bool) -> None:
    def call(comm: pycoll.Communicator) -> Any:
        with comm.group():
            comm.all_reduce(np.ones(4))
            comm.all_reduce(np.ones(5), "max" if comm.rank else "sum")
            if by_python:
                comm.broadcast(np.ones(3))

    assert parts(text_of_fresh(2, "shm", call)) == {
        "rank 0": "arrays[1] of 2: float64, op sum, shape (5,)",
        "rank 1": "arrays[1] of 2: float64, op max, shape (5,)",
    }


@pytest.mark.parametrize("later", [False, True])
def test_a_shorter_list_of_several_messages_is_told_at_once(later: bool) -> None:
    """The rank with the shorter list would be done after the first message."""

    def call(comm: pycoll.Communicator) -> Any:
        xs = [np.ones(3, FIVE), np.ones(4)][: 2 - comm.rank]
        return comm.all_reduce(xs, async_op=True).wait() if later else comm.all_reduce(xs)

    assert parts(text_of_fresh(2, "shm", call)) == {
        "rank 0": "arrays[1] of 2: float64, op sum, shape (4,)",
        "rank 1": "1 array, no arrays[1]",
    }


def test_operations_and_roots_of_lists_need_no_search() -> None:
    def call(comm: pycoll.Communicator) -> Any:
        return comm.all_reduce([np.ones(3), np.ones(4)], "max" if comm.rank else "sum")

    text = text_of_fresh(2, "shm", call)
    assert "op sum, arrays[0] of 2: float64, op sum, shape (3,)" in text, text
    assert "op max, arrays[0] of 2: float64, op max, shape (3,)" in text, text


def test_algorithms_alone_are_told_from_arrays() -> None:
    def call(comm: pycoll.Communicator) -> Any:
        return comm.all_reduce(
            [np.ones(3), np.ones(4)], algorithm="ring" if comm.rank else "recursive_doubling"
        )

    text = text_of_fresh(2, "shm", call)
    assert text.endswith("(with different algorithms or user operations)"), text


@pytest.mark.parametrize("number", [0, 9, 10, 99, 100, 3_333, 9_998])
def test_one_array_of_very_many_is_found(number: int) -> None:
    def call(comm: pycoll.Communicator) -> Any:
        xs = [np.ones((2, 3), FIVE)] * 9_999
        if comm.rank:
            xs[number] = np.ones((3, 2), FIVE)
        return comm.all_reduce(xs)

    assert parts(text_of_fresh(2, "shm", call)) == {
        "rank 0": f"arrays[{number}] of 9999: float32, op sum, shape (2, 3)",
        "rank 1": f"arrays[{number}] of 9999: float32, op sum, shape (3, 2)",
    }


def test_a_long_shape_is_cut() -> None:
    def call(comm: pycoll.Communicator) -> Any:
        shape = [1] * 40
        shape[comm.rank] = 6
        return comm.all_reduce([np.ones(3), np.ones(shape)])

    for text in parts(text_of_fresh(2, "shm", call)).values():
        assert len(text) == 87 and text.endswith("..."), text


def test_a_rank_that_comes_late_names_its_own_array() -> None:
    """The others have given up by then, with what they knew of each other."""

    def call(comm: pycoll.Communicator) -> Any:
        if comm.rank == 2:
            import time

            time.sleep(3)
        return comm.all_reduce([np.ones(4), np.ones((2, 3) if comm.rank else (3, 2))])

    world = fresh_world(3)
    try:
        texts = [str(error) for error in world.outcomes(call)]
    finally:
        world.close()
    assert texts[0] == texts[1], texts
    for text in texts:
        assert "rank 0 called all_reduce of 10 float64, op sum, arrays[1] of 2:" in text, texts
    assert "ranks 1 and 2 called" in texts[2] and texts[2].count("arrays[1] of 2") == 2, texts


def lists_of_processes(comm: pycoll.Communicator, later: bool) -> str:
    xs = [np.ones(4), np.ones((2, 3) if comm.rank == 1 else (3, 2))]
    try:
        comm.all_reduce(xs, async_op=True).wait() if later else comm.all_reduce(xs)
    except pycoll.MismatchError as error:
        return f"{error.rank} {error}"
    return "no error"


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_processes_name_the_array(transports: str, later: bool) -> None:
    texts = world_in_processes(3, lists_of_processes, later, transports=transports)
    assert set(texts) == {
        "1 ranks disagree about operation 1: ranks 0 and 2 called all_reduce of 10 float64, "
        "op sum, arrays[1] of 2: float64, op sum, shape (3, 2); rank 1 called all_reduce of 10 "
        "float64, op sum, arrays[1] of 2: float64, op sum, shape (2, 3)"
    }


def test_lists_that_agree_are_reduced() -> None:
    """Each message of a list has the whole list in its key."""
    world = fresh_world(2)
    try:
        for _ in range(3):
            made = world.run(
                lambda comm: comm.all_reduce(
                    [np.full(3, comm.rank, FIVE), np.full((2, 2), comm.rank), np.ones(0)]
                )
            )
            for one in made:
                assert [x.tolist() for x in one] == [[1.0] * 3, [[1, 1], [1, 1]], []]
    finally:
        world.close()
