"""Every algorithm of the table: proved, lowered, proved again, counted, and built for one rank."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import partial

import pytest
from processor import quickest_s
from samples import part_of

from pycoll.algorithms import HIERARCHIES, TABLE, Algorithm, lookup, tree
from pycoll.algorithms.formulas import Cost
from pycoll.errors import InvalidArgumentError
from pycoll.plan.lowering import add_acknowledgements, lower, lower_all
from pycoll.plan.verifier import verify_plans
from pycoll.schedule.collectives import REDUCING, ROOTED, Collective
from pycoll.schedule.language import FAN_MAX, Schedule
from pycoll.schedule.proof import fold_order, hears_all, verify_schedule
from pycoll.schedule.topology import Topology, single_host, topology_of

SIZES = range(1, 34)
EVERY_ROOT = 9
FLAT = [one for entries in TABLE.values() for one in entries.values() if not one.needs_topology]

TOPOLOGIES = {
    "nobody else": single_host(1),
    "one host": single_host(5),
    "a host each": topology_of(range(6)),
    "even": Topology.even(8, 2),
    "even, three hosts of four": Topology.even(12, 3),
    "interleaved": topology_of("abcabcabc"),
    "uneven": topology_of("aaabbcccccd"),
    "uneven, interleaved": topology_of("abacadabcaa"),
    "large": Topology.even(33, 5),
    "three levels": topology_of("aabbccddeeff", "xxxxyyyyzzzz"),
    "three levels, uneven": topology_of("aaabbccdeef", "xxxxxyyyyyz"),
    "four levels": topology_of("aabbccddeeffgghh", "0000111122223333", "ppppppppqqqqqqqq"),
}
#: Inside hosts an all_reduce falls apart in two: reduce_scatter and all_gather, or to a leader and
#: back.
HALVES = {
    Collective.ALL_REDUCE: {*TABLE[Collective.REDUCE_SCATTER], *TABLE[Collective.REDUCE]},
    Collective.BARRIER: {*TABLE[Collective.REDUCE]},
}
EVERY_PAIR = [
    (kind, f"hierarchical:{inner}+{outer}")
    for kind in HIERARCHIES
    for inner in sorted(HALVES.get(kind, TABLE[kind]))
    for outer in TABLE[kind]
    if "hierarchical" not in (inner, outer)
]
HIERARCHICAL = [(kind, "hierarchical") for kind in HIERARCHIES] + [
    (Collective.ALL_REDUCE, "hierarchical:ring+tree"),
    (Collective.ALL_REDUCE, "hierarchical:direct+halving_doubling"),
    (Collective.ALL_REDUCE, "hierarchical:ring+recursive_multiplying"),
    (Collective.ALL_REDUCE, "hierarchical:binomial+recursive_doubling"),
    (Collective.ALL_REDUCE, "hierarchical:tree+chain"),
    (Collective.REDUCE, "hierarchical:tree+chain"),
    (Collective.REDUCE, "hierarchical:binomial+tree"),
    (Collective.BROADCAST, "hierarchical:tree+scatter_all_gather"),
    (Collective.BROADCAST, "hierarchical:chain+tree"),
    (Collective.REDUCE_SCATTER, "hierarchical:ring+halving_doubling"),
    (Collective.ALL_GATHER, "hierarchical:bruck+recursive_doubling"),
    (Collective.GATHER, "hierarchical:binomial+direct"),
    (Collective.SCATTER, "hierarchical:direct+binomial"),
    (Collective.BARRIER, "hierarchical:binomial+recursive_doubling"),
]


def name_of(one: object) -> str:
    if isinstance(one, Algorithm):
        return f"{one.collective.name.lower()}-{one.name}"
    return one.name.lower() if isinstance(one, Collective) else str(one)


every_flat = pytest.mark.parametrize("algorithm", FLAT, ids=name_of)
every_hierarchy = pytest.mark.parametrize(("kind", "name"), HIERARCHICAL, ids=name_of)


def roots_of(kind: Collective, size: int) -> list[int]:
    if kind not in ROOTED:
        return [0]
    if size <= EVERY_ROOT:
        return list(range(size))
    return sorted({0, 1, size // 2, size - 1})


def built(algorithm: Algorithm) -> Iterator[Schedule]:
    for size in SIZES:
        for root in roots_of(algorithm.collective, size):
            yield algorithm.build(size, root=root)


def counted(schedule: Schedule) -> Cost:
    size = schedule.size
    sent, received, reduced = ([0] * size for _ in range(3))
    for t in schedule.transfers:
        sent[t.source] += 1
        received[t.destination] += 1
        reduced[t.destination] += t.reduce
    kind = schedule.collective
    chunks = 1 if kind is Collective.BARRIER else schedule.data_chunks
    if kind is Collective.ALL_TO_ALL:
        chunks //= size
    handled = [sum(both) for both in zip(sent, received, strict=True)]
    most = [Fraction(max(counts), chunks) for counts in (sent, received, handled, reduced)]
    return Cost(schedule.steps, *most, chunks)


@every_flat
def test_schedule_is_proved_for_every_size_and_root(algorithm: Algorithm) -> None:
    schedules = list(built(algorithm))
    assert len(schedules) >= min(len(SIZES), FAN_MAX + 1)
    for schedule in schedules:
        verify_schedule(schedule)


@every_flat
def test_plans_are_proved_for_every_size(algorithm: Algorithm) -> None:
    for size in SIZES:
        for root in roots_of(algorithm.collective, size)[-2 if size <= EVERY_ROOT else -1 :]:
            schedule = algorithm.build(size, root=root)
            followed = add_acknowledgements(schedule)
            verify_plans(lower_all(followed), everyone_heard=True)
            if followed is not schedule and size <= EVERY_ROOT:
                verify_plans(lower_all(schedule))


@every_flat
def test_cost_formula_counts_the_schedule(algorithm: Algorithm) -> None:
    for size in SIZES:
        if size == 1:
            assert algorithm.cost(1) == Cost(0, *[Fraction(0)] * 4, 1) or (
                algorithm.name == "tree" and not algorithm.build(1).transfers
            )
        else:
            assert algorithm.cost(size) == counted(algorithm.build(size)), size


@every_flat
def test_a_rank_builds_its_own_part_as_in_the_whole(algorithm: Algorithm) -> None:
    for whole in built(algorithm):
        for rank in range(whole.size):
            part = algorithm.build(whole.size, root=whole.root, only=rank)
            assert part == part_of(whole, rank), (whole.size, whole.root, rank)


@every_flat
def test_rank_order_is_what_the_table_says(algorithm: Algorithm) -> None:
    if algorithm.collective not in REDUCING:
        assert not algorithm.rank_ordered
        assert not algorithm.keeps_order
        return
    orders = {fold_order(schedule) for schedule in built(algorithm)}
    assert algorithm.rank_ordered == (orders == {"rank"})
    kept = all(in_rank_order(algorithm.build(size)) for size in SIZES)
    assert algorithm.keeps_order == kept


def in_rank_order(schedule: Schedule) -> bool:
    """Whether operands always stand in ascending rank order, by running it on tuples of ranks."""
    places = schedule.data_chunks + len(schedule.temporaries)
    held = {(rank, place): (rank,) for rank in range(schedule.size) for place in range(places)}
    step, folds = -1, {}
    for t in schedule.transfers:
        if t.step != step:
            step, snapshot, folds = t.step, dict(held), {}
        value = snapshot[t.source, t.chunk]
        place = (t.destination, t.target)
        front, own, behind = folds.setdefault(place, ([], snapshot[place], []))
        if not t.reduce:
            held[place] = value
            continue
        (front if t.before else behind).append(value)
        held[place] = tuple(rank for part in (*front, own, *behind) for rank in part)
    return all(
        list(held[rank, chunk]) == sorted(held[rank, chunk])
        for rank, chunk in held
        if chunk < schedule.data_chunks
    )


@pytest.mark.parametrize("kind", [k for k in Collective if k in REDUCING], ids=name_of)
def test_every_reduction_has_an_algorithm_in_exact_rank_order_for_any_size(
    kind: Collective,
) -> None:
    assert any(one.rank_ordered for one in TABLE[kind].values())


def test_symmetric_collectives_hear_from_every_rank() -> None:
    for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.BARRIER):
        for algorithm in TABLE[kind].values():
            assert hears_all(algorithm.build(7, topology=Topology.even(7, 2))), algorithm.name


@pytest.mark.parametrize("size", range(1, 300))
def test_double_tree_is_two_trees_of_log_depth_with_one_node_inside_both_at_most(
    size: int,
) -> None:
    inside = []
    for which in range(2):
        parent = {edge.child: edge.parent for edge in tree.edges(which, size, None)}
        assert sorted([*parent, tree.top_of(which, size)]) == list(range(size))
        for child in parent:
            depth, node = 0, child
            while node in parent:
                depth, node = depth + 1, parent[node]
            assert depth <= (size - 1).bit_length()
        inside.append(set(parent.values()))
    assert inside[0] & inside[1] <= ({0} if size % 2 else set())


@every_hierarchy
def test_hierarchy_is_proved_on_every_topology(kind: Collective, name: str) -> None:
    algorithm = lookup(kind, name)
    for place, topology in TOPOLOGIES.items():
        size = topology.size
        for root in sorted({0, size // 2, size - 1}) if kind in ROOTED else [0]:
            schedule = algorithm.build(size, root=root, topology=topology)
            verify_schedule(schedule)
            verify_plans(lower_all(add_acknowledgements(schedule)), everyone_heard=True)
            for rank in range(size):
                part = algorithm.build(size, root=root, only=rank, topology=topology)
                assert part == part_of(schedule, rank), (place, root, rank)


@pytest.mark.parametrize(("kind", "name"), EVERY_PAIR, ids=name_of)
def test_any_inner_goes_with_any_outer(kind: Collective, name: str) -> None:
    algorithm = lookup(kind, name)
    for place in ("even", "uneven, interleaved", "three levels, uneven"):
        topology = TOPOLOGIES[place]
        root = topology.size // 2 if kind in ROOTED else 0
        schedule = algorithm.build(topology.size, root=root, topology=topology)
        verify_schedule(schedule)
        verify_plans(lower_all(add_acknowledgements(schedule)), everyone_heard=True)


@every_hierarchy
def test_hierarchy_costs_at_most_its_formula(kind: Collective, name: str) -> None:
    algorithm = lookup(kind, name)
    for place, topology in TOPOLOGIES.items():
        found = counted(algorithm.build(topology.size, topology=topology))
        stated = algorithm.cost(topology.size, topology)
        assert found.steps <= stated.steps, place
        for what in ("sent", "received", "handled", "reduced"):
            assert getattr(found, what) <= getattr(stated, what), (place, what)


@pytest.mark.parametrize("kind", [Collective.ALL_REDUCE, Collective.REDUCE_SCATTER])
def test_hierarchy_on_even_hosts_costs_exactly_its_formula(kind: Collective) -> None:
    topology = Topology.even(12, 3)
    stated = TABLE[kind]["hierarchical"].cost(12, topology)
    found = counted(TABLE[kind]["hierarchical"].build(12, topology=topology))
    assert found == stated
    across = Fraction(2, 3) * Fraction(1, 4)
    assert found.sent == (Fraction(3, 4) + across) * (2 if kind is Collective.ALL_REDUCE else 1)


def test_hierarchy_sends_across_hosts_only_what_the_shards_need() -> None:
    topology = Topology.even(32, 4)
    schedule = TABLE[Collective.ALL_REDUCE]["hierarchical"].build(32, topology=topology)
    across = [0] * 32
    for t in schedule.transfers:
        across[t.source] += topology.host_of(t.source) != topology.host_of(t.destination)
    assert {Fraction(count, schedule.parts) for count in across} == {Fraction(2 * 3, 4 * 8)}


@pytest.mark.parametrize("kind", Collective, ids=name_of)
def test_one_rank_of_1024_is_built_within_100_ms(kind: Collective) -> None:
    size, ranks = 1024, (0, 1, 511, 512, 1023)
    topology = Topology.even(size, 128)
    for name, algorithm in TABLE[kind].items():
        for rank in ranks:
            build = partial(algorithm.build, size, only=rank, topology=topology)
            assert build().only == rank
            assert quickest_s(build, 0.1) < 0.1, (name, rank)


def test_one_rank_of_1024_has_a_plan_from_every_algorithm() -> None:
    topology = Topology.even(1024, 128)
    for entries in TABLE.values():
        for algorithm in entries.values():
            if algorithm.name != "bruck":
                plan = lower(algorithm.build(1024, only=513, topology=topology), 513)
                assert len(plan) > 64


def test_every_entry_says_what_it_is_and_where_it_is_from() -> None:
    for kind, entries in TABLE.items():
        for name, algorithm in entries.items():
            assert algorithm.collective is kind
            assert name in (algorithm.name, "hierarchical")
            assert 10 < len(algorithm.summary) < 60, algorithm.summary
            assert algorithm.source


def test_unknown_name_lists_the_others_and_suggests_the_nearest() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        lookup(Collective.ALL_REDUCE, "rings")
    text = str(caught.value)
    assert "'rings' does not exist for all_reduce; did you mean 'ring'?" in text
    for name in TABLE[Collective.ALL_REDUCE]:
        assert name in text


@pytest.mark.parametrize(
    ("kind", "name", "wrong"),
    [
        (Collective.ALL_REDUCE, "hierarchical:ring+nothing", "nothing"),
        (Collective.ALL_REDUCE, "hierarchical:bruck+ring", "bruck"),
        (Collective.ALL_REDUCE, "hierarchical:one_shot+ring", "one_shot"),
        (Collective.REDUCE, "hierarchical:chain+ring", "ring"),
        (Collective.ALL_REDUCE, "hierarchical:ring", "hierarchical:ring"),
        (Collective.SCAN, "hierarchical:ring+ring", "hierarchical:ring+ring"),
        (Collective.BARRIER, "ring", "ring"),
    ],
)
def test_a_name_of_another_collective_or_half_a_hierarchy_is_refused(
    kind: Collective, name: str, wrong: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"'{wrong.replace('+', '.')}' does not exist"):
        lookup(kind, name)


def test_wrong_arguments_are_refused_with_value_and_bound() -> None:
    ring = lookup(Collective.ALL_REDUCE, "ring")
    chain = lookup(Collective.REDUCE, "chain")
    hierarchical = lookup(Collective.ALL_REDUCE, "hierarchical")
    with pytest.raises(InvalidArgumentError, match="size is 0"):
        ring.build(0)
    with pytest.raises(InvalidArgumentError, match="only is 4; it must be a rank below 4"):
        ring.build(4, only=4)
    with pytest.raises(InvalidArgumentError, match="root is -1"):
        chain.build(4, root=-1)
    with pytest.raises(InvalidArgumentError, match="needs a topology of 4 ranks; got none"):
        hierarchical.build(4)
    with pytest.raises(InvalidArgumentError, match="got one of 3 ranks"):
        hierarchical.build(4, topology=single_host(3))
