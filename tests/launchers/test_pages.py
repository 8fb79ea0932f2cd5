"""The programs of the pages about Ray, Dask and Spark run as they stand there, and their commands
print what the pages show."""

from __future__ import annotations

import importlib.util
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_programs import ROOT, Program, environment
from guide_blocks import Scene, fenced, play
from guide_blocks import environment as commands_of
from guide_scenes import SCENES

sys.path.insert(0, str(ROOT / "bench"))
import hosts

BIN = Path(sys.executable).parent

GUIDES = ROOT / "docs" / "guides" / "starting"
PAGES = [(GUIDES / f"{name}.md").read_text() for name in ("ray", "dask", "spark")]
PROGRAMS = [one for page in PAGES for one in re.findall(r"```python\n(.*?)```", page, re.S)]
ENGINES = {
    "ray.train": "ray",
    "import ray": "ray",
    "pyspark": "pyspark",
    "distributed": "distributed",
}


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_of_the_page(number: int, program: Program, tmp_path: Path) -> None:
    text = PROGRAMS[number]
    engine = next(name for word, name in ENGINES.items() if word in text)
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed: make test-launchers installs it")
    if engine == "pyspark" and shutil.which("java") is None:
        pytest.skip("no java (apt: default-jre-headless)")
    (tmp_path / "program.py").write_text(text)
    program(sys.executable, "program.py")


def of(place: str) -> list[Scene]:
    return [one for one in SCENES if one.place == place]


def need(engine: str) -> None:
    """Skip the test unless the engine of a page is installed."""
    if importlib.util.find_spec({"dask": "distributed", "spark": "pyspark"}.get(engine, engine)):
        if engine == "spark" and shutil.which("java") is None:
            pytest.skip("no java (apt: default-jre-headless)")
        return
    pytest.skip(f"{engine} is not installed: make test-launchers installs it")


def settings(**more: str) -> dict[str, str]:
    """What programs of engines find in their environment, but for PATH."""
    own = environment(**more)
    return {name: own[name] for name in own if name != "PATH" and "proxy" not in name.lower()}


@pytest.mark.parametrize("scene", of("engine"), ids=str)
def test_commands_on_one_host(scene: Scene, tmp_path: Path) -> None:
    need(scene.page)
    play(scene, tmp_path, limit_s=400, **settings())


@pytest.fixture
def world() -> Iterator[hosts.Hosts]:
    """Two hosts; whatever still runs there ends with the test."""
    if reason := hosts.obstacle():
        pytest.skip(f"needs root and network namespaces: {reason}")
    with hosts.Hosts(2) as made:
        yield made


@pytest.mark.parametrize("page", ["dask", "spark"])
def test_commands_of_a_cluster(page: str, world: hosts.Hosts, tmp_path: Path) -> None:
    """The page's first block of commands starts what runs on host 0, the second on host 1."""
    need(page)
    (scene,) = of(page)
    own = settings(SPARK_WORKER_DIR=str(tmp_path / "work"))
    everything = commands_of(tmp_path, [BIN], **own)
    log = (tmp_path / "daemons.log").open("wb")
    for host, block in enumerate(fenced(page, "sh")):
        line = world.on(host, ["sh", "-c", block])
        subprocess.Popen(line, cwd=tmp_path, env=everything, stdout=log, stderr=log)
    try:
        play(scene, tmp_path, world.on, [BIN], 300, **own)
    except AssertionError as error:
        raise AssertionError((tmp_path / "daemons.log").read_text()[-4000:]) from error


def test_commands_of_a_cluster_of_ray(world: hosts.Hosts, tmp_path: Path) -> None:
    """The ranks of a node share memory, those of different nodes use sockets."""
    need("ray")
    folder = f"/tmp/ray-pycoll-{time.monotonic_ns() % 10**9}"
    # Ray asks whether it writes to a terminal, and else puts a time before each line.
    terminal = "--log-style pretty --log-color false"
    node = f"{terminal} --num-cpus 2 --object-store-memory 100000000 --disable-usage-stats"
    node += " --node-ip-address"
    own = settings(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        # Else a later program of this user would look for this cluster, which is gone by then.
        RAY_TMPDIR=folder,
        HEAD=f"{node} {world.addresses[0]} --include-dashboard false --temp-dir {folder}",
        NODE=f"{node} {world.addresses[1]}",
    )
    for scene in of("ray"):
        play(scene, tmp_path, world.on, limit_s=300, **own)
