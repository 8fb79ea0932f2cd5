"""comm.register and tensors, whose memory may be replaced while somebody holds them."""

from __future__ import annotations

import pytest
import torch

import pycoll
from pycoll.errors import InvalidArgumentError


def test_tensors_are_refused_and_their_arrays_are_not() -> None:
    (comm,) = pycoll.local_world(1)
    x = torch.zeros(4)
    with comm:
        with pytest.raises(
            InvalidArgumentError, match=r"arrays\[0\] is a Tensor: expected an object"
        ):
            comm.register(x)
        comm.register(x.numpy()).close()
