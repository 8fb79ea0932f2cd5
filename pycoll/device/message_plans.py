"""Plans of messages on devices: what one rank sends and receives in one launch.

    rank 0 sends to 1 and 2, and receives from 2:

    lane 0   input block 0>1   ---> channel to 1
    lane 1   input block 0>2   ---> channel to 2
    lane 2   channel from 2    ---> output block 2>0

A launch runs a part of an all_to_all: the rows of the rank's messages, one row per message. Each
message has a lane of its own while there are free lanes, so that no message waits for the peer of
another. Further sends share lanes with sends, and further receives with receives. Shared lanes do
not deadlock if the launches of both ranks contain all messages between them. A lane that sends
waits for the receipt of the segment four segments before. A lane that receives waits for the
sending of the same segment or an earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence

from pycoll.plan.plan_format import Buffer, Channel, Plan, Row, pack
from pycoll.schedule.collectives import Collective


def message_plan(
    size: int, rank: int, sends: Sequence[int], recvs: Sequence[int], number: int, lanes: int
) -> bytes:
    """Return the plan of one message to each rank of ``sends`` and one from each of ``recvs``.

    No rank is twice in either list. ``number`` is the channel number. A message to the rank itself
    must be in both lists and becomes a copy. The plan uses at most ``lanes`` lanes.
    """
    channels: list[Channel] = []
    out = [_send(size, rank, peer, channels, number) for peer in _rotate(sends, rank, size)]
    back = [
        _recv(size, rank, peer, channels, number)
        for peer in _rotate(recvs, rank, size)
        if peer != rank
    ]
    rows, lane_count = _in_lanes(out, back, lanes)
    return pack(
        Plan(Collective.ALL_TO_ALL, size, rank, 0, 1, 0, 0, lane_count, tuple(channels), rows)
    )


def _rotate(peers: Sequence[int], rank: int, size: int) -> list[int]:
    """Sort peers from the next rank on, so that ranks begin with different peers."""
    return sorted(peers, key=lambda peer: (peer - rank) % size)


def _send(size: int, rank: int, peer: int, channels: list[Channel], number: int) -> Row:
    chunk = rank * size + peer
    if peer == rank:
        return Row(chunk, 0, 0, Buffer.INPUT, 0, chunk, Buffer.OUTPUT, chunk, (), ())
    channels.append(Channel(peer, number, 1))
    end = len(channels) - 1
    return Row(chunk, 0, 0, Buffer.INPUT, 0, chunk, Buffer.NONE, 0, (), (end,))


def _recv(size: int, rank: int, peer: int, channels: list[Channel], number: int) -> Row:
    chunk = peer * size + rank
    channels.append(Channel(peer, number, 0))
    end = len(channels) - 1
    return Row(chunk, 0, 0, Buffer.NONE, 0, 0, Buffer.OUTPUT, chunk, (end,), ())


def _in_lanes(out: list[Row], back: list[Row], lanes: int) -> tuple[tuple[Row, ...], int]:
    """Return the rows, sorted by lane, and the number of lanes."""
    total = len(out) + len(back)
    if lanes == 1 or not out or not back:
        count = min(lanes, total)
        placed = [row._replace(lane=i % count) for i, row in enumerate(out + back)]
        return tuple(sorted(placed, key=lambda row: row.lane)), count
    count = min(lanes, total)
    sending = min(max(1, count * len(out) // total), count - 1)
    placed = [row._replace(lane=i % sending) for i, row in enumerate(out)]
    rest = count - sending
    placed += [row._replace(lane=sending + i % rest) for i, row in enumerate(back)]
    used = sorted({row.lane for row in placed})
    placed = [row._replace(lane=used.index(row.lane)) for row in placed]
    return tuple(sorted(placed, key=lambda row: row.lane)), len(used)
