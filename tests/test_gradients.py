"""The norm and the clipping of gradients on any mix of meshes equal torch's own on the full tensors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from lightning_par.parallel.gradients import clip_grad_norm_, clip_grad_value_, grad_norm
from lightning_par.parallel.shards import full_tensor
from lightning_par.testing import run_ranks

ORDERS = [1.0, 2.0, 3.0, math.inf]


def _full_grads(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Of 4 ranks the last holds nothing of 3 rows, and the last two nothing of 2.
    shapes = [(7, 3), (3, 5), (2, 2), (8, 4), (5,), (6, 2), (4, 3), (1,), ()]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes[:count]]


def _param(grad: Tensor, mesh: DeviceMesh | None = None, placements: list[Placement] | None = None) -> nn.Parameter:
    """A parameter with the given full gradient, plain or on a mesh."""
    if mesh is None:
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad.clone()
        return param
    param = nn.Parameter(distribute_tensor(torch.zeros_like(grad), mesh, placements, src_data_rank=None))
    param.grad = distribute_tensor(grad.clone(), mesh, placements, src_data_rank=None)
    return param


def _mixed_parameters() -> tuple[list[nn.Parameter], list[Tensor]]:
    """Parameters on four meshes and on none, and the full gradient of each."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    hsdp = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    full = _full_grads(9)
    params = [
        _param(full[0], flat, [Shard(0)]),
        _param(full[1], flat, [Shard(0)]),
        _param(full[2], hsdp, [Replicate(), Shard(0)]),
        _param(full[3], hsdp, [Shard(0), Shard(1)]),
        _param(full[4], hsdp["shard"], [Shard(0)]),
        _param(full[5], hsdp["replicate"], [Shard(1)]),
        _param(full[6], flat, [Replicate()]),
        _param(full[7]),
        _param(full[8]),
    ]
    return params, full


def _reference(grads: list[Tensor]) -> list[nn.Parameter]:
    return [_param(grad) for grad in grads]


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def _same_on_all_ranks(value: float) -> bool:
    values: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return len({repr(v) for v in values}) == 1


def _check_mixed() -> None:
    for order in ORDERS:
        params, full = _mixed_parameters()
        reference = _reference(full)
        expected = nn.utils.clip_grad_norm_(reference, 0.5, order)
        norm = clip_grad_norm_(params, 0.5, order)
        assert type(norm) is Tensor
        assert norm.shape == ()
        assert norm.dtype is torch.float64
        assert _same_on_all_ranks(norm.item())
        _assert_close(norm, expected)
        for param, ref in zip(params, reference, strict=True):
            assert param.grad is not None
            assert ref.grad is not None
            _assert_close(full_tensor(param.grad), ref.grad)
        # Clipped gradients have the norm that was asked for, and a larger limit leaves them.
        _assert_close(grad_norm(params, order), torch.tensor(0.5, dtype=torch.float64) * expected / (expected + 1e-6))
        before = [full_tensor(p.grad).clone() for p in params if p.grad is not None]
        clip_grad_norm_(params, 100.0, order)
        assert all(
            torch.equal(full_tensor(p.grad), b) for p, b in zip(params, before, strict=True) if p.grad is not None
        )


@pytest.mark.parametrize("world", [2, 4])
def test_mixed_meshes_equal_torch_on_full_tensors(world: int) -> None:
    run_ranks(world, _check_mixed)


def _check_partial() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank, (full, other) = dist.get_rank(), _full_grads(2)
    part = full / 4 + (rank - 1.5)  # the deviations cancel in the sum
    for order in ORDERS:
        summed = _param(full, mesh, [Replicate(), Replicate()])
        summed.grad = DTensor.from_local(part.clone(), mesh, [Partial(), Partial()])
        # Sharded over b, and a sum over a of half the value each.
        half = _param(other, mesh, [Replicate(), Shard(0)])
        assert isinstance(half.grad, DTensor)
        half.grad = DTensor.from_local(
            half.grad.to_local() / 2, mesh, [Partial(), Shard(0)], shape=other.shape, stride=other.stride()
        )
        reference = _reference([full, other])
        _assert_close(grad_norm([summed, half], order), nn.utils.get_total_norm([full, other], order))
        nn.utils.clip_grad_norm_(reference, 0.5, order)
        clip_grad_norm_([summed, half], 0.5, order)
        nn.utils.clip_grad_value_(reference, 0.05)
        clip_grad_value_([summed, half], 0.05)
        for param, ref in zip([summed, half], reference, strict=True):
            _assert_close(full_tensor(param.grad), ref.grad)


def test_partial_gradients_are_reduced_first() -> None:
    run_ranks(4, _check_partial)


