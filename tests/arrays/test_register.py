"""Arrays that RDMA devices may read: what is taken, what is held, and what is refused.

verbs_kept_test.cpp shows over a provider of the tests that devices do read them, and make test-rdma
on Soft-RoCE.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import pycoll
from pycoll.arrays.registered import Registered
from pycoll.errors import InvalidArgumentError


class Device:
    """Stands for a transport over verbs: keeps all, or none."""

    def __init__(self, willing: bool = True) -> None:
        self.willing = willing
        self.kept: list[int] = []

    def keep(self, view: Any) -> bool:
        if self.willing:
            self.kept.append(view.nbytes)
        return self.willing

    def lapse(self, view: Any) -> None:
        self.kept.remove(view.nbytes)


def registered(device: Any, *arrays: Any) -> Registered:
    return Registered(device, arrays)


def test_arrays_are_kept_until_the_end_of_the_block() -> None:
    device = Device()
    x, y = np.zeros(1000), np.zeros((3, 5), np.int8)
    with registered(device, x, y) as held:
        assert held.nbytes == 8015 and device.kept == [8000, 15]
        x[:] = 1
    assert held.nbytes == 0 and device.kept == []
    held.close()


def test_who_forgets_it_ends_it() -> None:
    device = Device()
    x = np.zeros(1000)
    held = registered(device, x)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is not None, "the array must live as long as it is registered"
    del held
    gc.collect()
    assert device.kept == [] and gone() is None


def test_what_is_registered_cannot_be_moved() -> None:
    array, moved = np.zeros(1000), bytearray(1000)
    with registered(Device(), array, moved):
        with pytest.raises(ValueError, match="resize"):
            array.resize(1 << 20)
        with pytest.raises(BufferError):
            moved.extend(bytes(1 << 20))
    moved.extend(bytes(1 << 20))


def test_a_device_that_refuses_leaves_arrays_to_be_copied() -> None:
    with registered(Device(willing=False), np.zeros(1000)) as held:
        assert held.nbytes == 0


def test_what_may_move_or_cannot_be_written_is_refused_and_then_nothing_is_kept() -> None:
    device, x = Device(), np.zeros(1000)
    fixed = np.zeros(10)
    fixed.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match=r"arrays\[1\] is a list: expected an object"):
        registered(device, x, [1.0])
    with pytest.raises(InvalidArgumentError, match=r"arrays\[1\] is read-only: pages that may not"):
        registered(device, x, fixed)
    with pytest.raises(InvalidArgumentError, match=r"arrays\[0\] is read-only"):
        registered(device, b"bytes")
    gc.collect()
    assert device.kept == []
    x.resize(2000, refcheck=False)


def test_a_communicator_without_such_a_device_registers_nothing() -> None:
    (comm,) = pycoll.local_world(1)
    with comm:
        with comm.register(np.zeros(1000), np.zeros(3)) as held:
            assert held.nbytes == 0
        with pytest.raises(InvalidArgumentError, match=r"arrays\[0\] is a str"):
            comm.register("text")
