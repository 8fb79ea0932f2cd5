"""The docstrings of pycoll.jax: their parts, and their examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from docstring_parts import faults_of, public_names, run_examples

import pycoll

jax = pytest.importorskip("jax", reason="no jax: pip install -r tests/requirements.txt")
import pycoll.jax  # noqa: E402

NAMES = public_names(pycoll.jax)


@pytest.fixture
def scope() -> Iterator[dict[str, Any]]:
    pycoll.init(rank=0, size=1)
    yield {"pycoll": pycoll, "jax": jax, "jnp": jax.numpy}
    pycoll.finalize()
    jax.clear_caches()


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_docstrings_are_in_order(name: str) -> None:
    assert faults_of(NAMES[name]) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_do_what_they_say(name: str, scope: dict[str, Any]) -> None:
    run_examples(NAMES[name], scope)
