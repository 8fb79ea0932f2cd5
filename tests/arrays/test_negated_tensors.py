"""Negated views of torch are recognised in every call, and never summed as their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import world_in_threads

import pycoll
from pycoll import InvalidArgumentError

Comm = pycoll.Communicator


def _imaginary() -> Any:
    """Negated, with gaps: 1, 3, 5 as the user sees it."""
    return torch.tensor([0 - 1j, 2 - 3j, 4 - 5j], dtype=torch.complex64).conj().imag


#: Some lie in memory as ordinary tensors do.
NEGATED: dict[str, Callable[[], Any]] = {
    "with gaps": _imaginary,
    "of one element": lambda: _imaginary()[:1],
    "detached": lambda: _imaginary().detach(),
    "contiguous": lambda: _imaginary().as_strided((5,), (1,)),
    "of real numbers": lambda: torch._neg_view(torch.arange(6.0).reshape(2, 3)),
    "of whole numbers": lambda: torch._neg_view(torch.arange(4)),
    "of complex numbers": lambda: torch._neg_view(torch.tensor([1 + 2j, 3 - 4j])),
    "conjugated": lambda: torch._neg_view(torch.tensor([1 + 2j, 3 - 4j])).conj(),
    "a view of one": lambda: torch._neg_view(torch.arange(6.0))[2:].view(2, 2),
}


@pytest.mark.parametrize("name", NEGATED)
def test_values_are_those_that_the_user_sees(name: str) -> None:
    def rank(comm: Comm) -> None:
        for _ in range(2):  # the second time native code knows such calls
            plain = torch.ones(6, dtype=NEGATED[name]().dtype)
            assert comm.all_reduce(plain, out=plain)[0] == 2
            x = NEGATED[name]()
            assert x.is_neg()
            expected = x.resolve_conj().resolve_neg() * 2
            assert torch.equal(comm.all_reduce(x), expected)
            assert torch.equal(comm.all_reduce([x, plain])[0], expected)
            with comm.group():
                work = comm.all_reduce(x)
            assert torch.equal(work.wait(), expected)

    world_in_threads(2).run(rank)


@pytest.mark.parametrize("name", NEGATED)
def test_none_is_written_to(name: str) -> None:
    def rank(comm: Comm) -> None:
        for _ in range(2):
            x = NEGATED[name]()
            before = x.clone()
            with pytest.raises(InvalidArgumentError, match="negated view"):
                comm.all_reduce(x, out=x)
            with pytest.raises(InvalidArgumentError, match="negated view"):
                comm.all_reduce.bind(x, out=x)()
            with pytest.raises(InvalidArgumentError, match="negated view"):
                comm.all_reduce([x], out=[x])
            with pytest.raises(InvalidArgumentError, match="negated view"), comm.group():
                comm.all_reduce(x, out=x)
            assert torch.equal(x, before)

    world_in_threads(2).run(rank)
