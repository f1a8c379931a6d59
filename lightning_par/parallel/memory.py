"""Memory: activation checkpointing, compilation of the blocks, and counting the bytes of a model's state.

Activation checkpointing (Chen et al. 2016, arXiv:1604.06174) keeps the inputs of a block and computes the rest of its
activations again in backward. With N equal blocks, activation memory falls from that of N blocks to that of one block
plus N inputs, for one more forward pass. The selective form (Korthikanti et al. 2022, arXiv:2205.05198) also keeps the
results that are dear to compute and small to hold.

A block is changed in place: its class is replaced by a subclass of the same name whose forward checkpoints the forward
of the original. Parameter names, module names and `isinstance` stay as they were, and hooks (FSDP's, pipelines') run
outside of the checkpoint, once.
"""

from __future__ import annotations

import copyreg
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_par.errors import Problem, Problems
from lightning_par.parallel import _compat, _compat_fsdp

Mode = Literal["full", "selective"]
MODES: tuple[Mode, ...] = ("full", "selective")

MATMULS = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "linear", "_addmm_activation", "_int_mm"),
        *("_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
    )
)
ATTENTION_KERNELS = frozenset(
    (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_attention_math_for_mps",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "flex_attention",
    )
)
COLLECTIVES = "_c10d_functional::"
SMALL_BUFFER = 2**16  # elements


@dataclass
class ActivationCheckpointing:
    """Which blocks compute their activations again in backward, and how much of them.

    Args:
        mode: ``"full"`` keeps only the inputs of a block. ``"selective"`` also keeps the result of every second matrix
            product, of attention kernels (those without dropout) and of collectives; torch refuses in backward what was
            written in place after it was kept, as by an in-place ReLU.
        every: Checkpoint every n-th block: the first, then each n-th after it.
    """

    mode: Mode = "full"
    every: int = 1


CheckpointSetting = bool | str | int | ActivationCheckpointing | Callable[[str, nn.Module], bool] | None


def apply_activation_checkpointing(
    blocks: Sequence[tuple[str, nn.Module]], setting: CheckpointSetting = True
) -> list[str]:
    """Make blocks compute their activations again in backward. Call it before compiling and before sharding.

    Losses and gradients stay bit for bit what they were: random states, the block's buffers and a key-value cache that
    it was given are as in the first forward when it is run again. While gradients are disabled nothing changes.

    Args:
        blocks: Names and modules, in the order of the forward. Changed in place. A block that is already checkpointed
            takes the new setting.
        setting: None or False: nothing. True or ``"full"``, ``"selective"``: all blocks. An int n: every n-th block, in
            full. An `ActivationCheckpointing`: both choices. A function of name and module: those where it is true.

    Returns:
        The names of the blocks that are checkpointed.

    Raises:
        ParallelConfigError: If the setting is none of these.
    """
    problems = Problems()
    problems.extend(checkpointing_problems(setting))
    problems.raise_if_any()
    chosen, mode = _choose(blocks, setting)
    for name, module in chosen:
        if "forward" in vars(module):
            problems.add(
                f"block `{name}` ({type(module).__name__}) carries a `forward` of its own on the instance, which hides "
                "the one of its class: it cannot be checkpointed in place",
                f"define forward in a subclass of {type(module).__name__}, or leave the block out: "
                "activation_checkpointing=lambda name, module: ...",
            )
    problems.raise_if_any()
    for _, module in chosen:
        base = vars(type(module)).get("_checkpoint_base", type(module))
        module.__class__ = _checkpointed_class(base, mode)
    return [name for name, _ in chosen]


