"""Find the repeated blocks of a model, and the modules beside them that deserve an FSDP unit of their own.

Almost every model worth sharding is prefix -> block 0 ... block n-1 -> suffix. The chain is found by its structure:
members of one container, or attributes with numbers in their names, that are of one class and hold much of the model.
Names and sizes are all that is looked at, so models on the meta device work.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from lightning_par.errors import ParallelConfigError, Problem, Problems

# A family, or a module beside the blocks, counts from this part of all parameters on.
LARGE = 0.02
# `_no_split_modules` of Hugging Face models is followed where its classes hold this part of the parameters.
HINT_COVERAGE = 0.5
_Modules = Collection[nn.Module]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WRAPPED = {"OptimizedModule": "_orig_mod", "CheckpointWrapper": "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class BlockFamily:
    """Blocks of one class.

    Attributes:
        class_name: Its name.
        names: Their fully qualified names, in the order of registration; a shared module has one.
        numel: Number of parameters in all of them.
    """

    class_name: str
    names: tuple[str, ...]
    numel: int = 0


@dataclass(frozen=True)
class ShardGroup:
    """Modules outside the blocks that form one FSDP unit.

    Attributes:
        names: Their fully qualified names, in the order of registration.
        label: "embedding", "norm+head", "head", "module" (another large one), or "tied ..." (modules
            that share a parameter).
        numel: Number of parameters of the unit.
    """

    names: tuple[str, ...]
    label: str
    numel: int = 0


@dataclass(frozen=True)
class BlockPlan:
    """What becomes an FSDP unit: each block, then each group in this order, then the root for the rest.

    Every parameter lies in exactly one unit, under all its names, when units are formed in that order.

    Attributes:
        families: Blocks by class.
        groups: Units beside the blocks; inner ones come before those that contain them.
        names: All blocks, in the order of registration.
        total_numel: Number of parameters of the model; shared ones count once.
        block_numel: Those in blocks.
        root_numel: Those in no block and no group.
        root_parameters: Their names.
        seen: How many modules of each class there are below the root.
    """

    families: tuple[BlockFamily, ...]
    groups: tuple[ShardGroup, ...]
    names: tuple[str, ...]
    total_numel: int
    block_numel: int
    root_numel: int
    root_parameters: tuple[str, ...] = ()
    seen: dict[str, int] = field(default_factory=dict)

    @property
    def coverage(self) -> float:
        """The part of the parameters that lies in blocks, 0 to 1."""
        return self.block_numel / max(self.total_numel, 1)

    def report(self) -> str:
        """Describe families, groups and what stays in the root, one line each, with sizes."""
        lines = [f"blocks: {len(self.names)}, with {self.coverage:.1%} of {self.total_numel:,} parameters"]
        for family in self.families:
            ends = family.names if len(family.names) < 3 else (family.names[0], "...", family.names[-1])
            lines.append(f"  {family.class_name} x {len(family.names)}: {' '.join(ends)} ({self._size(family.numel)})")
        if not self.families:
            lines.append("  nothing repeats: the model is one unit")
        lines += [f"group {g.label}: {', '.join(g.names)} ({self._size(g.numel)})" for g in self.groups]
        listed = ", ".join(self.root_parameters[:6]) + (", ..." if len(self.root_parameters) > 6 else "")
        return "\n".join([*lines, f"root: {listed or 'nothing'} ({self._size(self.root_numel)})"])

    def _size(self, numel: int) -> str:
        return f"{numel:,} parameters, {numel / max(self.total_numel, 1):.1%}"


def find_blocks(
    model: nn.Module,
    blocks: str | type[nn.Module] | Sequence[str | type[nn.Module]] = "auto",
    *,
    require: bool = True,
    wanted_for: str = "",
) -> BlockPlan:
    """Find the repeated blocks of a model and group what lies beside them; changes nothing.

    Args:
        model: The whole model or a LightningModule around it, on any device, also meta.
        blocks: "auto", or one or several classes, names of classes, or globs of module names
            (``"model.layers.*"``). Of nested matches the outermost is the block.
        require: Whether a model without repeated blocks is an error. If not, a model whose blocks, found by "auto",
            share parameters counts as one without.
        wanted_for: The option that needs blocks, for the message.

    Returns:
        The plan; without families and groups where nothing repeats.

    Raises:
        ParallelConfigError: If nothing repeats (it lists the classes seen), an entry of `blocks` matches nothing, or
            blocks share a parameter with each other or with a module outside.
    """
    tree = _Tree(model)
    automatic = isinstance(blocks, str) and blocks == "auto"
    if automatic:
        chosen = _structural(tree, _hinted(tree), sequential=False) or _structural(tree, set(), sequential=True)
    else:
        chosen = _select(tree, blocks)
    conflicts = _sharing_problems(tree, chosen)
    if not automatic or require:
        conflicts.raise_if_any()
    if conflicts:
        chosen = []
    if require and not chosen:
        wanted = f", and {wanted_for} works on blocks" if wanted_for else ""
        raise ParallelConfigError(
            Problem(
                f"no repeated blocks found in {type(model).__name__} ({tree.total:,} parameters){wanted}. "
                f"Classes present, and their part of the parameters: {_classes(tree) or 'none'}",
                'blocks=["MyBlock"] (a class, its name, or a glob of module names)'
                + (f", or no {wanted_for.partition('=')[0]}" if wanted_for else ""),
                "blocks: [MyBlock]",
            )
        )
    return _plan(tree, chosen)


class _Tree:
    """The modules of a model by name, without what lies inside metrics."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        # By name: torchmetrics need not be installed.
        metrics = {m for m in root.modules() if "torchmetrics.metric.Metric" in _class_names(m)}
        self.names = {module: name for name, module in root.named_modules(memo=metrics)}
        self.order = {module: i for i, module in enumerate(self.names)}
        self.total = _numel(root.parameters())

    def below_root(self) -> Iterator[nn.Module]:
        return (module for module in self.names if module is not self.root)

    def is_large(self, numel: int) -> bool:
        return numel >= LARGE * self.total and numel > 0

    def seen(self) -> dict[str, int]:
        return dict(Counter(_class(module).__name__ for module in self.below_root()))


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return what `torch.compile` or activation checkpointing has wrapped, or the module itself."""
    inner = getattr(module, _WRAPPED.get(type(module).__name__, ""), module)
    return module if inner is module else _unwrapped(inner)


def _class(module: nn.Module) -> type[nn.Module]:
    return type(_unwrapped(module))


def _class_names(module: nn.Module) -> set[str]:
    """Return the name and the import path of the class and of its bases."""
    return {name for c in _class(module).__mro__ for name in (c.__name__, f"{c.__module__}.{c.__qualname__}")}


def _has_forward(module: nn.Module, sequential: bool = False) -> bool:
    """Whether a module is called, so that hooks on it run; a plain `nn.Sequential` may be, or may be iterated over."""
    forward = _class(module).forward
    return forward is not nn.Module.forward and (sequential or forward is not nn.Sequential.forward)


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in set(parameters))


def _numel_of(modules: Iterable[nn.Module]) -> int:
    return _numel(parameter for module in modules for parameter in module.parameters())


def _reachable(module: nn.Module, name: str, stop: _Modules) -> dict[nn.Parameter, str]:
    """Map parameters to names in the way of FSDP's walk over a unit, which does not enter other units."""
    found: dict[nn.Parameter, str] = {}
    visited = set(stop)

    def visit(module: nn.Module, name: str) -> None:
        visited.add(module)
        for parameter_name, parameter in module.named_parameters(name, recurse=False):
            found.setdefault(parameter, parameter_name)
        for child_name, child in module.named_children():
            if child not in visited:
                visit(child, f"{name}.{child_name}" if name else child_name)

    visit(module, name)
    return found


