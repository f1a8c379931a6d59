"""Tensor parallelism of unmodified blocks: trace which Linear feeds which, propose, verify, divide."""

from lightning_par.parallel.tensor.apply import shard_block
from lightning_par.parallel.tensor.plan import AttributePatch, BlockTensorPlan, ModulePlan, SequenceEntry, SequencePlan
from lightning_par.parallel.tensor.propose import plan_block
from lightning_par.parallel.tensor.sequence import slice_sequence
from lightning_par.parallel.tensor.trace import LinearGraph, LinearGroup, LinearNode, trace_linears

__all__ = [
    "AttributePatch",
    "BlockTensorPlan",
    "LinearGraph",
    "LinearGroup",
    "LinearNode",
    "ModulePlan",
    "SequenceEntry",
    "SequencePlan",
    "plan_block",
    "shard_block",
    "slice_sequence",
    "trace_linears",
]
