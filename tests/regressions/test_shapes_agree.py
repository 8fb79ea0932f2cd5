"""Arrays of equal counts and different shapes were combined, so that ranks kept two layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import ThreadWorld, fresh_world, world_in_processes, world_in_threads

import pycoll

#: The whole shape is compared.
ALIKE = ["all_reduce", "reduce", "broadcast", "scan", "exscan", "reduce_scatter", "all_to_all"]
PAIRS = [((3, 2), (2, 3)), ((6,), (2, 3)), ((1,), ()), ((6, 1), (6,)), ((0, 3), (0, 2))]


def shown(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def mismatch(world: ThreadWorld, call: Any) -> str:
    texts = []
    for error in world.outcomes(call):
        assert isinstance(error, pycoll.MismatchError), error
        texts.append(str(error))
    assert texts[0] == texts[1], texts
    return texts[0]


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "plain") for name in ALIKE), *(("all_reduce", w) for w in ("out", "bound", "async"))],
)
def test_both_shapes_are_named(name: str, way: str) -> None:
    """Both ranks learn of it, however the call is made."""
    first, second = ((4, 2), (2, 4))
    world = fresh_world(2)
    try:

        def warm(comm: pycoll.Communicator) -> None:
            for _ in range(3):  # native calls find what the first one prepared
                getattr(comm, name)(np.ones((2, 4), np.float32))

        def call(comm: pycoll.Communicator) -> Any:
            x = np.ones(second if comm.rank else first, np.float32)
            operation = getattr(comm, name)
            if way == "async":
                return operation(x, async_op=True).wait()
            if way == "bound":
                return operation.bind(x)()
            if way == "out" and name not in ("reduce_scatter", "all_to_all"):
                return operation(x, out=x)
            return operation(x)

        world.run(warm)
        text = mismatch(world, call)
    finally:
        world.close()
    assert f"shape {shown(first)}" in text, text
    assert f"shape {shown(second)}" in text, text


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_kinds_of_shapes_are_told_apart(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    """A number is no array of one element, and an array without elements has a shape, too."""
    world = fresh_world(2)
    try:
        text = mismatch(
            world, lambda comm: comm.all_reduce(np.ones(second if comm.rank else first))
        )
    finally:
        world.close()
    assert f"shape {shown(first)}; rank 1 called" in text, text
    assert text.endswith(f"shape {shown(second)}"), text


def grouped(comm: pycoll.Communicator, x: Any) -> Any:
    with comm.group():
        comm.all_reduce(np.ones(5, np.float32))
        comm.all_reduce(x, out=x)


def listed(comm: pycoll.Communicator, x: Any) -> Any:
    return comm.all_reduce([np.ones(5, np.float32), x])


def listed_later(comm: pycoll.Communicator, x: Any) -> Any:
    return comm.all_reduce([np.ones(5, np.float32), x], async_op=True).wait()


@pytest.mark.parametrize("call", [grouped, listed, listed_later])
@pytest.mark.parametrize("warm", [False, True])
def test_members_of_messages_are_compared(call: Any, warm: bool) -> None:
    """Arrays that share a message differ in shape only."""
    world = fresh_world(2)
    try:
        if warm:
            world.run(lambda comm: call(comm, np.ones((2, 3), np.float32)))
        text = mismatch(
            world,
            lambda comm: call(comm, np.ones((2, 3) if comm.rank else (3, 2), np.float32)),
        )
    finally:
        world.close()
    for shape in ("(3, 2)", "(2, 3)"):
        assert f"arrays[1] of 2: float32, op sum, shape {shape}" in text, text


def test_equal_shapes_meet_whatever_holds_them() -> None:
    """Native calls, Python's and those of other arrays mean the same shape."""
    world = world_in_threads(2)

    def call(comm: pycoll.Communicator) -> list[Any]:
        x = np.arange(6.0).reshape(3, 2)
        strided = np.arange(12.0).reshape(3, 4)[:, ::2] if comm.rank else x
        flat = memoryview(x).cast("B").cast("d", (3, 2)) if comm.rank else x
        return [
            comm.all_reduce(x if comm.rank else np.asfortranarray(x)).tolist(),
            comm.all_reduce(strided).shape,
            comm.all_reduce(5 if comm.rank else np.array(5)),
            comm.all_reduce(7 if comm.rank else np.int64(7)),
            np.asarray(comm.all_reduce(flat)).tolist(),
            comm.all_reduce([x])[0].tolist() if comm.rank else comm.all_reduce(x).tolist(),
        ]

    double = (2 * np.arange(6.0).reshape(3, 2)).tolist()
    for matrix, shape, number, scalar, flat, alone in world.run(call):
        assert [matrix, flat, alone] == [double] * 3
        assert (shape, int(number), int(scalar)) == ((3, 2), 10, 14)


def test_reshaped_arrays_meet() -> None:
    """Counts alone are compared by ranks that reshape."""

    def call(comm: pycoll.Communicator) -> Any:
        x = np.arange(6.0).reshape((2, 3) if comm.rank else (3, 2))
        return comm.all_reduce(x.reshape(-1)).tolist()

    assert world_in_threads(2).run(call) == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]] * 2


def shapes_of_processes(comm: pycoll.Communicator) -> str:
    x = np.ones((2, 3) if comm.rank == 1 else (3, 2))
    try:
        comm.broadcast(x)
    except pycoll.MismatchError as error:
        return f"{error.rank} {error}"
    return "no error"


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_processes_learn_both_shapes(transports: str) -> None:
    """The rank that stands alone is at fault."""
    texts = world_in_processes(3, shapes_of_processes, transports=transports)
    assert set(texts) == {
        "1 ranks disagree about operation 1: ranks 0 and 2 called broadcast of 6 float64, root 0, "
        "shape (3, 2); rank 1 called broadcast of 6 float64, root 0, shape (2, 3)"
    }
