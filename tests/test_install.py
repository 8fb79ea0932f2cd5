"""What ``pip install .`` puts down: complete, small, and right also next to the sources."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
#: The build of the editable install, so that nothing is compiled again.
PIP = (
    *("-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"),
    *(
        "--config-settings=build-dir=build/python",
        "--config-settings=cmake.define.PYCOLL_WERROR=ON",
    ),
)
Run = Callable[..., str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package."""
    folder = tmp_path_factory.mktemp("installed") / "site"
    done = subprocess.run(
        [sys.executable, *PIP, "--target", str(folder), "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def run(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs Python in an environment that has this installation and no other."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    # On the search path its .pth files, the editable install's among them, are inert.
    packages = Path(np.__file__).parents[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYCOLL_")}
    env["PYTHONPATH"] = os.pathsep.join([str(site), str(packages)])

    def run(*words: str, cwd: Path) -> str:
        done = subprocess.run(
            [str(folder / "bin" / "python"), *words],
            env=env,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_installed_package_is_complete(site: Path) -> None:
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "pycoll").rglob("*.py")}
    found = {str(p.relative_to(site)) for p in site.rglob("*") if p.is_file()}
    assert sources <= found
    assert {"pycoll/py.typed", "pycoll/_core.pyi", "bin/pycoll"} <= found
    assert [name for name in found if name.startswith("pycoll/_core.") and name.endswith(".so")]
    assert {Path(name).parts[0] for name in found} == {
        "bin",
        "pycoll",
        "pycoll_comm-0.1.0.dist-info",
    }
    assert [name for name in found if name.endswith((".cpp", ".h", ".a"))] == []


def test_it_needs_no_more_than_it_says(site: Path) -> None:
    text = next(site.glob("*.dist-info/METADATA")).read_text()
    told = Parser().parsestr(text)
    needs = [line for line in told.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert told["Name"] == "pycoll-comm"
    assert told["Requires-Python"] == ">=3.10"
    assert {line.split(">")[0] for line in needs} == {"numpy", "click", "rich"}
    brought = [
        line
        for line in told.get_all("Requires-Dist", [])
        if 'extra == "cuda"' in line.replace("'", '"')
    ]
    assert [line.split(">")[0] for line in brought] == ["cupy-cuda13x"]


def test_it_runs_from_the_folder_of_the_sources(site: Path, run: Run, tmp_path: Path) -> None:
    """As ``make demo`` does; ranks of the benchmark once took the sources next to them."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import pycoll\npycoll.init()\nprint(pycoll.all_reduce(1), pycoll.__file__)\n"
    )
    command = str(site / "bin" / "pycoll")
    # With prefixes the launcher keeps the ranks' lines whole.
    said = run(command, "run", "--prefix", "-n", "2", str(script), cwd=ROOT)
    where = f"{site}/pycoll/__init__.py"
    assert sorted(said.splitlines()) == [f"[{rank}] 2 {where}" for rank in (0, 1)]
    assert "0 OK" in run(command, "bench", "broadcast", "-n", "2", "-e", "8", cwd=ROOT)
    assert "transport shm" in run(command, "info", cwd=ROOT)


def test_it_works_without_what_is_optional(run: Run, tmp_path: Path) -> None:
    """None of these is there; the rest does not mind."""
    missing = ("ml_dtypes", "matplotlib", "torch", "jax", "cupy", "numba", "mpi4py", "sklearn")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); " + (
        "import numpy as np, pycoll; comm = pycoll.init(); x = np.arange(3.0); "
        "assert (comm.all_reduce(x) == x).all() and comm.all_gather(x).shape == (3,); "
        "from pycoll.tools.info import print_information; print_information()"
    )
    assert "PYCOLL_TIMEOUT_S" in run("-c", code, cwd=tmp_path)


@pytest.mark.parametrize(
    ("compiler", "word", "text"),
    [("clang++", "use", "it needs GCC"), ("g++", "reuse", "expected generate or use")],
)
def test_a_build_by_a_profile_says_what_it_needs(
    compiler: str, word: str, text: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *("cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DPYCOLL_BINDINGS=OFF"),
            *(f"-DCMAKE_CXX_COMPILER={compiler}", f"-DPYCOLL_PROFILE={word}"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert f"PYCOLL_PROFILE is {word}: " in done.stderr
    assert text in " ".join(done.stderr.split())


# The entry point that torch reads

ENTRY_COST = """
import importlib.metadata, sys, time
load = importlib.metadata.EntryPoint.load

def measured(point):
    before, begin = set(sys.modules), time.thread_time()
    function = load(point)
    def call():
        function()
        ms = 1e3 * (time.thread_time() - begin)
        if point.name == "pycoll":
            print(ms, *sorted(set(sys.modules) - before))
    return call

importlib.metadata.EntryPoint.load = measured
import torch
"""
STRANGER = """
import sys
import torch, torch.distributed as dist
assert "pycoll.torch" not in sys.modules
dist.init_process_group("pycoll")
x = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(x)
print(dist.get_backend(), x.item(), flush=True)
dist.destroy_process_group()
"""


def test_torch_finds_the_backend_without_an_import(site: Path, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    (tmp_path / "stranger.py").write_text(STRANGER)
    command = (str(site / "bin" / "pycoll"), "run", "-n", "2", "stranger.py")
    assert run(*command, cwd=tmp_path) == "pycoll 3.0\npycoll 3.0\n"


def test_the_entry_point_costs_import_torch_less_than_a_millisecond(
    run: Run, tmp_path: Path
) -> None:
    """Of processor time; one process in time is enough, since others use the machine too."""
    pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    seen = []
    for _ in range(30):
        milliseconds, *modules = run("-c", ENTRY_COST, cwd=tmp_path).split()
        assert modules == ["pycoll", "pycoll.torch_entry"]
        seen.append(float(milliseconds))
        if seen[-1] < 1.0:
            return
    raise AssertionError(f"milliseconds of every process: {seen}")


def test_without_autoload_the_documented_import_registers(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    code = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch.distributed as dist
assert "pycoll" not in dist.Backend.backend_list
import pycoll.torch
dist.init_process_group("pycoll", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())
"""
    assert run("-c", code, cwd=tmp_path) == "pycoll\n"
