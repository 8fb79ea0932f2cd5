"""In the folder of the sources Python takes those, and did not say that native code is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tree(folder: Path) -> Path:
    """The Python sources alone, as a checkout has them."""
    shutil.copytree(ROOT / "pycoll", folder / "pycoll", ignore=shutil.ignore_patterns("*.so"))
    return folder


def test_a_tree_without_native_code_says_so(tmp_path: Path) -> None:
    """-S: without the site packages, where the installed one and its NumPy are."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import pycoll; pycoll.init"],
        cwd=tree(tmp_path),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), numpy_folder()])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"cannot be loaded from {tmp_path}/pycoll" in done.stderr
    assert "install it (pip install ." in done.stderr


def numpy_folder() -> str:
    import numpy

    return str(Path(numpy.__file__).parents[1])
