"""The programs of the pages about Ray, Dask and Spark run as they stand there."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest
from engine_programs import ROOT, Program

PAGES = [(ROOT / "docs" / "guides" / f"{name}.md").read_text() for name in ("ray", "dask", "spark")]
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
        pytest.skip("Spark needs java")
    (tmp_path / "program.py").write_text(text)
    program(sys.executable, "program.py")
