"""What has which dtype under each precision, and a loss scaler whose verdict is the same on all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from probe import crossed, long_run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.precision import (
    PRECISIONS,
    MixedPrecision,
    ShardedGradScaler,
    cast_floating,
    convert_inputs,
    dtype_table,
    fsdp_policy,
    resolve_precision,
)
from lightning_par.parallel.shards import full_tensor
from lightning_par.testing import run_ranks

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("precision", "storage", "param", "reduce", "autocast", "scaler"),
    [
        ("64-true", FP64, FP64, FP64, None, False),
        ("32-true", FP32, FP32, FP32, None, False),
        ("bf16-true", BF16, BF16, BF16, None, False),
        ("16-true", FP16, FP16, FP16, None, False),
        ("bf16-mixed", FP32, BF16, FP32, BF16, False),
        ("16-mixed", FP32, FP16, FP32, FP16, True),
    ],
)
def test_policies(precision: str, storage: Any, param: Any, reduce: Any, autocast: Any, scaler: bool) -> None:
    policy = resolve_precision(precision)
    assert (policy.storage, policy.param, policy.reduce, policy.output) == (storage, param, reduce, None)
    assert (policy.autocast, policy.scaler) == (autocast, scaler)
    pure = resolve_precision(precision, autocast=False)
    assert pure.autocast is None
    assert (pure.storage, pure.param, pure.reduce, pure.scaler) == (storage, param, reduce, scaler)


def test_short_spellings_mean_what_they_mean_in_lightning() -> None:
    from lightning.fabric.connector import _convert_precision_to_unified_args as unified

    for short in (64, 32, 16, "64", "32", "16", "bf16"):
        assert resolve_precision(short) == PRECISIONS[unified(short)]


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ParallelConfigError, match="64-true, 32-true, bf16-true, 16-true, bf16-mixed, 16-mixed"):
        resolve_precision("transformer-engine")
    with pytest.raises(ParallelConfigError) as caught:
        MixedPrecision(param="float32", reduce="fp32", buffer="half")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 2
    assert "mixed_precision.param is 'float32', known are fp32, bf16, fp16, fp64" in str(caught.value)
    assert "YAML: mixed_precision: {buffer: bf16}" in str(caught.value)


def test_overrides() -> None:
    override = MixedPrecision(reduce="bf16", output="fp32", buffer="fp64")
    policy = resolve_precision("bf16-mixed", override)
    assert (policy.param, policy.reduce, policy.output, policy.buffer) == (BF16, BF16, FP32, FP64)
    # Weights gathered in bf16 without autocast, still reduced in fp32.
    assert fsdp_policy(resolve_precision("32-true", MixedPrecision(param="bf16"))) == MixedPrecisionPolicy(BF16, FP32)
    assert resolve_precision("bf16-mixed", MixedPrecision(param="fp32")).param is FP32
    with pytest.raises(ParallelConfigError, match='fix: precision="16-mixed"'):
        resolve_precision("32-true", MixedPrecision(param="fp16"))
    with pytest.raises(ParallelConfigError, match="autocast=False"):
        resolve_precision("bf16-mixed", MixedPrecision(param="fp64"))


def test_fsdp_policy() -> None:
    mixed = fsdp_policy(resolve_precision("bf16-mixed"))
    assert mixed == MixedPrecisionPolicy(BF16, FP32, cast_forward_inputs=False)
    assert fsdp_policy(resolve_precision("16-mixed")) == MixedPrecisionPolicy(FP16, FP32, cast_forward_inputs=False)
    assert fsdp_policy(resolve_precision("bf16-mixed", autocast=False)) == MixedPrecisionPolicy(BF16, FP32)
    for precision in ("64-true", "32-true", "bf16-true", "16-true"):
        assert fsdp_policy(resolve_precision(precision)) == MixedPrecisionPolicy()
    assert fsdp_policy(resolve_precision("bf16-true", MixedPrecision(reduce="fp32"))).reduce_dtype is FP32


def test_contexts() -> None:
    x = torch.ones(2, 2)
    with resolve_precision("bf16-mixed").autocast_context("cpu"):
        assert (x @ x).dtype is BF16
    for policy in (resolve_precision("bf16-mixed", autocast=False), resolve_precision("bf16-true")):
        with policy.autocast_context("cpu"):
            assert (x @ x).dtype is FP32
    before = torch.get_default_dtype()
    for precision, inside in [("bf16-true", BF16), ("64-true", FP64), ("32-true", before), ("bf16-mixed", before)]:
        with resolve_precision(precision).default_dtype_context():
            assert torch.zeros(1).dtype is inside
        assert torch.get_default_dtype() is before


def test_table_has_a_line_for_each_precision() -> None:
    lines = dtype_table().splitlines()
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    table = {}
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        table[cells[0]] = dict(zip(header, cells, strict=True))
    assert list(table) == list(PRECISIONS)
    mixed = table["bf16-mixed"]
    assert [mixed[f"parameters {what}"] for what in ("stored", "gathered", "saved")] == ["fp32", "bf16", "fp32"]
    assert (mixed["gradients reduced"], mixed["autocast"], mixed["loss scaler"]) == ("fp32", "bf16", "off")
    assert table["16-mixed"]["loss scaler"] == "on"
    assert dict(resolve_precision("bf16-true").rows())["optimizer state"] == "bf16"


class _Probe(nn.Module):
    """Two layers and a buffer; remembers the dtype in which its weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.first.weight.dtype
        return self.second(self.first(x) * self.table)


