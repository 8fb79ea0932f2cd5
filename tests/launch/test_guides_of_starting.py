"""The commands of the guides about ways of starting print what the guides show, here and on two
hosts made of network namespaces."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from guide_blocks import ROOT, Scene, differences, fenced, play, typed
from guide_scenes import ELSEWHERE, SCENES, WITHOUT_OUTPUT

sys.path.insert(0, str(ROOT / "bench"))
import hosts


@pytest.fixture(scope="module")
def world() -> Iterator[hosts.Hosts]:
    if why := hosts.obstacle():
        pytest.skip(f"needs root and network namespaces: {why}")
    with hosts.Hosts(2) as made:
        yield made


@pytest.mark.parametrize("scene", [one for one in SCENES if one.place == "here"], ids=str)
def test_guides_show_what_is_printed(scene: Scene, tmp_path: Path) -> None:
    play(scene, tmp_path)


@pytest.mark.parametrize("scene", [one for one in SCENES if one.place == "hosts"], ids=str)
def test_guides_show_what_two_hosts_print(scene: Scene, world: hosts.Hosts, tmp_path: Path) -> None:
    play(scene, tmp_path, world.on)


#: The guides about ways of starting.
GUIDES_OF_STARTING = (
    *("launching", "agents", "ssh", "mpirun-srun", "kubernetes", "spark", "ray", "dask"),
    *("jax-distributed", "torchrun", "trainers", "engines", "staying-alive"),
)


@pytest.mark.parametrize("page", GUIDES_OF_STARTING)
def test_every_block_is_compared_with_a_run(page: str) -> None:
    """The one exception is the block of servers alone, which print nothing."""
    blocks = [typed(block) for block in fenced(page, "console")]
    run = [number for scene in SCENES if scene.page == page for number in scene.blocks]
    run += [number for name, number in ELSEWHERE if name == page]
    assert sorted(run) == list(range(len(blocks)))
    silent = [script for script, shown in blocks if not shown]
    assert all(script.endswith("-m pycoll.ps") for script in silent), silent
    for block in fenced(page, "sh"):
        assert block.startswith(WITHOUT_OUTPUT.get(page, ())), block


def test_differences_are_found() -> None:
    assert typed("$ a \\\n  b\nc\n  d\n$ e\nf\n") == ("a \\\n  b\ne", ["c d", "f"])
    assert differences(["a (pid 1)", "b"], ["b", "", "a (pid 2)"]) == []
    assert differences(["a", "a"], ["a", "b"]) == ["not printed: a", "not shown: b"]
    assert differences(["a", "..."], ["x", "a"]) == []
    assert differences(["a", "..."], ["x"]) == ["not printed: a"]
