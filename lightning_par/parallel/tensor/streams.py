"""Random streams of a divided block: hooks that switch between what all ranks draw and what each draws for its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_par.parallel._compat import not_compiled
from lightning_par.parallel.random import Stream, begin_own_stream, begin_shared_stream
from lightning_par.parallel.tensor._compat import first_tensor
from lightning_par.parallel.tensor.plan import BlockTensorPlan


def separate_streams(block: nn.Module, plan: BlockTensorPlan, mesh: DeviceMesh) -> None:
    """Let each rank draw from a stream of its own in training, wherever it has a part of a tensor.

    That is in divided groups, and with slices of the sequence in the whole block, except in modules that all ranks run
    alike. A block that draws nothing gets no hooks.
    """
    sequence = plan.sequence
    own_groups = plan.random_groups
    if sequence is not None:
        inside_whole = {module.group for module in plan.modules if sequence.is_whole(module.name)}
        own_groups = tuple(group for group in own_groups if group in inside_whole)
    slices_draw = sequence is not None and sequence.random
    if not own_groups and not slices_draw:
        return
    # Streams that were begun and not ended, the outermost first.
    begun: dict[str, Stream] = {}

    def begin(key: str, stream: Callable[..., Stream | None], *options: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not module.training or (key in begun and begun[key].is_running):
                return
            if (started := stream(first_tensor((args, kwargs)).device, mesh.get_local_rank(), *options)) is not None:
                begun[key] = started

        return not_compiled(hook)

    def end(key: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if key in begun:
                begun.pop(key).end()

        return not_compiled(hook)

    @not_compiled
    def end_all(*_: Any) -> None:
        for stream in reversed([begun.pop(key) for key in list(begun)]):
            stream.end()

    # What a recomputation has left; checkpointing has brought back the generator itself.
    block.register_forward_pre_hook(not_compiled(lambda *_: begun.clear()))
    if sequence is not None and slices_draw:
        block.register_forward_pre_hook(begin("block", begin_own_stream), with_kwargs=True)
        for number, entry in enumerate(sequence.entries):
            if entry.group == -1:
                module = block.get_submodule(entry.module)
                key = f"module {entry.module}"
                module.register_forward_pre_hook(begin(key, begin_shared_stream, number), with_kwargs=True)
                module.register_forward_hook(end(key))
    for divided in plan.modules:
        if divided.group in own_groups:
            linear, key = block.get_submodule(divided.name), f"group {divided.group}"
            # It ends before the row: a recomputation may stop once the row's input is there.
            hook = end(key) if divided.style == "row" else begin(key, begin_own_stream)
            linear.register_forward_pre_hook(hook, with_kwargs=True)
    block.register_forward_hook(end_all, always_call=True)
