"""Doors to internals of torch: a self-test that fails gives one warning, and equal results.

Each test breaks what one feature needs, as another version of torch might, in ranks that are
processes of their own. These then do what the feature is for.
"""

from __future__ import annotations

import re
import secrets
import subprocess
from pathlib import Path

import doors_checks
import pytest
from harness import free_port, python
from torch_processes import run_ranks

from pycoll import _core
from pycoll.doors import TORCH_TESTED as TESTED

ROOT = Path(__file__).resolve().parent.parent.parent
SIZE = 2
RULE_BREAK = """
import re, sys, types, warnings
rules = types.ModuleType("torch._dynamo.trace_rules")
rules.add = lambda name: None
rules.SKIP_DIRS_RE = re.compile("match nothing^")
sys.modules["torch._dynamo.trace_rules"] = rules
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as told:
    import pycoll
    pycoll.local_world(1)[0].close()
for one in told:
    print("told", one.category.__name__, one.message)
"""
#: torch, as far as the watch of imports knows it, with the rules that were added.
RULE_WATCHED = """
import sys, tempfile, pathlib
folder = pathlib.Path(tempfile.mkdtemp(), "torch", "_dynamo")
folder.mkdir(parents=True)
(folder.parent / "__init__.py").write_text("__version__ = '2.13.0'")
(folder / "__init__.py").write_text("")
(folder / "trace_rules.py").write_text(
    "import re\\nadded = []\\nadd = added.append\\nSKIP_DIRS_RE = re.compile('.*')"
)
sys.path.insert(0, str(folder.parent.parent))
import pycoll.comm.world
from torch._dynamo import trace_rules
print(trace_rules.added)
print(any(type(one).__module__ == "pycoll.comm.dynamo" for one in sys.meta_path))
"""
#: A library that refuses to set affinities, in front of the C library.
NO_AFFINITY = """
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
int sched_setaffinity(pid_t pid, size_t size, const cpu_set_t *set) {
  errno = EPERM;
  return -1;
}
"""
OVERSUBSCRIBED = """
import os, warnings
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as told:
    import numpy
    import pycoll
    for turn in range(2):
        world = pycoll.local_world(len(os.sched_getaffinity(0)) + 1)
        for comm in world:
            comm.close()
for one in told:
    print("told", one.category.__name__, one.message)
"""


def said_by_ranks(program: str, how: str, folder: Path) -> list[str]:
    address, secret = f"127.0.0.1:{free_port()}", secrets.token_hex(16)
    codes = run_ranks(SIZE, doors_checks.run_rank, program, how, address, secret, str(folder))
    assert codes == [0] * SIZE, codes
    return [(folder / str(rank)).read_text() for rank in range(SIZE)]


def warning_of(said: str, why: str = "self-test") -> str:
    """The only warning of a rank about a self-test, or about an old version."""
    mine = [line for line in said.splitlines() if why in line and line.startswith("told")]
    assert len(mine) == 1 and mine[0].startswith("told RuntimeWarning: "), said
    assert all(version in mine[0] for version in TESTED), mine
    return mine[0].removeprefix("told RuntimeWarning: ")


@pytest.mark.parametrize(
    "how", ["a context without effect", "no call of functions", "no list of compiled frames"]
)
def test_deferred_steps_go_off_with_one_warning(how: str, tmp_path: Path) -> None:
    for said in said_by_ranks("train", how, tmp_path):
        assert said.count("equal True") == 2, said
        assert "deferred False" in said, said
        assert "parameters step at once, since the self-test fails with torch" in said, said
        text = warning_of(said)
        assert text.startswith("deferred steps are off, since their self-test fails"), said


@pytest.mark.parametrize(
    ("how", "deferred", "when"),
    [
        ("nothing", True, "parameters step when the next forward pass needs them"),
        ("setting", False, "parameters step at once, since PYCOLL_DEFERRED_STEPS is 0"),
    ],
)
def test_deferred_steps_are_a_choice(how: str, deferred: bool, when: str, tmp_path: Path) -> None:
    for said in said_by_ranks("train", how, tmp_path):
        assert said.count("equal True") == 2 and f"deferred {deferred}" in said, said
        assert when in said and "told" not in said, said


