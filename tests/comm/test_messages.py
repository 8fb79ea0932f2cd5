"""Messages between two ranks."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from harness import fresh_world, talk_in_threads, world_in_threads
from hypothesis import given
from hypothesis import strategies as st

import pycoll
from pycoll import InvalidArgumentError, MismatchError

Comm = pycoll.Communicator


@given(
    st.sampled_from(["shm", "tcp"]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 70_000)), max_size=12),
    st.booleans(),
)
def test_messages_arrive_in_order_of_each_tag(
    transports: str, messages: list[tuple[int, int]], asynchronous: bool
) -> None:
    def payload(index: int, count: int) -> Any:
        return (np.arange(count) * (index + 1)) % 251

    def sender(comm: Comm) -> None:
        works = []
        for index, (tag, count) in enumerate(messages):
            if asynchronous:
                works.append(comm.isend(payload(index, count), 1, tag))
            else:
                comm.send(payload(index, count), 1, tag)
        for work in works:
            assert work.wait() is None

    def receiver(comm: Comm) -> None:
        works = []
        for index, (tag, count) in enumerate(messages):
            out = np.full(count, -1)
            works.append((index, out, comm.irecv(out, 0, tag)))
        for index, out, work in works:
            assert work.wait() is out
            assert np.array_equal(out, payload(index, len(out))), index

    world_in_threads(2, transports).run(lambda c: sender(c) if c.rank == 0 else receiver(c))


def test_messages_between_all_pairs_and_oneself() -> None:
    def rank(comm: Comm) -> None:
        inbox = {peer: np.zeros(5) for peer in range(comm.size)}
        works = [comm.irecv(inbox[peer], peer, tag=peer) for peer in range(comm.size)]
        works += [
            comm.isend(np.full(5, 10.0 * comm.rank + peer), peer, tag=comm.rank)
            for peer in range(comm.size)
        ]
        for work in works:
            work.wait()
        for peer, data in inbox.items():
            assert (data == 10 * peer + comm.rank).all()

    world_in_threads(4).run(rank)


def test_messages_from_anybody_tell_their_sender() -> None:
    """Sent before and after it was asked, by others and by the rank itself, next to other tags."""

    def rank(comm: Comm) -> None:
        if comm.rank:
            comm.send(np.full(70_000, comm.rank), 0, tag=5)
            comm.barrier()
            comm.send(np.full(3, -comm.rank), 0, tag=5)
            return
        senders = []
        for _ in range(comm.size - 1):
            out = np.zeros(70_000, int)
            senders.append(comm.irecv_any(out, tag=5).wait())
            assert (out == senders[-1]).all()
        short = [np.zeros(3, int) for _ in range(comm.size)]
        works = [comm.irecv_any(out, tag=5) for out in short]
        assert not any(work.done() for work in works)
        comm.barrier()
        comm.isend(np.zeros(3, int), 0, tag=5).wait()
        late = [work.wait() for work in works]
        assert [out.tolist() for out in short] == [[-one] * 3 for one in late]
        assert sorted(senders) == [1, 2, 3] and sorted(late) == [0, 1, 2, 3]

    world_in_threads(4).run(rank)


def test_a_message_from_nobody_is_told() -> None:
    def wait(comm: Comm) -> Any:
        comm.timeout_s = 0.2 if comm.rank == 0 else 20
        return comm.irecv_any(np.zeros(3)).wait() if comm.rank == 0 else comm.barrier()

    world = fresh_world(3)
    try:
        errors = world.outcomes(wait)
        text = "rank 0's recv from any rank with tag 0 did not finish within 0.2 s: ranks 1 and 2 "
        assert str(errors[0]) == text + "sent nothing with this tag"
    finally:
        world.close()
    world = fresh_world(3)
    try:
        # One of two may leave; a receive from anybody ends with the last of them.
        def leave(comm: Comm) -> Any:
            if comm.rank == 1:
                return comm.close()
            if comm.rank == 2:
                # Several messages may arrive together with the news that it has left.
                for tag in (2, 1, 0):
                    comm.send(np.ones(3), 0, tag=tag)
                return comm.close()
            assert comm.irecv_any(np.zeros(3)).wait() == 2
            return comm.irecv_any(np.zeros(3)).wait()

        error = world.outcomes(leave)[0]
        assert isinstance(error, pycoll.PeerLostError) and "closed its communicator" in str(error)
    finally:
        world.close()


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_mistaken_tag_is_told_to_both_sides(transports: str) -> None:
    def rank(comm: Comm) -> Any:
        if comm.rank == 0:
            comm.send(np.ones(3), 1, tag=5)
            return comm.barrier()
        comm.timeout_s = 0.2
        return comm.recv(np.zeros(3), 0, tag=6)

    world = fresh_world(2, transports)
    try:
        for error in world.outcomes(rank):
            assert isinstance(error, pycoll.TimeoutError) and error.ranks == (0,), error
            text = (
                r"rank 1's recv from rank 0 with tag 6 did not finish within 0.2 s: rank 0 \(.*\) "
                "sent nothing with this tag; its messages with tag 5 were not received"
            )
            assert re.fullmatch(text, str(error)), error
    finally:
        world.close()


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("call", "operation", "during"),
    [
        (lambda c: c.send(np.ones(1 << 20), 1, tag=7), "send", "send to rank 1 with tag 7"),
        (lambda c: c.recv(np.ones(3), 1, tag=8), "recv", "recv from rank 1 with tag 8"),
        (lambda c: c.irecv(np.ones(3), 1).wait(), "recv", "recv from rank 1 with tag 0"),
        (lambda c: c.irecv_any(np.ones(3), 9).wait(), "recv", "recv from any rank with tag 9"),
        (lambda c: c.split(0), "split", "operation 1 (all_gather of 6 int64)"),
    ],
)
def test_a_lost_peer_is_told_with_all_facts(
    transports: str, call: Any, operation: str, during: str
) -> None:
    world = fresh_world(2, transports)
    try:
        error = world.outcomes(lambda c: c.close() if c.rank else call(c))[0]
        how = "it closed its communicator before the operation was done"
        name = world.communicators[0].names[1]
        assert isinstance(error, pycoll.PeerLostError), error
        assert str(error) == f"rank 1 ({name}) was lost during {during}: {how}"
        facts = (error.rank, error.ranks, error.host, error.operation, error.how)
        assert facts == (1, (1,), name.rpartition(":")[0], operation, how)
        with pytest.raises(pycoll.PeerLostError) as later:
            world.communicators[0].recv(np.ones(3), 1)
        assert (later.value.how, later.value.host) == (how, error.host)
    finally:
        world.close()


def test_what_cannot_be_received_from_anybody() -> None:
    def rank(comm: Comm) -> None:
        with pytest.raises(InvalidArgumentError, match="tag is -1"):
            comm.irecv_any(np.zeros(3), tag=-1)
        with pytest.raises(InvalidArgumentError, match="read-only"):
            comm.irecv_any(b"123")
        text = "irecv_any within a group: there a recv names its source"
        with pytest.raises(InvalidArgumentError, match=text), comm.group():
            comm.irecv_any(np.zeros(3))

    world_in_threads(2).run(rank)


def test_messages_carry_any_kind_of_array() -> None:
    def rank(comm: Comm) -> None:
        if comm.rank == 0:
            comm.send(torch.arange(3).to(torch.bfloat16), 1)
            comm.send(b"hello", 1)
            comm.send(np.arange(10)[::2], 1)
            comm.send(7, 1)
        else:
            t = torch.zeros(3, dtype=torch.bfloat16)
            assert comm.recv(t, 0) is t and t.tolist() == [0, 1, 2]
            b = bytearray(5)
            assert comm.recv(b, 0) == b"hello"
            assert comm.recv(np.zeros(5, int), 0).tolist() == [0, 2, 4, 6, 8]
            assert comm.recv(np.zeros(1, int), 0).tolist() == [7]

    world_in_threads(2).run(rank)


def test_messages_and_collectives_interleave() -> None:
    def rank(comm: Comm) -> None:
        work = comm.irecv(np.zeros(2), 1 - comm.rank, tag=9)
        assert comm.all_reduce(1) == 2
        comm.send(np.full(2, float(comm.rank)), 1 - comm.rank, tag=9)
        assert comm.all_reduce(2) == 4
        assert (work.wait() == 1 - comm.rank).all()

    world_in_threads(2).run(rank)


def test_a_message_of_another_length_is_a_mismatch() -> None:
    world = fresh_world(2)
    try:
        errors = world.outcomes(
            lambda c: c.send(np.zeros(3), 1) if c.rank == 0 else c.recv(np.zeros(4), 0)
        )
        assert isinstance(errors[1], MismatchError), errors
        assert "24" in str(errors[1]) and "32" in str(errors[1])
    finally:
        world.close()


def test_threads_may_use_one_communicator_for_messages() -> None:
    """Each thread has tags of its own."""

    def rank(comm: Comm) -> None:
        def talk(tag: int) -> None:
            for step in range(20):
                work = comm.irecv(out := np.zeros(50), 1 - comm.rank, tag)
                comm.send(np.full(50, float(step)), 1 - comm.rank, tag)
                work.wait()
                assert (out == step).all()

        talk_in_threads(talk, range(4))

    world_in_threads(2).run(rank)


# ---- sendrecv, probe and dup


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_ring_shifts_long_and_short_data(transports: str) -> None:
    def rank(comm: Comm) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for count in (0, 3, 300_000):
            out = np.zeros(count)
            assert comm.sendrecv(np.full(count, float(comm.rank)), right, out, left, 2) is out
            assert (out == left).all()
        tag = comm.rank % 2
        out = np.zeros(1, int)
        comm.sendrecv(np.array([comm.rank]), right, out, left, tag, recv_tag=left % 2)
        assert out[0] == left

    world_in_threads(4, transports).run(rank)


def test_sendrecv_refuses_what_cannot_be() -> None:
    comm = world_in_threads(1).communicators[0]
    x = np.zeros(4)
    with pytest.raises(InvalidArgumentError, match="out overlaps x"):
        comm.sendrecv(x[:3], 0, x[1:], 0)
    with pytest.raises(InvalidArgumentError, match="source is 1"):
        comm.sendrecv(x, 0, x, 1)
    with comm.group(), pytest.raises(InvalidArgumentError, match="sendrecv inside a group"):
        comm.sendrecv(x, 0, np.zeros(4), 0)


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_probe_tells_of_messages_and_leaves_them(transports: str) -> None:
    def rank(comm: Comm) -> None:
        if comm.rank:
            comm.send(np.arange(comm.rank * 100_000, dtype=np.uint8), 0, tag=comm.rank)
            return
        assert comm.probe(2, tag=2) == (2, 2, 200_000)
        assert comm.probe(1, tag=None) == (1, 1, 100_000)
        first = comm.probe(tag=None)
        assert first in ((1, 1, 100_000), (2, 2, 200_000))
        assert comm.iprobe(2, tag=1) is None and comm.iprobe(tag=9) is None
        for source in (1, 2):
            assert comm.iprobe(source, tag=source) == (source, source, source * 100_000)
            out = np.zeros(source * 100_000, np.uint8)
            comm.recv(out, source, source)
            assert np.array_equal(out, np.arange(len(out)).astype(np.uint8))
        assert comm.iprobe(tag=None) is None

    world = fresh_world(3, transports)  # where no other test has left a message
    world.run(rank)
    world.close()


def test_probe_does_not_see_what_a_receive_takes() -> None:
    def rank(comm: Comm) -> None:
        if comm.rank == 0:
            out = np.zeros(2)
            work = comm.irecv(out, 1)
            comm.barrier()
            work.wait()
            assert comm.iprobe(1) is None
        else:
            comm.barrier()
            comm.send(np.ones(2), 0)

    world_in_threads(2).run(rank)


def test_probe_waits_and_a_timeout_leaves_the_world_usable() -> None:
    def rank(comm: Comm) -> None:
        if comm.rank == 0:
            with pytest.raises(pycoll.TimeoutError, match="from rank 1 with tag 4 has come within"):
                comm.probe(1, tag=4, timeout=0.05)
            with pytest.raises(pycoll.TimeoutError, match="no message from any rank has come"):
                comm.probe(tag=None, timeout=0.05)
            comm.barrier()
            assert comm.probe(tag=None).source == 1
            comm.recv(np.zeros(3), 1, tag=4)
        else:
            comm.barrier()
            comm.send(np.ones(3), 0, tag=4)

    world_in_threads(2).run(rank)


@pytest.mark.parametrize("source", [None, 1])
def test_probe_hears_that_its_source_is_gone(source: int | None) -> None:
    world = fresh_world(2)
    try:
        errors = world.outcomes(
            lambda comm: comm.close() if comm.rank else comm.probe(source, tag=None)
        )
        assert isinstance(errors[0], pycoll.PeerLostError) and errors[0].rank == 1, errors
        assert "during a probe" in str(errors[0])
    finally:
        world.close()


def test_probes_of_several_threads_are_all_answered() -> None:
    def rank(comm: Comm) -> None:
        if comm.rank:
            comm.barrier()
            for tag in range(8):
                comm.send(np.zeros(tag), 0, tag)
            return
        found: dict[int, Any] = {}
        threads = [
            threading.Thread(target=lambda tag=tag: found.update({tag: comm.probe(1, tag)}))
            for tag in range(8)
        ]
        for thread in threads:
            thread.start()
        comm.barrier()
        for thread in threads:
            thread.join(20)
        assert found == {tag: (1, tag, 8 * tag) for tag in range(8)}
        for tag in range(8):
            comm.recv(np.zeros(tag), 1, tag)

    world_in_threads(2).run(rank)


def test_a_duplicate_stands_by_itself() -> None:
    def rank(comm: Comm) -> None:
        comm.timeout_s = 17.0
        with comm.dup() as other:
            assert (other.rank, other.size, other.hosts) == (comm.rank, comm.size, comm.hosts)
            assert other.timeout_s == 17.0 and other.name != comm.name
            comm.isend(np.array([1]), (comm.rank + 1) % 3)
            other.isend(np.array([2]), (comm.rank + 1) % 3)
            for one, wanted in ((other, 2), (comm, 1)):
                assert one.recv(np.zeros(1, int), (comm.rank - 1) % 3).tolist() == [wanted]
            assert other.all_reduce(1) == 3
        assert comm.all_reduce(1) == 3
        with comm.group(), pytest.raises(InvalidArgumentError, match="dup inside a group"):
            comm.dup()

    world_in_threads(3).run(rank)
