"""Logits whose classes are divided over ranks, for code that knows nothing of it.

To the user's code `DividedLogits` is a tensor of the global shape. Each rank holds a slice of the classes; what treats
all classes alike is computed on slices, `cross_entropy` too. Whatever else reads the logits gathers them, and computes
as torch does.

Autograd runs over the slices. It passes through the whole logits only where they enter or leave an `autograd.Function`,
which no `__torch_function__` sees: that of a module's backward hooks, of reentrant checkpointing, of the user.

Ranks compute the same loss, so gradients of what they all hold are equal; those of what meets slices are summed.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_par.parallel._compat import leaves, map_leaves, map_tensors
from lightning_par.parallel.tensor._compat import function_name, like_tensor, without_subclasses
from lightning_par.parallel.tensor.collectives import gather, sum_gradients
from lightning_par.parallel.tensor.cross_entropy import divided_cross_entropy
from lightning_par.parallel.tensor.functions import CASTS, ELEMENTWISE, METADATA, is_in_place, properties, variants

log = logging.getLogger(__name__)

_Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Division:
    """How logits are divided.

    Attributes:
        group: The ranks, in the order of their slices.
        classes: Number of classes on all ranks; the size of the group divides it.
        report: Called with a sentence whenever logits are gathered.
    """

    group: dist.ProcessGroup
    classes: int
    report: Callable[[str], None]

    @property
    def here(self) -> int:
        """Number of classes on each rank."""
        return self.classes // self.group.size()

    @property
    def start(self) -> int:
        """The first class of this rank."""
        return self.here * self.group.rank()


def report_once(level: int = logging.INFO) -> Callable[[str], None]:
    """Make a function that logs each sentence once, at some level."""
    told: set[str] = set()

    def report(sentence: str) -> None:
        if sentence not in told:
            told.add(sentence)
            log.log(level, "%s", sentence)

    return report


class DividedLogits(Tensor):
    """A tensor (..., classes) of which this rank has (..., classes / ranks); made by `divide_logits`.

    Reading it is a collective, unless the classes stay divided: all ranks of its group must do so, not the first alone.
    """

    _local: Tensor
    _division: Division
    _made_by: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with without_subclasses():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        result = NotImplemented if handler is None else handler(func, args, kwargs)
        return _on_whole(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd keeps what a custom function saves
            return _wrapper(args[0]._local.detach(), args[0]._division)
        if func is torch.ops.aten.add.Tensor:  # autograd sums up gradients
            division = next(arg._division for arg in args if isinstance(arg, DividedLogits))
            return _wrapper(torch.add(*(_cut(arg, division) for arg in args)), division)
        raise RuntimeError(
            f"{func} reads logits whose classes are divided over ranks in a way that cannot be followed: set "
            "loss_parallel=False"
        )


class _Wrap(torch.autograd.Function):
    """The whole logits, as an autograd function sees them."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, division: Division) -> Tensor:
        ctx.division = division
        return _wrapper(local, division)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _cut(gradients[0], ctx.division), None


class _Unwrap(torch.autograd.Function):
    """The slice of logits that an autograd function has returned."""

    @staticmethod
    def forward(ctx: Any, logits: DividedLogits) -> Tensor:
        ctx.division = logits._division
        return logits._local.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _wrapper(gradients[0], ctx.division)


def _wrapper(local: Tensor, division: Division) -> DividedLogits:
    ranks = division.group.size()
    shape = (*local.shape[:-1], division.classes)
    strides = (*(stride * ranks for stride in local.stride()[:-1]), local.stride(-1))
    logits = like_tensor(DividedLogits, local, shape, strides)
    logits._local, logits._division, logits._made_by = local, division, None
    return logits


def divide_logits(local: Tensor, division: Division) -> DividedLogits:
    """Make logits of the global shape from this rank's slice.

    Args:
        local: Shape (..., classes / ranks).
        division: How the classes are divided.

    Raises:
        ValueError: If the slice has another number of classes.
    """
    if not local.dim() or local.shape[-1] != division.here:
        raise ValueError(f"a slice of {division.here} of {division.classes} classes has the shape {tuple(local.shape)}")
    logits: DividedLogits = _Wrap.apply(local, division)
    logits._made_by = logits.grad_fn
    return logits


