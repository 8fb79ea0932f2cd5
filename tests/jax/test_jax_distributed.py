"""``pycoll run`` tells JAX the places of ranks, and ``jax.distributed.initialize()`` reads them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import python

pytest.importorskip("jax", reason="no jax: pip install -r tests/requirements.txt")

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SHOW = f"import os; print(*(os.environ.get(one, '-') for one in {NAMES!r}), flush=True)"
AFTER = """
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax._src import distributed
found = multihost_utils.process_allgather(jnp.array([jax.process_index() + 1.0]))
where = distributed.global_state.coordinator_address
import sys
sys.stdout.write(f"{jax.process_index()} of {jax.process_count()}: {found.ravel().tolist()} "
                 f"{len(jax.local_devices())} {where == os.environ.get('WANTED')}\\n")
sys.stdout.flush()
jax.distributed.shutdown()
"""


def run(tmp_path: Path, code: str, *words: str, **environ: str) -> str:
    (tmp_path / "program.py").write_text(code)
    kept = {
        name: text
        for name, text in os.environ.items()
        if name not in NAMES and "proxy" not in name.lower()
    }
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "run", "-n", "2", *words, "program.py"],
        cwd=tmp_path,
        env={**kept, "JAX_PLATFORMS": "cpu", **environ},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Gloo, which JAX uses between processes on CPUs, prints that it is connected.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    return "\n".join(lines)


def told(text: str) -> list[list[str]]:
    return sorted(line.split() for line in text.splitlines())


def test_every_rank_is_told_its_place(tmp_path: Path) -> None:
    first, second = told(run(tmp_path, SHOW))
    host, _, port = first[0].rpartition(":")
    assert host == "127.0.0.1" and int(port) > 0
    assert [first, second] == sorted([[first[0], "2", "0"], [first[0], "2", "1"]])
    torch = "import os; print(os.environ['MASTER_PORT'], os.environ['JAX_COORDINATOR_ADDRESS'])"
    for master, address in told(run(tmp_path, torch)):
        assert not address.endswith(f":{master}"), "torch and JAX have ports of their own"


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    assert told(run(tmp_path, SHOW, JAX_COORDINATOR_ADDRESS="here:5")) == [["here:5", "-", "-"]] * 2


def test_a_launcher_inside_a_launcher_tells_its_own(tmp_path: Path) -> None:
    inner = f"""
import subprocess, sys
subprocess.run([sys.executable, "-m", "pycoll", "run", "-n", "1", sys.executable, "-c", {SHOW!r}],
               check=True)
"""
    assert [line[1:] for line in told(run(tmp_path, inner))] == [["1", "0"]] * 2


def test_jax_finds_its_ranks_without_arguments(tmp_path: Path) -> None:
    code = (
        "import os, jax, pycoll.jax\nos.environ['WANTED'] = os.environ['JAX_COORDINATOR_ADDRESS']\n"
    )
    said = run(tmp_path, f"{code}jax.distributed.initialize()\n{AFTER}")
    assert sorted(said.splitlines()) == [f"{rank} of 2: [1.0, 2.0] 1 True" for rank in range(2)]


@pytest.mark.parametrize("imported", ["", ", pycoll.jax"])
def test_arguments_win(imported: str, tmp_path: Path) -> None:
    """With and without the class in JAX's list; a meeting place of the user's own."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    # Ranks change their numbers.
    code = f"""import os, jax{imported}
place = 1 - int(os.environ["JAX_PROCESS_ID"])
jax.distributed.initialize({address!r}, num_processes=2, process_id=place)
{AFTER}"""
    said = run(tmp_path, code, WANTED=address)
    assert sorted(said.splitlines()) == [f"{rank} of 2: [1.0, 2.0] 1 True" for rank in range(2)]


def test_the_program_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "starting" / "jax-distributed.md").read_text()
    program, shown = page.split("```python\n")[1].split("```")[0], page.split("```console\n")[1]
    lines = [line for line in shown.split("```")[0].splitlines() if line.startswith("process")]
    assert len(lines) == 2 and sorted(run(tmp_path, program).splitlines()) == sorted(lines)


def test_without_the_launcher_nothing_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    import pycoll.jax  # noqa: F401

    clusters = pytest.importorskip(
        "jax._src.clusters", reason="no jax: pip install -r tests/requirements.txt"
    )
    known = clusters.ClusterEnv._cluster_types
    (ours,) = [one for one in known if getattr(one, "name", "") == "pycoll"]
    assert clusters.ClusterEnv._cluster_types[0] is ours
    assert not ours.is_env_present()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    assert not ours.is_env_present(), "another launcher has set them"
    monkeypatch.setenv("PYCOLL_STORE", "launcher")
    assert ours.is_env_present()
    assert (ours.get_process_count(), ours.get_process_id()) == (2, 1)


FIRST_OF_LIST = """
import warnings
import jax._src.clusters as clusters
{first}
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from pycoll.jax import cluster
    cluster.register()
known = getattr(clusters.ClusterEnv, "_cluster_types", [])
print("first", *(one.name for one in known[:1] if one.name == "pycoll"))
for one in told:
    print("told", one.category.__name__, one.message)
"""


@pytest.mark.parametrize(
    ("first", "setting", "said"),
    [
        ("", "1", "first pycoll"),
        ("", "0", "first"),
        ("del clusters.ClusterEnv.get_process_id", "1", "has no get_process_id"),
        ("del clusters.ClusterEnv._cluster_types", "1", "AttributeError"),
        ("import jax; jax.__version__ = '0.4.1'", "1", "jax 0.4.1 is too old; tested versions"),
    ],
)
def test_the_list_of_jax_has_a_door(first: str, setting: str, said: str) -> None:
    code = FIRST_OF_LIST.format(first=first)
    lines = python(code, PYCOLL_JAX_CLUSTER=setting, JAX_PLATFORMS="cpu").splitlines()
    if not first:
        assert lines == [said]
        return
    found, warning = lines
    assert found == "first" and warning.startswith("told RuntimeWarning answers of pycoll run to")
    assert said in warning and "Pass num_processes= and process_id=" in warning