def _ancestors(tree: _Tree, modules: _Modules) -> set[nn.Module]:
    return {m for m in tree.names if m not in modules and any(child in modules for child in m.modules())}


def _outermost(modules: _Modules) -> list[nn.Module]:
    inside = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if module not in inside]


class _Candidate(NamedTuple):
    """A module that may be a block; `uses` counts the names under which `parent` holds it."""

    module: nn.Module
    parent: nn.Module
    uses: int


def _hinted(tree: _Tree) -> set[nn.Module]:
    """Find the blocks that Hugging Face names in `_no_split_modules`, if they hold enough of the model."""
    hints = defaultdict(set)
    for module in tree.names:
        for class_name in getattr(module, "_no_split_modules", None) or ():
            hints[class_name].update(module.modules())
    members: dict[type[nn.Module], list[_Candidate]] = defaultdict(list)
    for candidate in _candidates(tree, opened=tree.names, fixed=(), sequential=False):
        class_ = _class(candidate.module)
        if candidate.module in hints.get(class_.__name__, ()):
            members[class_].append(candidate)
    chosen = _outermost([c.module for same in members.values() if sum(c.uses for c in same) > 1 for c in same])
    return set(chosen) if _numel_of(chosen) >= HINT_COVERAGE * tree.total else set()


