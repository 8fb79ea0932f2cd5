"""For tests with engines: programs run as a user runs them, in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Program = Callable[..., str]


def needs(*modules: str) -> None:
    """Skip the module's tests unless these packages are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"{', '.join(missing)} is not installed: make test-launchers installs it"
        pytest.skip(reason, allow_module_level=True)


def environment(**more: str) -> dict[str, str]:
    """The environment of a program: engines' processes are to find tests and this Python."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYCOLL_")}
    kept |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "launchers"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "PYSPARK_PYTHON": sys.executable,
        "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }
    found = importlib.util.find_spec("mpi4py")
    if found is not None and found.origin is not None:
        # Lightning asks mpi4py for a launcher, and its MPI lies next to the tests' packages.
        library = str(Path(found.origin).parents[3])
        kept["LD_LIBRARY_PATH"] = os.pathsep.join([library, kept.get("LD_LIBRARY_PATH", "")])
    return kept


def lines_of_page(engine: str) -> list[str]:
    """The lines that examples/train_on_engines.py prints by the engine's page, one host first."""
    page = (ROOT / "docs" / "guides" / "starting" / f"{engine}.md").read_text()
    return re.findall(rf"^{engine}: .*", page, re.M)


class Programs:
    """Runs commands in a folder. Each must end well; a call returns the command's output."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, *words: str, limit_s: float = 400, **more: str) -> str:
        done = subprocess.run(
            words,
            cwd=self._folder,
            env=environment(**more),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
        return done.stdout