def apply_compile(blocks: Sequence[tuple[str, nn.Module]], backend: str | None = None) -> None:
    """Compile each block in place, after checkpointing and before sharding; equal blocks share the compiled code.

    A checkpointed block that the compiler cannot trace as a whole (FSDP units inside of it, a key-value cache among its
    arguments) runs uncompiled, with the same result.

    Args:
        blocks: Names and modules. Changed in place.
        backend: A backend of `torch.compile`; None is its default.

    Raises:
        ParallelConfigError: If torch knows no such backend.
    """
    legal = torch.compiler.list_backends(exclude_tags=())
    if backend is not None and backend not in legal:
        problems = Problems()
        problems.add(f"compile backend {backend!r} is none of {', '.join(legal)}", "compile=True")
        problems.raise_if_any()
    for _, module in blocks:
        module.compile(backend=backend or "inductor")


def checkpointing_problems(setting: object) -> list[Problem]:
    """List what is wrong with the `activation_checkpointing` option, before there is a model."""
    problems = Problems()
    if setting is None or setting is False or callable(setting):
        return []
    explicit = _explicit(setting)
    legal = "it is None, True, 'full', 'selective', an int n (every n-th block), ActivationCheckpointing or a function"
    if explicit is None or explicit.mode not in MODES:
        problems.add(
            f"activation_checkpointing is {setting!r}; {legal} of name and module",
            "activation_checkpointing='full'",
            "activation_checkpointing: full",
        )
    elif isinstance(explicit.every, bool) or not isinstance(explicit.every, int) or explicit.every < 1:
        problems.add(
            f"activation_checkpointing of every n-th block with n={explicit.every!r}; n is an int >= 1",
            "activation_checkpointing=1",
        )
    return list(problems)


def _explicit(setting: object) -> ActivationCheckpointing | None:
    """Spell a short setting out; None if it is none of the known forms."""
    if setting is True:
        return ActivationCheckpointing()
    if isinstance(setting, str):
        return ActivationCheckpointing(cast(Mode, setting))
    if isinstance(setting, int):
        return ActivationCheckpointing(every=setting)
    return setting if isinstance(setting, ActivationCheckpointing) else None


def _choose(
    blocks: Sequence[tuple[str, nn.Module]], setting: CheckpointSetting
) -> tuple[list[tuple[str, nn.Module]], Mode]:
    if callable(setting):
        return [(name, module) for name, module in blocks if setting(name, module)], "full"
    explicit = _explicit(setting)
    if setting is False or explicit is None:
        return [], "full"
    return list(blocks[:: explicit.every]), explicit.mode


@functools.cache
def _checkpointed_class(base: type[nn.Module], mode: Mode) -> type[nn.Module]:
    """Return the subclass of `base` whose forward is checkpointed; always the same one for equal arguments."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return base.forward(self, *args, **kwargs)
        return _checkpointed_forward(base.forward, mode, self, args, kwargs)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        # copy and pickle look classes up by name, and find the original under that of this class.
        reduced = base.__reduce_ex__(self, protocol)
        if isinstance(reduced, tuple) and reduced[:2] == (copyreg.__newobj__, (checkpointed,)):  # type: ignore[attr-defined]
            return _new_instance, (base, mode), *reduced[2:]
        return reduced

    namespace = {
        "forward": forward,
        "__reduce_ex__": reduce_ex,
        "_checkpoint_base": base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    checkpointed: type[nn.Module] = type(base.__name__, (base,), namespace)
    return checkpointed


def _new_instance(base: type[nn.Module], mode: Mode) -> nn.Module:
    cls: type[nn.Module] = _checkpointed_class(base, mode)  # type: ignore[arg-type]  # mypy: a class is not hashable
    return cls.__new__(cls)


def _checkpointed_forward(
    forward: Callable[..., Any], mode: Mode, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    options: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}
    # Stopping early leaves the recomputation by an exception. Hooks inside the block (tensor and expert parallelism,
    # FSDP units of its norms) come in pairs and communicate: every rank must run all of them. Compiled code stops early
    # by itself.
    early_stop = not torch.compiler.is_compiling() and not _compat.has_inner_forward_hooks(module)
    return checkpoint(
        _replayed, [], forward, module, *args, use_reentrant=False, early_stop=early_stop, **options, **kwargs
    )


def _replayed(
    state: list[_ReplayedState], forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Run a forward or its recomputation; `state` is empty before the first and carries what they share."""
    # The compiler handles changes of state itself. Where it cannot, it calls this function without compiling.
    if torch.compiler.is_compiling():
        return forward(module, *args, **kwargs)
    if not state:
        state.append(_ReplayedState(module, args, kwargs))
    return state[0].run(forward, module, *args, **kwargs)


