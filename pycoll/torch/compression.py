"""Compression of gradients for the transfer."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """A compression of tensors for the transfer, with Horovod's two methods."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and the context that decompress needs."""

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the received tensor in its dtype from before ``compress``."""


class _Plain:
    """No compression."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Cast:
    """Sends floating-point tensors in a shorter dtype and all other tensors as they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.is_floating_point() and tensor.dtype.itemsize > self.dtype.itemsize:
            return tensor.to(self.dtype), tensor.dtype
        return tensor, None

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The available compressors: ``none``, ``fp16`` and ``bf16``.

    ``fp16`` and ``bf16`` send wider floating-point tensors as float16 or bfloat16. The reduction
    then rounds to that dtype. Programs use the attributes and make no object.

    Errors: none. Cost: one pass over the tensor before the transfer, and one after it.

    >>> small, context = hvd.Compression.fp16.compress(torch.ones(2))
    >>> small.dtype, context
    (torch.float16, torch.float32)
    """

    none: Compressor = _Plain()
    fp16: Compressor = _Cast(torch.float16)
    bf16: Compressor = _Cast(torch.bfloat16)
