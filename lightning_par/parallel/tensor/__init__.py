"""Tensor parallelism of unmodified blocks: trace which Linear feeds which, propose, verify, divide."""

from lightning_par.parallel.tensor.apply import shard_block
from lightning_par.parallel.tensor.logits import DividedLogits, gather_logits
from lightning_par.parallel.tensor.plan import AttributePatch, BlockTensorPlan, ModulePlan
from lightning_par.parallel.tensor.propose import plan_block
from lightning_par.parallel.tensor.trace import LinearGraph, LinearGroup, LinearNode, trace_linears
from lightning_par.parallel.tensor.vocabulary import divide_vocabulary
from lightning_par.parallel.tensor.vocabulary_plan import VocabularyPlan, plan_vocabulary

__all__ = [
    "AttributePatch",
    "BlockTensorPlan",
    "DividedLogits",
    "LinearGraph",
    "LinearGroup",
    "LinearNode",
    "ModulePlan",
    "VocabularyPlan",
    "divide_vocabulary",
    "gather_logits",
    "plan_block",
    "plan_vocabulary",
    "shard_block",
    "trace_linears",
]