class _Buffer(NamedTuple):
    owner: nn.Module
    name: str
    buffer: Tensor
    version: int
    before: Tensor


class _ReplayedState:
    """What a forward changes besides computing outputs: the block's buffers, a key-value cache among its arguments.

    The recomputation must start from the state of the first forward and must leave no second trace (a batch-norm would
    count each batch twice, a cache would hold each token twice).

    Args:
        module: The block.
        args: Positional arguments of its forward.
        kwargs: Keyword arguments.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._caches = [(cache, _attributes(cache)) for cache in _caches_in((*args, *kwargs.values()))]
        self._buffers = [
            _Buffer(owner, name, buffer, _compat.tensor_version(buffer), buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]
        self._recorded = False

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the first forward, and later recomputations of it."""
        if not self._recorded:
            result = forward(*args, **kwargs)
            self._keep_changed()
            return result
        buffers = [(entry.owner, entry.name, getattr(entry.owner, entry.name)) for entry in self._buffers]
        caches = [(owner, _attributes(owner)) for owner, _ in self._caches]
        try:
            # The buffers of the module are set aside, not overwritten: other graphs may have saved them.
            for entry in self._buffers:
                setattr(entry.owner, entry.name, entry.before.clone())
            for cache, attributes in self._caches:
                _set_attributes(cache, attributes)
            return forward(*args, **kwargs)
        finally:
            for owner, name, buffer in buffers:
                setattr(owner, name, buffer)
            for cache, attributes in caches:
                _set_attributes(cache, attributes)

    def _keep_changed(self) -> None:
        # Kernels such as that of batch norm write statistics without a trace in the version counter, so vectors of
        # that size are always kept; a large constant, as a causal mask, is not.
        self._buffers = [
            entry
            for entry in self._buffers
            if entry.before.numel() <= SMALL_BUFFER
            or getattr(entry.owner, entry.name) is not entry.buffer
            or _compat.tensor_version(entry.buffer) != entry.version
        ]
        self._recorded = True


def _caches_in(values: Iterable[Any]) -> Iterator[Any]:
    """Find the key-value caches of transformers among `values`, with their parts (a layer each, one each for cross)."""
    for value in values:
        if callable(getattr(value, "get_seq_length", None)):
            yield value
            for part in vars(value).values():
                yield from _caches_in(part if isinstance(part, list) else [part])


def _attributes(owner: Any) -> dict[str, Any]:
    return {name: value.copy() if isinstance(value, list | dict) else value for name, value in vars(owner).items()}


def _set_attributes(owner: Any, attributes: dict[str, Any]) -> None:
    vars(owner).clear()
    vars(owner).update(
        {name: value.copy() if isinstance(value, list | dict) else value for name, value in attributes.items()}
    )


