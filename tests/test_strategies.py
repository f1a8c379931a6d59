"""The strategies as a user meets them: names, options, YAML, what is wrong, processes, ways to build a module."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import StrategyRegistry
from probe import crossed, long_run
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_par import strategies
from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.precision import MixedPrecision
from lightning_par.strategies import fabric as fabric_strategies
from lightning_par.testing import run_ranks
from models import GPT, Block, NanoGPT, Tokens, loader
from parity import gathered, make_trainer

NAMES = {
    "par_ddp": ("DataParallelStrategy", 3),
    "par_zero1": ("ZeROStrategy", 1),
    "par_zero2": ("ZeROStrategy", 2),
    "par_zero3": ("ZeROStrategy", 3),
    "par_fsdp": ("FSDP2Strategy", 3),
    "par_hsdp": ("HSDPStrategy", 3),
    "par_tp": ("TensorParallelStrategy", 3),
}
BATCHES = [[4 * i + j for j in range(4)] for i in range(6)]


def weights(module: nn.Module) -> dict[str, Tensor]:
    return gathered({name: p.detach() for name, p in module.named_parameters()})


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


# -- names ----------------------------------------------------------------------------------------------------------


def make_host(host: str, strategy: Any, **options: Any) -> Any:
    if host == "trainer":
        return make_trainer(options.pop("devices", 2), strategy, **options)
    return Fabric(**({"accelerator": "cpu", "devices": 2, "strategy": strategy} | options))


@pytest.mark.parametrize("host", ["trainer", "fabric"])
@pytest.mark.parametrize("name", NAMES)
def test_names_work_in_any_case(name: str, host: str) -> None:
    class_name, stage = NAMES[name]
    module = strategies if host == "trainer" else fabric_strategies
    for spelling in (name, name.upper(), name.replace("par", "Par")):
        strategy = make_host(host, spelling).strategy
        assert type(strategy) is getattr(module, class_name)
        assert strategy._options.zero_stage == stage


def test_both_registries_describe_the_names() -> None:
    for registry in (StrategyRegistry, STRATEGY_REGISTRY):
        assert set(NAMES) <= set(registry.available_strategies())
        assert all(registry[name]["description"] for name in NAMES)
    strategies.register()


def train_by(name: str | None, host: str, class_name: str | None = None) -> list[bool]:
    module = GPT() if host == "fabric" else NanoGPT()
    family = strategies if host == "trainer" else fabric_strategies
    strategy = name if name else getattr(family, class_name or "")()
    made = make_host(host, strategy, max_steps=1) if host == "trainer" else make_host(host, strategy)
    if host == "trainer":
        made.fit(module, loader(BATCHES))
    else:
        made.launch()
        made.setup(module, torch.optim.SGD(module.parameters()))
    return [isinstance(m, FSDPModule) for m in module.modules() if isinstance(m, Block)]


@pytest.mark.parametrize(
    ("name", "host"),
    crossed(("par_fsdp", None), ("trainer", "fabric"), quick=[("par_fsdp", "fabric"), (None, "trainer")]),
)
def test_by_name_and_by_class(name: str | None, host: str) -> None:
    class_name = None if name else "FSDP2Strategy"
    assert run_ranks(2, train_by, name, host, class_name) == [[True] * 3] * 2


# -- YAML -----------------------------------------------------------------------------------------------------------


def parse(folder: Path, class_name: str, **init_args: Any) -> Any:
    """Give a file to Lightning's own CLI, without any subcommand."""
    strategy = {"class_path": f"lightning_par.strategies.{class_name}", "init_args": init_args}
    trainer = {"accelerator": "cpu", "devices": 2, "logger": False, "strategy": strategy}
    (folder / "run.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    return LightningCLI(NanoGPT, run=False, args=["--config", str(folder / "run.yaml")]).trainer.strategy


def test_yaml_has_every_type_of_option(tmp_path: Path) -> None:
    strategy = parse(
        tmp_path,
        "MeshStrategy",
        dp_replicate_size=1,
        dp_shard_size=2,
        zero_stage=2,
        blocks=["Block", "models.GPT"],
        mixed_precision={"reduce": "fp32", "param": "bf16"},
        autocast=False,
        activation_checkpointing="selective",
        compile="aot_eager",
        cpu_offload=True,
        sync_every_batch=False,
        state_dict_type="full",
        process_group_backend="gloo",
        timeout="0:10:00",
    )
    assert type(strategy) is strategies.MeshStrategy
    assert strategy._layout.dp_shard_size == 2
    options = strategy._options
    assert (options.zero_stage, options.activation_checkpointing, options.compile) == (2, "selective", "aot_eager")
    assert (options.cpu_offload, options.sync_every_batch) == (True, False)
    assert options.blocks[0] == "Block"
    assert strategy._mixed_precision == MixedPrecision(param="bf16", reduce="fp32")
    assert strategy._timeout == timedelta(minutes=10)
    assert (strategy._state_dict_type, strategy._autocast) == ("full", False)


@pytest.mark.parametrize(
    ("class_name", "init_args", "attribute", "value"),
    [
        ("FSDP2Strategy", {"activation_checkpointing": 2}, "activation_checkpointing", 2),
        ("FSDP2Strategy", {"activation_checkpointing": True}, "activation_checkpointing", True),
        ("FSDP2Strategy", {"reshard_after_forward": 2}, "reshard_after_forward", 2),
        ("FSDP2Strategy", {"compile": True}, "compile", True),
        ("FSDP2Strategy", {"auto_wrap_policy": "models.Block"}, "blocks", Block),
        ("FSDP2Strategy", {"auto_wrap_policy": ["models.Block"]}, "blocks", [Block]),
        ("ZeROStrategy", {"stage": 2}, "zero_stage", 2),
        ("HSDPStrategy", {"dp_shard_size": "node"}, "zero_stage", 3),
        ("DataParallelStrategy", {"sync_every_batch": True}, "sync_every_batch", True),
    ],
    ids=str,
)
def test_yaml_of_presets(tmp_path: Path, class_name: str, init_args: Any, attribute: str, value: Any) -> None:
    strategy = parse(tmp_path, class_name, **init_args)
    assert type(strategy) is getattr(strategies, class_name)
    assert getattr(strategy._options, attribute) == value


def test_yaml_with_an_unknown_option_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(tmp_path, "FSDP2Strategy", tensor_size=2)
    assert "tensor_size" in capsys.readouterr().err


# -- wrong configurations -------------------------------------------------------------------------------------------

WRONG: list[tuple[str, dict[str, Any], list[str]]] = [
    ("MeshStrategy", {"dp_shard_size": 3}, ["dp_shard_size 3", "world size is 2", "dp_shard_size: 2"]),
    ("MeshStrategy", {"dp_replicate_size": -1}, ["dp_replicate_size and dp_shard_size are -1"]),
    (
        "MeshStrategy",
        {"dp_shard_size": 1, "cp_size": 2, "activation_checkpointing": "fulll", "state_dict_type": "half"},
        ["context parallelism", "cp_size: 1", "'fulll'", "'half'", "state_dict_type: 'sharded'", "3 problems"],
    ),
    ("MeshStrategy", {"dp_shard_size": 3, "zero_stage": 4}, ["zero_stage is 4", "dp_shard_size 3", "2 problems"]),
    ("DataParallelStrategy", {"cpu_offload": True}, ["offload", "cpu_offload: false"]),
    ("ZeROStrategy", {"stage": 2, "reshard_after_forward": True}, ["reshard_after_forward=True"]),
    ("FSDP2Strategy", {"sync_every_batch": "yes"}, ["sync_every_batch is 'yes'"]),
    (
        "FSDP2Strategy",
        {"timeout": 60, "process_group_backend": "nccl", "mixed_precision": {"reduce": "bf16"}},
        ["timeout=timedelta(seconds=60)", "process_group_backend='gloo'", "mixed_precision: {reduce: bf16}"],
    ),
]


@pytest.mark.parametrize("host", ["trainer", "fabric"])
@pytest.mark.parametrize(("class_name", "options", "words"), WRONG, ids=str)
def test_all_that_is_wrong_is_said_at_once_and_first(
    host: str, class_name: str, options: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 1 of 2, and never the other one: a process group would wait for it for ever.
    for name, value in {"LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero.rank_zero_only.rank", 0)
    family = strategies if host == "trainer" else fabric_strategies
    made = make_host(host, getattr(family, class_name)(**options))
    with pytest.raises(ParallelConfigError) as error:
        made.fit(NanoGPT(), loader(BATCHES)) if host == "trainer" else made.launch()
    assert not dist.is_initialized()
    assert all(word in str(error.value) for word in words), str(error.value)
    assert str(error.value).count("fix: ") == len(error.value.problems)


@pytest.mark.parametrize("family", [strategies, fabric_strategies], ids=["trainer", "fabric"])
@pytest.mark.parametrize(
    ("class_name", "options", "words"),
    [
        (
            "FSDP2Strategy",
            {"tp_sise": 2, "blokcs": "Block"},
            ["no option 'blokcs'", "no option 'tp_sise'", "tp_size=2"],
        ),
        ("DataParallelStrategy", {"dp_shard_size": 2}, ["sets dp_shard_size itself", "HSDPStrategy(dp_shard_size=2)"]),
        ("ZeROStrategy", {"zero_stage": 2}, ["sets zero_stage itself", "stage=2"]),
        ("FSDP2Strategy", {"blocks": "Block", "auto_wrap_policy": {Block}}, ["both blocks and auto_wrap_policy"]),
        ("FSDP2Strategy", {"auto_wrap_policy": len}, ["auto_wrap_policy is a function"]),
    ],
    ids=str,
)
def test_options_that_python_takes_and_we_do_not(
    family: Any, class_name: str, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ParallelConfigError) as error:
        getattr(family, class_name)(**options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_precision_with_semantics_of_its_own_is_refused() -> None:
    with pytest.raises(ParallelConfigError, match=r"FSDPPrecision \(precision='bf16-true'\)") as error:
        make_trainer(2, "par_fsdp", plugins=[FSDPPrecision("bf16-true")])
    assert "precision: bf16-mixed" in str(error.value)


# -- processes ------------------------------------------------------------------------------------------------------


def one_fit(environment: Any = None, **variables: str) -> tuple[int, int, int, str, dict[str, Tensor]]:
    os.environ.update(variables)
    torch.manual_seed(3)
    module = NanoGPT()
    plugins = [environment()] if environment else []
    trainer = make_trainer(2, "par_fsdp", max_steps=1, plugins=plugins)
    assert trainer.strategy.launcher is None
    trainer.fit(module, loader(BATCHES))
    cluster = type(trainer.strategy.cluster_environment).__name__
    return trainer.global_rank, trainer.local_rank, trainer.world_size, cluster, weights(module)


def test_under_torchrun() -> None:
    results = run_ranks(2, one_fit, init_group=False)
    assert [found[:4] for found in results] == [(rank, rank, 2, "TorchElasticEnvironment") for rank in range(2)]


def fit_under_slurm() -> Any:
    rank = os.environ["RANK"]
    return one_fit(
        SLURMEnvironment,
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
        SLURM_NODEID="0",
        SLURM_JOB_ID="1",
        SLURM_JOB_NAME="job",
        SLURM_NODELIST="127.0.0.1",
    )


def test_under_slurm() -> None:
    results = run_ranks(2, fit_under_slurm, init_group=False)
    assert [found[:4] for found in results] == [(rank, rank, 2, "SLURMEnvironment") for rank in range(2)]


def adopt(host: str) -> tuple[bool, int]:
    before = dist.group.WORLD
    with mock.patch("atexit.register") as register:
        if host == "trainer":
            make_trainer(2, "par_fsdp", max_steps=1).fit(NanoGPT(), loader(BATCHES))
        else:
            fabric = Fabric(accelerator="cpu", devices=2, strategy="par_fsdp")
            fabric.launch()
            fabric.setup(GPT())
    ours = [call for call in register.call_args_list if "lightning_par" in call.args[0].__module__]
    return dist.is_initialized() and dist.group.WORLD is before, len(ours)


@pytest.mark.parametrize("host", ["trainer", "fabric"])
def test_a_process_group_is_adopted_and_left_alone(host: str) -> None:
    assert run_ranks(2, adopt, host) == [(True, 0)] * 2


def own_group() -> int:
    with mock.patch("atexit.register") as register:
        make_trainer(2, "par_fsdp", max_steps=1).fit(NanoGPT(), loader(BATCHES))
    return sum("lightning_par" in call.args[0].__module__ for call in register.call_args_list)


def test_an_own_process_group_ends_with_the_process() -> None:
    assert run_ranks(2, own_group, init_group=False) == [1, 1]


def foreign_group() -> str:
    """Lightning is told of one process, the process group has two."""
    trainer = make_trainer(1, "par_fsdp", max_steps=1, plugins=[LightningEnvironment()])
    del os.environ["LOCAL_RANK"]
    with pytest.raises(ParallelConfigError) as error:
        trainer.fit(NanoGPT(), loader(BATCHES))
    return str(error.value)


def test_a_process_group_of_other_processes_is_refused() -> None:
    for message in run_ranks(2, foreign_group):
        assert "has 2 ranks" in message
        assert "devices: 2" in message


def count_meshes() -> int:
    build = strategies.shared.ParallelLayout.build_mesh
    with mock.patch.object(strategies.shared.ParallelLayout, "build_mesh", autospec=True, side_effect=build) as counted:
        module = NanoGPT()
        for _ in range(2):
            trainer = make_trainer(2, "par_fsdp", max_steps=1)
            trainer.fit(module, loader(BATCHES))
            trainer.validate(module, loader(BATCHES), verbose=False)
    return counted.call_count


def test_runs_of_one_layout_share_their_communicators() -> None:
    assert run_ranks(2, count_meshes) == [1, 1]


# -- ways to build a module -----------------------------------------------------------------------------------------


class Late(NanoGPT):
    """Built in `configure_model`, with the weights of the ordinary build."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(3)
            late = NanoGPT()
            self.model, self.scale = late.model, late.scale


def build(how: str, host: Any) -> pl.LightningModule:
    if how == "configure_model":
        return Late()
    torch.manual_seed(3)
    with host.init_module(empty_init=how == "empty") if how in ("empty", "init") else nullcontext():
        return NanoGPT()


def built(how: str, strategy: str, precision: str) -> dict[str, Tensor]:
    trainer = make_trainer(2, strategy, max_steps=2, precision=precision)
    module = build(how, trainer)
    trainer.fit(module, loader(BATCHES))
    return weights(module)


@functools.cache
def built_by_init(strategy: str, precision: str) -> dict[str, Tensor]:
    return run_ranks(2, built, "init", strategy, precision)[0]


@pytest.mark.parametrize("how", ["configure_model", long_run("init"), "empty"])
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("par_fsdp", "64-true"), long_run("par_ddp", "64-true"), long_run("par_fsdp", "bf16-true")],
)
def test_each_way_to_build_gives_the_same_weights(how: str, strategy: str, precision: str) -> None:
    # Drawn in the storage dtype itself, as every `init_module` of Lightning does.
    assert_same(run_ranks(2, built, how, strategy, precision)[0], built_by_init(strategy, precision))


def built_with_fabric(how: str, strategy: str) -> dict[str, Tensor]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = build(how, fabric)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    for batch in loader(BATCHES):
        fabric.backward(model.training_step(batch, 0))
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


@pytest.mark.parametrize(
    ("strategy", "how"),
    crossed(("par_fsdp", "par_ddp"), ("init", "empty"), quick=[("par_fsdp", "empty"), ("par_ddp", "init")]),
)
def test_each_way_to_build_gives_the_same_weights_in_fabric(how: str, strategy: str) -> None:
    want = run_ranks(2, built_with_fabric, "plain", strategy)[0]
    assert_same(run_ranks(2, built_with_fabric, how, strategy)[0], want)


# -- one module in several runs -------------------------------------------------------------------------------------


def several_runs(devices: int, strategy: Any, plan: str) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(3)
    module = NanoGPT()
    trainer = make_trainer(devices, strategy, max_steps=2, precision="64-true")
    data, values = DataLoader(Tokens(24), batch_size=4), []
    if plan == "validate first":
        values.append(trainer.validate(module, data, verbose=False)[0]["val_loss"])
    trainer.fit(module, data)
    if plan == "same trainer":
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(module, data)
    elif plan == "new trainer":
        make_trainer(devices, strategy, max_steps=2, precision="64-true").fit(module, data)
    elif plan == "evaluate between":
        values.append(trainer.validate(module, data, verbose=False)[0]["val_loss"])
        predicted = trainer.predict(module, data)
        values += torch.cat(predicted).flatten().tolist()
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(module, data)
        values.append(trainer.validate(module, data, verbose=False)[0]["val_loss"])
    return weights(module), values


@pytest.mark.parametrize(
    ("strategy", "plan"),
    crossed(
        ("par_fsdp", "par_zero1", "par_ddp"),
        ("same trainer", "new trainer", "evaluate between", "validate first"),
        quick=[
            ("par_fsdp", "same trainer"),
            ("par_fsdp", "evaluate between"),
            ("par_ddp", "new trainer"),
            ("par_ddp", "validate first"),
        ],
    ),
)
def test_several_runs_are_those_of_one_process(plan: str, strategy: str) -> None:
    """All ranks read the same data, so that one process computes the same."""
    ((want, values),) = run_ranks(1, several_runs, 1, "auto", plan)
    for got, got_values in run_ranks(2, several_runs, 2, strategy, plan):
        assert_same(got, want, 1e-9)
        assert got_values == pytest.approx(values)


def test_every_public_name_is_there_for_both_hosts() -> None:
    names: Callable[[Any], set[str]] = lambda module: {n for n in module.__all__ if n.endswith("Strategy")}
    assert names(strategies) == names(fabric_strategies) >= {"MeshStrategy", *(n for n, _ in NAMES.values())}


# -- Lightning's options that need a strategy to act ----------------------------------------------------------------


def synchronised_batch_norm() -> bool:
    module = NanoGPT()
    module.norm = nn.BatchNorm1d(4)
    for _ in range(2):
        make_trainer(2, "par_fsdp", max_steps=1, sync_batchnorm=True).fit(module, loader(BATCHES))
    return isinstance(module.norm, nn.SyncBatchNorm) and isinstance(module.norm.weight, DTensor)


def test_synchronised_batch_norm() -> None:
    assert run_ranks(2, synchronised_batch_norm) == [True, True]
