"""Messages between two ranks that native code repeats: they do what their definitions do.

Ranks that are processes import this file, so only tests that need torch import it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from call_ways import defined, frames_of
from harness import (
    ProcessWorld,
    fresh_world,
    talk_in_threads,
    world_in_processes,
    world_in_threads,
)

import pycoll
from pycoll import InvalidArgumentError, Work

Comm = pycoll.Communicator
#: Methods with messages, each as a call on one rank that sends to itself.
NAMES = ("send", "isend", "recv", "irecv", "irecv_any", "sendrecv")
Take = Callable[[str], Callable[..., Any]]


def to_itself(take: Take, name: str, x: Any, out: Any, tag: int = 3) -> Any:
    """What the call gives whose name is ``name``; the other end is always native."""
    if name == "sendrecv":
        return take(name)(x, 0, out, 0, tag)
    if name in ("send", "isend"):
        made = take(name)(x, 0, tag=tag)
        take("recv")(out, 0, tag)
        return made.wait() if name == "isend" else made
    take("send")(x, 0, tag)
    made = take(name)(out, tag) if name == "irecv_any" else take(name)(out, 0, tag)
    return made.wait() if name != "recv" else made


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_give_the_same(name: str) -> None:
    import torch

    comm = world_in_threads(1).communicators[0]
    kinds = ("u1", "f4", "c16")
    arrays: list[Any] = [np.arange(n, dtype=kind) for n in (0, 1, 9, 9000) for kind in kinds]
    arrays += [np.arange(12.0).reshape(3, 4), np.array(2.0)]
    arrays += [torch.arange(6).reshape(2, 3), torch.ones(5).to(torch.bfloat16)]
    arrays.append(torch.nn.Parameter(torch.ones(3)))  # a message computes nothing: no gradient
    for x in arrays:
        out = torch.zeros_like(x) if isinstance(x, torch.Tensor) else np.zeros_like(x)
        for _ in range(3):  # the first may be the definition's, which fills the table

            def native(one: str) -> Callable[..., Any]:
                return getattr(comm, one)  # type: ignore[no-any-return]

            def python(one: str) -> Callable[..., Any]:
                return defined(comm, one)

            for take in (native, python):
                out[...] = 0
                found = to_itself(take, name, x, out)
                assert (out == x).all(), (name, x.dtype, x.shape)
                wanted = out if name in ("recv", "irecv", "sendrecv") else None
                assert found is wanted or (name == "irecv_any" and found == 0)


@pytest.mark.parametrize("name", NAMES)
def test_known_messages_run_no_python(name: str) -> None:
    import torch

    comm = world_in_threads(1).communicators[0]
    for x, out in ((np.ones(6), np.zeros(6)), (torch.ones(6), torch.zeros(6))):
        call = lambda: to_itself(lambda one: getattr(comm, one), name, x, out)  # noqa: B023, E731
        for _ in range(2):
            call()
        mine = {"to_itself", "<lambda>", f"{test_known_messages_run_no_python.__name__}.<locals>"}
        assert all(any(one in frame for one in mine) for frame in frames_of(call)), frames_of(call)


def test_a_call_differs_by_each_of_its_words() -> None:
    """Many ranks and tags; numbers that are no plain int; the type and the order of arguments."""

    import torch

    def rank(comm: Comm) -> None:
        out, peer = np.zeros(1, int), 1 - comm.rank
        for _ in range(2):
            for tag in (0, 1, 2, 300, 2**31 - 1):
                comm.isend(np.array([10 * comm.rank + tag % 7]), peer, tag)
            for tag in (2**31 - 1, 300, 2, 1, 0):
                assert comm.recv(out, peer, tag) is out and out[0] == 10 * peer + tag % 7
            for tag in (1, True, np.int64(1), np.uint8(1)):
                comm.send(out, peer, tag=tag)
                comm.recv(source=np.int16(peer), out=out, tag=tag)
        for values in (np.zeros(3, "f4"), np.zeros(3, "f8"), np.zeros((3, 1)), torch.zeros(3)):
            comm.sendrecv(values + comm.rank, peer, values, peer)
            assert (values == peer).all()

    world_in_threads(2).run(rank)


def overlapping(comm: Comm) -> Any:
    x = np.ones(4)
    return comm.sendrecv(x[:3], 1, x[1:], 1, 5)


BAD: dict[str, tuple[Callable[[Comm], Any], str]] = {
    "dest": (lambda c: c.send(np.ones(3), 2, 5), "dest is 2: expected a rank from 0 to 1"),
    "dest of None": (lambda c: c.isend(np.ones(3), None, 5), "dest is None: expected a rank"),
    "source": (lambda c: c.recv(np.ones(3), -1, 5), "source is -1: expected a rank"),
    "tag": (lambda c: c.send(np.ones(3), 1, -1), "tag is -1: expected 0 to"),
    "tag of float": (lambda c: c.irecv(np.ones(3), 1, 5.0), "tag is 5.0: expected a whole"),
    "large tag": (lambda c: c.send(np.ones(3), 1, 2**31), "tag is 2147483648"),
    "read-only": (lambda c: c.recv(np.broadcast_to(np.ones(1), 3), 1, 5), "out is read-only"),
    "steps": (lambda c: c.recv(np.ones(6)[::2], 1, 5), "is not contiguous in C order"),
    "stream": (lambda c: c.send(np.ones(3), 1, 5, stream=7), "stream is for device arrays"),
    "overlap": (overlapping, "out overlaps x"),
    "recv_tag": (
        lambda c: c.sendrecv(np.ones(3), 1, np.ones(3), 1, 5, recv_tag=-2),
        "tag is -2: expected 0 to",
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_refused_moves_nothing(text: str) -> None:
    """Also where native code has run such calls with other arguments."""
    call, match = BAD[text]

    def rank(comm: Comm) -> None:
        x, out, peer = np.ones(3), np.zeros(3), 1 - comm.rank
        for _ in range(2):
            comm.sendrecv(x, peer, out, peer, 5)
            comm.isend(x, peer, 5)
            comm.recv(out, peer, 5)
        comm.barrier()
        if comm.rank == 0:
            for _ in range(2):
                with pytest.raises(InvalidArgumentError, match=match):
                    call(comm)
        comm.barrier()
        assert comm.iprobe(tag=None) is None
        comm.barrier()
        comm.sendrecv(x, peer, out, peer, 5)

    world_in_threads(2).run(rank)


def test_arrays_are_read_anew_each_time() -> None:
    import torch

    comm = world_in_threads(1).communicators[0]
    x, out = np.arange(4.0), np.zeros(4)
    send, recv = comm.send.bind(x, 0, 4), comm.recv.bind(out, 0, 4)
    for step in range(4):
        x[:] = step
        assert send() is None and recv() is out and out.tolist() == [step] * 4
    assert frames_of(send) == [] and frames_of(recv) == []
    x.resize(2, refcheck=False)
    send()
    with pytest.raises(pycoll.MismatchError, match="message has 16 bytes, the array has 32 bytes"):
        recv()
    out.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="out is read-only"):
        recv()
    lazy = torch.ones(2, dtype=torch.complex64).conj()
    for _ in range(2):
        comm.send(lazy, 0), comm.send(lazy.imag, 0)
        got = torch.zeros(2, dtype=torch.complex64), torch.zeros(2)
        assert comm.recv(got[0], 0).tolist() == lazy.tolist()
        assert comm.recv(got[1], 0).tolist() == lazy.imag.tolist()


def test_known_calls_inside_a_group_wait_for_its_end() -> None:
    def rank(comm: Comm) -> None:
        x, out, peer = np.full(3, comm.rank), np.zeros(3, int), 1 - comm.rank
        for _ in range(3):
            comm.isend(x, peer)
            comm.recv(out, peer)
        out[:] = -1
        with comm.group():
            works = [comm.recv(out, peer), comm.isend(x, peer)]
            assert all(isinstance(work, Work) and not work.done() for work in works)
            for refused in (lambda: comm.sendrecv(x, peer, out, peer), lambda: comm.irecv_any(out)):
                with pytest.raises(InvalidArgumentError, match=r"(inside|within) a group"):
                    refused()
        assert works[0].wait() is out and (out == peer).all() and works[1].wait() is None

    world_in_threads(2).run(rank)


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_lengths_on_both_sides_of_the_short_ones(transports: str) -> None:
    def rank(comm: Comm) -> None:
        peer = 1 - comm.rank
        for count in (0, 1, 8191, 8192, 8193, 70_000):
            x, out = np.arange(count) + comm.rank, np.zeros(count, int)
            for _ in range(3):
                out[:] = -1
                comm.sendrecv(x, peer, out, peer)
                assert (out == np.arange(count) + peer).all()
                works = [comm.irecv_any(out, 1), comm.isend(x, peer, 1)]
                assert [work.wait() for work in works] == [peer, None]
                if comm.rank == 0:
                    comm.send(x, 1), comm.recv(out, 1)
                else:
                    comm.recv(out, 0), comm.send(x, 0)
                assert (out == np.arange(count) + peer).all()

    world_in_threads(2, transports).run(rank)


def test_threads_repeat_messages_of_their_own_tags() -> None:
    def rank(comm: Comm) -> None:
        def talk(tag: int) -> None:
            x, out, peer = np.zeros(50), np.zeros(50), 1 - comm.rank
            for step in range(60):
                x[:] = step + tag
                if tag % 2:
                    comm.sendrecv(x, peer, out, peer, tag)
                else:
                    work = comm.isend(x, peer, tag)
                    comm.recv(out, peer, tag)
                    work.wait()
                assert (out == step + tag).all()

        talk_in_threads(talk, range(4))

    world_in_threads(2).run(rank)


CALLS: dict[str, Callable[[Comm], Any]] = {
    "send": lambda c: c.send(np.ones(1 << 20), 1, 7),
    "recv": lambda c: c.recv(np.ones(3), 1, 7),
    "irecv": lambda c: c.irecv(np.ones(3), 1, 7).wait(),
    "irecv_any": lambda c: c.irecv_any(np.ones(3), 7).wait(),
    "sendrecv": lambda c: c.sendrecv(np.ones(3), 1, np.ones(3), 1, 7),
}


@pytest.mark.parametrize("name", CALLS)
def test_late_and_lost_peers_are_told_alike(name: str) -> None:
    """With the texts and facts of the definition, whether native code knows the call or not."""
    call = CALLS[name]
    texts: list[Any] = []
    for warm in (0, 2):
        for lost in (True, False):
            world = fresh_world(2)

            def rank(comm: Comm) -> Any:
                for _ in range(warm):  # noqa: B023
                    if comm.rank == 0:
                        call(comm)
                    else:
                        size = 1 << 20 if name == "send" else 3
                        if name in ("send", "sendrecv"):
                            comm.recv(np.ones(size), 0, 7)
                        if name != "send":
                            comm.send(np.ones(3), 0, 7)
                if comm.rank:
                    return comm.close() if lost else time.sleep(0.6)  # noqa: B023
                comm.timeout_s = 0.2 if not lost else 20  # noqa: B023
                return call(comm)

            try:
                error: Any = world.outcomes(rank)[0]
                kind = pycoll.PeerLostError if lost else pycoll.TimeoutError
                assert isinstance(error, kind), error
                text = str(error).replace(world.communicators[0].names[1], "name")
                facts = (error.rank, error.ranks, error.operation, error.host, error.how)
                texts.append((text, facts))
            finally:
                world.close()
    assert texts[:2] == texts[2:]


def killed(comm: Comm) -> Any:
    """The second rank is killed in the middle of many messages."""
    x, out = np.ones(4), np.zeros(4)
    for step in range(10_000_000):
        if comm.rank == 1 and step == 500:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            if comm.rank == 0:
                comm.send(x, 1), comm.recv(out, 1)
            else:
                comm.recv(out, 0), comm.send(x, 0)
        except pycoll.PeerLostError as error:
            return (step, error.rank, time.monotonic() - begin)
    return None


def test_a_killed_peer_is_told_within_two_seconds() -> None:
    found = ProcessWorld(2, killed).outcomes()
    assert isinstance(found[1], AssertionError) and "status -9" in str(found[1])
    step, rank, seconds = found[0]
    assert step in (499, 500) and rank == 1 and seconds < 2, found


def interrupted(comm: Comm) -> tuple[str, float]:
    """The first rank waits for one that sleeps, and is interrupted."""
    out = np.zeros(1)
    for _ in range(2):
        comm.sendrecv(np.ones(1), 1 - comm.rank, out, 1 - comm.rank)
    if comm.rank == 1:
        comm.send(out, 0)
        time.sleep(10)
        return ("", 0)
    comm.recv(out, 1)
    begin = time.monotonic()
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        comm.recv(out, 1)
    except KeyboardInterrupt:
        return ("interrupted", time.monotonic() - begin)
    return ("went on", 0)


def test_ctrl_c_stops_a_waiting_receive_at_once() -> None:
    (said, seconds), _ = world_in_processes(2, interrupted)
    assert said == "interrupted" and seconds < 5