def _selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts of the forward and of the recomputation of one block call, with a policy that counts from zero."""
    policy = _SelectivePolicy()
    forward, recomputation = create_selective_checkpoint_contexts(policy)
    if torch.compiler.is_compiling():  # the compiler marks every operation, through these very objects
        return forward, recomputation
    return _Filtered(forward, policy), _Filtered(recomputation, policy)


class _Filtered(TorchDispatchMode):
    """Shows a mode of selective checkpointing the operations that may be kept, and no others.

    Those others may differ between forward and recomputation: hooks inside the block gather parameters only once.
    """

    supports_higher_order_operators = True  # flex attention is one

    def __init__(self, mode: TorchDispatchMode, policy: _SelectivePolicy) -> None:
        super().__init__()
        self._mode, self._policy = mode, policy

    def __enter__(self) -> Any:
        with self._mode:  # makes it count from zero in each recomputation
            pass
        # torch 2.11 asks again there.
        self._policy.matmuls = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _SelectivePolicy.considers(func):
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class _SelectivePolicy:
    """Decides for each operation of one block call whether its result is kept.

    Attributes:
        matmuls: How many there have been in the forward, or in the recomputation where it is asked there.
    """

    def __init__(self) -> None:
        self.matmuls = 0

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if self._keeps(op, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE

    @staticmethod
    def considers(op: Any) -> bool:
        """Whether results of this operation are ever kept."""
        name = _name(op)
        return name in MATMULS or name in ATTENTION_KERNELS or name.startswith(COLLECTIVES)

    def _keeps(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name = _name(op)
        if name in MATMULS:
            self.matmuls += 1
            return self.matmuls % 2 == 1
        if name in ATTENTION_KERNELS:
            # A kernel that is not run again does not advance the random state: later dropouts would draw other masks.
            return not _argument(op, "dropout_p", args, kwargs)
        # Operations that write into an argument (all_reduce_, ..._out) must be run again to write into the new one.
        return name.startswith(COLLECTIVES) and not name.endswith(("_", "_out"))


def _name(op: Any) -> str:
    return str(op.name()).partition(".")[0]


def _argument(op: Any, wanted: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the value that an operator call has for one argument; None where the operator has no such argument."""
    for index, argument in enumerate(op._schema.arguments if isinstance(op, torch._ops.OpOverload) else ()):
        if argument.name == wanted:
            return args[index] if index < len(args) else kwargs.get(wanted, argument.default_value)
    return None


class _StorageCounter:
    """Adds up the sizes of storages, each one once."""

    def __init__(self) -> None:
        self._seen: set[tuple[torch.device, int]] = set()

    def add(self, tensors: Iterable[Tensor | None]) -> int:
        """Return the bytes of the storages of `tensors` that were not seen before; meta and fake tensors have none."""
        return sum(self._add(plain) for t in tensors if t is not None for plain in _compat.plain_tensors(t))

    def _add(self, tensor: Tensor) -> int:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # sparse, lazy
            return 0
        if storage.device.type == "meta" or not storage.nbytes():
            return 0
        key = (storage.device, storage.data_ptr())
        if key in self._seen:
            return 0
        self._seen.add(key)
        return storage.nbytes()


def live_tensor_bytes(exclude: Iterable[Tensor] = ()) -> int:
    """Return the bytes of all tensors that Python can reach, each storage once and with its present size.

    Tensors that only C++ holds, as those that autograd saved for backward, are not seen. Slow: for tests and reports.

    Args:
        exclude: Tensors whose storages are not counted.
    """
    gc.collect()
    counter = _StorageCounter()
    counter.add(exclude)
    # issubclass of the type: isinstance asks lazy proxies for their __class__, which may import or compute.
    alive = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    return counter.add(alive) + counter.add(t.grad for t in alive if t.is_leaf)


def model_state_bytes(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> dict[str, int]:
    """Return the bytes that this rank holds for the state of a model, by kind, each storage once.

    Args:
        module: The root module, parallelised or not.
        optimizers: Its optimizers.

    Returns:
        ``parameters``: those the rank keeps (its shards with their padding, and replicated ones); ``gathered``:
        unsharded copies that FSDP2 holds now; ``gradients``: sharded, replicated, and unsharded ones that wait to be
        reduced; ``optimizer``: optimizer state, and master weights that are no parameters of the module.
    """
    fsdp = _compat_fsdp.fsdp_tensors(module)
    counter = _StorageCounter()
    parameters = counter.add(fsdp.sharded)
    gathered = counter.add(fsdp.gathered)
    parameters += counter.add(module.parameters())
    gradients = counter.add(fsdp.gradients) + counter.add(p.grad for p in module.parameters())
    states = _compat.leaves([(dict(o.state), o.param_groups) for o in optimizers])
    state = counter.add(leaf for leaf in states if isinstance(leaf, Tensor))
    return {"parameters": parameters, "gathered": gathered, "gradients": gradients, "optimizer": state}
