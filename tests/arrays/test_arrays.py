"""Arrays of every framework: the result has the caller's type, dtype and device."""

from __future__ import annotations

import array
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import torch
from foreign_arrays import Bare, Foreign
from harness import world_in_threads
from hypothesis import given
from hypothesis import strategies as st

import pycoll
from pycoll import InvalidArgumentError
from pycoll.types import DType

Comm = pycoll.Communicator

TORCH = {
    word: getattr(torch, {"float8_e4m3": "float8_e4m3fn"}.get(word, word)) for word in oracle.DTYPES
}


def to_torch(x: Any) -> torch.Tensor:
    bits = torch.from_numpy(
        np.ascontiguousarray(x).view(f"u{x.itemsize}" if x.itemsize < 16 else x.dtype)
    )
    word = DType(pycoll._core.view(x).dtype).word
    return bits.view(TORCH[word]) if x.itemsize < 16 else bits


def from_torch(t: torch.Tensor, dtype: np.dtype[Any]) -> Any:
    if t.dtype == torch.complex128:
        return t.numpy()
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.view(plain).numpy().view(dtype)


@given(st.integers(1, 4), st.sampled_from(oracle.DTYPES), st.integers(0, 300), st.integers(0, 99))
def test_torch_tensors_of_every_dtype(size: int, dtype: str, count: int, seed: int) -> None:
    inputs = oracle.inputs(dtype, "max" if dtype == "bool" else "sum", size, count, seed)
    expected = oracle.fold(inputs, "sum")

    def rank(comm: Comm) -> Any:
        x = to_torch(inputs[comm.rank])
        found = comm.all_reduce(x)
        gathered = comm.all_gather(x)
        assert isinstance(found, torch.Tensor) and found.dtype == x.dtype == TORCH[dtype]
        assert found.device == x.device and isinstance(gathered, torch.Tensor)
        assert gathered.shape == (size * count,)
        return from_torch(found, inputs.dtype)

    for found in world_in_threads(size).run(rank):
        assert oracle.same_bits(found, expected)


def test_torch_layouts_gradients_and_out() -> None:
    def rank(comm: Comm) -> None:
        x = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()
        found = comm.all_reduce(x)
        assert torch.equal(found, 2 * x) and found.is_contiguous()
        weight = torch.nn.Parameter(torch.ones(3))
        with torch.no_grad():
            found = comm.all_reduce(weight)
        assert type(found) is torch.Tensor and not found.requires_grad
        assert comm.broadcast(weight, out=weight) is weight
        (weight * 2).sum().backward()
        assert comm.all_reduce(weight.grad, out=weight.grad) is weight.grad
        assert weight.grad.tolist() == [4.0, 4.0, 4.0]
        out = torch.zeros(3, 4)
        assert comm.all_reduce(torch.ones(3, 4), out=out) is out and bool((out == 2).all())
        assert comm.all_reduce(torch.tensor(2.5)).item() == 5.0
        assert comm.all_reduce(torch.zeros(0, 3)).shape == (0, 3)
        z = torch.tensor([1 + 2j, 3j])
        assert torch.equal(comm.all_reduce(z.conj()), 2 * z.conj())
        assert torch.equal(comm.all_reduce(z.conj().imag), 2 * z.conj().imag)
        mixed = np.zeros(3, np.float32)
        assert comm.all_reduce(torch.ones(3), out=mixed) is mixed and mixed.tolist() == [2, 2, 2]

    world_in_threads(2).run(rank)


