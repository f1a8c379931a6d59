"""Presets: mixins that only fix defaults of `MeshStrategy`, for the Trainer and for Fabric alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from lightning_par.errors import Problems
from lightning_par.layout import ParallelLayout

if TYPE_CHECKING:
    from lightning_par.strategies.shared import MeshShell as _Shell
else:
    _Shell = object


def _sets_itself(name: str, instead: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Refuse an option that a preset sets, where Python would say that it came twice."""

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
            problems = Problems()
            if name in kwargs:
                problems.add(
                    f"{type(self).__name__} sets {name} itself, {kwargs[name]!r} was given",
                    instead.format(kwargs[name]),
                )
            problems.raise_if_any()
            init(self, *args, **kwargs)

        return wrapped

    return decorate


class DataParallelDefaults(_Shell):
    """Replicates the model on every process and averages gradients (DDP).

    Args:
        dp_replicate_size: Number of replicas; -1 for all processes.
        **kwargs: Every other option of `MeshStrategy`.
    """

    @_sets_itself("dp_shard_size", "HSDPStrategy(dp_shard_size={}) or FSDP2Strategy()")
    def __init__(self, dp_replicate_size: int = -1, **kwargs: Any) -> None:
        super().__init__(dp_replicate_size=dp_replicate_size, dp_shard_size=1, **kwargs)


class ZeRODefaults(_Shell):
    """Shards optimizer state (stage 1), and gradients (2), and parameters (3) over all processes.

    Args:
        stage: What is sharded; 3 is the same as `FSDP2Strategy`.
        dp_shard_size: Number of ranks to shard over; -1 for all processes.
        **kwargs: Every other option of `MeshStrategy`.
    """

    @_sets_itself("zero_stage", "stage={}")
    def __init__(self, stage: Literal[1, 2, 3] = 1, dp_shard_size: int = -1, **kwargs: Any) -> None:
        super().__init__(zero_stage=stage, dp_shard_size=dp_shard_size, **kwargs)


class FSDP2Defaults(_Shell):
    """Shards parameters, gradients and optimizer state over all processes, block by block.

    Args:
        dp_shard_size: Number of ranks to shard over; -1 for all processes.
        **kwargs: Every other option of `MeshStrategy`.
    """

    def __init__(self, dp_shard_size: int = -1, **kwargs: Any) -> None:
        super().__init__(dp_shard_size=dp_shard_size, **kwargs)


class TensorParallelDefaults(_Shell):
    """Divides each matrix over neighbouring processes (tensor parallelism), and shards over the others.

    Args:
        tp_size: Number of ranks that share a matrix; ``"node"`` for the processes of one node.
        dp_shard_size: Number of ranks to shard over; -1 for what is left.
        **kwargs: Every other option of `MeshStrategy`.
    """

    def __init__(self, tp_size: int | Literal["node"] = "node", dp_shard_size: int = -1, **kwargs: Any) -> None:
        self._tp_in_node = tp_size == "node"
        size = 0 if isinstance(tp_size, str) else tp_size
        super().__init__(tp_size=size, dp_shard_size=dp_shard_size, **kwargs)

    def _requested_layout(self) -> ParallelLayout:
        layout = super()._requested_layout()
        return replace(layout, tp_size=self.num_processes) if self._tp_in_node else layout


class PipelineParallelDefaults(_Shell):
    """Gives each process its own blocks of the model (pipeline parallelism); micro-batches go from one to the next.

    Args:
        pp_size: Number of ranks of the pipeline; -1 for what is left.
        dp_shard_size: Number of ranks to shard each stage over.
        **kwargs: Every other option of `MeshStrategy`.
    """

    def __init__(self, pp_size: int = -1, dp_shard_size: int = 1, **kwargs: Any) -> None:
        super().__init__(pp_size=pp_size, dp_shard_size=dp_shard_size, **kwargs)


class HSDPDefaults(_Shell):
    """Shards within a node and replicates between nodes (HSDP).

    Args:
        dp_shard_size: Number of ranks to shard over; ``"node"`` for the processes of one node.
        dp_replicate_size: Number of replicas of that; -1 for what is left.
        **kwargs: Every other option of `MeshStrategy`.
    """

    def __init__(
        self, dp_shard_size: int | Literal["node"] = "node", dp_replicate_size: int = -1, **kwargs: Any
    ) -> None:
        self._shard_in_node = dp_shard_size == "node"
        size = 0 if isinstance(dp_shard_size, str) else dp_shard_size
        super().__init__(dp_shard_size=size, dp_replicate_size=dp_replicate_size, **kwargs)

    def _requested_layout(self) -> ParallelLayout:
        layout = super()._requested_layout()
        return replace(layout, dp_shard_size=self.num_processes) if self._shard_in_node else layout
