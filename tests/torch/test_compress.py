"""Codecs in training loops: Horovod's optimizer, hooks of DDP, average_gradients, DiLoCo."""

from __future__ import annotations

import functools

import compress_checks
import pytest
from torch_ranks import checks_of, outcomes_of


@functools.cache
def outcomes() -> dict[str, str]:
    return outcomes_of(2, compress_checks, checks_of(compress_checks))


@pytest.mark.parametrize("check", checks_of(compress_checks))
def test_check(check: str) -> None:
    failures = outcomes()[check]
    assert not failures, failures