def test_torch_scatter_and_gather_keep_the_kind() -> None:
    def rank(comm: Comm) -> None:
        x = torch.arange(5) if comm.rank == 0 else torch.zeros(0)
        mine = comm.scatter(x)
        assert mine.dtype == torch.int64 and mine.tolist() == [[0, 1, 2], [3, 4]][comm.rank]
        assert comm.scatter(x.numpy() if comm.rank == 0 else None).dtype == np.int64
        whole = comm.gather(mine)
        assert whole is None if comm.rank else torch.equal(whole, torch.arange(5))
        rows = comm.all_to_all(torch.arange(4) + 10 * comm.rank)
        assert rows.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][comm.rank]

    world_in_threads(2).run(rank)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(3, device="meta"), "x is a torch tensor on meta"),
        (torch.zeros(3).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(3, dtype=torch.float8_e5m2fnuz), "x has dtype torch.float8_e5m2fnuz"),
    ],
)
def test_torch_tensors_that_cannot_be_moved(x: torch.Tensor, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        world_in_threads(1).communicators[0].all_reduce(x)


def test_torch_out_that_is_a_lazy_view_is_refused() -> None:
    z = torch.zeros(3, dtype=torch.complex64)
    with pytest.raises(InvalidArgumentError, match="conjugated or negated"):
        world_in_threads(1).communicators[0].all_reduce(z, out=torch.zeros_like(z).conj())


JAX_DTYPES = [
    "bool",
    "int8",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3",
    "float8_e5m2",
]


@pytest.mark.parametrize("dtype", JAX_DTYPES)
def test_jax_arrays(dtype: str) -> None:
    inputs = oracle.inputs(dtype, "sum", 3, 12, 5).reshape(3, 3, 4)
    expected = oracle.fold(inputs, "sum")

    def rank(comm: Comm) -> Any:
        x = jnp.asarray(inputs[comm.rank])
        found = comm.all_reduce(x)
        assert isinstance(found, jax.Array) and found.dtype == x.dtype
        assert found.devices() == x.devices()
        joined = comm.all_gather(x)
        assert isinstance(joined, jax.Array) and joined.shape == (9, 4)
        assert oracle.same_bits(x, inputs[comm.rank])
        return np.asarray(found)

    for found in world_in_threads(3).run(rank):
        assert oracle.same_bits(found, expected)


def test_jax_results_are_new_and_out_is_refused() -> None:
    comm = world_in_threads(1).communicators[0]
    x = jnp.arange(3.0)
    with pytest.raises(InvalidArgumentError, match="out is a JAX array, which is immutable"):
        comm.all_reduce(x, out=x)
    with pytest.raises(InvalidArgumentError, match="traced JAX value"):
        jax.jit(comm.all_reduce)(x)
    assert float(comm.all_reduce(jnp.float32(2.5))) == 2.5
    assert comm.all_reduce(x.T[::-1]).tolist() == [2.0, 1.0, 0.0]
    out = np.zeros(3, np.float32)
    assert comm.all_reduce(x, out=out) is out and out.tolist() == [0, 1, 2]


def test_other_libraries_come_back_through_their_namespace() -> None:
    def rank(comm: Comm) -> None:
        found = comm.all_reduce(Foreign(np.arange(4)[::2] + comm.rank))
        assert isinstance(found, Foreign) and found.memory.tolist() == [1, 5]
        out = Foreign(np.zeros(2, int))
        assert comm.all_reduce(Foreign(np.ones(2, int)), out=out) is out
        assert out.memory.tolist() == [2, 2]
        plain = comm.all_reduce(Bare(np.ones(2)))
        assert isinstance(plain, np.ndarray) and plain.tolist() == [2, 2]

    world_in_threads(2).run(rank)


def test_bytes_and_their_kin() -> None:
    def rank(comm: Comm) -> None:
        found = comm.all_reduce(b"\x01\x02")
        assert type(found) is bytes and found == b"\x02\x04"
        assert comm.all_gather(b"ab" if comm.rank else b"c") == b"cab"
        found = comm.broadcast(bytearray(b"hello" if comm.rank == 0 else b"?????"))
        assert type(found) is bytearray and found == b"hello"
        window = comm.all_reduce(memoryview(bytearray(8)).cast("h"))
        assert type(window) is memoryview and window.format == "h" and window.tolist() == [0] * 4
        for code in "bhilqBHILQfd":
            numbers = comm.all_reduce(array.array(code, [1, 2, 3]))
            assert type(numbers) is array.array and numbers.typecode == code
            assert numbers.tolist() == [2, 4, 6]
        assert comm.all_gather(array.array("i", [comm.rank])).tolist() == [0, 1]
        own = bytearray(3)
        assert comm.broadcast(b"xyz", out=own) is own and own == b"xyz"

    world_in_threads(2).run(rank)


def test_numbers_of_python_and_numpy() -> None:
    def rank(comm: Comm) -> None:
        me = comm.rank + 1
        cases: list[tuple[Any, Any]] = [
            (me, 6),
            (me / 2, 3.0),
            (me * 1j, 6j),
            (comm.rank == 1, True),
        ]
        for x, expected in cases:
            found = comm.all_reduce(x)
            assert type(found) is type(x) and found == expected
        assert comm.all_reduce(-(2**63), "max") == -(2**63)
        found = comm.all_reduce(np.float32(me))
        assert type(found) is np.float32 and found == 6
        assert comm.all_gather(me) == [1, 2, 3]
        assert comm.all_gather(np.int16(me)).tolist() == [1, 2, 3]
        assert comm.gather(me, root=2) == ([1, 2, 3] if comm.rank == 2 else None)
        assert comm.broadcast(me, root=1) == 2
        assert comm.scan(me, "prod") == [1, 2, 6][comm.rank]
        assert comm.exscan(me, "min") == [2**63 - 1, 1, 1][comm.rank]

    world_in_threads(3).run(rank)


@given(st.sampled_from(["C", "F", "gaps", "reversed", "transposed", "broadcast"]))
def test_layouts_of_inputs_do_not_matter(layout: str) -> None:
    base = np.arange(24.0).reshape(4, 6)
    x = {
        "C": base,
        "F": np.asfortranarray(base),
        "gaps": np.repeat(base, 2, axis=1)[:, ::2],
        "reversed": base[::-1, ::-1],
        "transposed": base.T,
        "broadcast": np.broadcast_to(np.arange(6.0), (4, 6)),
    }[layout]

    def rank(comm: Comm) -> None:
        assert np.array_equal(comm.all_reduce(x), 2 * x)
        assert np.array_equal(comm.all_gather(x), np.concatenate([x, x]))
        out = np.zeros(x.shape)
        comm.all_reduce(x, out=out)
        assert np.array_equal(out, 2 * x)

    world_in_threads(2).run(rank)


def test_zero_dimensional_and_empty_arrays() -> None:
    def rank(comm: Comm) -> None:
        found = comm.all_reduce(np.array(2.0))
        assert isinstance(found, np.ndarray) and found.shape == () and found == 4
        assert comm.all_gather(np.array(comm.rank)).tolist() == [0, 1]
        assert comm.all_reduce(np.zeros((0, 3))).shape == (0, 3)
        assert comm.all_gather(np.zeros((0, 3))).shape == (0, 3)
        assert comm.reduce_scatter(np.zeros((1, 0))).shape == (1 - comm.rank, 0)
        assert comm.all_to_all(np.zeros((0, 2)), [0, 0]).shape == (0, 2)
        assert comm.scatter(np.zeros((1, 2)) if comm.rank == 0 else None).shape == (
            1 - comm.rank,
            2,
        )
        assert comm.all_reduce(b"") == b""

    world_in_threads(2).run(rank)


def test_read_only_inputs_are_fine_and_subclasses_become_plain() -> None:
    def rank(comm: Comm) -> None:
        x = np.ones(3)
        x.flags.writeable = False
        assert comm.all_reduce(x).tolist() == [2, 2, 2]
        assert type(comm.all_reduce(np.ones((2, 2)).view(np.matrix))) is np.ndarray

    world_in_threads(2).run(rank)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "float8_e5m2"])
def test_ml_dtypes_come_back_as_ml_dtypes(dtype: str) -> None:
    target = getattr(ml_dtypes, "float8_e4m3fn" if dtype == "float8_e4m3" else dtype)
    found = world_in_threads(2).run(lambda c: c.all_reduce(np.ones(3, target)))
    assert all(one.dtype == target and one.tolist() == [2, 2, 2] for one in found)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 5), "float32"), (0, "int8"), (1 << 20, np.float64), ((), "bool"), (7, "bfloat16")],
)
def test_empty_is_aligned(shape: Any, dtype: Any) -> None:
    found = pycoll.empty(shape, dtype)
    step = (2 << 20) if found.nbytes >= 2 << 20 else 64
    assert found.nbytes == 0 or found.ctypes.data % step == 0
    assert found.flags.writeable and found.flags.c_contiguous
    assert found.shape == (shape if isinstance(shape, tuple) else (shape,))
    found[...] = 1
    assert bool((found == 1).all())
