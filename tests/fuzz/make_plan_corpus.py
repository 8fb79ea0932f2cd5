"""Writes the seed corpus of the plan fuzzer: small plans written by hand, one file each.

A second writer of the format next to the library's own, with zlib's checksum; plan_test.cpp checks
that every file validates. Run it again after a change of FORMAT.md:

    python tests/fuzz/make_plan_corpus.py tests/fuzz/corpus/plan
"""

from __future__ import annotations

import argparse
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, GATHER = range(6)
SCATTER, ALL_TO_ALL, SCAN, EXSCAN, BARRIER = range(6, 11)
TOKEN = 0xFFFFFFFF
NONE, INPUT, OUTPUT, SCRATCH = range(4)
RECV, SEND = range(2)
FINAL, FLUSH, ZERO_COPY, DIRECT_WRITE, AWAIT_WINDOW, ANNOUNCE_WINDOW = 1, 2, 4, 8, 16, 32
BY_RECEIVER, BY_SENDER, SPLIT = range(3)
CODED_SOURCE, CODED_TARGET, ENCODE = 1, 2, 4


@dataclass
class Plan:
    collective: int
    size: int
    rank: int
    root: int = 0
    blocks: int = 1
    parts: int = 1
    lanes: int = 1
    temporaries: int = 0
    scratch: int = 0
    channels: list[tuple[int, int, int]] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)

    def channel(self, peer: int, direction: int, number: int = 0) -> int:
        """The index of a channel, listed on first use."""
        entry = (peer, number, direction)
        if entry not in self.channels:
            self.channels.append(entry)
        return self.channels.index(entry)

    def row(
        self,
        chunk: int,
        recv: tuple[int, ...] = (),
        send: tuple[int, ...] = (),
        source: tuple[int, int] = (NONE, 0),
        target: tuple[int, int] = (NONE, 0),
        position: int = 0,
        flags: int = 0,
        lane: int = 0,
        carry: int = 0,
        copies: int = BY_RECEIVER,
        codes: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Appends a row; recv and send name peers, on the channel with the lane's number."""
        recvs = [self.channel(peer, RECV, lane) for peer in recv]
        sends = [self.channel(peer, SEND, lane) for peer in send]
        ports = [*recvs, *[0xFFFF] * (8 - len(recvs)), *sends, *[0xFFFF] * (8 - len(sends))]
        head = struct.pack(
            "<I8B", chunk, lane, len(recv), len(send), flags, source[0], position, target[0], carry
        )
        self.rows.append(
            head + struct.pack("<II16H4B8x", source[1], target[1], *ports, copies, *codes)
        )

    def encode(self) -> bytes:
        head = struct.pack("<4sHBB", b"PCPL", 3, self.collective, self.lanes)
        head += struct.pack("<5I", self.size, self.rank, self.root, self.blocks, self.parts)
        head += struct.pack("<2I", self.temporaries, self.scratch)
        head += struct.pack("<2I16x", len(self.channels), len(self.rows))
        tables = b"".join(struct.pack("<IHBx", *entry) for entry in self.channels)
        tables += b"".join(self.rows)
        checksum = zlib.crc32(head + bytes(4) + tables)
        return head + struct.pack("<I", checksum) + tables


def ring_all_reduce(size: int, rank: int) -> Plan:
    plan = Plan(ALL_REDUCE, size, rank, parts=size)
    left, right = (rank - 1) % size, (rank + 1) % size
    plan.row(rank, send=(right,), source=(INPUT, rank))
    for step in range(1, size):
        chunk = (rank - step) % size
        last = step == size - 1
        plan.row(
            chunk,
            (left,),
            (right,),
            source=(INPUT, chunk),
            target=(OUTPUT, chunk) if last else (NONE, 0),
            position=1,
            flags=FINAL if last else 0,
        )
    for step in range(size - 1):
        chunk = (rank - step) % size
        onward = () if step == size - 2 else (right,)
        plan.row(chunk, (left,), onward, target=(OUTPUT, chunk))
    return plan


def tree_all_reduce() -> Plan:
    """Two lanes: up with three operands, down."""
    plan = Plan(ALL_REDUCE, 5, 1, parts=2, lanes=2)
    for chunk in range(2):
        plan.row(chunk, (3, 4), (0,), source=(INPUT, chunk), position=1)
    for chunk in range(2):
        plan.row(chunk, (0,), (3, 4), target=(OUTPUT, chunk), lane=1, flags=FLUSH)
    return plan


def linear_scan(collective: int) -> Plan:
    """The running total lives in scratch."""
    plan = Plan(collective, 3, 1, temporaries=1, scratch=1)
    if collective == SCAN:
        plan.row(0, (0,), source=(INPUT, 0), target=(SCRATCH, 0), position=1)
        plan.row(0, source=(SCRATCH, 0), target=(OUTPUT, 0))
        plan.row(0, send=(2,), source=(SCRATCH, 0))
    else:
        plan.row(0, (0,), target=(SCRATCH, 0))
        plan.row(0, source=(SCRATCH, 0), target=(OUTPUT, 0))
        plan.row(0, send=(2,), source=(SCRATCH, 0))
    return plan


def direct_all_to_all(size: int, rank: int) -> Plan:
    plan = Plan(ALL_TO_ALL, size, rank, blocks=size * size)
    own = rank * size + rank
    plan.row(own, source=(INPUT, own), target=(OUTPUT, own))
    for peer in range(size):
        if peer != rank:
            plan.row(rank * size + peer, send=(peer,), source=(INPUT, rank * size + peer))
    for peer in range(size):
        if peer != rank:
            plan.row(peer * size + rank, (peer,), target=(OUTPUT, peer * size + rank))
    return plan


def barrier() -> Plan:
    plan = Plan(BARRIER, 4, 2, blocks=0)
    plan.row(TOKEN, send=(3,))
    plan.row(TOKEN, (1,), (0,))
    plan.row(TOKEN, (0,))
    return plan


def rooted(collective: int, rank: int) -> Plan:
    """Three ranks, root 1, everything direct."""
    blocks = 1 if collective in (REDUCE, BROADCAST) else 3
    plan = Plan(collective, 3, rank, root=1, blocks=blocks)
    at_root = rank == 1
    if collective == BROADCAST and at_root:
        plan.row(0, send=(0, 2), source=(INPUT, 0), target=(OUTPUT, 0), flags=ZERO_COPY)
    elif collective == BROADCAST:
        plan.row(0, (1,), target=(OUTPUT, 0), flags=DIRECT_WRITE | ANNOUNCE_WINDOW)
    elif collective == REDUCE and at_root:
        plan.row(0, (0, 2), source=(INPUT, 0), target=(OUTPUT, 0), position=1, flags=FINAL | FLUSH)
    elif collective == REDUCE:
        plan.row(0, send=(1,), source=(INPUT, 0))
    elif collective == GATHER and at_root:
        plan.row(1, source=(INPUT, 1), target=(OUTPUT, 1))
        plan.row(0, (0,), target=(OUTPUT, 0))
        plan.row(2, (2,), target=(OUTPUT, 2))
    elif collective == GATHER:
        flags = ZERO_COPY | AWAIT_WINDOW
        plan.row(rank, send=(1,), source=(INPUT, rank), flags=flags, copies=BY_SENDER)
    elif at_root:
        flags = ZERO_COPY | AWAIT_WINDOW
        plan.row(0, send=(0,), source=(INPUT, 0), flags=flags, copies=SPLIT)
        plan.row(1, source=(INPUT, 1), target=(OUTPUT, 1))
        plan.row(2, send=(2,), source=(INPUT, 2))
    else:
        plan.row(rank, (1,), target=(OUTPUT, rank))
    return plan


def ring_reduce_scatter() -> Plan:
    plan = Plan(REDUCE_SCATTER, 3, 0, blocks=3, parts=2)
    for part in range(2):
        plan.row(4 + part, send=(1,), source=(INPUT, 4 + part))
        plan.row(2 + part, (2,), (1,), source=(INPUT, 2 + part))
        plan.row(part, (2,), source=(INPUT, part), target=(OUTPUT, part), position=1, flags=FINAL)
    return plan


def ring_all_gather() -> Plan:
    plan = Plan(ALL_GATHER, 3, 2, blocks=3)
    plan.row(2, send=(0,), source=(INPUT, 2), target=(OUTPUT, 2))
    plan.row(1, (1,), (0,), target=(OUTPUT, 1), flags=ZERO_COPY | DIRECT_WRITE, copies=BY_SENDER)
    plan.row(0, (1,), target=(OUTPUT, 0), flags=DIRECT_WRITE)
    return plan


def coded_all_reduce() -> Plan:
    """Three ranks, two-shot; the codes of the sum wait in scratch for the second receiver."""
    plan = Plan(ALL_REDUCE, 3, 0, parts=3, scratch=1)
    for peer in (1, 2):
        plan.row(peer, send=(peer,), source=(INPUT, peer), codes=(0, 1, ENCODE))
    plan.row(
        0,
        (1, 2),
        (1,),
        source=(INPUT, 0),
        target=(SCRATCH, 0),
        flags=FINAL,
        codes=(3, 1, ENCODE | CODED_TARGET),
    )
    plan.row(0, (), (2,), (SCRATCH, 0), (OUTPUT, 0), codes=(0, 1, CODED_SOURCE))
    for peer in (1, 2):
        plan.row(peer, (peer,), target=(OUTPUT, peer), codes=(1, 0, 0))
    return plan


def alone() -> Plan:
    plan = Plan(ALL_REDUCE, 1, 0)
    plan.row(0, source=(INPUT, 0), target=(OUTPUT, 0))
    return plan


def one_shot(size: int, rank: int) -> Plan:
    """A left fold in two rows: the second carries what the first has come to."""
    plan = Plan(ALL_REDUCE, size, rank, scratch=1)
    others = tuple(peer for peer in range(size) if peer != rank)
    plan.row(0, send=others[:3], source=(INPUT, 0))
    plan.row(0, send=others[3:], source=(INPUT, 0))
    own = {"source": (INPUT, 0), "position": min(rank, 3) if rank < 4 else rank - 3}
    first, second = (own, {}) if rank < 4 else ({}, own)
    plan.row(0, others[:3], target=(SCRATCH, 0), **first)
    plan.row(0, others[3:], target=(OUTPUT, 0), flags=FINAL, carry=1, **second)
    return plan


def corpus() -> dict[str, Plan]:
    plans = {
        "all_reduce_ring_2": ring_all_reduce(2, 1),
        "all_reduce_ring_4": ring_all_reduce(4, 2),
        "all_reduce_tree": tree_all_reduce(),
        "all_reduce_alone": alone(),
        "all_reduce_coded": coded_all_reduce(),
        "all_reduce_one_shot_low": one_shot(5, 2),
        "all_reduce_one_shot_high": one_shot(6, 4),
        "all_to_all_direct": direct_all_to_all(3, 1),
        "all_gather_ring": ring_all_gather(),
        "reduce_scatter_ring": ring_reduce_scatter(),
        "scan_linear": linear_scan(SCAN),
        "exscan_linear": linear_scan(EXSCAN),
        "barrier": barrier(),
        "nothing_to_do": Plan(BARRIER, 1, 0, blocks=0),
    }
    names = {REDUCE: "reduce", BROADCAST: "broadcast", GATHER: "gather", SCATTER: "scatter"}
    for collective, name in names.items():
        plans[f"{name}_root"] = rooted(collective, 1)
        plans[f"{name}_leaf"] = rooted(collective, 2)
    return plans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, plan in corpus().items():
        (folder / f"{name}.plan").write_bytes(plan.encode())


if __name__ == "__main__":
    main()
