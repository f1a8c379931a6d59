"""The private APIs of torch that the package `resilience` uses, each with what it replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def around_waits(before: Callable[[], Any], after: Callable[[Any], None]) -> Callable[[], None]:
    """Be told of each wait for a collective: before it, and after it with what `before` returned.

    Collectives of `torch.distributed` wait in `Work.wait`, also those that look synchronous (torch >= 2.0); it is
    replaced on the class. On CUDA it lets the current stream wait, as do events (FSDP2) and other streams there.

    Returns:
        Puts torch's own methods back.
    """
    owners: list[tuple[Any, str]] = [(dist.Work, "wait")] if dist.is_available() else []
    if torch.cuda.is_available():
        owners += [(torch.cuda.Stream, "wait_event"), (torch.cuda.Stream, "wait_stream")]
    undo = [_wrap(owner, name, before, after) for owner, name in owners]

    def put_back() -> None:
        for one in reversed(undo):
            one()

    return put_back


def _wrap(owner: Any, name: str, before: Callable[[], Any], after: Callable[[Any], None]) -> Callable[[], None]:
    original = getattr(owner, name)
    on_cuda = torch.cuda.is_available()

    def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Another stream's wait does not hold up the computation, and what a graph records does not happen now.
        elsewhere = name != "wait" and self != torch.cuda.current_stream()
        if elsewhere or (on_cuda and torch.cuda.is_current_stream_capturing()):
            return original(self, *args, **kwargs)
        token = before()
        try:
            return original(self, *args, **kwargs)
        finally:
            after(token)

    setattr(owner, name, waiting)

    def put_back() -> None:
        # Whoever replaced it later puts this one back itself.
        if getattr(owner, name) is waiting:
            setattr(owner, name, original)

    return put_back
