"""The double binary tree: each of two trees moves half of the data up and down.

    tree 1 over 0..7 (rank 0 is the root)     tree 2: mirrored, or shifted by one if size is odd

         0                                    A rank with children in one tree is a leaf of the
         |                                    other tree, so no rank moves more than the whole
         4                                    message; both trees are log2 deep.
       /   \
      2     6
     / \\   / \\
    1   3 5   7

Each tree uses one lane for its way up and another for its way down, so tiles move through all of
them at the same time.

Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", Parallel Computing 35 (2009). In the costs below p is the number of ranks, L = ceil(log2 p),
L' = ceil(log2(p-1)), and n is the message in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pycoll.algorithms.pattern import finish, log2_ceil
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import REDUCE, Schedule, Transfer


class Edge(NamedTuple):
    """An edge from ``child`` to ``parent``.

    ``level`` counts upwards from the leaves, which have level 0.
    """

    level: int
    child: int
    parent: int


def lowest(node: int) -> int:
    """The lowest set bit of ``node``."""
    return node & -node


def parent_of(size: int, node: int) -> int:
    """The parent of ``node`` in tree 1. Requires: node > 0."""
    low = lowest(node)
    up = (node ^ low) | (low << 1)
    return up if up < size else node ^ low


def children_of(size: int, node: int) -> list[int]:
    """The children of ``node`` in tree 1, ascending."""
    if node == 0:
        return [1 << (log2_ceil(size) - 1)] if size > 1 else []
    half = lowest(node) >> 1
    if half == 0:
        return []
    right = half
    while right and node + right >= size:
        right >>= 1
    return [node - half] + ([node + right] if right else [])


def flip(size: int, node: int) -> int:
    """The node of tree 2 for a node of tree 1; ``unflip`` is the inverse."""
    return size - 1 - node if size % 2 == 0 else (node + 1) % size


def unflip(size: int, node: int) -> int:
    """The node of tree 1 for a node of tree 2; the inverse of ``flip``."""
    return size - 1 - node if size % 2 == 0 else (node - 1) % size


def top_of(tree: int, size: int) -> int:
    """The root node of the tree, which has no parent."""
    return flip(size, 0) if tree else 0


def edges(tree: int, size: int, only: int | None) -> Iterator[Edge]:
    """All edges of a tree, or those of one node, in the order of the children in tree 1."""
    if only is None:
        children = list(range(1, size))
    else:
        own = unflip(size, only) if tree else only
        children = sorted(([own] if own else []) + children_of(size, own))
    for child in children:
        ends = (child, parent_of(size, child))
        low, high = (flip(size, end) for end in ends) if tree else ends
        yield Edge(lowest(child).bit_length() - 1, low, high)


def all_reduce(size: int, *, only: int | None = None) -> Schedule:
    """Double-tree all_reduce (Sanders, Speck and Träff 2009).

    Part t moves up tree t on lane 2t and down on lane 2t+1. Cost: 2L steps, 2n bytes sent per rank.
    """
    last = 2 * log2_ceil(size) - 1

    def up_and_down() -> Iterator[Transfer]:
        for part in range(2):
            for level, child, parent in edges(part, size, only):
                yield Transfer(
                    level, part, child, parent, REDUCE, before=child < parent, lane=2 * part
                )
                yield Transfer(last - level, part, parent, child, lane=2 * part + 1)

    return finish(Collective.ALL_REDUCE, size, up_and_down(), parts=2, only=only)


def rooted_edges(size: int, root: int, only: int | None) -> Iterator[tuple[int, Edge]]:
    """(part, edge) of two trees over all ranks but the root, which is the parent of both tops."""
    others = size - 1
    if others == 0:
        return
    place = None if only is None else (only - root) % size
    within = None if place is None else place - 1
    for part in range(2):
        top = top_of(part, others)
        if place is None or place == 0 or within == top:
            yield part, Edge(log2_ceil(others), (top + 1 + root) % size, root)
        if place == 0:
            continue
        for level, child, parent in edges(part, others, within):
            yield part, Edge(level, (child + 1 + root) % size, (parent + 1 + root) % size)


def broadcast(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Double-tree broadcast (Sanders, Speck and Träff 2009).

    The root sends part t to the top of tree t over the other ranks. Cost: 1+L' steps, n bytes sent
    and n received per rank.
    """
    last = log2_ceil(max(size - 1, 1))
    down = (
        Transfer(last - level, part, parent, child, lane=part)
        for part, (level, child, parent) in rooted_edges(size, root, only)
    )
    return finish(Collective.BROADCAST, size, down, parts=2, root=root, only=only)


def reduce(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Double-tree reduce (Sanders, Speck and Träff 2009): the edges of broadcast in reverse.

    Cost: 1+L' steps, n bytes sent and n received per rank.
    """
    up = (
        Transfer(level, part, child, parent, REDUCE, before=child < parent, lane=part)
        for part, (level, child, parent) in rooted_edges(size, root, only)
    )
    return finish(Collective.REDUCE, size, up, parts=2, root=root, only=only)
