"""The fixture of tests with engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_programs import Program, Programs


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Runs a command in an empty folder and returns its output; it must end well."""
    return Programs(tmp_path)