def _structural(tree: _Tree, fixed: _Modules, sequential: bool) -> list[nn.Module]:
    """Walk down from the root and stop at the first level where a class repeats; `fixed` are blocks known already.

    A candidate whose class makes no family is opened, and what lies inside is looked at as well.
    """
    around = _ancestors(tree, fixed)
    opened = set(around)
    while True:
        members: dict[type[nn.Module], list[_Candidate]] = defaultdict(list)
        for candidate in _candidates(tree, opened, fixed, sequential):
            if candidate.module not in around:
                members[_class(candidate.module)].append(candidate)
        large = {c: same for c, same in members.items() if tree.is_large(_numel_of(x.module for x in same))}
        families = {c: same for c, same in large.items() if sum(x.uses for x in same) > 1}
        # The odd one out in a list of blocks is a block: the one attention layer of a hybrid, a first dense layer.
        lists = {x.parent for same in families.values() for x in same if isinstance(x.parent, nn.ModuleList)}
        families |= {c: same for c, same in large.items() if any(x.parent in lists for x in same)}
        rejected = {x.module for c, same in members.items() if c not in families for x in same}
        if rejected <= opened:
            return _outermost([*fixed, *(x.module for same in families.values() for x in same)])
        opened |= rejected


def _candidates(tree: _Tree, opened: _Modules, fixed: _Modules, sequential: bool) -> list[_Candidate]:
    """List what might be a block; looks inside a candidate only if it is in `opened`."""
    found = []
    visited = set(fixed)

    def visit(parent: nn.Module) -> None:
        names: dict[nn.Module, list[str]] = defaultdict(list)
        for name, child in parent.named_modules(remove_duplicate=False):
            if name and "." not in name:
                names[child].append(name)
        for child, own_names in names.items():
            if child in visited or child not in tree.names:
                continue
            visited.add(child)
            numbered = isinstance(parent, _CONTAINERS) or all(name[-1].isdigit() for name in own_names)
            if numbered and _has_forward(child, sequential) and any(True for _ in _unwrapped(child).children()):
                found.append(_Candidate(child, parent, len(own_names)))
                if child not in opened:
                    continue
            visit(child)

    visit(tree.root)
    return found


