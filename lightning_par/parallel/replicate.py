"""Replicated parameters: average their gradients over the data ranks while backward still runs.

torch's `DistributedDataParallel` expects every parameter to get a gradient in every backward, one forward through the
wrapper, and plain tensors. Ordinary training steps toggle `requires_grad`, skip branches on some ranks, call methods of
the module and run several backwards; so this reducer listens to the gradients themselves and to nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_par.parallel._compat import run_at_end_of_backward
from lightning_par.parallel.shards import to_local, with_local

BUCKET_BYTES = 25 * 2**20
MAX_IN_FLIGHT = 2  # buckets on the wire at once: bounds the extra memory to this many buckets


@dataclass
class _Bucket:
    """Parameters of one dtype and device whose gradients travel together; of those cut over tp, this rank's parts."""

    params: list[nn.Parameter]
    waiting: set[nn.Parameter] = field(default_factory=set)
    active: list[nn.Parameter] = field(default_factory=list)
    sent: bool = False
    flat: Tensor | None = None
    work: dist.Work | None = None


class GradientReducer:
    """Averages the gradients of replicated parameters over a process group, overlapped with backward.

    A bucket is sent as soon as all its gradients are there; buckets leave in the same order on every rank. Behind the
    gradients each bucket carries one number a parameter, the count of ranks that have a gradient for it, so that a
    parameter which no rank used keeps its `grad` as it was (as in one process) and one that only some ranks used gets
    the same average everywhere.

    Args:
        params: The parameters; their order must be the same on all ranks. Duplicates count once.
        group: The data ranks.
        reduce_dtype: Dtype on the wire; None keeps that of the gradient.
        bucket_bytes: Size at which a bucket is closed.
        overlap: Send during backward. False waits for `finish`, for gradients beside those of another reduction on the
            same ranks: a rank that lacks one would meet that other reduction in a different order, and all would hang.

    It must be kept: its hooks do nothing once it is gone.

    Attributes:
        enabled: While False, gradients stay local and accumulate; the next backward with True averages the sum.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        reduce_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
    ) -> None:
        self.enabled = True
        self._group = group
        self._size = group.size()
        self._reduce_dtype = reduce_dtype
        unique = list(dict.fromkeys(params))
        self._buckets = _make_buckets(unique, bucket_bytes)
        self._bucket_of = {p: b for b in self._buckets for p in b.params}
        self._running = False
        self._finished_by_backward = False
        self._next = 0
        heard = [p for p in unique if p.is_floating_point() or p.is_complex()] if overlap else []
        self._handles = [self._listen(p) for p in heard]

    def _listen(self, param: nn.Parameter) -> RemovableHandle:
        # A parameter that is frozen now may be trained later (a finetuning schedule); torch wants it trainable here.
        trainable = param.requires_grad
        # Weak: Python's garbage collector does not see this hook, so the model would never be freed.
        average = weakref.WeakMethod(self._on_gradient)

        def hook(param: Tensor) -> None:
            method = average()
            if method is not None:
                method(param)

        handle = param.requires_grad_(True).register_post_accumulate_grad_hook(hook)
        param.requires_grad_(trainable)
        return cast(RemovableHandle, handle)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def finish(self) -> None:
        """Average what is not averaged yet. A training loop calls this after each backward, on every rank.

        On a rank whose backward reached a parameter autograd has done it already, and this does nothing; a rank whose
        loss reached none takes part in the others' averages here.
        """
        if self._finished_by_backward:
            self._finished_by_backward = False
        elif self.enabled and self._size > 1:
            self._finish()

    def _finish(self) -> None:
        if not self._running:
            self._start()
        while self._next < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            self._receive(bucket)
        self._running = False

    def reset(self) -> None:
        """Forget a backward that an exception has ended."""
        self._running = self._finished_by_backward = False
        for bucket in self._buckets:
            bucket.flat = bucket.work = None

    def _on_gradient(self, param: Tensor) -> None:
        if not self.enabled or self._size == 1:
            return
        if not self._running:
            self._start()
            run_at_end_of_backward(self._end_of_backward)
        bucket = self._bucket_of[cast(nn.Parameter, param)]
        if bucket.sent:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} got a second gradient in one backward, after its first was "
                "averaged over the ranks; this happens with reentrant checkpointing: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        bucket.waiting.discard(cast(nn.Parameter, param))
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._send_next()

    def _end_of_backward(self) -> None:
        if self._running:
            self._finish()
            self._finished_by_backward = True

    def _start(self) -> None:
        self._running = True
        self._finished_by_backward = False
        self._next = 0
        for bucket in self._buckets:
            # requires_grad is program structure (a GAN's toggles): equal on all ranks, so it may shape the message.
            bucket.active = [p for p in bucket.params if p.requires_grad]
            bucket.waiting = set(bucket.active)
            bucket.sent = False

    @torch.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        if self._next >= MAX_IN_FLIGHT:
            self._receive(self._buckets[self._next - MAX_IN_FLIGHT])
        self._next += 1
        bucket.sent = True
        if not bucket.active:
            return
        dtype = self._reduce_dtype or bucket.active[0].dtype
        sizes = [to_local(p).numel() for p in bucket.active]
        bucket.flat = torch.empty(sum(sizes) + len(sizes), dtype=dtype, device=bucket.active[0].device)
        *shares, present = bucket.flat.split([*sizes, len(sizes)])
        for param, share in zip(bucket.active, shares, strict=True):
            _divide_into(share, None if param.grad is None else to_local(param.grad), self._size)
        present.copy_(torch.tensor([float(p.grad is not None) / self._size for p in bucket.active]), non_blocking=True)
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    @torch.no_grad()
    def _receive(self, bucket: _Bucket) -> None:
        if bucket.work is None or bucket.flat is None:
            return
        bucket.work.wait()
        sizes = [to_local(p).numel() for p in bucket.active]
        *flat, present = bucket.flat.split([*sizes, len(sizes)])
        averages = [average.view_as(to_local(p)) for p, average in zip(bucket.active, flat, strict=True)]
        bucket.flat = bucket.work = None
        owned = [(to_local(p.grad), a) for p, a in zip(bucket.active, averages, strict=True) if p.grad is not None]
        if owned:
            torch._foreach_copy_([grad for grad, _ in owned], [average for _, average in owned])
        for i, (param, average) in enumerate(zip(bucket.active, averages, strict=True)):
            # Reading `present` waits for the device, so only a rank that lacks a gradient does it.
            if param.grad is None and bool(present[i] != 0):
                param.grad = with_local(average.to(param.dtype, copy=True), param)


def _divide_into(share: Tensor, gradient: Tensor | None, size: int) -> None:
    """Write a gradient divided by `size` into a flat tensor, where it can be in one pass over the memory."""
    if gradient is None:
        share.zero_()
    elif gradient.dtype == share.dtype:
        torch.div(gradient.reshape(-1), size, out=share)
    else:
        share.copy_(gradient.reshape(-1)).div_(size)


def _make_buckets(params: list[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Fill buckets in reverse order of registration, the usual order of the gradients."""
    buckets: list[_Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[_Bucket, int]] = {}
    for param in reversed(params):
        key = (param.dtype, param.device)
        bucket, size = open_buckets.get(key, (None, 0))
        if bucket is None or size >= bucket_bytes:
            bucket, size = _Bucket([]), 0
            buckets.append(bucket)
        bucket.params.append(param)
        open_buckets[key] = (bucket, size + to_local(param).numel() * param.element_size())
    return buckets
