"""The Python blocks of docs/gpu.md, with results and residuals checked; run by test_fake.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_ranks import ranks_of
from harness import ThreadWorld, fresh_world

import pycoll
from pycoll.compress import Block, Feedback, TopK
from pycoll.tools.bench.cuda import Stream, array

SIZE = 2
TOTAL = np.arange(1000, dtype=np.float32) * SIZE + 1
PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M)


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    made = fresh_world(SIZE)
    yield made
    made.close()


def scope_after(comm: pycoll.Communicator, block: str) -> dict[str, Any]:
    """The names of a block after its run, among them those that the page does not define."""
    scope: dict[str, Any] = {
        **{"comm": comm, "s": Stream(), "feedback": Feedback(), "Block": Block, "TopK": TopK},
        "x": array(np.arange(1000, dtype=np.float32) + comm.rank),
        "out": array(np.zeros(1000, np.float32)),
        "gathered": array(np.zeros(SIZE * 1000, np.float32)),
    }
    exec(block, scope)
    return scope


def check_arrays(scope: dict[str, Any]) -> None:
    np.testing.assert_array_equal(scope["x"].get(), TOTAL)
    np.testing.assert_array_equal(scope["y"].get(), TOTAL * SIZE)


def check_registered(scope: dict[str, Any]) -> None:
    np.testing.assert_array_equal(scope["out"].get(), TOTAL)
    assert scope["held"].nbytes == 0


def check_codec(scope: dict[str, Any]) -> None:
    residual = np.asarray(scope["feedback"].residual)
    assert residual.shape == (1000,) and residual.any()


CHECKS = (check_arrays, check_registered, check_codec, check_codec)


@pytest.mark.parametrize(("block", "check"), [*zip(BLOCKS, CHECKS, strict=True)])
def test_blocks_of_the_page_run(
    world: ThreadWorld, block: str, check: Callable[[dict[str, Any]], None]
) -> None:
    ranks_of(world, lambda comm: check(scope_after(comm, block)))
