"""Find the embeddings and heads that can be divided over the vocabulary.

Their own forward runs on slices of rows, so it must treat rows alike: small copies are tried, in float64. And nothing
else may read their weights: one run of the user's code is watched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from lightning_par.blocks import LARGE
from lightning_par.parallel._compat import leaves
from lightning_par.parallel.tensor._compat import TorchFunctionMode, function_name
from lightning_par.parallel.tensor.functions import METADATA
from lightning_par.parallel.tensor.rows import Call, why_not_by_rows

_GRADIENT: Any = Tensor.grad
# Reading a gradient, as for its norm, is no use of the weight.
_HARMLESS = {*METADATA, _GRADIENT.__get__}


@dataclass(frozen=True)
class VocabularyPlan:
    """What is divided over the vocabulary, outside the blocks.

    Attributes:
        tp_size: Number of ranks.
        embeddings: Names of the embeddings of which each rank has a slice of the rows.
        heads: Names of the Linears of which each rank has a slice of the output features.
        reasons: Why others stay replicated, by name.
        sharded_share: The part of the model's parameters that is divided, 0 to 1.
    """

    tp_size: int
    embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    sharded_share: float = 0.0

    def report(self) -> str:
        """Describe the plan, one line a module."""
        lines = [f"vocabulary over tp {self.tp_size}: {self.sharded_share:.1%} of the parameters divided"]
        lines += [f"  {name}: embedding, rows divided" for name in self.embeddings]
        lines += [f"  {name}: head, output features divided" for name in self.heads]
        return "\n".join([*lines, *(f"  {name}: replicated: {reason}" for name, reason in self.reasons.items())])


class _Group(NamedTuple):
    """Modules that share parameters, and are divided together or not at all."""

    modules: dict[str, nn.Module]
    parameters: set[nn.Parameter]

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.parameters)

    @property
    def is_tied_pair(self) -> bool:
        kinds = {isinstance(module, nn.Embedding) for module in self.modules.values()}
        return len(kinds) == 2


def plan_vocabulary(
    module: nn.Module, blocks: Sequence[str], tp_size: int, run: Callable[[], Any] | None = None
) -> VocabularyPlan:
    """Find what to divide; the module stays as it is.

    An embedding counts if it holds 2 % of the parameters or is tied to a head. A head is a Linear with as many output
    features as an embedding has rows, or tied to one; it counts likewise.

    Args:
        module: The model.
        blocks: Names of its blocks, where nothing is looked for.
        tp_size: Number of ranks.
        run: Makes one forward of the model, or better one step of the user; it shows whether anything reads the
            weights past their modules. Without it, that fails in the first step.
    """
    groups = _groups(module, blocks)
    total = max(1, sum(param.numel() for param in module.parameters()))
    watched = _watch(groups, run) if run is not None and groups else None
    divided: list[_Group] = []
    reasons: dict[str, str] = {}
    for group in groups:
        share = group.numel / total
        if share < LARGE and not group.is_tied_pair:
            why: str | None = f"it holds {share:.1%} of the parameters, less than {LARGE:.0%}"
        else:
            why = next(_limits(group, module, tp_size, watched), None)
        if why is None:
            divided.append(group)
        else:
            reasons.update(dict.fromkeys(group.modules, why))
    found = {name: one for group in divided for name, one in group.modules.items()}
    return VocabularyPlan(
        tp_size,
        tuple(name for name, one in found.items() if isinstance(one, nn.Embedding)),
        tuple(name for name, one in found.items() if not isinstance(one, nn.Embedding)),
        reasons,
        sum(group.numel for group in divided) / total,
    )


def _groups(module: nn.Module, blocks: Sequence[str]) -> list[_Group]:
    outside = {
        name: one
        for name, one in module.named_modules()
        if not any(name == block or name.startswith(f"{block}.") for block in blocks)
    }
    embeddings = [one for one in outside.values() if isinstance(one, nn.Embedding)]
    sizes = {embedding.num_embeddings for embedding in embeddings}
    groups: list[_Group] = []
    for name, one in outside.items():
        if isinstance(one, nn.Embedding) or (isinstance(one, nn.Linear) and one.out_features in sizes):
            modules: dict[str, nn.Module] = {name: one}
            parameters = set(one.parameters(recurse=False))
            for other in [group for group in groups if group.parameters & parameters]:
                groups.remove(other)
                modules, parameters = other.modules | modules, other.parameters | parameters
            groups.append(_Group(modules, parameters))
    return groups


def _limits(group: _Group, module: nn.Module, tp_size: int, watched: _Watch | None) -> Iterator[str]:
    """What rules out dividing a group."""
    for name, one in group.modules.items():
        yield from (f"{name}: {why}" if len(group.modules) > 1 else why for why in _own_limits(one, tp_size))
    names = {param: name for name, param in module.named_parameters()}
    if watched is None:
        own = {f"{name}.{key}" for name, one in group.modules.items() for key in one._parameters}
        for name, param in module.named_parameters(remove_duplicate=False):
            if param in group.parameters and name not in own:
                yield f"its parameter is {name} too, and without an example it is not known whether that is read"
    else:
        for param, reader in watched.reads.items():
            if param in group.parameters:
                yield f"{reader} reads {names[param]} outside the forward of the module that holds it"
        if not any(watched.calls.get(name) for name in group.modules):
            yield "its forward was not called in the example"
    for name, one in group.modules.items():
        for call in (watched.calls.get(name) if watched else None) or [Call()]:
            why = why_not_by_rows(one, call, tp_size)
            if why:
                yield f"{name}: {why}"


def _own_limits(module: Any, tp_size: int) -> Iterator[str]:
    weight = module._parameters.get("weight")
    if is_parametrized(module) or not isinstance(weight, Tensor):
        yield "its weight is computed from other parameters (parametrization, weight norm)"
        return
    if isinstance(weight, DTensor):
        yield "it is sharded already; divide it over tp first"
    if weight.dim() != 2 or not weight.is_floating_point():
        yield f"it is quantised: its weight is {weight.dtype} of shape {tuple(weight.shape)}"
    if extra := module._parameters.keys() - {"weight", "bias"} | module._modules.keys():
        yield f"it holds more than a weight and a bias: {', '.join(sorted(extra))}"
    rows = weight.shape[0]
    if rows % tp_size:
        padded = -(-rows // tp_size) * tp_size
        yield f"{rows} rows, which tp_size={tp_size} does not divide; pad to {padded}"
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            yield "max_norm changes its rows in a look-up"
        if module.sparse:
            yield "its gradients are sparse"
        if module.scale_grad_by_freq:
            yield "scale_grad_by_freq counts all tokens, of which a rank looks up its own"


class _Watch(TorchFunctionMode):
    """Notes which parameters are read while no module that holds them runs.

    Attributes:
        reads: The name of a function that did.
        calls: How each module was called, each way once.
    """

    def __init__(self, groups: Sequence[_Group]) -> None:
        super().__init__()
        self.reads: dict[nn.Parameter, str] = {}
        self.calls: dict[str, list[Call]] = {}
        self._running: Counter[nn.Parameter] = Counter()
        self._watched = {param for group in groups for param in group.parameters}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            for leaf in leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and leaf in self._watched and not self._running[leaf]:
                    self.reads.setdefault(leaf, function_name(func))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def hooked(self, name: str, module: nn.Module) -> Iterator[None]:
        """Note the calls of a module."""
        own = list(module.parameters(recurse=False))
        depth: list[None] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            depth.append(None)
            self._running.update(own)
            call = Call.seen(args, kwargs)
            if all(other.kind != call.kind for other in self.calls.setdefault(name, [])):
                self.calls[name].append(call)

        def after(module: nn.Module, args: Any, out: Any) -> None:
            if depth:
                depth.pop()
                self._running.subtract(own)

        handles = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _watch(groups: Sequence[_Group], run: Callable[[], Any]) -> _Watch:
    watch = _Watch(groups)
    with ExitStack() as stack:
        for group in groups:
            for name, one in group.modules.items():
                stack.enter_context(watch.hooked(name, one))
        stack.enter_context(watch)
        run()
    return watch
