"""Making gradients smaller while they travel."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """A way to travel. ``compress`` gives the smaller tensor and what decompress needs to know."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to be sent, and a note for decompress."""

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The received tensor in the type that it had before."""


class _Plain:
    """As it is."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Cast:
    """Floating-point tensors travel in a shorter type; all others as they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.is_floating_point() and tensor.dtype.itemsize > self.dtype.itemsize:
            return tensor.to(self.dtype), tensor.dtype
        return tensor, None

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The ways there are: ``none``, ``fp16`` and ``bf16``."""

    none: Compressor = _Plain()
    fp16: Compressor = _Cast(torch.float16)
    bf16: Compressor = _Cast(torch.bfloat16)
