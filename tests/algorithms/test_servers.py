"""Parameter servers: proved, lowered, counted, and compared with the bytes that BytePS promises."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from samples import part_of

from pycoll.algorithms import SERVED, lookup
from pycoll.algorithms.formulas import Cost
from pycoll.algorithms.servers import CLOSE, shares
from pycoll.comm.plans import Plans
from pycoll.cost.model import DEFAULT, SERVED_SEGMENT_BYTES, Link
from pycoll.cost.selection import candidates, choose, explain_text, predict
from pycoll.errors import InvalidArgumentError
from pycoll.plan.lowering import lower, lower_all
from pycoll.plan.plan_format import Buffer, unpack
from pycoll.plan.verifier import verify_plans
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import REDUCE, Schedule, ScheduleError, Transfer
from pycoll.schedule.proof import fold_order, hears_all, verify_schedule
from pycoll.schedule.topology import Topology, single_host, topology_of

ALL_REDUCE = Collective.ALL_REDUCE
#: (workers, servers) of up to 33 ranks.
WORLDS = [
    (size - servers, servers)
    for size in (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 25, 32, 33)
    for servers in sorted({1, 2, size // 3, size // 2, size - 1})
    if 0 < servers < size
]
HOSTS = {
    "a host each": topology_of(range(6)).serving(2),
    "two hosts and two servers": topology_of("aabbxy").serving(2),
    "servers share a host": topology_of("aaabbbxx").serving(2),
    "servers next to workers": topology_of("aabbab").serving(2),
    "uneven": topology_of("aaabbcx").serving(1),
    "interleaved": topology_of("abcabcxyz").serving(3),
    "racks": topology_of("aabbccddx", "000011112").serving(1),
    "large": topology_of("aaaaaaabbbbbbbcccccccdddddddwxyz").serving(4),
}


def built(name: str) -> Iterator[tuple[Schedule, Topology]]:
    for workers, servers in WORLDS:
        topology = single_host(workers + servers).serving(servers)
        yield lookup(ALL_REDUCE, name).build(topology.size, topology=topology), topology


def counted(schedule: Schedule) -> Cost:
    sent, received, reduced = ([0] * schedule.size for _ in range(3))
    for t in schedule.transfers:
        sent[t.source] += 1
        received[t.destination] += 1
        reduced[t.destination] += t.reduce
    handled = [sum(both) for both in zip(sent, received, strict=True)]
    parts = schedule.data_chunks
    most = [Fraction(max(counts), parts) for counts in (sent, received, handled, reduced)]
    return Cost(schedule.steps, *most, parts)


@pytest.mark.parametrize("name", SERVED[ALL_REDUCE])
def test_schedules_and_plans_are_proved_and_counted(name: str) -> None:
    for schedule, topology in built(name):
        verify_schedule(schedule)
        assert fold_order(schedule) == "rank"
        assert hears_all(schedule)
        verify_plans(lower_all(schedule), tiles=2, everyone_heard=True)
        stated = lookup(ALL_REDUCE, name).cost(schedule.size, topology)
        assert counted(schedule) == stated, (schedule.workers, schedule.servers)


@pytest.mark.parametrize("name", SERVED[ALL_REDUCE])
def test_a_rank_builds_its_own_part_as_in_the_whole(name: str) -> None:
    for schedule, topology in built(name):
        if schedule.size > 17:
            continue
        for rank in range(schedule.size):
            part = lookup(ALL_REDUCE, name).build(schedule.size, topology=topology, only=rank)
            assert part == part_of(schedule, rank), (schedule.workers, schedule.servers, rank)


@pytest.mark.parametrize("inner", ["direct", "ring", "binomial"])
@pytest.mark.parametrize("outer", SERVED[ALL_REDUCE])
def test_hierarchies_reduce_inside_hosts_first(inner: str, outer: str) -> None:
    algorithm = lookup(ALL_REDUCE, f"hierarchical:{inner}+{outer}")
    for place, topology in HOSTS.items():
        schedule = algorithm.build(topology.size, topology=topology)
        verify_schedule(schedule)
        assert hears_all(schedule), place
        verify_plans(lower_all(schedule), tiles=2, everyone_heard=True)
        for rank in range(topology.size):
            part = algorithm.build(topology.size, topology=topology, only=rank)
            assert part == part_of(schedule, rank), (place, rank)
        found, stated = counted(schedule), algorithm.cost(topology.size, topology)
        assert found.steps <= stated.steps, place
        for what in ("sent", "received", "handled", "reduced"):
            assert getattr(found, what) <= getattr(stated, what), (place, what)


def test_a_hierarchy_sends_one_copy_of_the_message_from_each_host() -> None:
    topology = HOSTS["large"]
    algorithm = lookup(ALL_REDUCE, "hierarchical:direct+servers")
    schedule = algorithm.build(topology.size, topology=topology)
    leaving = dict.fromkeys(range(4), 0)
    for t in schedule.transfers:
        if t.source < schedule.workers <= t.destination:
            leaving[topology.host_of(t.source)] += 1
    assert set(leaving.values()) == {schedule.parts}


def test_a_mixed_split_is_within_two_percent_of_the_theorem_of_byteps() -> None:
    for workers in range(2, 13):
        for servers in range(1, workers):
            best = Fraction(
                2 * workers * (workers - 1), workers**2 + servers * workers - 2 * servers
            )
            topology = single_host(workers + servers).serving(servers)
            cost = lookup(ALL_REDUCE, "servers_mixed").cost(topology.size, topology)
            assert best <= cost.sent <= best * CLOSE**2, (workers, servers)
            assert cost.chunks <= 256


def test_the_limits_of_a_mixed_split_are_the_direct_exchange_and_servers_apart() -> None:
    mixed = lookup(ALL_REDUCE, "servers_mixed").build(6, topology=single_host(6))
    direct = lookup(ALL_REDUCE, "direct").build(6)
    assert set(mixed.transfers) == set(direct.transfers)
    assert mixed.parts == direct.parts
    hosts = Topology.even(8, 4)
    one, other = (
        lookup(ALL_REDUCE, f"hierarchical:direct+{name}").build(8, topology=hosts)
        for name in ("servers_mixed", "direct")
    )
    assert set(one.transfers) == set(other.transfers)
    apart = single_host(8).serving(4)
    one, other = (
        lookup(ALL_REDUCE, name).build(8, topology=apart) for name in ("servers", "servers_mixed")
    )
    assert one == other
    assert shares(4, 1) == (2, 1)


def test_shards_are_parts_of_equal_length_whatever_the_message_holds() -> None:
    topology = single_host(11).serving(4)
    schedule = lookup(ALL_REDUCE, "servers").build(11, topology=topology)
    folded = [{t.chunk for t in schedule.transfers if t.destination == rank} for rank in range(11)]
    assert [len(chunks) for chunks in folded[7:]] == [1, 1, 1, 1]


def test_a_server_has_neither_input_nor_output_and_stores_nothing() -> None:
    topology = single_host(6).serving(2)
    schedule = lookup(ALL_REDUCE, "servers").build(6, topology=topology)
    plan = unpack(lower(schedule, 5))
    assert plan.servers == 2
    assert plan.scratch_slots == 0
    assert [(row.source, row.target, len(row.recv), len(row.send)) for row in plan.rows] == [
        (Buffer.NONE, Buffer.NONE, 4, 4)
    ]


def test_a_model_with_servers_apart_takes_the_bytes_of_its_busiest_link() -> None:
    nbytes, beta = 64 << 20, 1 / 125e6
    slow = DEFAULT._replace(across=Link(alpha=50e-6, beta=beta, gamma=0, overhead=1e-6))
    seconds = {}
    for servers in (1, 2, 4, 8):
        topology = topology_of(range(4 + servers)).serving(servers)
        seconds[servers] = predict(ALL_REDUCE, "servers", topology, nbytes, slow)
    ring = predict(ALL_REDUCE, "ring", topology_of(range(4)), nbytes, slow)
    for servers, found in seconds.items():
        alone = max(1, 4 / servers) * nbytes * beta
        assert alone <= found <= 1.06 * alone, servers
    assert seconds[4] < 0.7 * ring


def test_worlds_with_servers_choose_among_algorithms_with_servers_only() -> None:
    topology = topology_of("aabbxy").serving(2)
    names = candidates(ALL_REDUCE, topology)
    assert names == (
        "servers",
        "servers_mixed",
        "hierarchical:direct+servers",
        "hierarchical:direct+servers_mixed",
    )
    assert candidates(ALL_REDUCE, topology, deterministic=True) == ("servers", "servers_mixed")
    assert candidates(Collective.ALL_GATHER, topology) == ()
    assert "servers" not in candidates(ALL_REDUCE, topology.workers)
    for nbytes in (0, 8, 1 << 16, 1 << 28):
        assert choose(ALL_REDUCE, topology, nbytes).name in names
    text = explain_text(ALL_REDUCE, topology, 1 << 20)
    assert "servers" in text and " of at most 32 KiB in each" in text
    assert Plans(0, topology).parameters.segment_bytes == SERVED_SEGMENT_BYTES
    assert Plans(0, topology.workers).parameters == DEFAULT


def test_what_fits_no_servers_is_refused() -> None:
    served = single_host(4).serving(1)
    with pytest.raises(InvalidArgumentError, match="servers is 4: expected 0 to 3, so that at"):
        single_host(4).serving(4)
    with pytest.raises(InvalidArgumentError, match=r"at least one server.*--servers 2"):
        lookup(ALL_REDUCE, "servers").build(4, topology=single_host(4))
    with pytest.raises(InvalidArgumentError, match="needs a topology of 4 ranks; got none"):
        lookup(ALL_REDUCE, "servers").build(4)
    with pytest.raises(InvalidArgumentError, match="ring all_reduce knows no servers, and 1 of 4"):
        lookup(ALL_REDUCE, "ring").build(4, topology=served)
    with pytest.raises(InvalidArgumentError, match=r"hierarchical.* knows no servers"):
        lookup(ALL_REDUCE, "hierarchical").build(4, topology=served)


def test_the_proof_knows_who_contributes() -> None:
    push = [Transfer(0, 0, worker, 2, REDUCE) for worker in (0, 1)]
    pull = [Transfer(1, 0, 2, worker) for worker in (0, 1)]
    served = Schedule(ALL_REDUCE, 3, 1, (*push, *pull), servers=1)
    verify_schedule(served)
    with pytest.raises(ScheduleError, match="rank 0 ends with chunk 0 of rank 1 in output chunk 0"):
        verify_schedule(served._replace(transfers=(push[1], *pull)))
    with pytest.raises(ScheduleError, match="must hold chunk 0 of ranks 0-2"):
        # Without servers the contribution of rank 2 is missing in what rank 1 gets.
        reduced = tuple(t._replace(reduce=False) if t.step == 0 else t for t in push[:1])
        verify_schedule(Schedule(ALL_REDUCE, 3, 1, (*reduced, *pull)))
    with pytest.raises(ScheduleError, match="3 servers of 3 ranks: one rank must work"):
        verify_schedule(served._replace(servers=3))
    with pytest.raises(ScheduleError, match="all_gather has a block for every rank"):
        verify_schedule(Schedule(Collective.ALL_GATHER, 3, 1, (), servers=1))
    with pytest.raises(ScheduleError, match="root 2 serves"):
        verify_schedule(Schedule(Collective.REDUCE, 3, 1, (), root=2, servers=1))
