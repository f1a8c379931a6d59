"""Try whether an embedding or a head treats its rows alike, so that each rank can compute with some of them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.parallel._compat import leaves, map_leaves, map_tensors
from lightning_par.parallel.tensor._compat import map_first_tensor
from lightning_par.parallel.tensor.verify import TOLERANCE, InDouble, cotangent, describe

# Rows of a rank in a trial: enough for a first, a last and others.
_ROWS = 4


@dataclass(frozen=True)
class Call:
    """How a module was called; by default with one tensor of two dimensions.

    Attributes:
        args: Positional arguments; the first tensor has no values.
        kwargs: Keyword arguments.
        kind: The same for calls that differ in sizes only.
    """

    args: tuple[Any, ...] = (torch.empty(2, 2, dtype=torch.long, device="meta"),)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""

    @classmethod
    def seen(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Note a call, without its values where they do not matter."""
        kind = repr(map_leaves(lambda x: (x.dtype, x.dim()) if isinstance(x, Tensor) else x, (args, kwargs)))
        args, kwargs = map_tensors(Tensor.detach, (args, kwargs))
        args, kwargs = map_first_tensor(lambda first: first.to("meta"), args, kwargs)
        return cls(args, kwargs, kind)


def local_rows(ids: Tensor, rows: int, start: int, here: int) -> tuple[Tensor, Tensor]:
    """Number tokens by the rows of one rank, with 0 for those of other ranks.

    Args:
        ids: Tokens, any shape.
        rows: Size of the vocabulary.
        start: The rank's first row.
        here: Number of its rows.

    Returns:
        The numbers, and a mask of the tokens of other ranks. What is no token stays out of range, for the look-up to
        report as ever.
    """
    elsewhere = ((ids >= 0) & (ids < start)) | ((ids >= start + here) & (ids < rows))
    return (ids - start).masked_fill(elsewhere, 0), elsewhere


@contextmanager
def holding(module: nn.Module, slices: Mapping[str, Tensor], start: int) -> Iterator[None]:
    """Let a module hold slices of its parameters, and its padding token by its number among them.

    Args:
        module: An embedding or a Linear.
        slices: Plain tensors by the names of its parameters.
        start: The first row of the slices.
    """
    parameters, padding = dict(module._parameters), getattr(module, "padding_idx", None)
    module._parameters.update(slices)  # type: ignore[arg-type]
    if padding is not None:
        here = slices["weight"].shape[0]
        vars(module)["padding_idx"] = padding - start if start <= padding < start + here else None
    try:
        yield
    finally:
        module._parameters.update(parameters)
        if padding is not None:
            vars(module)["padding_idx"] = padding


def why_not_by_rows(module: nn.Module, call: Call, tp_size: int) -> str:
    """Compare a small copy of a module with what `tp_size` ranks compute, each with its rows; outputs and gradients.

    Args:
        module: An embedding or a Linear; only its size is of interest, not its values.
        call: How it is called.
        tp_size: Number of ranks.

    Returns:
        Why the numbers differ; empty if they do not.
    """
    twin = _small(module, _ROWS * tp_size)
    try:
        with torch.enable_grad(), InDouble():
            source, args, kwargs = _arguments(twin, call, _ROWS * tp_size)
            run = _embed if isinstance(module, nn.Embedding) else _project
            expected = run(twin, 1, source, args, kwargs)
            found = run(twin, tp_size, source, args, kwargs)
    except Exception as error:  # The module's own code, with sizes it may not know.
        return f"a slice of {type(module).__name__} does not run ({describe(error)})"
    for name, value in expected.items():
        difference = (found[name] - value).abs().max().item() / max(value.abs().max().item(), 1e-300)
        if not difference <= TOLERANCE:
            return f"{type(module).__name__} does not treat its rows alike (error {difference:.1e} in the {name})"
    return ""


def _small(module: nn.Module, rows: int) -> nn.Module:
    """A copy with few rows, in float64, without hooks: those run around the divided module."""
    generator = torch.Generator().manual_seed(0)
    twin = copy.copy(module)
    vars(twin).update(
        training=False,
        _parameters={
            name: param
            if param is None
            else nn.Parameter(torch.randn((rows, *param.shape[1:]), generator=generator, dtype=torch.float64))
            for name, param in module._parameters.items()
        },
        _buffers={
            name: buffer.double() if buffer is not None and buffer.is_floating_point() else buffer
            for name, buffer in module._buffers.items()
        },
        _forward_hooks=OrderedDict(),
        _forward_pre_hooks=OrderedDict(),
    )
    for size in {"num_embeddings", "out_features"} & vars(twin).keys():
        vars(twin)[size] = rows
    if getattr(module, "padding_idx", None) is not None:
        vars(twin)["padding_idx"] = rows - 2
    return twin


def _arguments(twin: Any, call: Call, rows: int) -> tuple[Tensor, Any, Any]:
    args, kwargs = map_tensors(lambda t: t if t.is_meta else t.to(twin.weight.device), (call.args, dict(call.kwargs)))
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    shape = tensors[0].shape
    if isinstance(twin, nn.Embedding) and tensors[0].is_floating_point():
        raise TypeError(f"it is called with {tensors[0].dtype} and not with tokens")
    if len(tensors) == 1:
        # As many values as show something, whatever the batch is.
        shape = torch.Size([*[2] * (len(shape) - 1), rows][: len(shape)])
    if isinstance(twin, nn.Embedding):
        return torch.arange(shape.numel()).reshape(shape) % rows, args, kwargs
    shape = torch.Size([*shape[:-1], twin.in_features])
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64), args, kwargs


def _slices(twin: nn.Module, ranks: int) -> dict[str, list[Tensor]]:
    """A slice of each parameter for each rank."""
    own = {name: param.detach() for name, param in twin._parameters.items() if param is not None}
    return {name: [part.clone().requires_grad_() for part in value.chunk(ranks)] for name, value in own.items()}


def _numbers(out: Tensor, sources: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """The output, and the gradients of what several ranks have a slice of each."""
    tensors = [tensor for slices in sources.values() for tensor in slices]
    gradients = iter(torch.autograd.grad(out, tensors, cotangent(out)))
    found = {f"gradient of {name}": torch.cat([next(gradients) for _ in slices]) for name, slices in sources.items()}
    return {"output": out.detach(), **found}


def _embed(twin: nn.Module, ranks: int, ids: Tensor, args: Any, kwargs: Any) -> dict[str, Tensor]:
    outs, slices = [], _slices(twin, ranks)
    here = len(slices["weight"][0])
    for rank in range(ranks):
        local, elsewhere = local_rows(ids, here * ranks, here * rank, here)
        rank_args, rank_kwargs = _with_first(local, args, kwargs)
        with holding(twin, {name: pieces[rank] for name, pieces in slices.items()}, here * rank):
            outs.append(twin(*rank_args, **rank_kwargs).masked_fill(elsewhere[..., None], 0))
    return _numbers(torch.stack(outs).sum(0), slices)


def _project(twin: nn.Module, ranks: int, x: Tensor, args: Any, kwargs: Any) -> dict[str, Tensor]:
    outs, slices, x = [], _slices(twin, ranks), x.clone().requires_grad_()
    args, kwargs = _with_first(x, args, kwargs)
    for rank in range(ranks):
        with holding(twin, {name: pieces[rank] for name, pieces in slices.items()}, 0):
            outs.append(twin(*args, **kwargs))
    return _numbers(torch.cat(outs, -1), {**slices, "the input": [x]})


def _with_first(tensor: Tensor, args: Any, kwargs: Any) -> Any:
    return map_first_tensor(lambda _: tensor, args, kwargs)
