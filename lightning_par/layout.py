"""The parallel layout: six sizes, checked against the world size, and the groups of ranks that follow from them.

Everything but `ParallelMesh` is arithmetic on integers, so a layout of thousands of ranks can be planned, printed and
tested without torch and without processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from lightning_par.errors import ParallelConfigError, Problem, Problems

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_RULE = "a size is a whole number, at least 1"

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes whose sizes multiply to the world size, outermost first."""

_SIZES = tuple(f"{axis}_size" for axis in AXES)

_FLATTENED = {
    "data": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "model": ("pp", "cp", "tp"),
}

# What the ranks of one group have in common. The two expert views cut (dp_shard, cp, tp) in another way.
_SHARED: dict[str, tuple[str, ...]] = {
    **{axis: tuple(other for other in AXES if other != axis) for axis in AXES},
    **{view: tuple(other for other in AXES if other not in axes) for view, axes in _FLATTENED.items()},
    "ep": ("pp", "dp_replicate", "expert_fsdp"),
    "expert_fsdp": ("pp", "dp_replicate", "ep"),
}

# Where several changes are as good, data axes go first: they change no arithmetic inside the model.
_PREFERRED = ("dp_shard_size", "dp_replicate_size", "tp_size", "cp_size", "pp_size")

VIEWS = tuple(_SHARED)
"""Every name that `ParallelLayout.groups` takes."""

# What differs between the ranks of a group, and what they do together.
_MEANING = {
    "pp": "the blocks they own; they share the samples",
    "dp_replicate": "the samples; they hold the same shards of the parameters and average the gradients",
    "dp_shard": "the samples; each holds a shard of the parameters (ZeRO)",
    "cp": "the positions of the sequence; they share the samples, and shard the parameters as dp_shard does",
    "tp": "the slice of each matrix; they share the samples",
    "ep": "the experts they own; each token goes to the rank that owns its expert",
    "expert_fsdp": "the tokens; each holds a shard of the same experts",
}


