"""Fixtures of the tests of joining."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator

import pytest
from joining import footprint

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery import identity


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    before = footprint()
    yield
    gc.collect()
    deadline = Deadline(5)
    while footprint() != before and not deadline.passed():
        time.sleep(0.02)
    assert footprint() == before, "threads or descriptors are left"


@pytest.fixture
def as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that take each other for processes, so that they really pass descriptors."""
    counter = itertools.count()
    monkeypatch.setattr(identity, "process_token", lambda: f"process {next(counter)}")
