"""FLOPs counted as a step runs."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch.compiler import set_stance
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_par.parallel._compat import in_backward

aten = torch.ops.aten
# They compute the scores of the forward again.
_ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
}


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of matrix products, convolutions and attention that this rank runs inside of it.

    Conventions: a multiplication and an addition are two FLOPs; everything elementwise is left out; attention counts
    whole, also where a causal mask makes half of it needless; a backward counts what its operators do, so a frozen
    layer counts less. What activation checkpointing computes again, and scores that the backward of attention computes
    again, are in `hardware` only. Of a product of DTensors `model` has this rank's share of the whole, and `hardware`
    what it computes, which is more where ranks compute the same; where they do so with plain tensors (logits of a head
    that is not divided), both have it on each rank. Formulas are those of `torch.utils.flop_counter`, with the
    attention kernel of CPUs added. Operators on meta tensors cost nothing and count nothing. Compiled functions run
    uncompiled meanwhile, since what is inside of a compiled one cannot be seen.

    Attributes:
        model: FLOPs of forward and backward.
        hardware: FLOPs that were computed.
        active: Whether it counts.

    Example::

        with FlopCounter() as counter:
            loss(model(batch)).backward()
        counter.model
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = 0.0
        self.hardware = 0.0
        self.active = True
        self._within_dtensor = False
        self._eager: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Self:
        """Begin to count."""
        # Where dynamo is not even imported nothing is compiled. Without this it would meet the mode, give the function
        # up, and leave it uncompiled for good.
        eager = set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        eager.__enter__()
        self._eager.append(eager)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """End it."""
        super().__exit__(*exception)
        self._eager.pop().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it."""
        kwargs = kwargs or {}
        whole = DTensor in types
        if whole and self._within_dtensor:
            # DTensor runs it in parts, which come here again.
            return NotImplemented
        if whole:
            self._within_dtensor = True
            try:
                super().__enter__()
                result = func(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
                self._within_dtensor = False
        else:
            result = func(*args, **kwargs)
        if not self.active:
            return result
        flops, again = _flops(func, args, kwargs, result)
        if not whole:
            self.hardware += flops + again
        # Autograd's own operators run without grad mode; a forward that is run again needs it.
        if flops and not self._within_dtensor and not (in_backward() and torch.is_grad_enabled()):
            self.model += flops / (_mesh_size(args) if whole else 1)
        return result


def _mesh_size(args: tuple[Any, ...]) -> int:
    return next(arg.device_mesh.size() for arg in args if isinstance(arg, DTensor))


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """FLOPs of an operator, and those of what it computes once more."""
    packet = getattr(func, "overloadpacket", None)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if packet is None or not tensors or any(tensor.is_meta for tensor in tensors):
        return 0, 0
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(tensor.shape for tensor in tensors[:3]))), 0
    if packet in _ATTENTION_BACKWARD:
        shapes = [tensor.shape for tensor in tensors[:4]]
        scores = 2 * shapes[1].numel() * shapes[2][-2]
        return int(sdpa_backward_flop_count(*shapes)) - scores, scores
    count = flop_registry.get(packet)
    return (0 if count is None else int(count(*args, **kwargs, out_val=result))), 0
