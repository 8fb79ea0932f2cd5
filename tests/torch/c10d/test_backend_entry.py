"""The entry point of ``import torch`` registers the backend once, and never raises."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from pycoll import torch_entry

dist = pytest.importorskip(
    "torch.distributed", reason="no torch: pip install -r tests/requirements.txt"
)


class _Backend:
    """What torch has, for a torch that refuses."""

    backend_list: ClassVar[list[str]] = []

    @staticmethod
    def register_backend(*arguments: Any, **words: Any) -> None:
        raise TypeError("register_backend() has no argument extended_api")


def test_it_registers_once() -> None:
    torch_entry.register()
    first = dist.Backend._plugins["PYCOLL"]
    torch_entry.register()
    import pycoll.torch  # noqa: F401  # registers too

    assert dist.Backend._plugins["PYCOLL"] is first
    assert dist.Backend("pycoll") == "pycoll"
    assert dist.Backend.backend_capability["pycoll"] == ["cpu", "cuda"]


def test_a_default_group_stays_torch_s_own() -> None:
    torch_entry.register()
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl"


@pytest.mark.parametrize("strict", [False, True])
def test_a_torch_that_refuses_is_imported_all_the_same(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = SimpleNamespace(is_available=lambda: True, Backend=_Backend)
    monkeypatch.setattr(torch_entry.importlib, "import_module", lambda name: torn)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("error" if strict else "always")
        torch_entry.register()
    assert [str(one.message) for one in told] == (
        []
        if strict
        else [
            "the backend 'pycoll' of torch.distributed is missing: TypeError('register_backend() "
            "has no argument extended_api'); import pycoll.torch shows the error"
        ]
    )


def test_a_torch_without_distributed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setattr(torch_entry.importlib, "import_module", lambda name: bare)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_entry.register()
