"""The example trains about as well as synchronous training, on the mean of five seeds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "local_updates.py"


def test_local_updates_learn_digits_like_synchronous_training() -> None:
    pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    pytest.importorskip("sklearn", reason="no scikit-learn: pip install -r tests/requirements.txt")
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", str(EXAMPLE)]
    done = subprocess.run(
        [*command, "--seeds", "5", "--steps", "120"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    found = {name: float(share) for name, share in re.findall(r"^(.+?) +([\d.]+)% of", said, re.M)}
    assert len(found) == 5, said
    synchronous = found.pop("synchronous")
    assert synchronous > 90, said
    for name, share in found.items():
        assert share >= synchronous - 1, (name, said)
