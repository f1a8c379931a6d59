"""Batch normalisation by the statistics of all data ranks, also on CPU, where torch's `SyncBatchNorm` does not run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_reduce
from typing_extensions import override


class SyncBatchNormOnCPU(nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` written with differentiable all-reduces (sums, then squares around the mean)."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Normalise an input of shape (N, C, ...) over all dimensions but C."""
        if input.device.type != "cpu":
            return super().forward(input)
        if not self.training and self.running_mean is not None:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        dims = [0, *range(2, input.ndim)]
        shape = [1, -1, *(1 for _ in input.shape[2:])]
        # Half precision would lose digits in the sums.
        x = input if input.dtype in (torch.float32, torch.float64) else input.float()
        count = x.new_tensor([x.numel() // x.shape[1]])
        sums = all_reduce(torch.cat([x.sum(dims), count]), group=self.process_group)
        mean, total = sums[:-1] / sums[-1], sums[-1]
        centred = x - mean.view(shape)
        variance = all_reduce(centred.square().sum(dims), group=self.process_group) / total
        if self.training:
            self._track(mean, variance, total)
        result = centred * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), factor)


def synchronise_over(module: nn.Module, group: ProcessGroup) -> None:
    """Let each `SyncBatchNorm` of a module take its statistics over a group, on any device."""
    for child in module.modules():
        if isinstance(child, nn.SyncBatchNorm):
            child.process_group = group
            if type(child) is nn.SyncBatchNorm:
                child.__class__ = SyncBatchNormOnCPU
