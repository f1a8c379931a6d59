"""Parameters that several stages use, such as an embedding tied to the head: one sum of their gradients everywhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_par.parallel.shards import to_local, with_local


class SharedParameters:
    """The parameters that this rank shares with other ranks of its pipeline.

    Args:
        ranks: By name the ranks that have a copy, this one among them.
        group: The ranks of the pipeline.
    """

    def __init__(self, ranks: Mapping[str, tuple[int, ...]], group: dist.ProcessGroup) -> None:
        self._ranks = dict(ranks)
        self._group = group

    def counted_elsewhere(self, module: nn.Module) -> list[nn.Parameter]:
        """Copies that a sum over all ranks of the pipeline must leave out: another rank counts them."""
        return [param for param, ranks in self._copies(module) if self._group.rank() != ranks[0]]

    @torch.no_grad()
    def sum_gradients(self, module: nn.Module) -> None:
        """Give all copies the sum of their gradients, bit for bit the same; None where no copy has one."""
        for param, ranks in self._copies(module):
            if param.requires_grad:
                self._sum(param, ranks)

    def _copies(self, module: nn.Module) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """The copies here and their ranks. Most models have none, and are not walked through in each step for that."""
        params = dict(module.named_parameters()) if self._ranks else {}
        return [(params[name], ranks) for name, ranks in self._ranks.items()]

    def _sum(self, param: nn.Parameter, ranks: tuple[int, ...]) -> None:
        """Add up on the first rank, in the order of the ranks, and send the sum back."""
        like = to_local(param)
        gradient = torch.zeros_like(like) if param.grad is None else to_local(param.grad).contiguous()
        present = torch.tensor(float(param.grad is not None), device=like.device)
        first, others = ranks[0], ranks[1:]
        if self._group.rank() == first:
            for other in others:
                theirs, has_one = torch.empty_like(gradient), torch.empty_like(present)
                self._receive(other, has_one, theirs)
                gradient, present = gradient + theirs, torch.maximum(present, has_one)
            for other in others:
                self._send(other, present, gradient)
        else:
            self._send(first, present, gradient)
            gradient = torch.empty_like(gradient)
            self._receive(first, present, gradient)
        if not present.item():
            return
        if param.grad is None:
            param.grad = with_local(gradient, param)
        else:
            to_local(param.grad).copy_(gradient)

    def _send(self, rank: int, *tensors: Tensor) -> None:
        for tensor in tensors:
            dist.send(tensor, group=self._group, group_dst=rank)

    def _receive(self, rank: int, *tensors: Tensor) -> None:
        for tensor in tensors:
            dist.recv(tensor, group=self._group, group_src=rank)
