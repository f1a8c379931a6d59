"""What a sharded load will write and where, and what of it does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from lightning_par.checkpoint.errors import CheckpointMismatch, checkpoint_error
from lightning_par.checkpoint.ranks import Ranks
from lightning_par.checkpoint.stages import Groups, merge_groups, on_all_stages, union
from lightning_par.checkpoint.state import (
    compare_names,
    empty_state,
    group_problems,
    name_problems,
    named_parameters_of,
    optimizer_names,
    plain_name,
    stage_state,
    state_problems,
    tensor_problem,
)
from lightning_par.errors import Problem
from lightning_par.parallel.stages import stages_of


@dataclass(frozen=True)
class Names:
    """The names of what is loaded.

    Attributes:
        model: Of the model's state, on all stages of a pipeline.
        own: By optimizer and group, of the parameters of this rank.
        groups: The same, of all stages.
    """

    model: list[str]
    own: list[Groups]
    groups: list[Groups]

    @classmethod
    def of(cls, module: nn.Module, optimizers: Sequence[Optimizer], ranks: Ranks, failure: str) -> Names:
        """Ask all stages; collective."""
        stages = stages_of(module)
        model, own = ranks.together(
            failure, lambda: (list(stage_state(module)), [optimizer_names(module, one) for one in optimizers])
        )
        everywhere = on_all_stages(stages, lambda: (model, own))
        order = [] if stages is None else [plain_name(name) for name in stages.parameters]
        groups = [
            merge_groups(type(optimizer).__name__, [own[i] for _, own in everywhere], order)[0]
            for i, optimizer in enumerate(optimizers)
        ]
        return cls(union(model for model, _ in everywhere), own, groups)


class LoadPlan:
    """What a load will write and where, and everything that does not fit.

    Attributes:
        targets: Tensors to read, by their name in the checkpoint.
        model: Values for the module, by name.
        optimizers: Arguments of `restore_optimizer`.
        missing, unexpected: Names that only one side has.
        differences: The same as problems, which ``strict=False`` accepts.
        misfits: Problems that nothing accepts.
    """

    def __init__(self, stored: Mapping[str, TensorStorageMetadata]) -> None:
        self._stored = stored
        self.targets: dict[str, Tensor] = {}
        self.model: dict[str, Any] = {}
        self.optimizers: list[tuple[Optimizer, list[list[str]], dict[str, dict[str, Any]], Any]] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.differences: list[Problem] = []
        self.misfits: list[Problem] = []

    def add_model(self, module: nn.Module, names: Names, values: Mapping[str, Any]) -> None:
        """Plan to read what the module and the checkpoint both have."""
        template = stage_state(module)
        saved = {name.removeprefix("model."): name for name in self._stored if name.startswith("model.")}
        known = set(names.model)
        self._differ(
            "model",
            [name for name in names.model if name not in saved and name not in values],
            [name for name in (*saved, *values) if name not in known],
        )
        self.model = {name: value for name, value in values.items() if name in template}
        for name, target in template.items():
            if name not in saved:
                continue
            size = self._stored[saved[name]].size
            problem = tensor_problem(name, target, size)
            if problem:
                self.misfits.append(problem)
            else:
                self.targets[saved[name]] = self.model[name] = target

    def add_optimizers(
        self, optimizers: Sequence[Optimizer], names: Names, records: Sequence[Mapping[str, Any]]
    ) -> None:
        """Plan to read the state of each optimizer into new tensors."""
        if len(optimizers) != len(records):
            self.differences.append(
                Problem(f"{len(optimizers)} optimizers are to be loaded, the checkpoint holds {len(records)}")
            )
            self.missing += [f"optimizer.{i}" for i in range(len(records), len(optimizers))]
            self.unexpected += [f"optimizer.{i}" for i in range(len(optimizers), len(records))]
        for i, (optimizer, record) in enumerate(zip(optimizers, records, strict=False)):
            self._add_optimizer(f"optimizer.{i}", optimizer, names.own[i], names.groups[i], record)

    def raise_if_unfit(self, title: str, strict: bool) -> None:
        """Raise with everything that cannot be loaded, or, when strict, that would be left out."""
        if self.misfits:
            raise checkpoint_error(title, self.misfits + self.differences, CheckpointMismatch)
        if strict and self.differences:
            raise checkpoint_error(
                f"{title} (strict=False loads what both sides have)", self.differences, CheckpointMismatch
            )

    def _add_optimizer(
        self, label: str, optimizer: Optimizer, names: Groups, whole: Groups, record: Mapping[str, Any]
    ) -> None:
        groups, values, tensors = record["param_groups"], record["values"], record["tensors"]
        missing, unexpected = compare_names(whole, groups, tensors)
        prefix = f"{label}.state."
        listed = {f"{prefix}{name}.{key}" for name, keys in tensors.items() for key in keys}
        # Rank 0 wrote the lists; a tensor that is on none of them came from a rank with other state.
        unlisted = [k.removeprefix(prefix) for k in self._stored if k.startswith(prefix) and k not in listed]
        self._differ(label, missing, unexpected + unlisted)
        problems = group_problems(label, optimizer, whole, groups)
        if problems:
            self.differences += problems
            self.unexpected.append(f"{label}.param_groups")
        state: dict[str, dict[str, Any]] = {}
        for name, param, group in named_parameters_of(optimizer, names):
            if name in tensors:
                state[name] = dict(values[name])
                sizes = {key: self._stored[f"{prefix}{name}.{key}"].size for key in tensors[name]}
                stored_param = self._stored.get(f"model.{name}")
                # Of a parameter that does not fit itself enough is said.
                if stored_param is None or stored_param.size == param.shape:
                    self.misfits += state_problems(name, param, sizes)
            for key in tensors.get(name, ()):
                stored_name = f"{prefix}{name}.{key}"
                stored = self._stored[stored_name]
                dtype = _dtype_here(key, stored, self._stored.get(f"model.{name}"), param)
                state[name][key] = self.targets[stored_name] = empty_state(key, stored.size, dtype, param, group)
        self.optimizers.append((optimizer, names, state, None if problems else groups))

    def _differ(self, label: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        self.missing += [f"{label}.{name}" for name in missing]
        self.unexpected += [f"{label}.{name}" for name in unexpected]
        self.differences += name_problems(label, missing, unexpected)


def _dtype_here(
    key: str, stored: TensorStorageMetadata, stored_param: TensorStorageMetadata | None, param: Tensor
) -> torch.dtype:
    # State in the parameter's precision follows it to another one; state that was kept in its own stays there.
    dtype: torch.dtype = stored.properties.dtype
    follows = stored_param is not None and stored_param.properties.dtype == dtype and key != "step"
    return param.dtype if follows and (stored.size or not param.ndim) else dtype
