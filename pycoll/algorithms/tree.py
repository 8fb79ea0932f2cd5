"""The double binary tree: half of the data up and down each of two trees.

    tree 1 over 0..7 (rank 0 on top)          tree 2: mirrored, or shifted by one if size is odd

         0                                    A rank that has children in one tree is a leaf of the
         |                                    other, so nobody moves more than the whole message;
         4                                    both trees are log2 deep.
       /   \
      2     6
     / \\   / \
    1   3 5   7

Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35 (2009). Each tree's way up and down has its own lane, so tiles flow through
all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pycoll.algorithms.pattern import finish, log2_ceil
from pycoll.collective import Collective
from pycoll.schedule import REDUCE, Schedule, Transfer


class Edge(NamedTuple):
    """``child`` hangs below ``parent``; ``level`` counts from the leaves (0) up."""

    level: int
    child: int
    parent: int


def lowest(node: int) -> int:
    """The lowest set bit."""
    return node & -node


def parent_of(size: int, node: int) -> int:
    """In tree 1. Requires: node > 0."""
    low = lowest(node)
    up = (node ^ low) | (low << 1)
    return up if up < size else node ^ low


def children_of(size: int, node: int) -> list[int]:
    """In tree 1, ascending."""
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
    """Tree 2 is tree 1 with its nodes renamed so; ``unflip`` renames back."""
    return size - 1 - node if size % 2 == 0 else (node + 1) % size


def unflip(size: int, node: int) -> int:
    """The node of tree 1 that ``flip`` renames to ``node``."""
    return size - 1 - node if size % 2 == 0 else (node - 1) % size


def top_of(tree: int, size: int) -> int:
    """The node without a parent."""
    return flip(size, 0) if tree else 0


def edges(tree: int, size: int, only: int | None) -> Iterator[Edge]:
    """All edges of a tree, or those at one node, in the order of the children in tree 1."""
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
    """2L steps, 2n bytes. Part t goes up tree t on lane 2t and down on lane 2t+1."""
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
    """(part, edge) of two trees over everybody but the root, which stands above both tops."""
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
    """1+L steps, n bytes: the root sends part t to the top of tree t over the others."""
    last = log2_ceil(max(size - 1, 1))
    down = (
        Transfer(last - level, part, parent, child, lane=part)
        for part, (level, child, parent) in rooted_edges(size, root, only)
    )
    return finish(Collective.BROADCAST, size, down, parts=2, root=root, only=only)


def reduce(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """1+L steps, n bytes: broadcast's way back."""
    up = (
        Transfer(level, part, child, parent, REDUCE, before=child < parent, lane=part)
        for part, (level, child, parent) in rooted_edges(size, root, only)
    )
    return finish(Collective.REDUCE, size, up, parts=2, root=root, only=only)