def whole(tensor: Tensor) -> Tensor:
    """Gather divided logits, with a gradient; collective over their ranks. Any other tensor is returned as it is."""
    if not isinstance(tensor, DividedLogits):
        return tensor
    return gather(_local(tensor), -1, tensor._division.group)


def gather_logits(data: Any) -> Any:
    """Gather the divided logits in nested containers, such as what a step returns; collective over their ranks."""
    if not any(isinstance(leaf, DividedLogits) for leaf in leaves(data)):
        return data
    return map_tensors(whole, data)


def _local(logits: DividedLogits) -> Tensor:
    """The slice of this rank, with the graph of the logits."""
    if logits.grad_fn is logits._made_by:
        return logits._local
    # They come out of an autograd function, which has computed without gradients.
    local: Tensor = _Unwrap.apply(logits)
    return local


def _rewrap(result: Any, logits: DividedLogits) -> Any:
    """Divided logits again, from the slices that a function of `logits` returned."""
    if isinstance(result, list | tuple):
        return type(result)(_rewrap(part, logits) for part in result)
    return logits if result is logits._local else divide_logits(result, logits._division)


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = "") -> Any:
    """Gather all divided logits among the arguments, say so, and compute as torch does."""
    if _writes(func, args, kwargs):
        _refuse_function(func, args, kwargs)
    division = next(leaf._division for leaf in leaves((args, kwargs)) if isinstance(leaf, DividedLogits))
    division.report(f"loss parallel is off: the step reads the logits with {function_name(func)}{why}")
    args, kwargs = map_leaves(lambda leaf: whole(leaf) if isinstance(leaf, DividedLogits) else leaf, (args, kwargs))
    return func(*args, **kwargs)


def _writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function would write into divided logits."""
    name = getattr(func, "__name__", "")
    in_place = is_in_place(name) or name in ("__setitem__", "__set__", "__delete__") or kwargs.get("inplace")
    targets = args[:1] if in_place else ()
    return any(isinstance(target, DividedLogits) for target in leaves((targets, kwargs.get("out"))))


def _refuse_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise RuntimeError(
        f"{function_name(func)} cannot be had of logits whose classes are divided over ranks: gather them with "
        "lightning_par.parallel.tensor.logits.whole, on all ranks, or set loss_parallel=False"
    )


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute on slices what treats each element alike; other tensors are broadcast along the classes, or cut."""
    logits = next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, DividedLogits))
    division = logits._division
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not all(_can_be_cut(tensor, division) for tensor in tensors):
        return NotImplemented
    if "out" in kwargs or (is_in_place(func.__name__) and args[0] is not logits):
        return NotImplemented
    args, kwargs = map_tensors(lambda tensor: _cut(tensor, division), (args, kwargs))
    result = func(*args, **kwargs)
    return _rewrap(result, logits) if isinstance(result, Tensor) else NotImplemented


def _can_be_cut(tensor: Tensor, division: Division) -> bool:
    if isinstance(tensor, DividedLogits):
        return tensor._division.group is division.group and tensor.shape[-1] == division.classes
    return not tensor.dim() or tensor.shape[-1] in (1, division.classes)


