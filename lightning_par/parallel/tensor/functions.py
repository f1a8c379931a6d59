"""Functions of torch by what they do, as `__torch_function__` gets them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# They treat each element alike.
ELEMENTWISE = (
    "add sub subtract mul multiply div divide true_divide neg negative pow square sqrt exp log tanh sigmoid abs "
    "clamp clamp_min clamp_max clip masked_fill where maximum minimum nan_to_num rsub __rsub__ __rdiv__ __pow__ "
    "__rpow__ add_ sub_ mul_ div_ neg_ tanh_ clamp_ clamp_min_ clamp_max_ masked_fill_ __iadd__ __isub__ __imul__ "
    "__idiv__ __itruediv__ __add__ __radd__ __sub__ __mul__ __rmul__ __div__ __truediv__ __neg__"
)
# They give the same values in another dtype or memory.
CASTS = "float half bfloat16 double to type type_as cpu cuda clone contiguous detach"


def variants(*names: str) -> list[Any]:
    """Return the functions of these names in torch, of tensors and in `torch.nn.functional`."""
    holders = (torch, Tensor, F)
    return [getattr(holder, name) for name in names for holder in holders if callable(getattr(holder, name, None))]


def properties(*names: str) -> list[Any]:
    """Return what reads these properties of a tensor."""
    return [getattr(Tensor, name).__get__ for name in names]


def is_in_place(name: str) -> bool:
    """Whether a function of that name writes into its first argument."""
    if name.endswith("__"):
        return name.startswith("__i") and name not in ("__iter__", "__invert__", "__index__", "__int__")
    return name.endswith("_")


# They read no values.
METADATA = {
    *variants("size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex"),
    *variants("is_contiguous", "is_signed", "is_inference", "is_same_size", "get_device", "element_size"),
    *(Tensor.__len__, Tensor.__hash__),
    *properties("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn"),
    *properties("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla"),
    *properties("is_mps", "is_xpu", "itemsize", "nbytes", "output_nr"),
}
