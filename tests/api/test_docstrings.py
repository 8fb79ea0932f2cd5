"""The examples in the API's docstrings do what they say.

Those that begin with ``comm.`` run on every rank of a world; "on N ranks" and "rank R" in the
comment behind the call say how many there are, and whose result is shown.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from docstring_parts import examples_of, ranks_of, run_on_ranks

import pycoll

NAMES = [name for name in pycoll.__all__ if getattr(pycoll, name).__doc__]
METHODS = [
    name
    for name in dir(pycoll.Communicator)
    if not name.startswith("_") and hasattr(pycoll.Communicator, name)
]


def is_method(name: str) -> bool:
    """Whether a function has its docstring from a method."""
    method = getattr(pycoll.Communicator, name, None)
    return method is not None and method.__doc__ == getattr(pycoll, name).__doc__


def run_method(name: str) -> None:
    method = getattr(pycoll.Communicator, name)
    comments = " ".join(example.source for example in examples_of(method))
    shown = int((re.search(r"rank (\d+)", comments) or [0, "0"])[1])
    scope = {"np": np, "pycoll": pycoll, "loss": np.float64(2.0), "hits": np.int64(3)}
    run_on_ranks(method, scope, ranks_of(method, 3), shown)


@pytest.mark.parametrize(
    "name", [n for n in METHODS if examples_of(getattr(pycoll.Communicator, n))]
)
def test_examples_of_methods(name: str) -> None:
    run_method(name)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if not is_method(n) and examples_of(getattr(pycoll, n))]
)
def test_examples_of_functions(name: str) -> None:
    scope: dict[str, Any] = {"pycoll": pycoll, "numpy": np}
    try:
        for example in examples_of(getattr(pycoll, name)):
            if example.want:
                assert repr(eval(example.source, scope)) == example.want.rstrip("\n")
            else:
                exec(example.source, scope)
    finally:
        pycoll.finalize()
        for comm in (value for value in scope.values() if isinstance(value, pycoll.Communicator)):
            comm.close()


def test_there_are_examples() -> None:
    """So that a parser that finds none does not pass."""
    assert len([n for n in METHODS if examples_of(getattr(pycoll.Communicator, n))]) >= 7


def test_the_example_of_the_class_shows_every_property() -> None:
    shown = "".join(example.source for example in examples_of(pycoll.Communicator))
    for name, one in vars(pycoll.Communicator).items():
        assert not isinstance(one, property) or f"comm.{name}" in shown, name


def test_every_method_says_what_it_does() -> None:
    for name in METHODS:
        assert (getattr(pycoll.Communicator, name).__doc__ or "").strip(), name
