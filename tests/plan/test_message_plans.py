"""Plans of messages: every rank's launches end, and bring what was sent, however little fits."""

from __future__ import annotations

import random
from collections import deque

import pytest

from pycoll.algorithms import TABLE
from pycoll.device.message_plans import message_plan
from pycoll.plan.lowering import lower_all
from pycoll.plan.plan_format import DEPTH, Buffer, Plan, unpack
from pycoll.schedule.collectives import ROOTED
from pycoll.schedule.topology import Topology

NUMBER = 4

#: By channel: sender and receiver; what is in it, as chunk and tile.
Wires = dict[tuple[int, int], "deque[tuple[int, int]]"]


class Lane:
    """One lane of one rank, which runs its rows tile after tile."""

    def __init__(self, plan: Plan, lane: int, tiles: dict[int, int], wires: Wires) -> None:
        self.plan = plan
        self.rows = [row for row in plan.rows if row.lane == lane]
        self.tiles = tiles
        self.wires = wires
        most = max(tiles[row.chunk] for row in self.rows)
        self.left = deque(
            (tile, row) for tile in range(most) for row in self.rows if tile < tiles[row.chunk]
        )
        self.received: list[tuple[int, int]] = []

    def step(self) -> bool:
        """Whether the next row could run."""
        if not self.left:
            return False
        tile, row = self.left[0]
        rank = self.plan.rank
        if row.send:
            wire = self.wires.setdefault((rank, self.plan.channels[row.send[0]].peer), deque())
            if len(wire) == DEPTH:
                return False
            wire.append((row.chunk, tile))
        elif row.recv:
            wire = self.wires.setdefault((self.plan.channels[row.recv[0]].peer, rank), deque())
            if not wire:
                return False
            self.received.append(wire.popleft())
            assert self.received[-1] == (row.chunk, tile)
        else:
            assert (row.source, row.target) == (Buffer.INPUT, Buffer.OUTPUT)
        self.left.popleft()
        return True


@pytest.mark.parametrize("size", [2, 3, 5, 9])
@pytest.mark.parametrize("lanes", [1, 2, 3, 7])
def test_groups_that_match_come_to_an_end(size: int, lanes: int) -> None:
    for seed in range(12):
        draw = random.Random(f"{size} {lanes} {seed}")
        pairs = {
            (i, j): draw.choice([1, 1, 2, 9])
            for i in range(size)
            for j in range(size)
            if draw.random() < 0.7
        }
        tiles = {i * size + j: count for (i, j), count in pairs.items()}
        wires: Wires = {}
        all_lanes = []
        for rank in range(size):
            sends = [j for i, j in pairs if i == rank]
            recvs = [i for i, j in pairs if j == rank]
            if not sends and not recvs:
                continue
            plan = unpack(message_plan(size, rank, sends, recvs, NUMBER, lanes))
            assert 1 <= plan.lane_count <= lanes
            assert len(plan.rows) == len(sends) + len(recvs) - ((rank, rank) in pairs)
            all_lanes += [Lane(plan, lane, tiles, wires) for lane in range(plan.lane_count)]
        while any(lane.left for lane in all_lanes):
            draw.shuffle(all_lanes)
            assert any(lane.step() for lane in all_lanes), f"a deadlock, seed {seed}"
        got = sorted(one for lane in all_lanes for one in lane.received)
        sent = [(i * size + j, t) for (i, j), n in pairs.items() if i != j for t in range(n)]
        assert got == sorted(sent)


def test_messages_have_a_lane_each_while_there_are_lanes() -> None:
    plan = unpack(message_plan(4, 1, [0, 2], [0, 3], NUMBER, 7))
    assert [row.lane for row in plan.rows] == [0, 1, 2, 3]
    assert {channel.number for channel in plan.channels} == {NUMBER}


def test_collectives_leave_the_number_of_messages_alone() -> None:
    for collective, algorithms in TABLE.items():
        for algorithm in algorithms.values():
            for size in (2, 5, 8):
                root = size - 1 if collective in ROOTED else 0
                schedule = algorithm.build(size, root=root, topology=Topology.even(size, 2))
                for image in lower_all(schedule):
                    assert all(channel.number < NUMBER for channel in unpack(image).channels)