class _ReducedDtypes(TorchDispatchMode):
    """Records the dtypes of all that goes through a reduce-scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce_scatter" in func.name():
            self.found |= {leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


def _measured_dtypes(precision: str) -> dict[str, str]:
    names = {FP64: "fp64", FP32: "fp32", BF16: "bf16", FP16: "fp16"}
    policy, model = resolve_precision(precision), _Probe()
    cast_floating(model, policy.storage, policy.buffer)
    fully_shard(model, mp_policy=fsdp_policy(policy))
    optimizer = torch.optim.AdamW(model.parameters())
    with policy.autocast_context("cpu"):
        out = model(convert_inputs({"x": torch.ones(2, 4)}, policy.storage)["x"])
    with _ReducedDtypes() as reduced:
        out.sum().backward()
    optimizer.step()
    weight = model.first.weight
    found = {
        "parameters stored": weight.to_local().dtype,
        "parameters gathered": model.seen,
        "gradients stored": weight.grad.to_local().dtype,
        "optimizer state": optimizer.state[weight]["exp_avg"].to_local().dtype,
        "parameters saved": model.state_dict()["first.weight"].dtype,
    }
    if policy.buffer:
        found["buffers"] = model.table.dtype
    if dist.get_world_size() > 1:
        (found["gradients reduced"],) = reduced.found
    return {what: names[dtype] for what, dtype in found.items()}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world", [long_run(1), 2])
def test_table_is_what_fsdp_does(world: int, precision: str) -> None:
    promised = dict(resolve_precision(precision).rows())
    for measured in run_ranks(world, _measured_dtypes, precision):
        assert measured == {what: promised[what] for what in measured}


def test_cast_floating_keeps_identity_and_leaves_the_rest() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model.register_buffer("rotary", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    model[0].register_buffer("shared", model.scratch)
    before = dict(model.named_parameters(remove_duplicate=False))
    cast_floating(model, BF16)
    assert model[2].running_mean.dtype is FP32
    cast_floating(model, None, BF16)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] and after[name].dtype is BF16 for name in before)
    assert model[2].running_mean.dtype is BF16
    assert model[2].num_batches_tracked.dtype is torch.int64
    assert model.rotary.dtype is torch.complex64
    assert model.scratch is model[0].shared
    assert "scratch" not in model.state_dict()


def _check_cast_dtensor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(3, 3)
    full = module.weight.detach().clone()
    module.weight = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]), requires_grad=False)
    weight = module.weight
    cast_floating(module, BF16)
    assert module.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, DTensor)
    assert not weight.requires_grad
    assert weight.dtype is weight.to_local().dtype is BF16
    assert torch.equal(weight.full_tensor(), full.to(BF16))


def test_cast_floating_reaches_the_local_tensor() -> None:
    run_ranks(2, _check_cast_dtensor)


def test_convert_inputs() -> None:
    batch = {"x": torch.ones(2), "y": [torch.ones(2, dtype=torch.int64), ("name", 3, None)], "z": torch.ones(1) * 1j}
    converted = convert_inputs(batch, BF16)
    assert converted["x"].dtype is BF16
    assert converted["y"][0].dtype is torch.int64
    assert converted["y"][1] == ("name", 3, None)
    assert converted["z"].is_complex()


def _sharded_and_plain() -> tuple[list[nn.Parameter], list[Tensor]]:
    """Parameters on two meshes and on none, and the full value of each."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(shape, generator=generator) for shape in [(3, 2), (1, 2), (2,)]]
    shards = [
        distribute_tensor(value.clone(), m, p, src_data_rank=None)
        for value, m, p in zip(full[:2], [mesh["a"], mesh], [[Shard(0)], [Shard(0), Shard(1)]], strict=True)
    ]
    return [nn.Parameter(value) for value in [*shards, full[2].clone()]], full


def _backward(scaler: torch.amp.GradScaler, params: list[nn.Parameter]) -> None:
    """Give each parameter the gradient 2 x, scaled."""
    for param in params:
        local = param.to_local() if isinstance(param, DTensor) else param
        scaler.scale(local.square().sum()).backward()


def _poison(params: list[nn.Parameter], which: int, rank: int, value: float) -> None:
    if dist.get_rank() == rank:
        grad = params[which].grad
        (grad.to_local() if isinstance(grad, DTensor) else grad)[0].fill_(value)


