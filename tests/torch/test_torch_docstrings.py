"""The docstrings of pycoll.torch: their parts, and their examples in a world of one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from docstring_parts import faults_of, public_names, run_examples

import pycoll

torch = pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
import torch.distributed as dist  # noqa: E402

import pycoll.torch as hvd  # noqa: E402
from pycoll.torch import fsdp, hooks, method_hooks  # noqa: E402

#: Packages and modules with an ``__all__``, and the public names of modules without one.
EXPORTED: dict[Any, list[str]] = {
    hvd: [],
    hvd.elastic: [],
    hooks: [],
    method_hooks: ["MethodState", "method_hook"],
    fsdp: ["ShardedCodecs", "compress"],
}
NAMES = {
    f"{module.__name__}.{name}": one
    for module, names in EXPORTED.items()
    for name, one in public_names(module, names).items()
    if one.__module__.startswith("pycoll.")
}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    pycoll.init(rank=0, size=1)
    dist.init_process_group("pycoll", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    hvd.shutdown()
    pycoll.finalize()


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_docstrings_are_in_order(name: str) -> None:
    assert faults_of(NAMES[name]) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_do_what_they_say(name: str) -> None:
    hvd.init()
    scope: dict[str, Any] = {"torch": torch, "hvd": hvd, "os": os, "pycoll": pycoll}
    modules = {"hooks": hooks, "method_hooks": method_hooks, "fsdp": fsdp}
    run_examples(NAMES[name], scope | modules)