def _check_fsdp_over_tp() -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6)).double()
    single = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6)).double()
    single.load_state_dict(model.state_dict())
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(4, 6, dtype=torch.float64)
    model(x).square().mean().backward()
    single(x).square().mean().backward()
    placements = {type(placement).__name__ for p in model.parameters() for placement in p.placements}
    assert "_StridedShard" in placements
    for order in ORDERS:
        expected = nn.utils.get_total_norm([p.grad for p in single.parameters()], order)
        _assert_close(grad_norm(model.parameters(), order), expected)
    next(model.parameters()).grad.to_local().fill_(math.nan)
    with pytest.raises(RuntimeError, match="nan"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_fsdp_over_tensor_parallel() -> None:
    run_ranks(4, _check_fsdp_over_tp)


def _check_collectives() -> None:
    for order in (2.0, math.inf):
        params, _ = _mixed_parameters()
        with CommDebugMode() as comm:
            clip_grad_norm_(params, 0.5, order)
        # flat, replicate and shard; [Shard(0), Shard(1)] needs no collective of its own.
        assert comm.get_total_counts() == 3
        with CommDebugMode() as comm:
            clip_grad_norm_([params[6], params[7]], 0.5, order)
            clip_grad_value_(params, 0.5)
        assert comm.get_total_counts() == 0


def test_one_collective_for_each_group() -> None:
    run_ranks(4, _check_collectives)


def _check_missing() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    first, second = (torch.full((world, 2), value, dtype=torch.float64) for value in (3.0, 4.0))
    params = [_param(first, mesh, [Shard(0)]), _param(second, mesh, [Shard(0)])]
    if rank == 0:
        params[1].grad = None
    if rank == 1:
        params[0].grad = params[1].grad = None
    squares = [9.0 * 2 * (world - 1), 16.0 * 2 * (world - 2)]
    _assert_close(clip_grad_norm_(params, 1.0), torch.tensor(math.sqrt(sum(squares)), dtype=torch.float64))
    for param in params:
        param.grad = None
    for order in ORDERS:
        norm = clip_grad_norm_(params, 1.0, order)
        assert norm.item() == 0.0
        assert norm.dtype is torch.float64
    clip_grad_value_(params, 1.0)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_without_a_gradient_take_part(world: int) -> None:
    run_ranks(world, _check_missing)


def _nonfinite(value: float, where: int, is_plain: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = _param(torch.ones(4, 2), mesh, [Shard(0)])
    if is_plain:  # the same on all ranks, as every plain gradient
        plain = _param(torch.tensor([1.0, value]))
    else:
        plain = _param(torch.ones(2))
        if dist.get_rank() == where:
            param.grad.to_local()[0, 0] = value
    found = []
    for order in ORDERS:
        found.append(str(grad_norm([param, plain], order).item()))
        with pytest.raises(RuntimeError, match="order"):
            clip_grad_norm_([param, plain], 1.0, order, error_if_nonfinite=True)
    return found


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_on_one_rank_raises_on_all(value: float, where: int) -> None:
    expected = [str(value)] * len(ORDERS)
    assert run_ranks(2, _nonfinite, value, where, False) == [expected] * 2
    assert run_ranks(2, _nonfinite, value, where, True) == [expected] * 2


def _check_value() -> None:
    params, full = _mixed_parameters()
    reference = _reference(full)
    nn.utils.clip_grad_value_(reference, 0.3)
    clip_grad_value_(params, 0.3)
    for param, ref in zip(params, reference, strict=True):
        assert torch.equal(full_tensor(param.grad), ref.grad)


def test_clip_by_value() -> None:
    run_ranks(4, _check_value)


def _check_stages() -> None:
    """Two pipeline stages of two ranks: each shards its own parameter, and one of them has none to train."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, full = rank // 2, _full_grads(2)
    params = [_param(full[stage], mesh["dp"], [Shard(0)])]
    group = mesh.get_group("pp")
    for order in ORDERS:
        expected = nn.utils.get_total_norm(full, order)
        _assert_close(grad_norm(params, order, extra_groups=[group]), expected)
        alone = grad_norm(params if stage else [], order, extra_groups=[group])
        torch.testing.assert_close(alone.double(), nn.utils.get_total_norm(full[1:], order), rtol=1e-6, atol=0)


def test_extra_groups_sum_over_pipeline_stages() -> None:
    run_ranks(4, _check_stages)


def test_tied_frozen_and_single_parameters() -> None:
    tied, frozen = _param(torch.tensor([3.0, 4.0])), _param(torch.ones(2))
    frozen.requires_grad_(False)
    assert grad_norm([tied, tied, frozen]).item() == 5.0
    assert clip_grad_norm_((p for p in [tied, frozen, tied]), 2.5).item() == 5.0
    torch.testing.assert_close(tied.grad, torch.tensor([1.5, 2.0]))
    assert torch.equal(frozen.grad, torch.ones(2))
    clip_grad_value_(tied, 1.0)
    assert torch.equal(tied.grad, torch.ones(2))


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_and_empty_tensors(order: float) -> None:
    assert clip_grad_norm_([], 1.0, order).item() == 0.0
    empty, without = _param(torch.zeros(0, 3)), nn.Parameter(torch.ones(2))
    assert clip_grad_norm_([empty, without], 1.0, order, error_if_nonfinite=True).item() == 0.0
    clip_grad_value_([empty, without], 1.0)


def test_half_precision_is_accumulated_in_float32() -> None:
    params = [_param(torch.full((1000,), 0.1, dtype=torch.bfloat16)) for _ in range(50)]
    expected = nn.utils.get_total_norm([p.grad.double() for p in params])
    norm = clip_grad_norm_(params, 1.0)
    assert norm.dtype is torch.float32
    assert params[0].grad.dtype is torch.bfloat16
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)


def test_sums_of_powers_may_leave_the_range_of_float32() -> None:
    params = [_param(torch.tensor([5e12])) for _ in range(10)]
    torch.testing.assert_close(grad_norm(params, 3.0), torch.tensor(5e12 * 10 ** (1 / 3)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", [0, -1.0, -math.inf, math.nan])
def test_orders_that_are_no_norm_are_refused(order: float) -> None:
    with pytest.raises(ValueError, match="norm_type"):
        grad_norm([_param(torch.ones(2))], order)
