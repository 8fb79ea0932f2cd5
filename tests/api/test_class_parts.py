"""The parts of the class Communicator: each one uses only itself and the classes below it."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest

from pycoll.comm.communicator import Communicator
from pycoll.comm.data_movement import Moving
from pycoll.comm.objects import Objects
from pycoll.comm.operations import Core
from pycoll.comm.point_to_point import Messages
from pycoll.comm.reductions import Reducing

PARTS = {Reducing: (Core,), Moving: (Core,), Messages: (Core,), Objects: (Messages,)}


def tree_of(part: type) -> ast.ClassDef:
    found = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
    assert isinstance(found, ast.ClassDef)
    return found


def names_on_self(tree: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The attributes of ``self`` that the code reads or writes."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, context)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@pytest.mark.parametrize("part", PARTS)
def test_a_part_uses_itself_and_what_it_derives_from(part: type) -> None:
    assert part.__bases__ == PARTS[part]
    tree = tree_of(part)
    known = set(dir(part)) | set(Core.__annotations__) | names_on_self(tree_of(Core), ast.Store)
    used = names_on_self(tree, ast.Load)
    assert used, "no method uses the communicator"
    assert used <= known, f"{part.__name__} uses {sorted(used - known)}"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_no_state(part: type) -> None:
    assert "__init__" not in vars(part)
    own = names_on_self(tree_of(part), ast.Store)
    assert own <= names_on_self(tree_of(Core), ast.Store) | set(dir(Core)), sorted(own)


def test_the_communicator_consists_of_the_parts() -> None:
    assert Communicator.__bases__ == (Reducing, Moving, Objects)