def _cut(tensor: Tensor, division: Division) -> Tensor:
    if isinstance(tensor, DividedLogits):
        return _local(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        tensor = sum_gradients(tensor, division.group)
    alike = not tensor.dim() or tensor.shape[-1] == 1
    return tensor if alike else tensor.narrow(-1, division.start, division.here)


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits = args[0]
    if not isinstance(logits, DividedLogits):  # `tensor.to(logits)`
        return NotImplemented
    local = _local(logits)
    args, kwargs = map_tensors(lambda t: t._local if isinstance(t, DividedLogits) else t, (args, kwargs))
    result = func(*args, **kwargs)
    # The group may not reach another device.
    if not isinstance(result, Tensor) or result.device != local.device:
        return NotImplemented
    return _rewrap(result, logits)


def _alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the first argument, and no other, is divided logits."""
    found = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, DividedLogits)]
    return len(found) == 1 and bool(args) and found[0] is args[0] and "out" not in kwargs


def _on_slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _rewrap(func(_local(args[0]), *args[1:], **kwargs), args[0])


def _along(position: int, default: int | None = None) -> _Handler:
    """Handle functions that do something along one dimension, which may be any but the classes."""

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dim = args[position] if len(args) > position else kwargs.get("dim", default)
        if not _alone(args, kwargs) or type(dim) is not int or dim in (-1, args[0].dim() - 1):
            return NotImplemented
        return _on_slice(func, args, kwargs)

    return handle


def _rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`for row in logits`."""
    return NotImplemented if args[0].dim() < 2 else iter(args[0].unbind(0))


def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move dimensions, as long as the classes stay the last."""
    if not _alone(args, kwargs) or kwargs:
        return NotImplemented
    last = args[0].dim() - 1
    dims = [dim % (last + 1) for dim in (args[1] if len(args) == 2 else args[1:])]
    stays = dims[-1:] == [last] if func in variants("permute") else last not in dims
    return _on_slice(func, args, kwargs) if stays else NotImplemented


def _flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | kwargs
    last = args[0].dim() - 1 if _alone(args, kwargs) else -1
    if not values.keys() <= {"start_dim", "end_dim"} or values.get("end_dim", -1) in (-1, last):
        return NotImplemented
    return _on_slice(func, args, kwargs)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the leading dimensions another shape."""
    shape = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if not _alone(args, kwargs) or kwargs or not shape or not all(isinstance(size, int) for size in shape):
        return NotImplemented
    logits, last = args[0], shape[-1]
    if last == -1:
        others = torch.Size(shape[:-1]).numel()
        last = logits.numel() // others if others else -1
    if last != logits._division.classes:
        return NotImplemented
    return _rewrap(func(_local(logits), (*shape[:-1], logits._division.here)), logits)


def _view_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].view(args[1].shape) if len(args) == 2 else NotImplemented


def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _alone(args, kwargs) or len(args) + len(kwargs) > 2 or kwargs.keys() - {"dim"}:
        return NotImplemented
    logits, last = args[0], args[0].dim() - 1
    dims = [*args[1:], *kwargs.values()] or [tuple(range(last))]
    wanted = {dim % (last + 1) for dim in (dims[0] if isinstance(dims[0], list | tuple) else dims)}
    # A rank may have one class only, which is not to disappear.
    return _rewrap(func(_local(logits), tuple(sorted(wanted - {last}))), logits)


def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not _alone(args, kwargs) or type(dim) is not int or dim in (-1, args[0].dim()):
        return NotImplemented
    return _on_slice(func, args, kwargs)


def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Index leading dimensions, by numbers, slices or tensors."""
    if not _alone(args, kwargs):
        return NotImplemented
    logits, index = args
    entries = list(index) if isinstance(index, tuple) else [index]
    consumed = [_consumes(entry) for entry in entries]
    if None in consumed:
        return NotImplemented
    used, dims = sum(count or 0 for count in consumed), logits.dim()
    from_the_end = any(entry is Ellipsis for entry in entries[:-1])
    if used < dims and not from_the_end:
        return _on_slice(func, args, kwargs)
    if entries and _is_everything(entries[-1], logits._division.classes):
        return _on_slice(func, (logits, (*entries[:-1], slice(None))), kwargs)
    return NotImplemented


def _consumes(entry: Any) -> int | None:
    """How many dimensions an entry of an index takes; None where that is not known."""
    if entry is Ellipsis or entry is None:
        return 0
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.dim() or None
    known = isinstance(entry, slice | Tensor) or type(entry) is int
    flat = isinstance(entry, list) and all(type(number) in (int, bool) for number in entry)
    return 1 if known or flat else None


def _is_everything(entry: Any, size: int) -> bool:
    return isinstance(entry, slice) and entry.indices(size) == (0, size, 1)


_CROSS_ENTROPY = inspect.signature(F.cross_entropy)


def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute on slices where the classes are dimension 1 (or the only one) and the targets are classes."""
    given = _CROSS_ENTROPY.bind(*args, **kwargs).arguments
    logits, target, weight = given.pop("input"), given.pop("target"), given.get("weight")
    why = _why_not(logits, target, weight, given)
    if why:
        return _on_whole(func, args, kwargs, f" of {why}")
    given = {name: value for name, value in given.items() if value is not None}
    local = _local(logits)
    if torch.is_autocast_enabled(local.device.type) and local.dtype in (torch.float16, torch.bfloat16):
        local = local.float()  # as autocast does for every cross entropy
    rows, classes = local.reshape(-1, logits._division.here), target.reshape(-1)
    with torch.autocast(local.device.type, enabled=False):
        losses = divided_cross_entropy(rows, classes, logits._division.group, **given)
    return losses.reshape(target.shape) if given.get("reduction") == "none" else losses