def _select(tree: _Tree, blocks: str | type[nn.Module] | Sequence[str | type[nn.Module]]) -> list[nn.Module]:
    """Return the modules that the user named; an entry that matches nothing, or no possible block, is an error."""
    problems = Problems()
    matches: list[tuple[str, list[nn.Module]]] = []
    for entry in [blocks] if isinstance(blocks, str | type) else blocks:
        spelled = entry.__name__ if isinstance(entry, type) else str(entry)
        matched = [module for module in tree.below_root() if _matches(entry, tree.names[module], module)]
        usable = [m for m in matched if _has_forward(m, sequential=True) and any(True for _ in m.parameters())]
        if not matched:
            problems.extend([_no_match(tree, spelled)])
        elif not usable:
            problems.add(
                f"blocks: {spelled!r} matches {len(matched)} modules such as {tree.names[matched[0]]!r} "
                f"({_class(matched[0]).__name__}), none with parameters and a forward of its own",
                f"blocks=['{tree.names[matched[0]]}.*'] names what is inside",
                f"blocks: ['{tree.names[matched[0]]}.*']",
            )
        matches.append((spelled, usable))
    chosen = _outermost(dict.fromkeys(module for _, usable in matches for module in usable))
    for spelled, usable in matches:
        if usable and not set(usable) & set(chosen):
            problems.add(
                f"blocks: {spelled!r} matches only modules inside other blocks, such as "
                f"{tree.names[usable[0]]!r}; blocks do not nest",
                f"leave {spelled!r} out of blocks",
            )
    problems.raise_if_any()
    return chosen


