"""The examples in the API's docstrings do what they say.

Those that begin with ``comm.`` run on every rank of a world; "on N ranks" and "rank R" in the
comment behind the call say how many there are, and whose result is shown.
"""

from __future__ import annotations

import doctest
import re
from typing import Any

import numpy as np
import pytest
from harness import world_in_threads

import pycoll

NAMES = [name for name in pycoll.__all__ if getattr(pycoll, name).__doc__]
METHODS = [
    name
    for name in dir(pycoll.Communicator)
    if not name.startswith("_") and hasattr(pycoll.Communicator, name)
]
PARSER = doctest.DocTestParser()


def examples_of(thing: Any) -> list[doctest.Example]:
    return PARSER.get_examples(thing.__doc__ or "")


def run_on_ranks(examples: list[doctest.Example]) -> None:
    comments = " ".join(example.source for example in examples)
    size = int((re.search(r"on (\d+) ranks", comments) or [0, "3"])[1])
    shown = int((re.search(r"rank (\d+)", comments) or [0, "0"])[1])

    def rank(comm: pycoll.Communicator) -> list[str]:
        scope: dict[str, Any] = {"comm": comm, "np": np, "pycoll": pycoll}
        scope.update(loss=np.float64(2.0), hits=np.int64(3))
        output = []
        for example in examples:
            if example.want:
                output.append(repr(eval(example.source, scope)))
            else:
                exec(example.source, scope)
                output.append("")
        return output

    found = world_in_threads(size).run(rank)[shown]
    assert found == [example.want.rstrip("\n") for example in examples]


@pytest.mark.parametrize(
    "name", [n for n in METHODS if examples_of(getattr(pycoll.Communicator, n))]
)
def test_examples_of_methods(name: str) -> None:
    run_on_ranks(examples_of(getattr(pycoll.Communicator, name)))


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in METHODS and examples_of(getattr(pycoll, n))]
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


def test_every_method_says_what_it_does() -> None:
    for name in METHODS:
        assert (getattr(pycoll.Communicator, name).__doc__ or "").strip(), name
