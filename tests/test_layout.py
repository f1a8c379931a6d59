"""The layout's arithmetic, its error messages, and the device meshes cut from it."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_par.errors import ParallelConfigError
from lightning_par.layout import AXES, VIEWS, Coordinates, ParallelLayout

few = settings(max_examples=50, deadline=None)
SIZES = tuple(f"{axis}_size" for axis in AXES)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    sizes = {name: draw(st.integers(1, 4)) for name in SIZES}
    span = sizes["dp_shard_size"] * sizes["cp_size"] * sizes["tp_size"]
    return ParallelLayout(**sizes, ep_size=draw(st.sampled_from(divisors(span))))


def apply_fixes(layout: ParallelLayout, error: ParallelConfigError) -> ParallelLayout:
    """Make every change that the error asks for, as a user would."""
    changes = {}
    for problem in error.problems:
        changes.update(eval(f"dict({problem.python})"))
    return replace(layout, **changes)


# Sizes


@few
@given(layouts(), st.sampled_from([*SIZES, None]))
def test_the_missing_size_is_what_is_left(layout: ParallelLayout, missing: str | None) -> None:
    world = math.prod(getattr(layout, name) for name in SIZES)
    asked = replace(layout, **{missing: -1}) if missing else layout
    assert asked.is_resolved == (missing is None)
    resolved = asked.resolve(world)
    assert resolved == layout
    assert resolved.is_resolved
    assert resolved.world_size == world


def test_the_default_shards_over_all_ranks() -> None:
    layout = ParallelLayout().resolve(8)
    assert (layout.dp_shard_size, layout.data_size, layout.fsdp_size) == (8, 8, 8)
    assert ParallelLayout().resolve(1).world_size == 1


def test_an_unresolved_layout_says_so() -> None:
    with pytest.raises(ParallelConfigError, match=r"dp_shard_size is -1.*\n.*resolve\(world_size\)"):
        ParallelLayout().groups("tp")
    with pytest.raises(ParallelConfigError, match="tp_size is 0"):
        _ = ParallelLayout(dp_shard_size=1, tp_size=0).world_size
    assert not ParallelLayout(dp_shard_size=1, tp_size=0).is_resolved


def test_layouts_pickle_and_hash() -> None:
    layout = ParallelLayout(tp_size=2).resolve(8)
    assert layout.coordinates(3).tp == 1
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert len({layout, ParallelLayout(dp_shard_size=4, tp_size=2)}) == 1


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "cp", "ep", "gpus"),
    [(128, 8, 4, 1, 1, 4096), (4, 2, 2, 1, 8, 128), (2, 4, 1, 2, 4, 64), (1, 1, 1, 1, 1, 1)],
)
def test_from_product_follows_the_rule_of_the_field(dp: int, tp: int, pp: int, cp: int, ep: int, gpus: int) -> None:
    layout = ParallelLayout.from_product(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
    assert dp * tp * pp * cp * ep == gpus
    assert layout.resolve(gpus) == layout
    assert (layout.dp_shard_size, layout.dp_replicate_size, layout.ep_size) == (dp * ep, 1, ep)
    cp_factor = f" x CP {cp}" if cp > 1 else ""
    assert f"GPUs {gpus} = DP {dp} x TP {tp} x PP {pp}{cp_factor} x EP {ep} " in layout.describe()


def test_from_product_refuses_what_is_no_size() -> None:
    with pytest.raises(ParallelConfigError) as info:
        ParallelLayout.from_product(dp=-1, tp=True, pp=2.0, ep=0)  # type: ignore[arg-type]
    assert [problem.python for problem in info.value.problems] == [
        "from_product(dp=1)",
        "from_product(tp=1)",
        "from_product(pp=2)",
        "from_product(ep=1)",
    ]
    assert "YAML" not in str(info.value)


# Errors


def test_all_problems_are_listed_at_once() -> None:
    layout = ParallelLayout(pp_size=-1, dp_replicate_size=0, dp_shard_size=-1, ep_size=5, tp_size=True)
    with pytest.raises(ParallelConfigError) as info:
        layout.resolve(16)
    text = str(info.value)
    assert len(info.value.problems) == 4
    assert "pp_size=1" in {problem.python for problem in info.value.problems}
    assert "pp_size and dp_shard_size are -1; only one" in text
    assert "dp_replicate_size is 0;" in text
    assert "tp_size is True;" in text
    assert "ep_size 5 does not divide dp_shard_size 16 x cp_size 1 x tp_size 1 = 16" in text
    assert "fix: ep_size=4    (YAML: ep_size: 4)" in text


def test_a_wrong_product_names_the_nearest_legal_values() -> None:
    (problem,) = ParallelLayout(dp_shard_size=4, tp_size=2).problems(16)
    assert "dp_shard_size 4 x cp_size 1 x tp_size 2 = 8, but the world size is 16" in problem.what
    assert "dp_shard_size=8, dp_replicate_size=2, tp_size=4" in problem.what
    assert problem.python == "dp_shard_size=8"


def test_an_indivisible_rest_names_the_values_below_and_above() -> None:
    (problem,) = ParallelLayout(tp_size=3).problems(16)
    assert "= 3 does not divide the world size 16, so nothing is left for dp_shard_size" in problem.what
    assert problem.what.endswith("nearest legal values: tp_size=2, tp_size=4")
    assert str(problem).endswith("fix: tp_size=4    (YAML: tp_size: 4)")


def test_several_sizes_are_changed_together_where_one_does_not_help() -> None:
    (problem,) = ParallelLayout(pp_size=3, dp_shard_size=5, tp_size=3).problems(16)
    assert problem.what.endswith("pp_size=2, dp_shard_size=4, tp_size=2 together")
    assert problem.yaml == "{pp_size: 2, dp_shard_size: 4, tp_size: 2}"


def test_an_ep_size_that_divides_after_the_fix_is_not_blamed() -> None:
    (problem,) = ParallelLayout(dp_shard_size=4, ep_size=3, tp_size=2).problems(24)
    assert problem.python == "dp_shard_size=12"
    (problem,) = ParallelLayout(dp_replicate_size=-1, dp_shard_size=9, ep_size=6).problems(48)
    assert problem.python == "dp_shard_size=12"


def test_a_size_that_is_none_takes_what_the_legal_sizes_leave() -> None:
    (problem,) = ParallelLayout(dp_shard_size=4, tp_size=0).problems(16)
    assert problem.python == "tp_size=4"


def test_ep_cannot_be_what_is_left() -> None:
    (problem,) = ParallelLayout(ep_size=-1).problems(8)
    assert "ep takes no ranks of its own" in problem.what
    assert problem.python == "ep_size=1"


@pytest.mark.parametrize("size", [0, -2, True, 2.0, "2", None, float("inf"), float("nan"), [2]])
@pytest.mark.parametrize("name", [*SIZES, "ep_size"])
def test_what_is_no_size_is_refused(name: str, size: object) -> None:
    layout = ParallelLayout(**{name: size})  # type: ignore[arg-type]
    for world in (None, 8):
        (problem,) = layout.problems(world)
        assert problem.what.startswith(f"{name} is {size!r}; a size is a whole number")
        assert not replace(layout, **eval(f"dict({problem.python})")).problems(world)


@pytest.mark.parametrize("world", [0, -4, True, "8"])
def test_a_world_size_that_is_none_is_refused(world: object) -> None:
    (problem,) = ParallelLayout().problems(world)  # type: ignore[arg-type]
    assert f"the world size is {world!r}" in problem.what


@few
@given(
    st.fixed_dictionaries({name: st.sampled_from([-1, 0, 1, 2, 3, 5, 8, True, "4"]) for name in (*SIZES, "ep_size")}),
    st.integers(1, 200),
)
def test_making_all_the_changes_gives_a_legal_layout(sizes: dict[str, int], world: int) -> None:
    layout = ParallelLayout(**sizes)
    try:
        resolved = layout.resolve(world)
    except ParallelConfigError as error:
        resolved = apply_fixes(layout, error).resolve(world)
    assert resolved.world_size == world
    assert (resolved.dp_shard_size * resolved.cp_size * resolved.tp_size) % resolved.ep_size == 0


@few
@given(st.fixed_dictionaries({name: st.sampled_from([-1, 0, 1, 3, "4"]) for name in (*SIZES, "ep_size")}))
def test_without_a_world_size_the_changes_are_legal_too(sizes: dict[str, int]) -> None:
    layout = ParallelLayout(**sizes)
    problems = layout.problems()
    assert not apply_fixes(layout, ParallelConfigError(*problems)).problems()


# Coordinates and groups


@few
@given(layouts())
def test_coordinates_are_unique_and_rank_of_inverts_them(layout: ParallelLayout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len({place[: len(AXES)] for place in places}) == layout.world_size
    assert len({(p.pp, p.dp_replicate, p.expert_fsdp, p.ep) for p in places}) == layout.world_size
    for rank, place in enumerate(places):
        assert layout.rank_of(**{axis: getattr(place, axis) for axis in AXES}) == rank


@few
@given(layouts())
def test_tp_is_innermost_and_pp_outermost(layout: ParallelLayout) -> None:
    for group in layout.groups("tp"):
        assert group == list(range(group[0], group[0] + layout.tp_size))
    stage = layout.world_size // layout.pp_size
    assert all(layout.coordinates(rank).pp == rank // stage for rank in range(layout.world_size))


@few
@given(layouts())
def test_every_view_partitions_the_world(layout: ParallelLayout) -> None:
    for view in VIEWS:
        groups = layout.groups(view)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert {len(group) for group in groups} == {layout.size(view)}
        assert all(group == sorted(group) for group in groups)
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)


@few
@given(layouts())
def test_the_groups_of_an_axis_differ_in_that_axis_only(layout: ParallelLayout) -> None:
    for axis in AXES:
        for group in layout.groups(axis):
            first = layout.coordinates(group[0])
            for index, rank in enumerate(group):
                dense = {name: getattr(first, name) for name in AXES}
                assert layout.rank_of(**{**dense, axis: index}) == rank


@few
@given(layouts())
def test_data_ranks_are_disjoint_and_model_groups_share_them(layout: ParallelLayout) -> None:
    data_of = [layout.data_rank(rank) for rank in range(layout.world_size)]
    assert layout.data_size == layout.dp_replicate_size * layout.dp_shard_size
    for group in layout.groups("data"):
        assert [data_of[rank] for rank in group] == list(range(layout.data_size))
    for group in layout.groups("model"):
        assert len({data_of[rank] for rank in group}) == 1
    assert len(layout.groups("model")) == layout.data_size


@few
@given(layouts())
def test_the_expert_views_use_the_ranks_of_dp_shard_cp_and_tp(layout: ParallelLayout) -> None:
    span = layout.dp_shard_size * layout.cp_size * layout.tp_size
    assert layout.size("ep") * layout.size("expert_fsdp") == span
    for start in range(0, layout.world_size, span):
        for flat in range(span):
            place = layout.coordinates(start + flat)
            assert flat == (place.dp_shard * layout.cp_size + place.cp) * layout.tp_size + place.tp
            assert (place.ep, place.expert_fsdp) == (flat % layout.ep_size, flat // layout.ep_size)
    for view in ("ep", "expert_fsdp"):
        assert all(len({rank // span for rank in group}) == 1 for group in layout.groups(view))


def test_known_groups_of_sixteen_ranks() -> None:
    layout = ParallelLayout(pp_size=2, dp_replicate_size=2, dp_shard_size=2, ep_size=4, tp_size=2).resolve(16)
    assert layout.coordinates(11) == Coordinates(pp=1, dp_replicate=0, dp_shard=1, cp=0, tp=1, ep=3, expert_fsdp=0)
    assert layout.groups("pp")[1] == [1, 9]
    assert layout.groups("data")[0] == [0, 2, 4, 6]
    assert layout.groups("fsdp")[1] == [1, 3]
    assert layout.groups("model")[0] == [0, 1, 8, 9]
    assert layout.groups("ep")[0] == [0, 1, 2, 3]


def test_ranks_and_views_that_do_not_exist_are_refused() -> None:
    layout = ParallelLayout(tp_size=2).resolve(4)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=f"rank {rank} is not one of the 4 ranks"):
            layout.coordinates(rank)
    with pytest.raises(ValueError, match=r"tp=2 is not in 0\.\.1"):
        layout.rank_of(tp=2)
    with pytest.raises(ValueError, match="no view 'dp' here; choose one of pp, dp_replicate"):
        layout.groups("dp")


def test_four_thousand_ranks() -> None:
    layout = ParallelLayout(pp_size=4, dp_replicate_size=2, ep_size=64, cp_size=2, tp_size=8).resolve(4096)
    assert layout.dp_shard_size == 32
    assert layout.coordinates(4095) == Coordinates(3, 1, 31, 1, 7, 63, 7)
    for view in VIEWS:
        groups = layout.groups(view)
        assert len(groups) * layout.size(view) == 4096
        assert len({rank for group in groups for rank in group}) == 4096
    assert layout.groups("expert_fsdp")[0] == list(range(0, 512, 64))
    assert len(layout.describe(ranks_per_node=8).splitlines()) < 30
    assert ParallelLayout(tp_size=7).problems(4096)[0].python == "tp_size=8"


# Text


def test_describe_shows_both_products_and_where_groups_lie() -> None:
    text = ParallelLayout(pp_size=2, dp_replicate_size=2, dp_shard_size=2, ep_size=4, tp_size=2).describe(4)
    assert "world 16 = pp 2 x dp_replicate 2 x dp_shard 2 x cp 1 x tp 2\n" in text
    assert "GPUs 16 = DP 1 x TP 2 x PP 2 x EP 4 (DP: the ranks that share an expert)\n" in text
    assert "data ranks 4; ranks that read the same samples 4\n" in text
    lines = text.splitlines()
    tp, pp = (next(i for i, line in enumerate(lines) if line.startswith(axis)) for axis in ("tp 2", "pp 2"))
    assert lines[tp + 1] == "    groups: 8, for example ranks 0, 1; every group stays inside a node"
    assert lines[pp + 1] == "    groups: 8, for example ranks 0, 8; 8 of 8 cross nodes, over up to 2 nodes"
    assert not any(line.startswith("cp") for line in lines)
    assert "node" not in ParallelLayout(dp_shard_size=2).describe()


def test_describe_counts_groups_that_straddle_uneven_nodes() -> None:
    text = ParallelLayout(dp_shard_size=3, tp_size=4).describe(ranks_per_node=6)
    assert "groups: 3, for example ranks 0, 1, 2, 3; 1 of 3 cross nodes, over up to 2 nodes" in text
    with pytest.raises(ValueError, match="ranks_per_node is 0"):
        ParallelLayout(dp_shard_size=3).describe(ranks_per_node=0)


def test_describe_does_not_claim_a_product_that_is_none() -> None:
    text = ParallelLayout(dp_shard_size=2, ep_size=8, tp_size=4).describe()
    assert "GPUs 8 = DP 2 x TP 4 x PP 1 (dense parameters)" in text
    assert "GPUs 8 = DP 1 x TP 1 x PP 1 x EP 8 (experts: ep spans ranks of tp or cp)" in text


@few
@given(layouts())
def test_every_product_that_describe_prints_is_right(layout: ParallelLayout) -> None:
    for line in layout.describe().splitlines():
        if line.startswith(("world", "GPUs")):
            whole, factors = line.partition("(")[0].split(" = ")
            assert int(whole.split()[1]) == math.prod(int(factor.split()[1]) for factor in factors.split(" x "))


def test_rank_table() -> None:
    assert ParallelLayout(dp_shard_size=2, tp_size=2).rank_table().splitlines() == [
        "rank  data rank  dp_shard  tp",
        "   0          0         0   0",
        "   1          0         0   1",
        "   2          1         1   0",
        "   3          1         1   1",
    ]
    assert "data rank  dp_shard" in ParallelLayout(dp_shard_size=16).describe()
    assert "data rank  dp_shard" not in ParallelLayout(dp_shard_size=17).describe()


# Meshes


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        dist.destroy_process_group()


MESHES = [
    ParallelLayout(pp_size=2, dp_replicate_size=2, dp_shard_size=2, cp_size=2, ep_size=2, tp_size=1),
    ParallelLayout(pp_size=2, dp_replicate_size=1, dp_shard_size=2, cp_size=2, ep_size=4, tp_size=2),
    ParallelLayout(dp_replicate_size=2, dp_shard_size=4, ep_size=4, tp_size=2),
    ParallelLayout(dp_shard_size=16, ep_size=16),
    ParallelLayout(dp_replicate_size=4, dp_shard_size=2, tp_size=2),
    ParallelLayout(dp_shard_size=1, tp_size=16),
    ParallelLayout(pp_size=16, dp_shard_size=1),
]


@pytest.mark.parametrize("layout", MESHES, ids=repr)
def test_meshes_hold_the_ranks_of_the_layout(layout: ParallelLayout) -> None:
    import torch.distributed as dist

    views = [view for view in VIEWS if layout.ep_size > 1 or not view.startswith(("ep", "expert"))]
    wanted = {view: layout.groups(view) for view in views}
    for rank in range(16):
        with fake_world(rank, 16):
            mesh = layout.build_mesh("cpu")
            assert mesh.root.mesh_dim_names == AXES
            assert mesh.root.mesh.flatten().tolist() == list(range(16))
            assert (mesh.data_rank, mesh.data_size) == (layout.data_rank(rank), layout.data_size)
            for view in views:
                (mine,) = (group for group in wanted[view] if rank in group)
                assert mesh.mesh(view).mesh.tolist() == mine, view
                assert dist.get_process_group_ranks(mesh.group(view)) == mine, view
                assert mesh.mesh(view).get_local_rank() == mine.index(rank), view
            hsdp = mesh.mesh("hsdp")
            assert tuple(hsdp.shape) == (layout.dp_replicate_size, layout.fsdp_size)
            (mine,) = (group for group in wanted["loss"] if rank in group)
            assert hsdp.mesh.flatten().tolist() == mine


def test_the_two_dimensional_meshes_use_the_groups_of_their_views() -> None:
    layout = ParallelLayout(dp_replicate_size=2, dp_shard_size=2, cp_size=2, ep_size=2, tp_size=2)
    with fake_world(5, 16):
        mesh = layout.build_mesh("cpu")
        for name, sharded in (("hsdp", "fsdp"), ("expert_hsdp", "expert_fsdp")):
            both = mesh.mesh(name)
            assert both.get_group(0) is mesh.group("dp_replicate")
            assert both.get_group(1) is mesh.group(sharded)
        assert mesh.mesh("expert_hsdp").mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
        with pytest.raises(ValueError, match="'hsdp' has two dimensions"):
            mesh.group("hsdp")


def test_views_that_differ_by_axes_of_size_one_share_their_group() -> None:
    with fake_world(3, 8):
        mesh = ParallelLayout(tp_size=2).build_mesh("cpu")
        assert mesh.layout.dp_shard_size == 4
        for view in ("data", "fsdp", "loss"):
            assert mesh.group(view) is mesh.group("dp_shard")
        assert mesh.group("model") is mesh.group("tp")
    with fake_world(3, 8):
        mesh = ParallelLayout(cp_size=2, tp_size=2).build_mesh("cpu")
        assert mesh.group("loss") is mesh.group("fsdp")


def test_one_rank_has_every_mesh() -> None:
    with fake_world(0, 1):
        mesh = ParallelLayout().build_mesh("cpu")
        for view in (*AXES, "data", "fsdp", "loss", "model", "hsdp"):
            assert mesh.mesh(view).size() == 1
        with pytest.raises(ValueError, match="no view 'ep' here"):
            mesh.mesh("ep")


def test_fsdp_accepts_the_meshes_on_top_of_tp_and_ep_shards() -> None:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    layout = ParallelLayout(dp_replicate_size=2, dp_shard_size=2, cp_size=2, ep_size=4, tp_size=2)
    for sliced, view in (("tp", "fsdp"), ("tp", "hsdp"), ("ep", "expert_fsdp"), ("ep", "expert_hsdp")):
        with fake_world(6, 16):
            mesh = layout.build_mesh("cpu")
            linear = nn.Linear(4, 16, bias=False)
            inner = distribute_tensor(linear.weight.data, mesh.mesh(sliced), [Shard(0)], src_data_rank=None)
            linear.weight = nn.Parameter(inner)
            fully_shard(linear, mesh=mesh.mesh(view))
            weight = linear.weight
            assert isinstance(weight, DTensor)
            assert weight.shape == torch.Size([16, 4])
            assert weight.to_local().shape[0] == 16 // mesh.mesh(sliced).size() // mesh.mesh(view).size(-1)


def test_a_mesh_needs_a_process_group_of_its_size() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ParallelLayout().build_mesh("cpu")
    with fake_world(0, 4), pytest.raises(ParallelConfigError, match="world size is 4"):
        ParallelLayout(dp_shard_size=8).build_mesh("cpu")


def test_importing_the_layout_loads_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_par.layout as layout; layout.ParallelLayout(tp_size=2).resolve(8).describe();"
        "sys.exit(bool({'torch', 'lightning'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[1])