class Coordinates(NamedTuple):
    """Where a rank is: its index on each axis, and on the two views that experts use."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    expert_fsdp: int


@dataclass(frozen=True)
class ParallelLayout:
    """How the ranks are divided among the parallel axes.

    ``world = pp_size x dp_replicate_size x dp_shard_size x cp_size x tp_size``, outermost first, so that the ranks of a
    tp group are neighbours. One of these five may be -1: whatever is left. Nothing is checked before `resolve`.

    Args:
        pp_size: Pipeline stages.
        dp_replicate_size: Replicas of the (sharded) parameters.
        dp_shard_size: Ranks over which parameters, gradients and optimizer states are sharded.
        ep_size: Ranks over which the experts are partitioned. No factor of the world size: ``ep`` is a second view of
            the tp, then cp, then dp_shard ranks, and must divide their product.
        cp_size: Ranks over which the sequence is split.
        tp_size: Ranks over which each matrix is sliced.
    """

    pp_size: int = 1
    dp_replicate_size: int = 1
    dp_shard_size: int = -1
    ep_size: int = 1
    cp_size: int = 1
    tp_size: int = 1

    @classmethod
    def from_product(cls, dp: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> ParallelLayout:
        """Make a layout from the rule "total GPUs = DP x TP x PP x EP" (x CP where there is one).

        Args:
            dp: Ranks that share an expert (all data ranks when ``ep`` is 1).
            tp: Tensor-parallel size.
            pp: Pipeline stages.
            cp: Context-parallel size.
            ep: Expert-parallel size.

        Raises:
            ParallelConfigError: If a size is not a whole number of at least 1.
        """
        found = Problems()
        for name, value in {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}.items():
            if not _is_size(value):
                found.add(f"{name} is {value!r}; {_RULE}", f"from_product({name}={_hint(value)})")
        found.raise_if_any()
        return cls(pp_size=pp, dp_shard_size=dp * ep, ep_size=ep, cp_size=cp, tp_size=tp)

    def problems(self, world_size: int | None = None) -> list[Problem]:
        """List everything that is wrong; making all the changes listed gives a legal layout.

        Args:
            world_size: Number of ranks; None checks only what does not depend on it.
        """
        found = Problems()
        if world_size is not None and not _is_size(world_size):
            found.add(f"the world size is {world_size!r}; it is a whole number, at least 1", "start at least one rank")
            world_size = None
        given = {name: getattr(self, name) for name in _SIZES}
        unset = [name for name, size in given.items() if size == -1]
        left = "dp_shard_size" if "dp_shard_size" in unset else next(iter(unset), None)
        target = _target(given, left, self.ep_size, world_size)
        for name, size in given.items():
            if not _is_size(size) and size != -1:
                what = f"{name} is {size!r}; {_RULE}, or -1 for whatever is left"
                found.add(what, *_fix({name: target[name]}))
        if len(unset) > 1:
            what = f"{' and '.join(unset)} are -1; only one size can be whatever is left"
            found.add(what, *_fix({name: target[name] for name in unset if name != left}))
        if world_size is not None:
            _check_product(given, target, world_size, found)
        _check_ep(self.ep_size, target, found)
        return list(found)

    def resolve(self, world_size: int) -> ParallelLayout:
        """Return the layout with the -1 filled in.

        Raises:
            ParallelConfigError: With all problems, if the sizes and the world size do not go together.
        """
        problems = self.problems(world_size)
        if problems:
            raise ParallelConfigError(*problems)
        known = math.prod(size for size in self._given if size != -1)
        return replace(self, **{n: world_size // known for n in _SIZES if getattr(self, n) == -1})

    @property
    def _given(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in _SIZES)

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        problems = self.problems()
        if problems:
            raise ParallelConfigError(*problems)
        if -1 in self._given:
            name = _SIZES[self._given.index(-1)]
            raise ParallelConfigError(Problem(f"{name} is -1 and not known yet", "layout = layout.resolve(world_size)"))
        return self._given

    @property
    def is_resolved(self) -> bool:
        """Whether every size is a legal number; only then the groups and the coordinates are known."""
        return -1 not in self._given and not self.problems()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self._shape)

    @property
    def data_size(self) -> int:
        """Number of data ranks: ranks that read different samples."""
        return self.size("data")

    @property
    def fsdp_size(self) -> int:
        """Number of ranks over which a dense parameter is sharded: dp_shard x cp."""
        return self.size("fsdp")

    def size(self, view: str) -> int:
        """Number of ranks in each group of a view."""
        _check_view(view, VIEWS)
        span = math.prod(self._shape[2:])
        if view in ("ep", "expert_fsdp"):
            return self.ep_size if view == "ep" else span // self.ep_size
        return math.prod(size for axis, size in zip(AXES, self._shape, strict=True) if axis not in _SHARED[view])

    def coordinates(self, rank: int) -> Coordinates:
        """Return the place of a rank, in constant time; a rank outside the world is a ValueError."""
        _, dp_replicate_size, dp_shard_size, cp_size, tp_size = self._shape
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks 0..{self.world_size - 1}")
        rest, tp = divmod(rank, tp_size)
        rest, cp = divmod(rest, cp_size)
        rest, dp_shard = divmod(rest, dp_shard_size)
        pp, dp_replicate = divmod(rest, dp_replicate_size)
        expert_fsdp, ep = divmod(rank % (dp_shard_size * cp_size * tp_size), self.ep_size)
        return Coordinates(pp, dp_replicate, dp_shard, cp, tp, ep, expert_fsdp)

    def rank_of(self, *, pp: int = 0, dp_replicate: int = 0, dp_shard: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at a place: the inverse of `coordinates`. An index outside its axis is a ValueError."""
        rank = 0
        for axis, size, index in zip(AXES, self._shape, (pp, dp_replicate, dp_shard, cp, tp), strict=True):
            if not 0 <= index < size:
                raise ValueError(f"{axis}={index} is not in 0..{size - 1} ({axis}_size is {size})")
            rank = rank * size + index
        return rank

    def data_rank(self, rank: int) -> int:
        """Return which of the ``data_size`` disjoint parts of the samples a rank reads."""
        place = self.coordinates(rank)
        return place.dp_replicate * self.dp_shard_size + place.dp_shard

    def groups(self, view: str) -> list[list[int]]:
        """Divide all ranks into the groups of a view.

        Args:
            view: An axis ("pp", "dp_replicate", "dp_shard", "cp", "tp"), or "data" (dp_replicate x dp_shard), "fsdp"
                (dp_shard x cp), "loss" (data x cp), "model" (the ranks that read the same samples), "ep" (the ranks
                that hold all experts together), "expert_fsdp" (the ranks that hold the same experts).

        Returns:
            The groups in the order of their first rank; ranks in a group ascend.
        """
        _check_view(view, VIEWS)
        shared = itemgetter(*(Coordinates._fields.index(name) for name in _SHARED[view]))
        groups: dict[object, list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(shared(self.coordinates(rank)), []).append(rank)
        return list(groups.values())

    def rank_table(self) -> str:
        """Return the coordinates of every rank as a table; axes of size 1 are left out."""
        axes = self._wide_views()
        header = ["rank", "data rank", *axes]
        rows = [header]
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            rows.append([str(rank), str(self.data_rank(rank)), *(str(getattr(place, axis)) for axis in axes)])
        return "\n".join("  ".join(f"{cell:>{len(name)}}" for cell, name in zip(r, header, strict=True)) for r in rows)

    def _wide_views(self) -> list[str]:
        views = (*AXES, "ep", "expert_fsdp") if self.ep_size > 1 else AXES
        return [view for view in views if self.size(view) > 1]

    def describe(self, ranks_per_node: int | None = None) -> str:
        """Explain the layout to a person: the products, what each axis does, who talks to whom.

        Args:
            ranks_per_node: Ranks that share a node; if given, each axis is reported as inside a node or across nodes.
        """
        if ranks_per_node is not None and not _is_size(ranks_per_node):
            raise ValueError(f"ranks_per_node is {ranks_per_node!r}; it is a whole number, at least 1")
        product = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self._shape, strict=True))
        lines = [f"world {self.world_size} = {product}", *self._product_of_the_field()]
        lines.append(f"data ranks {self.data_size}; ranks that read the same samples {self.size('model')}")
        for view in self._wide_views():
            lines.append(f"{view} {self.size(view)}: its ranks differ in {_MEANING[view]}")
            lines.append(f"    {self._example(view, ranks_per_node)}")
        if self.world_size <= 16:
            lines += ["", self.rank_table()]
        return "\n".join(lines)

    def _product_of_the_field(self) -> list[str]:
        gpus, pp = f"GPUs {self.world_size}", f"PP {self.pp_size}"
        dense = f"TP {self.tp_size} x {pp}" + (f" x CP {self.cp_size}" if self.cp_size > 1 else "")
        dp, rest = divmod(self.data_size, self.ep_size)
        if not rest:
            return [f"{gpus} = DP {dp} x {dense} x EP {self.ep_size} (DP: the ranks that share an expert)"]
        # An ep group that spans tp or cp ranks is no factor next to them: the rule holds for each kind of parameter.
        sharing = self.world_size // (self.pp_size * self.ep_size)
        return [
            f"{gpus} = DP {self.data_size} x {dense} (dense parameters)",
            f"{gpus} = DP {sharing} x TP 1 x {pp} x EP {self.ep_size} (experts: ep spans ranks of tp or cp)",
        ]

    def _example(self, view: str, ranks_per_node: int | None) -> str:
        groups = self.groups(view)
        shown = [str(rank) for rank in groups[0]]
        if len(shown) > 8:
            shown = [*shown[:4], "...", shown[-1]]
        text = f"groups: {len(groups)}, for example ranks {', '.join(shown)}"
        if ranks_per_node is None:
            return text
        nodes = [len({rank // ranks_per_node for rank in group}) for group in groups]
        crossing = sum(count > 1 for count in nodes)
        if not crossing:
            return f"{text}; every group stays inside a node"
        return f"{text}; {crossing} of {len(groups)} cross nodes, over up to {max(nodes)} nodes"

    def build_mesh(self, device_type: str) -> ParallelMesh:
        """Make the meshes on ``"cuda"``, ``"cpu"``, ...; collective over the default process group."""
        return ParallelMesh(self, device_type)


class ParallelMesh:
    """The device meshes and process groups of a layout, seen from this rank.

    All groups are made at once, in the same order on every rank. A view that differs from another one only by axes of
    size 1 is the same mesh, which saves communicators and their memory.

    Args:
        layout: The layout; a -1 in it is filled from the size of the default process group.
        device_type: ``"cuda"``, ``"cpu"``, ...

    Attributes:
        layout: The resolved layout.
        root: The mesh (pp, dp_replicate, dp_shard, cp, tp), from which all the others are cut.

    Raises:
        RuntimeError: If there is no default process group.
        ParallelConfigError: If the layout does not fit the world size.
    """

    def __init__(self, layout: ParallelLayout, device_type: str) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from lightning_par.parallel import _compat

        if not dist.is_initialized():
            raise RuntimeError("the mesh needs a process group: call torch.distributed.init_process_group() before")
        self.layout = layout.resolve(dist.get_world_size())
        self.device_type = device_type
        self._rank = dist.get_rank()
        self.root: DeviceMesh = init_device_mesh(device_type, self.layout._shape, mesh_dim_names=AXES)
        # Torch deprecates finding a flattened mesh by its name in the root, hence the own book of meshes.
        meshes = {axis: self.root[axis] for axis in AXES}
        meshes.update((view, self._flatten(axes)) for view, axes in _FLATTENED.items())
        meshes["hsdp"] = _compat.concatenate_meshes([meshes["dp_replicate"], meshes["fsdp"]])
        if self.layout.ep_size > 1:
            names = ("expert_fsdp", "ep")
            sizes = tuple(self.layout.size(name) for name in names)
            experts = _compat.unflatten_mesh(self._flatten(("dp_shard", "cp", "tp")), sizes, names)
            meshes.update((name, experts[name]) for name in names)
            meshes["expert_hsdp"] = _compat.concatenate_meshes([meshes["dp_replicate"], meshes["expert_fsdp"]])
        self._meshes = meshes

    def _flatten(self, axes: tuple[str, ...]) -> DeviceMesh:
        from lightning_par.parallel import _compat

        wide = tuple(axis for axis in axes if self.layout.size(axis) > 1) or axes[:1]
        return self.root[wide[0]] if len(wide) == 1 else _compat.flatten_mesh(self.root[wide], "_".join(wide))

    def mesh(self, view: str) -> DeviceMesh:
        """Return the mesh of a view.

        Args:
            view: As for `ParallelLayout.groups`: 1-D. Also "hsdp" (dp_replicate, fsdp) and "expert_hsdp" (dp_replicate,
                expert_fsdp): 2-D. The expert views exist only where ``ep_size`` is more than 1; without, ValueError.
        """
        _check_view(view, tuple(self._meshes))
        return self._meshes[view]

    def group(self, view: str) -> ProcessGroup:
        """Return the process group of a 1-D view (ValueError for the others)."""
        mesh = self.mesh(view)
        if mesh.ndim != 1:
            raise ValueError(f"{view!r} has two dimensions and so no single process group")
        return mesh.get_group()

    @property
    def data_rank(self) -> int:
        """Which of the ``data_size`` disjoint parts of the samples this rank reads."""
        return self.layout.data_rank(self._rank)

    @property
    def data_size(self) -> int:
        """Number of data ranks."""
        return self.layout.data_size


def _check_view(view: str, known: tuple[str, ...]) -> None:
    if view not in known:
        raise ValueError(f"there is no view {view!r} here; choose one of {', '.join(known)}")


def _check_product(given: Mapping[str, object], target: Mapping[str, int], world_size: int, found: Problems) -> None:
    """Report that the sizes do not multiply to the world size; `target` is the nearest legal layout."""
    known = {name: size for name, size in given.items() if _is_size(size)}
    changes = {name: target[name] for name in known if target[name] != known[name]}
    if not changes:
        return
    product = " x ".join(f"{name} {size}" for name, size in known.items())
    ranks = math.prod(known.values())
    if len(known) == len(given):
        what = f"{product} = {ranks}, but the world size is {world_size}"
    else:
        rest = " and ".join(name for name in given if name not in known)
        what = f"{product} = {ranks} does not divide the world size {world_size}, so nothing is left for {rest}"
    found.add(f"{what}; {_nearby(known, changes, world_size)}", *_fix(changes))


def _nearby(known: Mapping[str, int], changes: Mapping[str, int], world_size: int) -> str:
    """Name the legal values next to what was given, one size at a time; else the whole change."""
    values: list[str] = []
    for name in sorted(known, key=_PREFERRED.index):
        most, rest = divmod(world_size, math.prod(known.values()) // known[name])
        legal = () if rest else (most,) if len(known) == len(AXES) else _divisors(most)
        values += [f"{name}={value}" for value in _neighbours(known[name], legal)]
    nearest = ", ".join(values) or ", ".join(f"{name}={value}" for name, value in changes.items()) + " together"
    return f"nearest legal values: {nearest}"


def _check_ep(ep_size: object, target: Mapping[str, int], found: Problems) -> None:
    span = math.prod(target[name] for name in ("dp_shard_size", "cp_size", "tp_size"))
    legal = _divisors(span) if span > 0 else ()
    best = _neighbours(_hint(ep_size), legal) or (_hint(ep_size),)
    nearest = min(best, key=lambda value: abs(math.log(value) - math.log(_hint(ep_size))))
    if not _is_size(ep_size):
        unset = "; ep takes no ranks of its own, so nothing can be left for it" if ep_size == -1 else ""
        found.add(f"ep_size is {ep_size!r}; {_RULE}{unset}", *_fix({"ep_size": nearest}))
    elif legal and ep_size not in legal:
        sizes = " x ".join(f"{name} {target[name]}" for name in ("dp_shard_size", "cp_size", "tp_size"))
        what = f"ep_size {ep_size} does not divide {sizes} = {span}"
        found.add(f"{what}; nearest legal values: {', '.join(map(str, best))}", *_fix({"ep_size": nearest}))


def _target(given: Mapping[str, object], left: str | None, ep_size: object, world_size: int | None) -> dict[str, int]:
    """Find the legal layout nearest to what was given; every fix is read off it, so the fixes go together.

    Nearest: fewest legal sizes changed, then the smallest ratios. Without a world size the -1 stays a -1.
    """
    wanted = {name: -1 if name == left else _hint(size) for name, size in given.items()}
    if world_size is None:
        return wanted
    known = [name for name, size in given.items() if _is_size(size)]
    product = math.prod(wanted[name] for name in known)
    if len(known) == len(given) - 1 and left is not None and world_size % product == 0:
        return {**wanted, left: world_size // product}
    if len(known) == len(given) and product == world_size:
        return wanted

    def distance(sizes: Mapping[str, int]) -> tuple[int, bool, float, int]:
        moved = [name for name in _SIZES if sizes[name] != wanted[name] and name != left]
        span = sizes["dp_shard_size"] * sizes["cp_size"] * sizes["tp_size"]
        ratio = sum(abs(math.log(sizes[name]) - math.log(wanted[name])) for name in moved)
        order = sum(_PREFERRED.index(name) for name in moved)
        return sum(name in known for name in moved), span % _hint(ep_size) != 0, round(ratio, 9), order

    layouts = (dict(zip(_SIZES, sizes, strict=True)) for sizes in _factorizations(world_size, len(_SIZES)))
    return min(layouts, key=distance)


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in _factorizations(number // first, count - 1):
            yield (first, *rest)


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def _neighbours(value: int, legal: tuple[int, ...]) -> tuple[int, ...]:
    """Return the nearest legal values below and above, or `value` alone where it is legal."""
    below, above = (size for size in legal if size <= value), (size for size in legal if size >= value)
    return tuple(sorted({*sorted(below)[-1:], *sorted(above)[:1]}))


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _hint(value: object) -> int:
    """Guess the size that was meant by something that may be none (``"2"``, 2.0, 0)."""
    try:
        return max(1, int(value))  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return 1


def _fix(sizes: Mapping[str, int]) -> tuple[str, str]:
    """Spell a change in Python and in YAML."""
    python = ", ".join(f"{name}={size}" for name, size in sizes.items())
    yaml = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    return python, yaml if len(sizes) == 1 else f"{{{yaml}}}"
