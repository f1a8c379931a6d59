"""Give a sharded model, built on the meta device, the weights that an ordinary CPU build would have, bit for bit.

`capture_init` looks up how each parameter and buffer gets its value, before sharding changes the tensors;
`InitPlan.materialize` computes them one at a time after it, and keeps only what the rank owns.

A model built under the user's own ``torch.device("meta")`` has no recorded values: there the `reset_parameters` of its
modules (or the `_init_weights` of a Hugging Face model) are recorded at capture. The values are then a proper
initialisation and equal for every layout, but not those of an ordinary build, which may do more than that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_par.errors import Problems
from lightning_par.parallel import _compat
from lightning_par.parallel.deferred import (
    META,
    VERSION_MARK,
    Node,
    Ref,
    deferred_init,
    evaluate,
    needed_ops,
    node_of,
    ref_of,
)
from lightning_par.parallel.shards import copy_full_into

__all__ = ["InitPlan", "capture_init", "deferred_init"]

_FIX = "build the model in configure_model() or under the strategy's init context (`deferred_init`)"


@dataclass(frozen=True)
class _Alias:
    """A plain attribute that is the same object as a registered parameter or buffer."""

    name: str


@dataclass
class InitPlan:
    """How the tensors of a module get their initial values.

    Args:
        values: Recipe of each parameter and buffer on the meta device, under all of its names.
        attributes: Module, attribute name and recipe of tensors that are neither, such as rotary tables.
    """

    values: dict[str, Ref]
    attributes: list[tuple[nn.Module, str, Any]]

    @property
    def needed(self) -> bool:
        """Whether anything was on the meta device; if not, nothing here does anything."""
        return bool(self.values or self.attributes)

    @property
    def _nodes(self) -> list[Node]:
        found = [leaf for _, _, value in self.attributes for leaf in _compat.leaves(value) if isinstance(leaf, Ref)]
        return list(dict.fromkeys(ref.node for ref in (*self.values.values(), *found)))

    def synchronise(self, group: dist.ProcessGroup) -> bool:
        """Make the initial values equal on all ranks of `group`, from its first rank; collective.

        Ranks without a common seed would otherwise cut their shards out of different models. Only the random states
        and the constants are compared and, where they differ, sent: a few kilobytes for each parameter.

        Returns:
            True if the ranks differed.
        """
        ops = needed_ops(self._nodes, float("inf"))
        inputs = [t for op in ops for t in _compat.leaves((op.rng, op.args, op.kwargs)) if isinstance(t, Tensor)]
        digest = hashlib.sha256()
        for tensor in inputs:
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, digest.hexdigest(), group=group)
        if all(other == everyone[0] for other in everyone):
            return False
        theirs = [inputs]
        dist.broadcast_object_list(theirs, src=dist.get_global_rank(group, 0), group=group)
        for mine, first in zip(inputs, theirs[0], strict=True):
            mine.copy_(first)
        return True

    @torch.no_grad()
    def materialize(self, module: nn.Module, device: torch.device | str, only: Collection[str] | None = None) -> None:
        """Allocate the meta tensors of `module` on `device` and fill them; needs no communication.

        Real tensors stay as they are, and so do ties between parameters, `requires_grad`, attributes set on
        parameters, and which buffers are persistent. Parameters may be DTensors now. Names that `module` lacks are
        skipped (a pipeline stage owns a part). At any moment one full-size value exists, and what it is made from.

        Args:
            module: The module that was captured.
            device: Where the tensors go.
            only: Names of submodules; the tensors of others stay on the meta device for a later call.

        Raises:
            ParallelConfigError: If `module` has a tensor on the meta device that was not there at capture, or that has
                a gradient hook: plain parameters become new objects, only DTensors stay the same ones.
        """
        if not self.needed:
            return
        chosen = {name: t for name, t in _named_tensors(module) if t.is_meta and (only is None or _lies_in(name, only))}
        problems = Problems()
        for name, tensor in chosen.items():
            if name not in self.values:
                problems.add(f"{name} is on the meta device and was not there when capture_init ran", _FIX)
            if not isinstance(tensor, DTensor) and _compat.has_gradient_hooks(tensor):
                problems.add(
                    f"{name} has a gradient hook, which would be lost with the meta tensor that it is on",
                    "register gradient hooks after the model was materialised",
                )
        problems.raise_if_any()
        device = torch.device(device)
        ids = {id(tensor) for tensor in chosen.values()}
        # A tied tensor is there under names outside too.
        names = {name for name, tensor in _named_tensors(module) if id(tensor) in ids}
        _allocate(module, device, ids)
        targets = dict(_named_tensors(module))
        for node in dict.fromkeys(ref.node for name, ref in self.values.items() if name in names):
            self._fill(node, {name: targets[name] for name in names})
        self.values = {name: ref for name, ref in self.values.items() if only is not None and name not in names}
        owners = {child for name, child in module.named_modules() if only is None or _lies_in(f"{name}.", only)}
        for owner, key, value in self.attributes:
            if owner in owners and key in vars(owner):
                vars(owner)[key] = _compat.map_leaves(lambda leaf: _attribute(leaf, targets, device), value)
        self.attributes = [entry for entry in self.attributes if entry[0] not in owners]

    def _fill(self, node: Node, targets: dict[str, Tensor]) -> None:
        views = {id(targets[name]): name for name, ref in self.values.items() if ref.node is node and name in targets}
        if views:
            storage = evaluate([node])[node]
            for name in views.values():
                copy_full_into(targets[name], self.values[name].view(storage))


def capture_init(module: nn.Module) -> InitPlan:
    """Find out how each tensor of `module` that is on the meta device gets its value. Call it before sharding.

    Raises:
        ParallelConfigError: Names every tensor whose value nothing gives, and the fix.
    """
    plain = [(owner, key, value) for owner in module.modules() for key, value in _attributes_on_meta(owner)]
    named = [(name, tensor) for name, tensor in _named_tensors(module) if tensor.device == META]
    if not named and not plain:
        return InitPlan({}, [])
    problems = Problems()
    _find_changed(named, problems)
    problems.raise_if_any()
    missing = {id(tensor) for _, tensor in named if not _has_value(tensor)}
    if missing:
        _record_resets(module, missing, problems)
    named = [(name, tensor) for name, tensor in _named_tensors(module) if tensor.device == META]
    names = {id(tensor): name for name, tensor in reversed(named)}

    def recipe(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device != META:
            return leaf
        return _Alias(names[id(leaf)]) if id(leaf) in names else ref_of(leaf)

    _find_valueless(module, named, problems)
    for owner, key, value in plain:
        if any(isinstance(t, Tensor) and id(t) not in names and not _has_value(t) for t in _compat.leaves(value)):
            problems.add(f"attribute {key} of {type(owner).__name__} holds a meta tensor without a value", _FIX)
    problems.raise_if_any()
    return InitPlan(
        {name: ref_of(tensor) for name, tensor in named},
        [(owner, key, _compat.map_leaves(recipe, value)) for owner, key, value in plain],
    )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _attributes_on_meta(owner: nn.Module) -> Iterator[tuple[str, Any]]:
    """Find meta tensors among the plain attributes of one module, also in lists, tuples and dicts."""
    for key, value in vars(owner).items():
        if key in ("_parameters", "_buffers", "_modules") or not isinstance(value, (Tensor, list, tuple, dict)):
            continue
        if any(isinstance(leaf, Tensor) and leaf.device == META for leaf in _compat.leaves(value)):
            yield key, value


def _attribute(leaf: Any, targets: dict[str, Tensor], device: torch.device) -> Any:
    if isinstance(leaf, _Alias):
        return targets.get(leaf.name, leaf)
    return leaf.view(evaluate([leaf.node])[leaf.node]).to(device) if isinstance(leaf, Ref) else leaf


def _has_value(tensor: Tensor) -> bool:
    """Tell whether the recorded operations give a value; parameters that are only allocated have none."""
    node = None if is_lazy(tensor) else node_of(tensor)
    if tensor.device != META or (node is None and not is_lazy(tensor) and not tensor.numel()):
        return True
    if node is None:
        return False
    if node.foreign:
        return sum(ref.nbytes for op in node.writes for ref in op.written if ref.node is node) >= node.nbytes
    return not isinstance(tensor, nn.Parameter) or not tensor.numel() or any(not op.blank for op in node.writes)


def _find_changed(named: list[tuple[str, Tensor]], problems: Problems) -> None:
    """Refuse what was cast, copied or written after the context: on the meta device such changes are lost."""
    for name, tensor in named:
        version = getattr(tensor, VERSION_MARK, None)
        if version is not None and (node_of(tensor) is None or tensor._version != version):
            problems.add(
                f"{name} was changed, cast or copied after its init context had ended, which the meta device forgets",
                "do everything that changes the weights inside configure_model() or the init context",
            )


def _find_valueless(module: nn.Module, named: list[tuple[str, Tensor]], problems: Problems) -> None:
    by_class: dict[str, list[str]] = {}
    for name, tensor in named:
        if not _has_value(tensor):
            owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
            by_class.setdefault(owner, []).append(name + (" (lazy: run one batch first)" if is_lazy(tensor) else ""))
    for owner, names in by_class.items():
        problems.add(
            f"on the meta device and nothing gives a value, in {owner}: {', '.join(names)}",
            f"{_FIX}, or give {owner} a reset_parameters() that sets all of its parameters and buffers",
        )


def _record_resets(module: nn.Module, missing: set[int], problems: Problems) -> None:
    """Record initialisation methods for tensors whose construction was not recorded."""

    def call(method: Any, owner: nn.Module, *args: Any) -> None:
        try:
            method(*args)
        except Exception as error:  # a user's method may raise anything; all problems are reported together
            problems.add(f"{type(owner).__name__}.{method.__name__} failed on the meta device: {error}", _FIX)

    with deferred_init(), torch.no_grad():
        for model, part in _children_first(module):
            tensors = [*part.parameters(), *part.buffers()]
            if model is not None and tensors and all(id(t) in missing for t in tensors):
                call(model._init_weights, part, part)
        for _, part in _children_first(module):
            lost = [t for t in (*part.parameters(recurse=False), *part.buffers(recurse=False)) if not _has_value(t)]
            kept = [p for p in part.parameters(recurse=False) if id(p) not in missing and p.numel()]
            reset = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
            if lost and not kept and callable(reset):
                call(reset, part)


def _children_first(module: nn.Module, model: Any = None) -> Iterator[tuple[Any, nn.Module]]:
    """Yield each module with the Hugging Face model that it is in, in the order in which constructors initialise."""
    if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        model = module
    for child in module.children():
        yield from _children_first(child, model)
    yield model, module


def _lies_in(name: str, modules: Collection[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _allocate(module: nn.Module, device: torch.device, ids: Collection[int]) -> None:
    """Replace some meta tensors of a module by uninitialised ones on `device`, and keep what `Module._apply` loses."""
    slots = [(owner, key, p) for owner in module.modules() for key, p in owner._parameters.items() if p is not None]
    notes = [dict(vars(param)) for _, _, param in slots]
    made: dict[int, Tensor] = {}

    def empty(tensor: Tensor) -> Tensor:
        if id(tensor) not in ids:
            return tensor
        return made.setdefault(id(tensor), torch.empty_like(tensor, device=device))

    # Holding the buffers keeps an id from being used twice. `_apply`, because FSDP2 then re-reads its shards, and
    # recurrent layers their flat weights.
    buffers = list(module.buffers())
    module._apply(empty)
    del buffers
    first: dict[int, nn.Parameter] = {}
    for (owner, key, old), note in zip(slots, notes, strict=True):
        new = first.setdefault(id(old), getattr(owner, key))
        if owner._parameters[key] is not new:
            owner._parameters[key] = new
        vars(new).update({k: v for k, v in note.items() if k != VERSION_MARK})
