"""Tensor parallelism of unmodified blocks: trace which Linear feeds which, propose, verify, divide."""

from lightning_par.parallel.tensor.apply import shard_block
from lightning_par.parallel.tensor.examples import Example, examples_of, observe
from lightning_par.parallel.tensor.model import STYLES, ModelTensorPlan, TensorPlanOption, plan_model, shard_model
from lightning_par.parallel.tensor.plan import AttributePatch, BlockTensorPlan, ModulePlan
from lightning_par.parallel.tensor.propose import plan_block
from lightning_par.parallel.tensor.trace import LinearGraph, LinearGroup, LinearNode, trace_linears

__all__ = [
    "STYLES",
    "AttributePatch",
    "BlockTensorPlan",
    "Example",
    "LinearGraph",
    "LinearGroup",
    "LinearNode",
    "ModelTensorPlan",
    "ModulePlan",
    "TensorPlanOption",
    "examples_of",
    "observe",
    "plan_block",
    "plan_model",
    "shard_block",
    "shard_model",
    "trace_linears",
]
