"""What the ranks of a start by torchrun must not share with those of the start before."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn


def group_of_this_start(timeout: timedelta) -> dict[str, Any]:
    """More arguments for `init_process_group`, so that it finds nothing of an earlier start.

    torchrun keeps one store for all starts (torch 2.13, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is 1), where a rank
    takes the addresses of ranks that are gone for those of the others. On one node its names begin with the number of
    the start; nodes may count starts differently.

    Args:
        timeout: How long to wait for the store.
    """
    told = os.environ
    if told.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    if told.get("GROUP_WORLD_SIZE") != "1":
        if int(told.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            rank_zero_warn(
                "torchrun lets all starts share one store, where a rank that it starts again may find what is gone, "
                "and wait: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, on all nodes"
            )
        return {}
    store = dist.TCPStore(  # type: ignore[attr-defined]
        told["MASTER_ADDR"], int(told["MASTER_PORT"]), int(told["WORLD_SIZE"]), is_master=False, timeout=timeout
    )
    name = f"start-{told['TORCHELASTIC_RESTART_COUNT']}"
    return {"store": dist.PrefixStore(name, store)}  # type: ignore[attr-defined]
