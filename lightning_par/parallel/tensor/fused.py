"""The order of a fused column's output features.

In memory it is that of the ranks (q0 k0 v0 q1 k1 v1), so that each rank's slice is one piece. State dicts and
checkpoints see that of the undivided module (q k v), so that they fit any layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel.shards import full_tensor, parameter_names, sharded_like

_NOTE = "_lightning_par_feature_order"


class FeatureOrder(NamedTuple):
    """Where the features of a parameter are.

    Attributes:
        indices: The undivided module's feature at each place, shape (features,).
        dim: The dimension of the features.
    """

    indices: Tensor
    dim: int

    def original(self, value: Tensor) -> Tensor:
        """Bring a value from the order of ranks into that of the undivided module; collective for a DTensor."""
        return self._selected(value, self.indices.argsort())

    def of_ranks(self, value: Tensor) -> Tensor:
        """Bring a value from the order of the undivided module into that of ranks; collective for a DTensor."""
        return self._selected(value, self.indices)

    def _selected(self, value: Tensor, indices: Tensor) -> Tensor:
        full = full_tensor(value)
        full = full.index_select(self.dim, indices.to(full.device))
        return sharded_like(full, value) if isinstance(value, DTensor) else full


def note_order(linear: nn.Module, indices: Tensor, *, transposed: bool) -> None:
    """Note the order of a fused column's features, and let state dicts have that of the undivided module.

    Args:
        linear: The fused column.
        indices: The undivided module's feature at each place.
        transposed: Whether its weight is (in, out).
    """
    linear.__dict__[_NOTE] = {
        name: FeatureOrder(indices, 1 if transposed and param.dim() == 2 else 0)
        for name, param in linear.named_parameters(recurse=False)
    }
    linear.register_state_dict_post_hook(_after_saving)
    linear.register_load_state_dict_pre_hook(_before_loading)


def feature_orders(module: nn.Module) -> dict[str, FeatureOrder]:
    """The order of each parameter whose features are not in that of the undivided module, by the parameter's name."""
    notes = {
        getattr(owner, key): order for owner in module.modules() for key, order in vars(owner).get(_NOTE, {}).items()
    }
    return {name: notes[param] for param, name in parameter_names(module).items() if param in notes}


def reorder_state(
    name: str, state: Mapping[str, Any], param: Tensor, order: FeatureOrder, *, to_ranks: bool
) -> dict[str, Any]:
    """Bring an optimizer's state of a parameter into another order of the features; collective for DTensors.

    Args:
        name: The parameter's name.
        state: Values by key.
        param: The parameter.
        order: Where its features are.
        to_ranks: From the order of the undivided module into that of ranks; else back.

    Raises:
        ParallelConfigError: If it cannot be told which part of a value belongs to which feature.
    """

    def brought(value: Tensor, order: FeatureOrder) -> Tensor:
        return order.of_ranks(value) if to_ranks else order.original(value)

    def reordered(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.numel() == 1:
            return value
        if value.ndim == param.ndim:
            # A factor has size 1 where it is a mean.
            return brought(value, order) if value.shape[order.dim] == param.shape[order.dim] else value
        if value.ndim == 1 and key.endswith(("row", "col")):
            kept = 0 if key.endswith("row") else 1
            return brought(value, order._replace(dim=0)) if kept == order.dim else value
        raise ParallelConfigError(
            Problem(
                f"optimizer state {key!r} of {name} has the shape {tuple(value.shape)}, and which of it belongs to "
                f"which feature of its parameter of shape {tuple(param.shape)} is not known; its features are in the "
                "order of the tp ranks",
                f'tp_plan={{"{name.rpartition(".")[0]}": "gather"}}',
            )
        )

    return {key: reordered(key, value) for key, value in state.items()}


def _after_saving(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, metadata: object) -> None:
    for name, order in vars(module)[_NOTE].items():
        value = state_dict.get(prefix + name)
        if value is not None and not value.is_meta:
            state_dict[prefix + name] = order.original(value.detach())


def _before_loading(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    for name, order in vars(module)[_NOTE].items():
        value = state_dict.get(prefix + name)
        if value is not None and not value.is_meta:
            state_dict[prefix + name] = order.of_ranks(value.detach())
