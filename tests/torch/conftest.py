"""These tests need PyTorch (tests/requirements.txt); without it they fail, and say so here."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A folder of this name is on the path, so that the import alone proves nothing.
    import torch

    if items and not hasattr(torch, "Tensor"):
        raise pytest.UsageError("PyTorch is missing: pip install -r tests/requirements.txt")
