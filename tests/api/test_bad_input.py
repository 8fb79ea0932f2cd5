"""Wrong requests are refused before a byte moves, in words that name argument, value, bound."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from harness import fresh_world, world_in_threads

import pycoll
from pycoll import InvalidArgumentError, MismatchError, ReductionError

Comm = pycoll.Communicator


def refused(size: int, function: Callable[[Comm], Any]) -> str:
    """The text of the InvalidArgumentError that rank 0 gets; all ranks call, and get one."""
    world = world_in_threads(size)
    errors = world.outcomes(function)
    for error in errors:
        assert isinstance(error, InvalidArgumentError), error
        assert isinstance(error, ValueError)
    assert world.is_usable()
    return str(errors[0])


x = np.arange(6.0)


def frozen() -> Any:
    out = np.zeros(6)
    out.flags.writeable = False
    return out


def grid() -> Any:
    return np.zeros((2, 3))


def fortran() -> Any:
    return np.zeros((2, 3), order="F")


def shifted(comm: Comm) -> Any:
    memory = np.zeros(7)
    return comm.all_reduce(memory[:6], out=memory[1:])


#: (what is wrong, words that the text must contain, call)
CASES: list[tuple[str, list[str], Callable[[Comm], Any]]] = [
    ("list", ["x is <class 'list'>", "NumPy"], lambda c: c.broadcast([1, 2])),
    ("None", ["x is <class 'NoneType'>"], lambda c: c.broadcast(None)),
    ("text", ["x is <class 'str'>"], lambda c: c.send("hello", 1)),
    ("dtype", ["datetime64[s]", "float32", "bool"], lambda c: c.all_reduce(np.zeros(2, "M8[s]"))),
    ("object dtype", ["x has dtype object"], lambda c: c.all_reduce(np.zeros(2, object))),
    ("byte order", [">f4", "newbyteorder"], lambda c: c.all_reduce(np.zeros(2, ">f4"))),
    ("big int", ["x is 1" + "0" * 30, "2**63-1"], lambda c: c.all_reduce(10**30)),
    ("masked", ["x is a masked array", "filled"], lambda c: c.all_reduce(np.ma.array([1, 2]))),
    ("op name", ["op is 'summ'", "sum", "bxor"], lambda c: c.all_reduce(x, "summ")),
    ("op type", ["op is 3"], lambda c: c.all_reduce(x, 3)),
    ("op none", ["op is None"], lambda c: c.all_reduce(x, None)),
    ("op none of a list", ["op is None"], lambda c: c.all_reduce([x], None)),
    ("op none of scan", ["op is None"], lambda c: c.scan(x, op=None)),
    ("op list", ["op is ['sum']"], lambda c: c.all_reduce(x, ["sum"])),
    ("bits", ["op 'band'", "float64", "sum"], lambda c: c.all_reduce(x, "band")),
    ("order", ["op 'min'", "complex128"], lambda c: c.reduce(x * 1j, op="min")),
    ("scan avg", ["op 'avg'", "scan", "sum"], lambda c: c.scan(x, "avg")),
    ("root high", ["root is 2", "0 to 1"], lambda c: c.reduce(x, root=2)),
    ("root low", ["root is -1", "0 to 1"], lambda c: c.broadcast(x, root=-1)),
    ("root type", ["root is 'a'"], lambda c: c.gather(x, root="a")),
    ("scatter root", ["root is 9"], lambda c: c.scatter(x, root=9)),
    ("dest", ["dest is 2", "0 to 1"], lambda c: c.send(x, 2)),
    ("source", ["source is -1", "0 to 1"], lambda c: c.recv(x, -1)),
    ("tag low", ["tag is -1", "2147483647"], lambda c: c.isend(x, 1, -1)),
    ("tag high", ["tag is 2147483648"], lambda c: c.irecv(x, 1, 2**31)),
    ("tag type", ["tag is 1.5"], lambda c: c.send(x, 1, 1.5)),
    ("out shape", ["out", "(5,)", "(6,)"], lambda c: c.all_reduce(x, out=np.zeros(5))),
    ("out dtype", ["out", "float32", "float64"], lambda c: c.all_reduce(x, out=np.zeros(6, "f4"))),
    ("out frozen", ["out is read-only"], lambda c: c.all_reduce(x, out=frozen())),
    ("out number", ["out is a scalar", "pass an array"], lambda c: c.recv(5, 0)),
    ("out bytes", ["out is read-only"], lambda c: c.recv(b"12345678", 1)),
    ("out gaps", ["out", "not contiguous"], lambda c: c.all_reduce(x, out=np.zeros(12)[::2])),
    ("out fortran", ["not contiguous"], lambda c: c.all_reduce(grid(), out=fortran())),
    ("out shifted", ["overlaps x partly", "apart"], shifted),
    ("out in place", ["cannot work in place"], lambda c: c.all_to_all(x, out=x)),
    ("out list", ["out is <class 'list'>"], lambda c: c.all_reduce(x, out=[0.0])),
    ("out scalar", ["out is a scalar"], lambda c: c.all_reduce(3.0, out=np.float64(1))),
    ("recv gaps", ["not contiguous"], lambda c: c.recv(np.zeros(12)[::2], 1)),
    ("no axis", ["reduce_scatter", "shape ()"], lambda c: c.reduce_scatter(np.float64(1))),
    ("uneven", ["7 rows", "2 ranks", "splits"], lambda c: c.all_to_all(np.zeros(7))),
    ("splits sum", ["add up to 5", "6 rows"], lambda c: c.all_to_all(x, [2, 3])),
    ("splits length", ["3 entries", "2 ranks"], lambda c: c.all_to_all(x, [2, 2, 2])),
    ("splits sign", ["splits[1] is -1"], lambda c: c.all_to_all(x, [7, -1])),
    ("splits type", ["splits is 6"], lambda c: c.all_to_all(x, 6)),
    ("splits item", ["splits[0] is 3.0"], lambda c: c.all_to_all(x, [3.0, 3.0])),
    ("lengths", ["lengths[0] is 5", "6 rows"], lambda c: c.all_gather(x, lengths=[5, 6])),
    ("algorithm", ["'rign'", "'ring'", "tree"], lambda c: c.all_reduce(x, algorithm="rign")),
    (
        "algorithm elsewhere",
        ["'ring'", "binomial"],
        lambda c: c.gather(x, algorithm="ring", lengths=[6, 6]),
    ),
    ("algorithm type", ["algorithm is 7"], lambda c: c.all_reduce(x, algorithm=7)),
    (
        "not deterministic",
        ["'ring'", "rank order", "direct"],
        lambda c: c.all_reduce(x, algorithm="ring", deterministic=True),
    ),
    ("timeout", ["timeout_s is 0"], lambda c: setattr(c, "timeout_s", 0)),
    ("timeout sign", ["timeout_s is -1"], lambda c: setattr(c, "timeout_s", -1)),
    ("timeout nan", ["timeout_s is nan"], lambda c: setattr(c, "timeout_s", float("nan"))),
    ("timeout type", ["timeout_s is 'long'"], lambda c: setattr(c, "timeout_s", "long")),
    ("color", ["color is 'red'"], lambda c: c.split("red")),
    ("key", ["key is 1.5"], lambda c: c.split(0, 1.5)),
    (
        "explain",
        ["collective is 'all_reduced'", "all_reduce"],
        lambda c: c.explain("all_reduced", 8),
    ),
    ("explain bytes", ["nbytes is -8"], lambda c: c.explain("all_reduce", -8)),
]


@pytest.mark.parametrize(("what", "words", "call"), CASES, ids=[case[0] for case in CASES])
def test_refused(what: str, words: list[str], call: Callable[[Comm], Any]) -> None:
    text = refused(2, call)
    for word in words:
        assert word in text, f"{what}: {text}"


def test_refusals_name_the_operation_and_leave_the_communicator_usable() -> None:
    world = world_in_threads(2)
    for error in world.outcomes(lambda c: c.scan(x, "nope")):
        assert isinstance(error, InvalidArgumentError)
        assert error.operation == "scan"
    assert [r.tolist() for r in world.run(lambda c: c.all_reduce(np.ones(2)))] == [[2, 2]] * 2


def test_out_is_untouched_by_a_refusal() -> None:
    out = np.full(6, 7.0)
    refused(2, lambda c: c.all_reduce(x, "band", out=out))
    assert out.tolist() == [7.0] * 6


@pytest.mark.parametrize("name", ["all_gather", "gather"])
def test_unequal_trailing_dimensions_name_the_odd_rank(name: str) -> None:
    world = world_in_threads(4)
    errors = world.outcomes(lambda c: getattr(c, name)(np.zeros((2, 4 if c.rank == 2 else 3))))
    for error in errors:
        assert isinstance(error, MismatchError)
        assert error.rank == 2 and error.ranks == (2,) and error.operation == name
        assert "rank 2 passed float64 of shape (2, 4)" in str(error)
        assert "rank 0 float64 of shape (2, 3)" in str(error)
    assert world.is_usable()
    assert len(world.run(lambda c: c.all_gather(np.zeros((1, 3))))) == 4


def test_unequal_dtypes_in_all_gather_name_the_odd_ranks() -> None:
    world = world_in_threads(5)
    errors = world.outcomes(
        lambda c: c.all_gather(np.zeros(2, np.int16 if c.rank in (1, 3) else np.int32))
    )
    for error in errors:
        assert isinstance(error, MismatchError)
        assert error.ranks == (1, 3) and "ranks 1, 3 passed int16" in str(error)


@pytest.mark.parametrize(
    ("what", "call", "words"),
    [
        ("count", lambda c: c.all_reduce(np.zeros(3 + (c.rank == 1))), ["3", "4"]),
        ("dtype", lambda c: c.all_reduce(np.zeros(3, "f4" if c.rank == 1 else "f8")), ["float32"]),
        ("op", lambda c: c.all_reduce(x, "max" if c.rank == 1 else "sum"), ["max", "sum"]),
        ("root", lambda c: c.broadcast(x, root=int(c.rank == 1)), ["root"]),
        (
            "collective",
            lambda c: c.scan(x) if c.rank == 1 else c.all_reduce(x),
            ["scan", "all_reduce"],
        ),
        (
            "large",
            lambda c: c.all_reduce(np.zeros(400_000 + (c.rank == 1))),
            ["400000", "400001"],
        ),
    ],
)
def test_disagreement_is_a_mismatch_on_every_rank(
    what: str, call: Callable[[Comm], Any], words: list[str]
) -> None:
    world = fresh_world(3)
    try:
        errors = world.outcomes(call)
        for error in errors:
            assert isinstance(error, MismatchError), f"{what}: {errors}"
            assert "1" in str(error) and 1 in error.ranks, str(error)
            for word in words:
                assert word in str(error), str(error)
        for comm in world.communicators:
            assert comm.failure is not None
            with pytest.raises(MismatchError):
                comm.barrier()
    finally:
        world.close()


def test_user_ops_may_differ_only_in_name_and_are_then_a_mismatch() -> None:
    pycoll.register_op("left", lambda a, b: a)
    pycoll.register_op("right", lambda a, b: b)
    world = fresh_world(2)
    try:
        errors = world.outcomes(lambda c: c.all_reduce(x, "left" if c.rank else "right"))
        assert all(isinstance(error, MismatchError) for error in errors), errors
    finally:
        world.close()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda a, b: (a + b)[:1],
            r"gave float64 of shape \(1,\) for two arrays of float64 of sha",
        ),
        (lambda a, b: 7.0, r"gave float64 of shape \(\) "),
        (lambda a, b: a + 1j * b, "gave complex128 of shape"),
    ],
)
def test_a_user_op_that_gives_something_else_is_named(function: Any, text: str) -> None:
    pycoll.register_op("something else", function)
    world = fresh_world(2)
    try:
        errors = world.outcomes(lambda c: c.all_reduce(x, "something else"))
        assert all(isinstance(error, ReductionError) for error in errors), errors
        assert re.search(text, str(errors[0]))
    finally:
        world.close()


def test_closed_communicator_says_so() -> None:
    world = fresh_world(2)
    world.close()
    comm = world.communicators[0]
    for call in (
        lambda: comm.all_reduce(x),
        lambda: comm.barrier(async_op=True).wait(),
        lambda: comm.send(x, 1),
        lambda: comm.split(0),
        lambda: comm.all_gather(x),
    ):
        with pytest.raises(pycoll.ClosedError, match="closed"):
            call()
    comm.close()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("", np.add), "name is ''"),
        (("sum", np.add), "builtin"),
        (("x", 3), "function is 3"),
    ],
)
def test_register_op_refuses(args: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        pycoll.register_op(*args)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (((-1,),), "shape is"),
        ((1.5,), "shape is"),
        ((2**62,), f"shape is {2**62}: the system has no memory for {2**64} bytes"),
        ((2**50,), f"shape is {2**50}: the system has no memory for {2**52} bytes"),
        ((2**44,), f"shape is {2**44}: the system has no memory for {2**46} bytes"),
        ((3, "flaot32"), "dtype is 'flaot32'"),
        ((3, object), "dtype is <class 'object'>, which is no element type"),
        ((3, "S"), "dtype is 'S'"),
    ],
)
def test_empty_refuses(args: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        pycoll.empty(*args)


def test_arrays_that_claim_to_be_on_a_device() -> None:
    """Without a driver, and with one, which does not know the memory."""
    comm = world_in_threads(1).communicators[0]

    class Claims:
        __cuda_array_interface__: ClassVar = {
            "data": (4096, False),
            "shape": (4,),
            "typestr": "<f4",
            "version": 3,
        }

    with pytest.raises(InvalidArgumentError) as caught:
        comm.all_reduce(Claims())
    text = str(caught.value)
    assert re.match(r"x is on a CUDA device, but .*libcuda\.so\.1", text) or (
        text == "x is memory that the CUDA driver does not know: was it freed?"
    ), text


@pytest.mark.parametrize("root", [0, 1])
def test_what_the_root_of_a_scatter_refuses_is_told_to_all(root: int) -> None:
    """None waits for the rows; the communicator stays usable."""
    bad: list[tuple[str, dict[str, Any]]] = [
        ("NoneType", {"x": None}),
        ("shape ()", {"x": np.float64(1)}),
        ("datetime64", {"x": np.zeros(4, "M8[s]")}),
        ("out has shape (3,)", {"x": np.zeros(4), "out": np.zeros(3)}),
        ("'rign'", {"x": np.zeros(4), "algorithm": "rign"}),
        ("stream is for device arrays", {"x": np.zeros(4), "stream": 7}),
        ("x is", {"x": "\N{SNOWMAN}" * 2000}),
    ]

    def run(comm: Comm) -> None:
        for _ in range(2):  # common calls are read by native code from the second time on
            np.testing.assert_array_equal(
                comm.scatter(np.arange(4.0), root), [2 * comm.rank, 2 * comm.rank + 1]
            )
            for word, words in bad:
                with pytest.raises(InvalidArgumentError) as caught:
                    comm.scatter(**words, root=root) if comm.rank == root else comm.scatter(
                        root=root
                    )
                assert word in str(caught.value) or comm.rank != root
                told = f"rank {root} (" in str(caught.value)
                assert told == (comm.rank != root), caught.value

    world_in_threads(2).run(run)
