"""torch's pipeline stage around a replayed step; private parts of `torch.distributed.pipelining.stage` (torch >= 2.13).

torch finds out what crosses a cut with one more forward, for all micro-batches alike. Here it is told, for each one.
`tests/test_pipeline_runtime.py` tells what breaks when torch changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _StageMeta, extract_tensor_meta
from torch.distributed.pipelining.stage import _RecvInfo

from lightning_par.parallel.pipeline.replay import Meta

Metas = Sequence[tuple[Meta, ...]]


class StepModule(nn.Module):
    """What torch takes for the module of a stage.

    Args:
        run: Runs the step on a micro-batch, given its index and what was received.
        fail: Is told what failed in a backward.
        root: Gives the parameters.
    """

    def __init__(
        self,
        run: Callable[[int, tuple[Tensor, ...]], Any],
        fail: Callable[[Exception], None],
        root: nn.Module,
    ) -> None:
        super().__init__()
        self._run = run
        self.fail = fail
        # Past `nn.Module`, of which it would be a submodule.
        self.__dict__["_root"] = root

    def forward(self, *received: Tensor, mb_index: Tensor) -> Any:
        return self._run(int(mb_index), received)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        root: nn.Module = self.__dict__["_root"]
        return root.parameters(recurse)


class ReplayStage(PipelineStage):
    """A stage that is told what it receives and sends in each micro-batch.

    Args:
        module: Runs the step.
        index: Of the stage.
        count: Of stages.
        device: Where it runs.
        group: The ranks of the pipeline.
        metas: What crosses the cuts before and after the stage, by micro-batch; nothing before the first and after the
            last stage.
    """

    def __init__(
        self,
        module: StepModule,
        index: int,
        count: int,
        device: torch.device,
        group: dist.ProcessGroup,
        metas: tuple[Metas, Metas],
    ) -> None:
        super().__init__(module, index, count, device, group=group)
        self.expect(metas)

    def expect(self, metas: tuple[Metas, Metas]) -> None:
        """Say what the next batch sends and receives; receive buffers are kept where nothing changes."""
        if metas == getattr(self, "_metas", None):
            return
        self._metas = metas
        # Of the first stage torch wants one argument to cut into micro-batches; the last one returns its loss.
        inputs: tuple[Tensor, ...] = (torch.zeros(1),) if self.is_first else tuple(map(_like, metas[0][0]))
        outputs = (torch.zeros(()),) if self.is_last else tuple(map(_like, metas[1][0]))
        self._user_meta = _StageMeta(
            inputs=tuple(map(extract_tensor_meta, inputs)),
            outputs=tuple(map(extract_tensor_meta, outputs)),
            input_grads=None,
            output_grads=None,
        )
        if self._inference_mode is not None:
            count = len(self.args_recv_info)
            self._stage_meta.inputs, self._stage_meta.outputs = self._user_meta.inputs, self._user_meta.outputs
            self._setup_forward_recv_info(count, self.has_backward)
            self._setup_forward_send_info()
            self.grad_send_info = None
            if self.has_backward:
                self._setup_backward_recv_info(count)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        if self.is_first:
            super()._setup_forward_recv_info(num_microbatches, has_backward)
            return
        for chunk in range(num_microbatches):
            self.args_recv_info[chunk] = tuple(
                self._receiving(meta, self.stage_index - 1) for meta in self._metas[0][chunk]
            )

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        for chunk in range(num_microbatches):
            self.grad_recv_info[chunk] = (
                ()
                if self.is_last
                else tuple(
                    self._receiving(meta, self.stage_index + 1, wanted=meta.dtype.is_floating_point)
                    for meta in self._metas[1][chunk]
                )
            )

    def _receiving(self, meta: Meta, source: int, wanted: bool = True) -> _RecvInfo:
        buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device) if wanted else None
        described = extract_tensor_meta(_like(meta)) if wanted else None
        return _RecvInfo(f"from stage {source}", source, buffer, described)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        inputs: Any = self.fwd_cache[bwd_chunk_id][1] if self.has_backward else ()
        try:
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        except Exception as error:  # of the user's own functions: the other stages wait for what this one sends
            self._fail(error)
            self.bwd_cache[bwd_chunk_id] = (None,) * len(self._user_meta.inputs or ())
        if self.has_backward and not self.is_first:
            self.bwd_cache[bwd_chunk_id] = tuple(
                _to_send(grad, value) for grad, value in zip(self.bwd_cache[bwd_chunk_id], inputs, strict=False)
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        try:
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        except Exception as error:  # as above; what failed before has left nothing to do here
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        # torch puts its own error around that of the backward.
        cause = error.__cause__
        self.submod.fail(cause if isinstance(cause, Exception) else error)  # type: ignore[operator]


def _to_send(gradient: Tensor | None, value: Tensor) -> Tensor | None:
    """The gradient of a received tensor as it can be sent."""
    if gradient is None:
        # torch would send zeros of the shape that the first micro-batch has.
        return torch.zeros_like(value) if value.is_floating_point() else None
    # That of a mean is one number, expanded.
    return gradient.contiguous()


def _like(meta: Meta) -> Tensor:
    # Always with a gradient: what is frozen now may be trained later.
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta", requires_grad=meta.dtype.is_floating_point)