def _check_skip(which: int, value: float, unscale_first: bool) -> None:
    params, full = _sharded_and_plain()
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=2)
    rank_with_rows = 0 if which == 1 else 1
    _backward(scaler, params)
    _poison(params, which, rank_with_rows, value)
    with CommDebugMode() as comm:
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert comm.get_total_counts() == 1
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(full_tensor(p.detach()), f) for p, f in zip(params, full, strict=True))
    # The next two steps are finite: both are taken, and the scale grows again.
    for step, scale in enumerate([4.0, 8.0], start=1):
        optimizer.zero_grad()
        _backward(scaler, params)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        for param, value_before in zip(params, full, strict=True):
            torch.testing.assert_close(full_tensor(param.detach()), value_before * 0.8**step)


@pytest.mark.parametrize(
    ("which", "value", "unscale_first"),
    crossed(
        (0, 1, 2),
        (math.inf, math.nan),
        (False, True),
        quick=[(0, math.inf, False), (1, math.nan, True), (2, math.inf, True), (2, math.nan, False)],
    ),
)
def test_all_ranks_skip_the_step_that_one_must_skip(which: int, value: float, unscale_first: bool) -> None:
    run_ranks(2, _check_skip, which, value, unscale_first)


def _check_unscale() -> None:
    params, full = _sharded_and_plain()
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    _backward(scaler, params)
    scaler.unscale_(optimizer)
    reference = [nn.Parameter(value) for value in full]
    torch_optimizer, torch_scaler = torch.optim.SGD(reference, lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    _backward(torch_scaler, reference)
    torch_scaler.unscale_(torch_optimizer)
    for param, ref in zip(params, reference, strict=True):
        assert torch.equal(full_tensor(param.grad), ref.grad)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def test_unscaled_gradients_equal_those_of_torch_on_full_tensors() -> None:
    run_ranks(2, _check_unscale)


def _check_fp16_step(poisoned: bool) -> None:
    """A real 16-mixed step under FSDP2, where only rank 1 has an overflow."""
    torch.manual_seed(0)
    policy, model = resolve_precision("16-mixed"), _Probe()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mp_policy=fsdp_policy(policy))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10)
    with policy.autocast_context("cpu"):
        loss = model(torch.ones(2, 4)).float().mean()
    scaler.scale(loss).backward()
    _poison([model.second.bias], 0, 1 if poisoned else -1, math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0**9 if poisoned else 2.0**10)
    same = [torch.equal(full_tensor(value), before[name]) for name, value in model.state_dict().items()]
    assert all(same) is poisoned


@pytest.mark.parametrize("poisoned", [False, True])
def test_fp16_under_fsdp(poisoned: bool) -> None:
    run_ranks(2, _check_fp16_step, poisoned)


def _check_fused(poisoned: bool, unscale_first: bool) -> None:
    """Fused optimizers get the scale and the verdict as attributes and skip by themselves."""
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(1.0, 7.0).view(3, 2)
    param = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None))
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
    assert optimizer._step_supports_amp_scaling
    reference = nn.Parameter(full.clone())
    reference.grad = full.clone()
    torch.optim.AdamW([reference], lr=0.1).step()
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    param.grad = distribute_tensor(full * 8.0, mesh, [Shard(0)], src_data_rank=None)
    _poison([param], 0, 1 if poisoned else -1, math.inf)
    with CommDebugMode() as comm:
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert comm.get_total_counts() == 1
    assert scaler.get_scale() == (4.0 if poisoned else 8.0)
    torch.testing.assert_close(full_tensor(param.detach()), full if poisoned else reference.detach())


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("poisoned", [False, True])
def test_fused_optimizers(poisoned: bool, unscale_first: bool) -> None:
    run_ranks(2, _check_fused, poisoned, unscale_first)


def _check_missing_gradients() -> None:
    params, full = _sharded_and_plain()
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    _backward(scaler, params)
    _poison(params, 2, 1, math.inf)
    if dist.get_rank() == 0:
        optimizer.zero_grad()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(full_tensor(p.detach()), f) for p, f in zip(params, full, strict=True))


def test_a_rank_without_gradients_follows_the_verdict() -> None:
    run_ranks(2, _check_missing_gradients)


def test_scaler_in_one_process_is_torchs() -> None:
    results = []
    for kind in (torch.amp.GradScaler, ShardedGradScaler):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = kind("cpu", init_scale=2.0**12, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(model(torch.tensor([1, 1, 2])).sum()).backward()
            if step == 3:
                model[1].weight.grad.fill_(math.inf)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append((scaler.state_dict(), [p.detach() for p in model.parameters()]))
    (torch_state, torch_params), (state, params) = results
    assert state == torch_state
    torch.testing.assert_close(params, torch_params)
    restored = ShardedGradScaler("cpu")
    restored.load_state_dict(torch_state)
    assert restored.state_dict() == torch_state


def test_fp16_gradients_are_refused() -> None:
    param = nn.Parameter(torch.ones(2, dtype=FP16))
    optimizer, scaler = torch.optim.SGD([param]), ShardedGradScaler("cpu")
    scaler.scale(param.float().sum()).backward()
    with pytest.raises(ValueError, match="16-mixed"):
        scaler.unscale_(optimizer)
