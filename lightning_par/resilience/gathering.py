"""What each rank knows, brought to all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def gather_numbers(mine: Sequence[float], device: torch.device | str) -> list[list[float]]:
    """Bring some numbers of each rank to all of them, in one collective of the default group.

    Args:
        mine: As many on each rank.
        device: On which the group's backend works.

    Returns:
        For each rank, its numbers; without a process group those of this one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [list(mine)]
    tensor = torch.tensor(mine, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return [rank.tolist() for rank in everyone]
