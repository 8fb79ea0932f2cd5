"""What init and local_world refuse, and what they take, before anybody is waited for."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import pycoll
from pycoll import InvalidArgumentError


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"rank": 0}, "without size"),
        ({"size": 2}, "without rank"),
        ({"rank": 2, "size": 2}, "out of range"),
        ({"rank": 0, "size": 0}, "size=0: expected 1 to 4096"),
        ({"rank": 0, "size": 10**12}, "size=1000000000000: expected 1 to 4096"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": -3.0}, "timeout_s is -3.0"),
        ({"init_timeout_s": -1}, "init_timeout_s is -1"),
        (
            {"timeout_s": 10**400},
            "number beyond all floats: expected at most 1.8e+308",
        ),
        ({"timeout_s": np.bool_(True)}, "timeout_s is"),
        ({"transports": 5}, "transports is 5: expected names"),
        ({"transports": ["shm", 5]}, "5 is no transport"),
        ({"deterministic": "no"}, "deterministic is 'no': expected True or False"),
        ({"deterministic": 1}, "deterministic is 1"),
        ({"rank": 0, "size": 2, "address": 5}, "address is 5: expected a text"),
        ({"rank": 0, "size": 2, "address": "[::1:55", "secret": "s" * 16}, "brackets, [::1]:port"),
        ({"transports": "pigeon"}, "there are shm, verbs, tcp"),
        ({"transports": []}, "one or more of shm, verbs, tcp"),
        ({"transports": ""}, "expected names separated by commas"),
        ({"rank": 0, "size": 2, "address": "127.0.0.1:9"}, "secret"),
        ({"comm": 3}, "mpi4py"),
    ],
)
def test_init_refuses(words: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        pycoll.init(**words)
    assert text in str(caught.value)
    assert not pycoll.is_initialized()


def test_init_takes_what_means_the_same() -> None:
    """Numbers of NumPy, and blanks as in the variable."""
    comm = pycoll.init(transports="shm, tcp", timeout_s=np.int64(4), deterministic=np.bool_(False))
    try:
        assert comm.timeout_s == 4.0
        comm.timeout_s = np.float32(2.5)
        assert comm.timeout_s == 2.5
    finally:
        pycoll.finalize()


class _NoComm:
    """As MPI.COMM_NULL."""

    Iallgather = Iallgatherv = Get_size = None

    def Get_rank(self) -> int:  # noqa: N802
        raise RuntimeError("MPI_ERR_COMM: invalid communicator")


def test_a_communicator_of_mpi_that_is_none() -> None:
    with pytest.raises(InvalidArgumentError, match=r"comm cannot be used .*invalid communicator"):
        pycoll.init(comm=_NoComm())


def test_threads_that_cannot_start_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for the missing one end, and the next world is none the worse."""
    before = threading.active_count()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "pycoll-join-3":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(pycoll.TransportError, match="lets 3 of 5 threads start"):
            pycoll.local_world(5)
    assert threading.active_count() == before
    for comm in pycoll.local_world(2):
        comm.close()


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "2", 4097, 40_000])
def test_local_world_refuses(count: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="count is"):
        pycoll.local_world(count)


def test_local_world_refuses_hosts_of_another_length() -> None:
    with pytest.raises(InvalidArgumentError, match="hosts has 1 entries for 2 ranks"):
        pycoll.local_world(2, hosts=[0])
    with pytest.raises(InvalidArgumentError, match="hosts is 5"):
        pycoll.local_world(2, hosts=5)  # type: ignore[arg-type]
