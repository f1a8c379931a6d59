"""Find the embeddings and heads that can be divided over the vocabulary.

Their own forward runs on slices of rows, so it must treat rows alike: small copies are tried, in float64. And nothing
else may read their weights: one run of the user's code is watched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from lightning_par.blocks import LARGE
from lightning_par.errors import Problems
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
        gathered: Heads among them whose logits are gathered at once.
        reasons: Why others stay replicated, by name.
        divided_numel: Number of parameters that are divided.
        sharded_share: The part of the model's parameters that is divided, 0 to 1.
    """

    tp_size: int
    embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    divided_numel: int = 0
    sharded_share: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that is divided."""
        return (*self.embeddings, *self.heads)

    def report(self) -> str:
        """Describe the plan, one line a module."""
        share = f"{self.sharded_share:.1%} of the model" if self.names else "nothing is divided"
        lines = [f"embedding and head: {share}"]
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
    module: nn.Module,
    blocks: Sequence[str],
    tp_size: int,
    watched: Watched | None = None,
    *,
    wishes: Mapping[str, str] | None = None,
) -> VocabularyPlan:
    """Find what to divide; the module stays as it is.

    An embedding counts if it holds 2 % of the parameters or is tied to a head. A head is a Linear with as many output
    features as an embedding has rows, or tied to one; it counts likewise.

    Args:
        module: The model.
        blocks: Names of its blocks, where nothing is looked for.
        tp_size: Number of ranks.
        watched: What `watching` saw in one forward of the model, or better in one step of the user: whether anything
            reads the weights past their modules. Without it, that fails in the first step.
        wishes: "shard", "gather" or "replicate" by name of an embedding or Linear outside the blocks.

    Raises:
        ParallelConfigError: If what is wished cannot be had.
    """
    wishes = wishes or {}
    problems = Problems()
    groups = _groups(module, blocks)
    total = max(1, sum(param.numel() for param in module.parameters()))
    divided: list[_Group] = []
    reasons: dict[str, str] = {}
    for group in groups:
        share = group.numel / total
        wish = next((wishes[name] for name in group.modules if name in wishes), None)
        if wish == "replicate":
            why: str | None = "as tp_plan says"
        elif share < LARGE and not group.is_tied_pair and wish is None:
            why = f"it holds {share:.1%} of the parameters, less than {LARGE:.0%}"
        else:
            why = next(_limits(group, module, tp_size, watched), None)
        if why is None:
            divided.append(group)
        else:
            reasons.update(dict.fromkeys(group.modules, why))
            if wish in ("shard", "gather"):
                name = next(iter(group.modules))
                problems.add(f"{name} cannot be divided: {why}", f'tp_plan={{"{name}": "replicate"}}')
    others = wishes.keys() - {name for group in groups for name in group.modules}
    for name in sorted(name for name in others if wishes[name] != "replicate"):
        what = f"{name} lies outside the blocks and is neither an embedding nor a head, so it is not divided"
        problems.add(what, f'tp_plan={{"{name}": "replicate"}}')
    problems.raise_if_any()
    found = {name: one for group in divided for name, one in group.modules.items()}
    return VocabularyPlan(
        tp_size,
        tuple(name for name, one in found.items() if isinstance(one, nn.Embedding)),
        tuple(name for name, one in found.items() if not isinstance(one, nn.Embedding)),
        tuple(name for name, one in found.items() if isinstance(one, nn.Linear) and wishes.get(name) == "gather"),
        reasons,
        sum(group.numel for group in divided),
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


def _limits(group: _Group, module: nn.Module, tp_size: int, watched: Watched | None) -> Iterator[str]:
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


class Watched(TorchFunctionMode):
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


@contextmanager
def watching(module: nn.Module, blocks: Sequence[str]) -> Iterator[Watched]:
    """See how the modules of the vocabulary are used in what runs inside."""
    groups = _groups(module, blocks)
    watched = Watched(groups)
    with ExitStack() as stack:
        for group in groups:
            for name, one in group.modules.items():
                stack.enter_context(watched.hooked(name, one))
        stack.enter_context(watched)
        yield watched