@pytest.mark.parametrize(
    "how",
    [
        "no swap",
        "a swap without effect",
        "no counter",
        "a counter that misses users",
        "no backward pass",
    ],
)
def test_swapped_storages_go_off_with_one_warning(how: str, tmp_path: Path) -> None:
    for said in said_by_ranks("reduce", how, tmp_path):
        assert said.count("equal True") == 5 and "shared False" in said, said
        text = warning_of(said)
        assert text.startswith("swapped torch storages are off, since their self-test fails"), said


def test_swapped_storages_work_here(tmp_path: Path) -> None:
    for said in said_by_ranks("reduce", "nothing", tmp_path):
        assert said.count("equal True") == 5 and "self-test" not in said, said
        assert f"shared {_core.reachable_memory_is_quick()}" in said, said


def test_other_backends_go_off_with_one_warning(tmp_path: Path) -> None:
    for said in said_by_ranks("reduce", "no further backends", tmp_path):
        assert said.count("equal True") == 5 and "own backends None None" in said, said
        text = warning_of(said)
        assert text.startswith("other backends than pycoll in a process group are off"), said


@pytest.mark.parametrize(
    ("program", "feature", "line"),
    [
        ("train", "deferred steps", "deferred False"),
        ("reduce", "swapped torch storages", "shared False"),
        ("backends", "other backends than pycoll in a process group", "for meta None"),
    ],
)
def test_an_older_torch_closes_every_door(
    program: str, feature: str, line: str, tmp_path: Path
) -> None:
    for said in said_by_ranks(program, "an old torch", tmp_path):
        assert line in said and "equal False" not in said, said
        text = warning_of(said, feature)
        assert text.startswith(f"{feature} are off, since torch 2.12.9+cpu is too old;"), said


@pytest.mark.parametrize(
    ("how", "backend"), [("nothing", "ProcessGroup"), ("no other backends", "None")]
)
def test_other_backends_are_a_choice(how: str, backend: str, tmp_path: Path) -> None:
    for said in said_by_ranks("backends", how, tmp_path):
        assert said.splitlines()[0] == f"for meta {backend}" and "told" not in said, said


def test_a_rule_without_effect_is_told() -> None:
    said = python(RULE_BREAK)
    assert said.count("told") == 1, said
    assert "torch.compile traces pycoll" in said and "the rule has no effect" in said, said
    assert "told" not in python(RULE_BREAK, PYCOLL_COMPILER_RULE="0")


def test_the_rule_is_a_choice() -> None:
    """With a module in the place of torch's, which the watch of imports would find."""
    said = {setting: python(RULE_WATCHED, PYCOLL_COMPILER_RULE=setting).split() for setting in "01"}
    assert said == {"0": ["[]", "False"], "1": ["['pycoll']", "False"]}


def test_the_rule_is_off_for_an_older_torch() -> None:
    said = python(RULE_WATCHED.replace("2.13.0", "2.12.9"))
    assert said.split() == ["[]", "False"], said


def test_cpu_balancing_goes_off_with_one_warning(tmp_path: Path) -> None:
    source, library = tmp_path / "none.c", tmp_path / "none.so"
    source.write_text(NO_AFFINITY)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    said = python(OVERSUBSCRIBED, LD_PRELOAD=str(library))
    assert re.findall("told (.*)", said) == [
        "RuntimeWarning CPU balancing is off, since its self-test fails: this process may not set "
        "the affinity of its threads. Only the scheduler moves the ranks that share cores"
    ], said
    assert "self-test" not in python(OVERSUBSCRIBED)


def test_documents_name_the_tested_versions() -> None:
    for name in ("README.md", "docs/index.md", "docs/process-wide.md", "docs/install.md"):
        text = (ROOT / name).read_text()
        assert all(version in text for version in TESTED), name
