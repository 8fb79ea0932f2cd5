"""Nested structures of arrays: dicts, lists, tuples and, where JAX is loaded, its pytree nodes."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pycoll.errors import InvalidArgumentError


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, array) pairs: "layer/0/weight". ``name`` stands for a single array."""
    return _leaves(tree, "", name)


def _leaves(node: Any, path: str, name: str) -> Iterator[tuple[str, Any]]:
    parts = _parts(node)
    if parts is None:
        yield path or name, node
        return
    for key, child in parts[0]:
        yield from _leaves(child, f"{path}/{key}" if path else str(key), name)


def rebuilt(node: Any, arrays: Iterator[Any]) -> Any:
    """A structure like ``node`` with these arrays as its leaves."""
    parts = _parts(node)
    if parts is None:
        return next(arrays)
    children, make = parts
    return make([rebuilt(child, arrays) for _, child in children])


Parts = tuple[list[tuple[Any, Any]], Callable[[list[Any]], Any]]


def _parts(node: Any) -> Parts | None:
    """The (key, child) pairs of a node and a function that builds a node of the same kind.

    None for a leaf.
    """
    if node is None:
        return [], lambda _: None
    if isinstance(node, dict):
        keys = sorted(node, key=str)
        twice = next((b for a, b in itertools.pairwise(keys) if str(a) == str(b)), None)
        if twice is not None:
            raise InvalidArgumentError(f"tree has two keys that read {str(twice)!r} in one dict")
        return [(key, node[key]) for key in keys], lambda new: _dict_like(node, keys, new)
    if isinstance(node, list | tuple):
        kind: Any = type(node)
        fields = getattr(kind, "_fields", None)
        if fields is None:
            return list(enumerate(node)), kind
        return list(zip(fields, node, strict=True)), kind._make
    return _parts_of_jax(node)


def _dict_like(node: dict[Any, Any], keys: list[Any], new: list[Any]) -> Any:
    made = copy.copy(node)
    made.update(zip(keys, new, strict=True))
    return made


def _parts_of_jax(node: Any) -> Parts | None:
    """The parts of a pytree node that is registered with JAX, if JAX is loaded."""
    jax = sys.modules.get("jax")
    if jax is None or jax.tree_util.all_leaves([node]):
        return None
    children, shape = jax.tree_util.tree_flatten(node, is_leaf=lambda one: one is not node)
    return list(enumerate(children)), shape.unflatten
