"""The programs of docs/guides/ray-dask-spark.md run as they stand there."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest
from engine_programs import ROOT, Program

PAGE = (ROOT / "docs" / "guides" / "ray-dask-spark.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
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
        pytest.skip("Spark needs java")
    (tmp_path / "program.py").write_text(text)
    program(sys.executable, "program.py")
