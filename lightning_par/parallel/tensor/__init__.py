"""Tensor parallelism of unmodified blocks: trace which Linear feeds which, propose, verify, divide."""

from lightning_par.parallel.tensor.apply import shard_block
from lightning_par.parallel.tensor.examples import Example, examples_of, observe
from lightning_par.parallel.tensor.fused import feature_orders, reorder_state
from lightning_par.parallel.tensor.logits import DividedLogits, gather_logits
from lightning_par.parallel.tensor.model import (
    STYLES,
    ModelTensorPlan,
    TensorPlanOption,
    plan_model,
    plan_together,
    shard_model,
    slice_chains,
)
from lightning_par.parallel.tensor.plan import AttributePatch, BlockTensorPlan, ModulePlan, SequenceEntry, SequencePlan
from lightning_par.parallel.tensor.propose import plan_block
from lightning_par.parallel.tensor.sequence import slice_sequence
from lightning_par.parallel.tensor.trace import LinearGraph, LinearGroup, LinearNode, trace_linears
from lightning_par.parallel.tensor.vocabulary import divide_vocabulary
from lightning_par.parallel.tensor.vocabulary_plan import VocabularyPlan, plan_vocabulary

__all__ = [
    "STYLES",
    "AttributePatch",
    "BlockTensorPlan",
    "DividedLogits",
    "Example",
    "LinearGraph",
    "LinearGroup",
    "LinearNode",
    "ModelTensorPlan",
    "ModulePlan",
    "SequenceEntry",
    "SequencePlan",
    "TensorPlanOption",
    "VocabularyPlan",
    "divide_vocabulary",
    "examples_of",
    "feature_orders",
    "gather_logits",
    "observe",
    "plan_block",
    "plan_model",
    "plan_together",
    "plan_vocabulary",
    "reorder_state",
    "shard_block",
    "shard_model",
    "slice_chains",
    "slice_sequence",
    "trace_linears",
]
