"""Views of arrays: NumPy, DLPack and the buffer protocol end in one, which keeps them alive."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import re
import resource
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from harness import ROOT
from hypothesis import given
from hypothesis import strategies as st

from pycoll import InvalidArgumentError, _core
from pycoll.schedule.collectives import Collective
from pycoll.types import ITEM_BYTES, DType, ReduceOp, identity_bytes, is_defined, numpy_dtype


@pytest.mark.parametrize("dtype", list(DType))
def test_numpy_dtypes_are_the_engines_dtypes(dtype: DType) -> None:
    found = _core.view(np.zeros(3, numpy_dtype(dtype)))
    assert (found.dtype, found.count, found.nbytes) == (dtype, 3, 3 * ITEM_BYTES[dtype])
    assert numpy_dtype(dtype).itemsize == ITEM_BYTES[dtype]


@pytest.mark.parametrize(
    ("enum", "name"), [(DType, "DType"), (ReduceOp, "ReduceOp"), (Collective, "Collective")]
)
def test_enums_are_those_of_the_header(enum: Any, name: str) -> None:
    header = (ROOT / "csrc/base/types.h").read_text()
    body = re.search(rf"enum class {name} : std::uint8_t \{{(.*?)\}};", header, re.S)
    assert body is not None
    told = {word: int(value) for word, value in re.findall(r"k(\w+) = (\d+)", body[1])}
    assert told == {camel(one.name): one.value for one in enum}


def camel(name: str) -> str:
    """FLOAT8_E4M3 -> Float8E4M3, as C++ spells it."""
    special = {"UINT": "UInt", "BFLOAT": "BFloat"}
    for word, spelled in special.items():
        if name.startswith(word):
            return spelled + name[len(word) :]
    return "".join(
        part.capitalize() if part[:2] != "E4" and part[:2] != "E5" else part
        for part in name.split("_")
    )


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("op", list(ReduceOp))
def test_defined_pairs_are_those_of_the_engines(dtype: DType, op: ReduceOp) -> None:
    assert is_defined(dtype, op) == _core.defined(dtype, op)


def element(dtype: DType, op: ReduceOp) -> Any:
    return np.frombuffer(identity_bytes(dtype, op), numpy_dtype(dtype))[0]


@pytest.mark.parametrize("dtype", list(DType))
def test_identities_change_nothing(dtype: DType) -> None:
    """On the types' extreme and middle values."""
    for word in oracle.ops_for(dtype.word):
        if word == "avg":
            continue
        values = oracle.inputs(dtype.word, word, 3, 20, 1).reshape(-1)
        unchanged = np.full_like(values, element(dtype, ReduceOp[word.upper()]))
        expected = (values != 0).astype(values.dtype) if word in oracle.LOGICAL else values
        assert oracle.same_bits(oracle.fold(np.stack([unchanged, values]), word), expected), word


