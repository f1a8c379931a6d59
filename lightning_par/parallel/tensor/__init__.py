"""Tensor parallelism of unmodified blocks: trace which Linear feeds which, propose, verify, divide.

Names load on first use: who trains without tensor parallelism does not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from lightning_par.parallel.tensor.plan import (
        AttributePatch,
        BlockTensorPlan,
        ModulePlan,
        SequenceEntry,
        SequencePlan,
    )
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

_HOME = {
    "apply": ("shard_block",),
    "examples": (
        "Example",
        "examples_of",
        "observe",
    ),
    "fused": (
        "feature_orders",
        "reorder_state",
    ),
    "logits": (
        "DividedLogits",
        "gather_logits",
    ),
    "model": (
        "ModelTensorPlan",
        "STYLES",
        "TensorPlanOption",
        "plan_model",
        "plan_together",
        "shard_model",
        "slice_chains",
    ),
    "plan": (
        "AttributePatch",
        "BlockTensorPlan",
        "ModulePlan",
        "SequenceEntry",
        "SequencePlan",
    ),
    "propose": ("plan_block",),
    "sequence": ("slice_sequence",),
    "trace": (
        "LinearGraph",
        "LinearGroup",
        "LinearNode",
        "trace_linears",
    ),
    "vocabulary": ("divide_vocabulary",),
    "vocabulary_plan": (
        "VocabularyPlan",
        "plan_vocabulary",
    ),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOME.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
