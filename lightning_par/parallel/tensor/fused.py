"""The order of a fused column's output features.

In memory it is that of the ranks (q0 k0 v0 q1 k1 v1), so that each rank's slice is one piece. State dicts and
checkpoints see that of the undivided module (q k v), so that they fit any layout.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