@pytest.mark.parametrize(
    ("x", "dtype", "shape", "writable"),
    [
        (b"abc", DType.UINT8, (3,), False),
        (bytearray(b"ab"), DType.UINT8, (2,), True),
        (memoryview(b"abcd").cast("h"), DType.INT16, (2,), False),
        (memoryview(bytearray(24)).cast("d", (3, 1)), DType.FLOAT64, (3, 1), True),
        (memoryview(b"xy").cast("c"), DType.UINT8, (2,), False),
        (array.array("f", [1, 2, 3]), DType.FLOAT32, (3,), True),
        (array.array("q"), DType.INT64, (0,), True),
        ((ctypes.c_uint16 * 5)(), DType.UINT16, (5,), True),
        (((ctypes.c_int32 * 2) * 3)(), DType.INT32, (3, 2), True),
        (mmap.mmap(-1, 4096), DType.UINT8, (4096,), True),
        (memoryview(np.zeros((2, 2), np.complex64)), DType.COMPLEX64, (2, 2), True),
        (memoryview(np.zeros(2, np.float16)), DType.FLOAT16, (2,), True),
        (memoryview(np.zeros(2, bool)), DType.BOOL, (2,), True),
    ],
)
def test_buffer_protocol(x: Any, dtype: DType, shape: tuple[int, ...], writable: bool) -> None:
    found = _core.view(x)
    assert (found.dtype, found.shape, found.writable) == (dtype, shape, writable)
    assert found.contiguous and found.device == "cpu"


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (3, "x is <class 'int'>, which is no array"),
        (np.zeros(2, np.longdouble), "x has dtype "),
        (np.zeros(2, np.clongdouble), "x has dtype "),
        (np.zeros(2, "S3"), "x has dtype |S3"),
        (np.zeros(2, [("a", "i4")]), "x has dtype "),
        (np.zeros(2, ml_dtypes.int4), "x has dtype int4"),
        (np.zeros(2, ml_dtypes.float8_e4m3fnuz), "x has dtype float8_e4m3fnuz"),
        (np.zeros(2, ">i8"), "foreign byte order"),
        (memoryview(np.zeros(2, ">i8")), "foreign byte order"),
        (array.array("u", "ab"), "a buffer's format"),
        (type("Bad", (), {"__dlpack__": lambda self: 5})(), "DLPack capsule"),
        (type("Worse", (), {"__dlpack__": lambda self: 1 / 0})(), "division by zero"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(x: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        _core.view(x)
    assert words in str(caught.value)


def test_one_byte_types_have_no_byte_order() -> None:
    assert _core.view(np.zeros(2, ">i1")).dtype == DType.INT8


class OnDevice:
    """A producer whose memory the host cannot reach, and which must not be asked to export it."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **words: Any) -> Any:
        raise AssertionError("a copy from the device would have been made")


def test_device_arrays_need_the_cuda_build() -> None:
    with pytest.raises(InvalidArgumentError, match=r"x lives on a device.*build with CUDA"):
        _core.view(OnDevice())


class Producer:
    """Exports a NumPy array through DLPack, old or new."""

    def __init__(self, memory: Any, versioned: bool) -> None:
        self.memory = memory
        self.versioned = versioned
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **words: Any) -> Any:
        self.asked.append(words)
        if not self.versioned:
            if words:
                raise TypeError("__dlpack__() got an unexpected keyword argument")
            return self.memory.__dlpack__()
        return self.memory.__dlpack__(**words)


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_old_and_new(versioned: bool) -> None:
    memory = np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2]
    producer = Producer(memory, versioned)
    found = _core.view(producer)
    assert (found.dtype, found.shape, found.contiguous) == (DType.INT16, (3, 2), False)
    assert producer.asked[0] == {"max_version": (1, 0)}
    out = np.empty(6, np.int16)
    _core.pack([found], _core.view(out))
    assert out.tolist() == memory.reshape(-1).tolist()


def test_dlpack_tells_that_memory_is_read_only() -> None:
    memory = np.zeros(3)
    memory.flags.writeable = False
    assert not _core.view(Producer(memory, True)).writable


def test_a_spent_capsule_is_refused() -> None:
    capsule = np.zeros(3).__dlpack__()
    assert _core.view(capsule).count == 3
    with pytest.raises(InvalidArgumentError, match="spent"):
        _core.view(capsule)


def test_the_view_keeps_numpy_alive_and_lets_go() -> None:
    memory = np.zeros(1000)
    alive = weakref.ref(memory)
    count = sys.getrefcount(memory)
    found = _core.view(memory)
    assert sys.getrefcount(memory) == count + 1
    del memory
    gc.collect()
    assert alive() is not None
    del found
    assert alive() is None


def test_the_view_keeps_a_dlpack_producer_alive_and_lets_go() -> None:
    memory = np.zeros(1000)
    alive = weakref.ref(memory)
    found = _core.view(Producer(memory, True))
    del memory
    gc.collect()
    assert alive() is not None
    del found
    gc.collect()
    assert alive() is None


def test_an_unused_capsule_is_freed_by_its_own_destructor() -> None:
    memory = np.zeros(1000)
    count = sys.getrefcount(memory)
    del_me = memory.__dlpack__()
    found = _core.view(del_me)
    del del_me
    gc.collect()
    assert sys.getrefcount(memory) > count
    del found
    assert sys.getrefcount(memory) == count


def test_the_view_locks_a_bytearray_and_lets_go() -> None:
    memory = bytearray(8)
    found = _core.view(memory)
    with pytest.raises(BufferError):
        memory.append(1)
    del found
    memory.append(1)


def test_refused_arrays_are_let_go() -> None:
    memory = np.zeros(1000, np.longdouble)
    buffer = memoryview(memory)
    count = sys.getrefcount(memory)
    for x in (memory, buffer, Producer(memory, True)):
        with pytest.raises(InvalidArgumentError):
            _core.view(x)
    del x
    gc.collect()
    assert sys.getrefcount(memory) == count


def test_views_leak_nothing() -> None:
    def once() -> None:
        big = np.zeros(50_000)
        _core.view(big)
        _core.view(Producer(big, True))
        _core.view(Producer(big, False))
        _core.view(big.tobytes())
        _core.packed(_core.view(big[::2]))

    for _ in range(20):
        once()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(500):
        once()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


slices = st.sampled_from([(0, 1), (0, 2), (1, 1), (1, 2), (None, -1)])


@st.composite
def strided(draw: Any) -> Any:
    """An array with gaps, reversed and permuted axes."""
    axes = draw(st.lists(st.tuples(st.integers(0, 5), slices), max_size=4))
    target = numpy_dtype(draw(st.sampled_from(list(DType))))
    whole = [2 * length + 2 for length, _ in axes]
    count = int(np.prod(whole)) * target.itemsize
    memory = (np.arange(count) % 251).astype(np.uint8).view(target).reshape(whole)
    cut = memory[(..., *(slice(start, None, step) for _, (start, step) in axes))]
    cut = cut[(..., *(slice(0, length) for length, _ in axes))]
    return cut.transpose(draw(st.permutations(range(len(axes)))))


@given(strided())
def test_packing_is_c_order_and_unpacking_its_reverse(x: Any) -> None:
    found = _core.view(x)
    assert found.shape == x.shape
    assert found.contiguous == x.flags.c_contiguous
    flat = np.empty(x.size, x.dtype)
    _core.pack([found], _core.view(flat))
    assert flat.tobytes() == x.tobytes()
    copy = _core.packed(found)
    assert copy.contiguous and copy.shape == x.shape
    back = np.zeros([2 * n for n in x.shape], x.dtype)[(..., *(slice(0, None, 2) for _ in x.shape))]
    _core.unpack(copy, [_core.view(back)])
    assert back.tobytes() == x.tobytes()


def test_packing_needs_exactly_its_space() -> None:
    with pytest.raises(InvalidArgumentError, match="the arrays have 24 bytes, the buffer 32"):
        _core.pack([_core.view(np.zeros(3))], _core.view(np.zeros(4)))


def test_fill_needs_an_element_of_the_size() -> None:
    with pytest.raises(InvalidArgumentError, match="8 bytes"):
        _core.fill(_core.view(np.zeros(3)), b"123")


memory = np.zeros(10)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (memory, memory, 1),
        (memory, memory.view(np.int64), 1),
        (memory[:5], memory[5:], 0),
        (memory[:6], memory[5:], 2),
        (memory, memory[:9], 2),
        (memory, memory[::-1], 2),
        (memory[::2], memory[5:], 2),
        (memory[:0], memory, 0),
        (memory, np.zeros(10), 0),
    ],
)
def test_overlap(one: Any, other: Any, expected: int) -> None:
    assert _core.view(one).overlap(_core.view(other)) == expected
    assert _core.view(other).overlap(_core.view(one)) == expected
