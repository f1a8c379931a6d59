"""What users attach to parameters and modules, carried over to the sharded ones or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_par.errors import ParallelConfigError, Problem
from lightning_par.parallel import _compat
from lightning_par.parallel.shards import class_name

_OWN = ("_parameters", "_buffers", "_modules")


def carry_over(module: nn.Module) -> Callable[[], None]:
    """Note what the user has put on the parameters of a module, and where else they are kept, before it is sharded.

    Returns:
        A function to call afterwards: the new parameters get the attributes and the gradient hooks of the old ones, and
        take their places in lists, tuples and dicts that are attributes of modules.
    """
    old = dict(module.named_parameters())
    notes = {name: (dict(vars(param)), _compat.gradient_hooks(param)) for name, param in old.items()}
    name_of = {param: name for name, param in old.items()}
    kept = [
        (owner, key)
        for owner in module.modules()
        for key, value in vars(owner).items()
        if key not in _OWN and isinstance(value, list | tuple | dict) and _holds(value, name_of)
    ]

    def restore() -> None:
        new = dict(module.named_parameters())
        for name, param in new.items():
            attributes, hooks = notes[name]
            vars(param).update(attributes)
            if hooks is not None:
                _compat.set_gradient_hooks(param, hooks)
        for owner, key in kept:
            vars(owner)[key] = _compat.map_leaves(
                lambda leaf: new[name_of[leaf]] if _is_in(leaf, name_of) else leaf, vars(owner)[key]
            )

    return restore


def hook_problems(module: nn.Module) -> list[Problem]:
    """Find gradient hooks that would see something else than in one process, or nothing."""
    names = [name for name, param in module.named_parameters() if _compat.has_accumulation_hooks(param)]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        Problem(
            f"{names[0]}{more} has a hook of register_post_accumulate_grad_hook, which would run before the gradients "
            "are averaged over the ranks",
            "register_hook on the parameter, or LightningModule.on_before_optimizer_step",
        )
    ]


def sparse_problems(module: nn.Module) -> list[Problem]:
    """Find embeddings whose gradients are sparse, which are not averaged over data ranks."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    names = [name for name, child in module.named_modules() if isinstance(child, kinds) and child.sparse]
    return [
        Problem(
            f"{class_name(module.get_submodule(name))} {name!r} makes sparse gradients, and gradients that are "
            "averaged over ranks are dense",
            "sparse=False in it, with the dense form of the optimizer",
        )
        for name in names
    ]


def refuse_copies(module: nn.Module) -> None:
    """Say what to do instead where a sharded module is copied; torch only says that it cannot be."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            # A class that torch made, below the user's own.
            type(child).__deepcopy__ = _no_copy  # type: ignore[attr-defined]


def _no_copy(module: nn.Module, memo: Any) -> NoReturn:
    raise ParallelConfigError(
        Problem(
            f"{class_name(module)} is sharded, and a copy of it would lack what gathers its parameters",
            "copy the module in __init__ or configure_model, as a submodule, so that the copy is sharded too; or copy "
            "its parameters: {name: p.detach().clone() for name, p in module.named_parameters()}",
        )
    )


def _holds(value: Any, params: dict[nn.Parameter, str]) -> bool:
    return any(_is_in(leaf, params) for leaf in _compat.leaves(value))


def _is_in(leaf: Any, params: dict[nn.Parameter, str]) -> bool:
    return isinstance(leaf, nn.Parameter) and leaf in params