def _matches(entry: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(entry, type):
        return issubclass(_class(module), entry)
    return entry in _class_names(module) or fnmatchcase(name, str(entry))


def _no_match(tree: _Tree, entry: str) -> Problem:
    seen = tree.seen()
    known = {text.lower(): text for text in [*filter(None, tree.names.values()), *seen]}
    near = [known[k] for k in difflib.get_close_matches(entry.lower(), known, n=3)]
    best = next((text for text in near if text in seen), next(iter(near), "MyBlock"))
    return Problem(
        f"blocks: {entry!r} matches no module of {type(tree.root).__name__}; near misses: {', '.join(near) or 'none'}. "
        f"Classes present: {_classes(tree)}",
        f"blocks=['{best}'] (a class, its name, or a glob of module names)",
        f"blocks: [{best}]",
    )


def _classes(tree: _Tree) -> str:
    """List the classes of a model with their number and part of the parameters, largest first."""
    members: dict[str, list[nn.Module]] = defaultdict(list)
    for module in tree.below_root():
        members[_class(module).__name__].append(module)
    sizes = {name: _numel_of(same) / max(tree.total, 1) for name, same in members.items()}
    return ", ".join(f"{n} x {len(members[n])} ({sizes[n]:.1%})" for n in sorted(sizes, key=lambda n: (-sizes[n], n)))


def _sharing_problems(tree: _Tree, chosen: Sequence[nn.Module]) -> Problems:
    """Find parameters that lie in two blocks, or in a block and outside: they would belong to two units."""
    owners: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    shared: dict[tuple[nn.Module, nn.Module], list[tuple[str, str]]] = defaultdict(list)
    for block in [*chosen, tree.root]:
        for parameter, name in _reachable(block, tree.names[block], chosen).items():
            owner, other_name = owners.setdefault(parameter, (block, name))
            if owner is not block:
                shared[owner, block].append((other_name, name))
    problems = Problems()
    for (one, other), names in shared.items():
        more = f" (and {len(names) - 1} more parameters)" if len(names) > 1 else ""
        where = "outside the blocks" if other is tree.root else f"in block {tree.names[other]!r}"
        enclosing = _enclosing(tree, names[0])
        fix = "give each its own parameter, or share the whole block module"
        problems.add(
            f"{names[0][0]!r} in block {tree.names[one]!r} and {names[0][1]!r} {where} are the same parameter{more}; "
            "a parameter can only be in one FSDP unit",
            f"blocks=['{enclosing}'] makes one unit of both; or {fix}" if enclosing else fix,
            f"blocks: [{enclosing}]" if enclosing else "",
        )
    return problems


def _enclosing(tree: _Tree, names: tuple[str, str]) -> str:
    """Name the smallest callable module below the root that contains both parameters, if there is one."""
    one, other = ({name[:i] for i, letter in enumerate(name) if letter == "."} for name in names)
    callables = {name for module, name in tree.names.items() if _has_forward(module)}
    return max(one & other & callables, key=len, default="")


def _plan(tree: _Tree, chosen: Sequence[nn.Module]) -> BlockPlan:
    ordered = sorted(chosen, key=tree.order.__getitem__)
    members: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for block in ordered:
        members[_class(block)].append(block)
    families = [BlockFamily(c.__name__, tuple(tree.names[x] for x in m), _numel_of(m)) for c, m in members.items()]
    units = set(ordered)
    groups = _leaf_groups(tree, units) if ordered else []
    rest = _reachable(tree.root, "", units)
    return BlockPlan(
        families=tuple(families),
        groups=tuple(groups),
        names=tuple(tree.names[block] for block in ordered),
        total_numel=tree.total,
        block_numel=_numel_of(ordered),
        root_numel=_numel(rest),
        root_parameters=tuple(rest.values()),
        seen=tree.seen(),
    )


def _leaf_groups(tree: _Tree, units: set[nn.Module]) -> list[ShardGroup]:
    """Group large or tied modules outside the blocks, and add them to `units`."""
    last_block = max(tree.order[block] for block in units)
    pieces = _tied_pieces(tree, units)
    loose = [p[0] for p in pieces if len(p) == 1]
    wanted = [piece for piece in pieces if len(piece) > 1 or tree.is_large(_numel_of(piece))]

    def tail(piece: Sequence[nn.Module]) -> list[nn.Module]:
        return [module for module in piece if tree.order[module] > last_block and not _is_named(module, "norm")]

    head = next((p for p in sorted(wanted, key=len, reverse=True) if tail(p)), None)
    end = tree.order[tail(head)[-1]] if head else 0
    norms = [m for m in loose if _is_named(m, "norm") and last_block < tree.order[m] < end]
    norm = max(norms, key=tree.order.__getitem__, default=None)
    groups = []
    for piece in wanted:
        if norm and piece == [norm]:
            continue
        roles = ["embedding"] if any(_is_named(m, "embed") and tree.order[m] < last_block for m in piece) else []
        roles += ["norm"] if norm and piece is head else []
        roles += ["head"] if piece is head or (len(piece) > 1 and tail(piece)) else []
        label = ("tied " if len(piece) > 1 else "") + ("+".join(roles) or "module")
        modules = sorted([*piece, norm] if norm and piece is head else piece, key=tree.order.__getitem__)
        units.update(modules)
        groups.append(ShardGroup(tuple(tree.names[m] for m in modules), label, _numel_of(modules)))
    return groups


def _is_named(module: nn.Module, word: str) -> bool:
    return any(word in c.__name__.lower() for c in type(module).__mro__)


def _tied_pieces(tree: _Tree, blocks: _Modules) -> list[list[nn.Module]]:
    """List the modules outside the blocks that can be units; those that share parameters together.

    A module that holds parameters itself is not taken apart: `nn.MultiheadAttention` never calls its `out_proj`.
    """
    ancestors = _ancestors(tree, blocks)
    leaves: list[nn.Module] = []
    parents: dict[nn.Module, set[nn.Module]] = defaultdict(set)
    visited = set(blocks)

    def visit(parent: nn.Module) -> None:
        for child in parent.children():
            if child in visited or child not in tree.names:
                continue
            visited.add(child)
            owns = any(True for _ in child.parameters(recurse=False))
            if owns and child not in ancestors and _has_forward(child):
                leaves.append(child)
            else:
                visit(child)

    visit(tree.root)
    for parent in tree.names:
        for child in parent.children():
            parents[child].add(parent)
    # A module that another one holds too, beside the path to the blocks, may be used there without being called.
    bound = {p for m in leaves if len(parents[m]) > 1 and not parents[m] <= ancestors for p in m.parameters()}
    elsewhere = bound | _reachable(tree.root, "", {*blocks, *leaves}).keys()
    piece_of: dict[nn.Parameter, list[nn.Module]] = {}
    for leaf in leaves:
        piece = [leaf]
        for parameter in leaf.parameters():
            other = piece_of.get(parameter, piece)
            if not any(module in piece for module in other):
                piece = [*other, *piece]
        piece_of.update((p, piece) for module in piece for p in module.parameters())
    pieces = {id(piece): piece for piece in piece_of.values()}.values()
    return [piece for piece in pieces if not any(p in elsewhere for m in piece for p in m.parameters())]
