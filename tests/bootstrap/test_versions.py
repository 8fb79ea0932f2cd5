"""Ranks with different versions of pycoll or Python hear of it, with both, however they meet."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness import free_port
from joining import SECRET

from pycoll import MismatchError
from pycoll.bootstrap.discovery.identity import Identity
from pycoll.bootstrap.rendezvous.checked_rounds import identities_of
from pycoll.config import Config


def told(*versions: tuple[str, str]) -> MismatchError:
    """What ranks with these versions of pycoll and Python raise."""
    mine = Identity.mine(Config())
    with pytest.raises(MismatchError) as caught:
        identities_of([mine._replace(pycoll=a, python=b).to_bytes() for a, b in versions])
    return caught.value


def test_the_ranks_that_differ_from_most_are_named() -> None:
    error = told(("2.0", "3.11"), ("1.0", "3.11"), ("1.0", "3.11"))
    assert (error.rank, error.ranks, error.operation) == (0, (0,), "init")
    assert "rank 0 (" in str(error) and " has pycoll 2.0, and rank 1 (" in str(error)
    assert " has pycoll 1.0: install the same one on all hosts" in str(error)
    error = told(("1.0", "3.11"), ("1.0", "3.12"), ("1.0", "3.11"), ("1.0", "3.13"))
    assert error.ranks == (1, 3) and "rank 1 (" in str(error)
    assert " has Python 3.12, and rank 0 (" in str(error) and " has Python 3.11:" in str(error)


def test_a_version_without_the_check_is_named_as_such() -> None:
    mine = Identity.mine(Config())
    blob = mine.to_bytes().replace(b'"pycoll"', b'"other"')
    with pytest.raises(MismatchError, match=r"rank 1 .* of an earlier version, and rank"):
        identities_of([mine.to_bytes(), blob])


def test_processes_of_two_versions_do_not_join() -> None:
    address = f"127.0.0.1:{free_port()}"
    code = "import pycoll; {}pycoll.init()"
    ranks = []
    for rank, first in enumerate(("", "pycoll.__version__ = '9.8.7'; ", "")):
        words = {"RANK": str(rank), "SIZE": "3", "ADDRESS": address, "SECRET": SECRET}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", code.format(first)],
                env={**os.environ, **{f"PYCOLL_{name}": word for name, word in words.items()}},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 1
        assert "MismatchError: " in errors and "rank 1 (" in errors, errors
        assert " has pycoll 9.8.7, and rank 0 (" in errors, errors