def _why_not(logits: Any, target: Tensor, weight: Tensor | None, given: dict[str, Any]) -> str:
    if not isinstance(logits, DividedLogits):
        return "other logits"
    if isinstance(target, DividedLogits) or target.is_floating_point():
        return "class probabilities"
    if logits.dim() > 2:
        return f"logits with classes in dimension 1 of {logits.dim()}"
    if target.dtype is not torch.int64 or target.shape != logits.shape[:-1]:
        return f"targets {target.dtype} of shape {tuple(target.shape)}"
    if weight is not None and (weight.requires_grad or weight.shape != logits.shape[-1:]):
        return f"weights of shape {tuple(weight.shape)}"
    if {"size_average", "reduce"} & {name for name, value in given.items() if value is not None}:
        return "a deprecated option"
    return ""


def _register_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the hook see the gradient of the whole logits, divided as they are."""
    logits, hook = args

    def on_local(gradient: Tensor) -> Tensor | None:
        changed = hook(divide_logits(gradient, logits._division))
        return None if changed is None else _cut(changed.detach(), logits._division)

    return _local(logits).register_hook(on_local)


_BACKWARD = inspect.signature(torch.autograd.backward)


def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Start from slices, with slices of the gradients."""
    given = _BACKWARD.bind(*args, **kwargs).arguments
    tensors, gradients = given["tensors"], given.get("grad_tensors")
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if gradients is None:
        gradients = [None] * len(tensors)
    pairs = list(zip(tensors, [gradients] if isinstance(gradients, Tensor) else gradients, strict=True))
    given["tensors"] = [_local(one) if isinstance(one, DividedLogits) else one for one, _ in pairs]
    given["grad_tensors"] = [
        _cut(gradient, one._division) if isinstance(one, DividedLogits) and gradient is not None else gradient
        for one, gradient in pairs
    ]
    func(**given)


def _of_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(_local(args[0]))


def _gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient = func(_local(args[0]))
    return None if gradient is None else divide_logits(gradient, args[0]._division)


def _describe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    logits = args[0]
    return (
        f"DividedLogits(shape={tuple(logits.shape)}, dtype={logits.dtype}, device={logits.device}, "
        f"{logits._division.here} of {logits._division.classes} classes here)"
    )


def _handlers() -> dict[Any, _Handler]:
    found: dict[Any, _Handler] = {}
    for names, handler in (
        (ELEMENTWISE, _elementwise),
        (CASTS, _cast),
        ("narrow select index_select", _along(1)),
        ("unbind", _along(1, 0)),
        ("split chunk", _along(2, 0)),
        ("transpose swapaxes swapdims permute", _permute),
        ("flatten", _flatten),
        ("view reshape", _view),
        ("view_as", _view_as),
        ("squeeze", _squeeze),
        ("unsqueeze", _unsqueeze),
        ("cross_entropy", _cross_entropy),
        ("__getitem__", _index),
        ("__iter__", _rows),
        ("register_hook", _register_hook),
        ("retain_grad", _of_local),
        ("__repr__ __format__", _describe),
        ("data_ptr storage untyped_storage share_memory_ is_shared __reduce_ex__ __dlpack__", _refuse_function),
    ):
        found.update(dict.fromkeys(variants(*names.split()), handler))
    found.update(dict.fromkeys(properties("_base", "_version"), _of_local))
    found.update(dict.fromkeys(properties("grad"), _gradient))
    found.update(dict.fromkeys(properties("data"), _cast))
    found[torch.autograd.grad] = _refuse_function
    found[torch.autograd.backward] = _backward
    return found


_HANDLERS = _handlers()
