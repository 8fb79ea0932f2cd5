"""SyncBatchNorm: batch normalisation over the batches of all ranks."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from pycoll.torch.horovod import horovod_world
from pycoll.torch.horovod.reducing_calls import allreduce
from pycoll.torch.horovod.scaled_ops import Sum


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with mean and variance over the batches of all ranks.

    Arguments: those of ``torch.nn.BatchNorm1d``; inputs have shape (N, C, ...) with any number of
    axes from 2. N may differ between ranks, and may be 0 on some.

    Result: a tensor of the shape and dtype of the input. In evaluation mode with running
    statistics, and in a world of one rank, the layer behaves as the layer of torch.

    Errors: ValueError for an input of fewer than 2 axes, and where all ranks together have fewer
    than 2 values per channel. Other errors are those of ``allreduce``.

    Cost: two all-reduces of about C values in the forward pass, two in the backward pass.

    Source: Ioffe and Szegedy, "Batch normalization", 2015 (arXiv 1502.03167), with sums over ranks.

    >>> layer = hvd.SyncBatchNorm(num_features=3)
    >>> layer(torch.randn(4, 3, 5)).shape
    torch.Size([4, 3, 5])
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"input has {input.dim()} dimensions: expected at least 2")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``input`` of shape (N, C, ...); update running statistics in training."""
        self._check_input_dim(input)
        together = self.training or not self.track_running_stats
        if not together or horovod_world.size() == 1:
            result: torch.Tensor = super().forward(input)
            return result
        axes = [0, *range(2, input.dim())]
        # Sums of 16-bit values use float32.
        wide = input.float() if input.dtype.itemsize < 4 else input
        rows = wide.new_full((1,), input.numel() // max(1, input.shape[1]))
        sums = allreduce(torch.cat([wide.sum(axes), rows]), op=Sum)
        count = sums[-1].detach()
        if count < 2:
            raise ValueError("expected more than 1 value per channel on all ranks together")
        mean = sums[:-1] / count
        centred = wide - _per_channel(mean, wide)
        variance = allreduce((centred * centred).sum(axes), op=Sum) / count
        self._track(mean.detach(), variance.detach(), float(count))
        result = centred * _per_channel(torch.rsqrt(variance + self.eps), wide)
        if self.affine:
            result = result * _per_channel(self.weight, wide) + _per_channel(self.bias, wide)
        return result.to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        if not (self.training and self.track_running_stats):
            return
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape([1, -1, *[1] * (like.dim() - 2)])
