"""Checkpoints through Lightning: ModelCheckpoint, resuming, files of plain Lightning, Fabric's save and load."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from probe import long_run, some
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import checkpoint as ckpt
from lightning_par import strategies
from lightning_par.strategies import fabric as fabric_strategies
from lightning_par.testing import RanksFailed, run_ranks
from models import NanoGPT, Tokens, loader
from parity import gathered, make_trainer

SHARDED, FULL = "sharded", "full"
SPECS = {
    "fsdp": ("FSDP2Strategy", {}),
    "zero1": ("ZeROStrategy", {"stage": 1}),
    "ddp": ("DataParallelStrategy", {}),
}


class Scheduled(NanoGPT):
    """With dropout, a schedule of the learning rate, and hyper-parameters."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__(dropout=dropout)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), "interval": "step"}]


def weights(module: nn.Module) -> dict[str, Tensor]:
    return gathered({name: p.detach() for name, p in module.named_parameters()})


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def data() -> DataLoader[Any]:
    """Two batches an epoch; all ranks read the same, so that one process computes the same."""
    return DataLoader(Tokens(8), batch_size=4)


def strategy_of(spec: str, state_dict_type: str, family: Any = strategies) -> Any:
    if spec == "plain":
        return "auto"
    name, options = SPECS[spec]
    return getattr(family, name)(state_dict_type=state_dict_type, **options)


def trainer_of(spec: str, state_dict_type: str = SHARDED, **options: Any) -> Any:
    devices = dist.get_world_size() if dist.is_initialized() else 1
    checkpointing = any(isinstance(c, ModelCheckpoint) for c in options.get("callbacks", []))
    strategy = strategy_of(spec, state_dict_type)
    return make_trainer(devices, strategy, precision="64-true", enable_checkpointing=checkpointing, **options)


# -- ModelCheckpoint and resuming -----------------------------------------------------------------------------------


def save_each_epoch(
    folder: str, spec: str, state_dict_type: str, dropout: float = 0.0, *, epochs: int = 3, **options: Any
) -> Any:
    """Train; the weights at the end."""
    torch.manual_seed(3)
    module = Scheduled(dropout)
    # Lightning does not find its place within an epoch again, so it is saved between them.
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True, **options)
    trainer_of(spec, state_dict_type, max_epochs=epochs, callbacks=[saver]).fit(module, data())
    return weights(module)


def resume(path: str, spec: str, state_dict_type: str, dropout: float = 0.0) -> dict[str, Tensor]:
    """From a checkpoint to the end of the third epoch."""
    torch.manual_seed(17)
    module = Scheduled(dropout)
    trainer_of(spec, state_dict_type, max_epochs=3).fit(module, data(), ckpt_path=path)
    return weights(module)


@pytest.mark.parametrize("spec", some(SPECS, "fsdp"))
@pytest.mark.parametrize(("state_dict_type", "dropout"), [(SHARDED, 0.1), long_run(FULL, 0.0)])
def test_resuming_goes_on_bit_for_bit(tmp_path: Path, spec: str, state_dict_type: str, dropout: float) -> None:
    """With dropout where it is sharded: the directory holds the random state of each rank."""
    whole = run_ranks(2, save_each_epoch, str(tmp_path), spec, state_dict_type, dropout)
    path = tmp_path / "epoch=1.ckpt"
    assert (ckpt.is_sharded_checkpoint(path), path.is_file()) == (state_dict_type == SHARDED, state_dict_type == FULL)
    for got, want in zip(run_ranks(2, resume, str(path), spec, state_dict_type, dropout), whole, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("state_dict_type", [SHARDED, long_run(FULL)])
@pytest.mark.parametrize(("there", "here"), [("fsdp", "ddp"), long_run("ddp", "zero1")])
def test_another_strategy_goes_on(tmp_path: Path, there: str, here: str, state_dict_type: str) -> None:
    whole = run_ranks(2, save_each_epoch, str(tmp_path), there, state_dict_type)[0]
    other = FULL if state_dict_type == SHARDED else SHARDED
    assert_same(run_ranks(2, resume, str(tmp_path / "epoch=1.ckpt"), here, other)[0], whole, 1e-9)


def files(folder: Path) -> dict[str, str]:
    kind = lambda path: "link" if path.is_symlink() else "directory" if path.is_dir() else "file"
    return {path.name: kind(path) for path in folder.iterdir()}


def keep_one(folder: str, state_dict_type: str, save_last: Any) -> tuple[str, str]:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=save_last)
    for steps in (2, 4):
        trainer = trainer_of("fsdp", state_dict_type, max_steps=steps, callbacks=[saver])
        trainer.fit(NanoGPT(), data(), ckpt_path="last" if steps == 4 else None)
    return saver.best_model_path, saver.last_model_path


@pytest.mark.parametrize("save_last", [long_run(True), "link"])
@pytest.mark.parametrize("state_dict_type", [SHARDED, long_run(FULL)])
def test_old_checkpoints_and_links_are_removed(tmp_path: Path, state_dict_type: str, save_last: Any) -> None:
    kind = "directory" if state_dict_type == SHARDED else "file"
    for best, last in run_ranks(2, keep_one, str(tmp_path), state_dict_type, save_last):
        assert (Path(best).name, Path(last).name) == ("step=4.ckpt", "last.ckpt")
    assert files(tmp_path) == {"step=4.ckpt": kind, "last.ckpt": "link" if save_last == "link" else kind}


def save_over(folder: str, state_dict_type: str) -> None:
    trainer = trainer_of("fsdp", state_dict_type, max_steps=1)
    trainer.fit(NanoGPT(), data())
    for name in ("link", "other kind", "nothing"):
        trainer.save_checkpoint(str(Path(folder, name)))


@pytest.mark.parametrize("state_dict_type", [SHARDED, long_run(FULL)])
def test_saving_replaces_links_and_the_other_kind_of_checkpoint(tmp_path: Path, state_dict_type: str) -> None:
    (tmp_path / "target").write_text("keep me")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    if state_dict_type == SHARDED:
        (tmp_path / "other kind").write_text("a file")
    else:
        ckpt.save_sharded(tmp_path / "other kind", model=ckpt.model_state(nn.Linear(2, 2)))
    run_ranks(2, save_over, str(tmp_path), state_dict_type)
    kind = "directory" if state_dict_type == SHARDED else "file"
    assert files(tmp_path) == {"target": "file", "link": kind, "other kind": kind, "nothing": kind}
    assert (tmp_path / "target").read_text() == "keep me"


def test_a_file_does_not_replace_a_folder_of_other_things(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "thesis.txt").write_text("")
    run_ranks(2, save_over, str(tmp_path), FULL)
    assert (tmp_path / "nothing" / "thesis.txt").exists()


# -- evaluation and plain Lightning ---------------------------------------------------------------------------------


def validate(path: str | None, spec: str) -> float:
    trainer = trainer_of(spec)
    torch.manual_seed(17)
    return float(trainer.validate(Scheduled(), data(), ckpt_path=path, verbose=False)[0]["val_loss"])


@pytest.mark.parametrize("state_dict_type", [SHARDED, long_run(FULL)])
def test_validation_from_a_checkpoint(tmp_path: Path, state_dict_type: str) -> None:
    run_ranks(2, save_each_epoch, str(tmp_path), "fsdp", state_dict_type, epochs=1)
    path = str(tmp_path / "epoch=0.ckpt")
    trained = run_ranks(2, validate, path, "fsdp")
    assert run_ranks(2, validate, path, "ddp") == pytest.approx(trained)
    assert run_ranks(1, validate, path, "fsdp") == pytest.approx(trained[:1])
    assert run_ranks(2, validate, None, "fsdp")[0] != pytest.approx(trained[0])


@pytest.mark.parametrize("spec", some(SPECS, "fsdp"))
def test_plain_lightning_loads_and_resumes_a_full_file(tmp_path: Path, spec: str) -> None:
    want = run_ranks(2, save_each_epoch, str(tmp_path), spec, FULL)[0]
    loaded = Scheduled.load_from_checkpoint(tmp_path / "epoch=2.ckpt")
    assert loaded.hparams.dropout == 0.0
    # Both times plain Lightning loads into fp32 weights, which it converts afterwards.
    assert_same(weights(loaded.double()), want, 1e-6)
    assert_same(run_ranks(1, resume, str(tmp_path / "epoch=1.ckpt"), "plain", FULL)[0], want, 1e-6)


@pytest.mark.parametrize("spec", some(SPECS, "fsdp"))
def test_a_plain_lightning_file_goes_on_here(tmp_path: Path, spec: str) -> None:
    want = run_ranks(1, save_each_epoch, str(tmp_path), "plain", FULL)[0]
    for got in run_ranks(2, resume, str(tmp_path / "epoch=1.ckpt"), spec, SHARDED):
        assert_same(got, want, 1e-9)


def resume_other_optimizers(path: str) -> None:
    module = Scheduled()
    two = [torch.optim.SGD(m.parameters(), 0.1) for m in (module.model.blocks, module.model.norm)]
    module.automatic_optimization = False
    module.configure_optimizers = lambda: two  # type: ignore[method-assign]
    trainer_of("fsdp", max_epochs=3).fit(module, data(), ckpt_path=path)


@pytest.mark.parametrize("state_dict_type", [SHARDED, long_run(FULL)])
def test_another_number_of_optimizers_is_refused(tmp_path: Path, state_dict_type: str) -> None:
    run_ranks(2, save_each_epoch, str(tmp_path), "fsdp", state_dict_type, epochs=1)
    with pytest.raises(RanksFailed, match=r"Checkpoint(.|\n)*(2 optimizers are|1 optimizers, here are 2)"):
        run_ranks(2, resume_other_optimizers, str(tmp_path / "epoch=0.ckpt"))


@pytest.mark.parametrize("state_dict_type", [long_run(SHARDED), FULL])
def test_training_does_not_go_on_from_weights_alone(tmp_path: Path, state_dict_type: str) -> None:
    run_ranks(2, save_each_epoch, str(tmp_path), "fsdp", state_dict_type, epochs=1, save_weights_only=True)
    path = str(tmp_path / "epoch=0.ckpt")
    assert run_ranks(2, validate, path, "fsdp")
    with pytest.raises(RanksFailed, match=r"contains only the model|optimizers are to be loaded"):
        run_ranks(2, resume, path, "fsdp", state_dict_type)


# -- trap 10: classes in the file -----------------------------------------------------------------------------------


@dataclass
class Recipe:
    """A hyper-parameter that is no plain type."""

    width: int = 16


class WithRecipe(NanoGPT):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe.width)
        self.save_hyperparameters()


def save_a_class(path: str, state_dict_type: str) -> None:
    trainer = trainer_of("fsdp", state_dict_type, max_steps=1)
    trainer.fit(WithRecipe(Recipe()), data())
    trainer.save_checkpoint(path)


def load_a_class(path: str, run: str, weights_only: bool | None, works: bool) -> None:
    trainer = trainer_of("fsdp", max_steps=2)
    options: dict[str, Any] = {} if run == "fit" else {"verbose": False}
    refused = pytest.raises((pickle.UnpicklingError, ckpt.CheckpointError), match="[Ww]eights.only")
    with nullcontext() if works else refused:
        getattr(trainer, run)(WithRecipe(Recipe()), data(), ckpt_path=path, weights_only=weights_only, **options)


@pytest.mark.parametrize("run", ["fit", long_run("validate")])
@pytest.mark.parametrize("state_dict_type", [SHARDED, FULL])
def test_10_weights_only_reaches_the_file(tmp_path: Path, state_dict_type: str, run: str) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(2, save_a_class, path, state_dict_type)
    run_ranks(2, load_a_class, path, run, weights_only=False, works=True)
    run_ranks(2, load_a_class, path, run, weights_only=True, works=False)
    # torch restricts files by default; a directory of ours is trusted, as the metadata in it is a pickle anyway.
    run_ranks(2, load_a_class, path, run, weights_only=None, works=state_dict_type == SHARDED)


# -- Fabric ---------------------------------------------------------------------------------------------------------


class Counter:
    """Anything with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def fabric_state(spec: str, state_dict_type: str, seed: int) -> tuple[Fabric, dict[str, Any], nn.Module]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy_of(spec, state_dict_type, fabric_strategies))
    fabric.launch()
    torch.manual_seed(seed)
    module = NanoGPT().double()
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    return fabric, {"model": model, "optimizer": optimizer, "counter": Counter(), "step": 0}, module


def fabric_steps(fabric: Fabric, state: dict[str, Any], steps: int) -> None:
    for batch in loader([[4 * i, 4 * i + 1] for i in range(state["step"], state["step"] + steps)]):
        fabric.backward(state["model"].training_step(batch, 0))
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["step"] += 1
        state["counter"].count += 2


def fabric_save(path: str, spec: str, state_dict_type: str) -> dict[str, Tensor]:
    fabric, state, module = fabric_state(spec, state_dict_type, 3)
    fabric_steps(fabric, state, 2)
    fabric.save(path, state | {"note": "kept"})
    fabric_steps(fabric, state, 2)
    return weights(module)


def fabric_resume(path: str, spec: str, state_dict_type: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    fabric, state, module = fabric_state(spec, state_dict_type, 17)
    rest = fabric.load(path, state)
    assert (state["step"], state["counter"].count) == (2, 4)
    fabric_steps(fabric, state, 2)
    return weights(module), rest


@pytest.mark.parametrize("state_dict_type", [SHARDED, long_run(FULL)])
@pytest.mark.parametrize("spec", some(SPECS, "fsdp"))
def test_fabric_goes_on_bit_for_bit(tmp_path: Path, spec: str, state_dict_type: str) -> None:
    path = str(tmp_path / "checkpoint")
    want = run_ranks(2, fabric_save, path, spec, state_dict_type)[0]
    for got, rest in run_ranks(2, fabric_resume, path, spec, state_dict_type):
        assert rest == {"note": "kept"}
        assert_same(got, want)


def fabric_parts(path: str, state_dict_type: str) -> dict[str, Any]:
    """What loads without a state, strictly, filtered, and as a raw module."""
    fabric, state, module = fabric_state("fsdp", state_dict_type, 3)
    fabric.save(path, {"model": state["model"], "step": 5}, filter={"model": lambda name, value: "norm" in name})
    before = weights(module)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    found: dict[str, Any] = {"all": fabric.load(path)}
    fabric.load(path, {"model": state["model"]}, strict=False)
    found["restored"] = {n for n, p in weights(module).items() if torch.equal(p, before[n]) and p.any()}
    with pytest.raises((ckpt.CheckpointError, KeyError), match="positions"):
        fabric.load(path, {"model": state["model"]})
    with pytest.raises(ValueError, match="together with its module"):
        fabric.load_raw(path, state["optimizer"])
    fabric.save(path, {"model": state["model"]})
    with pytest.raises(KeyError, match="lacks.*'absent'"):
        fabric.load(path, {"model": state["model"], "absent": 1})
    return found


@pytest.mark.parametrize("state_dict_type", [SHARDED, FULL])
def test_fabric_loads_parts(tmp_path: Path, state_dict_type: str) -> None:
    found = run_ranks(2, fabric_parts, str(tmp_path / "checkpoint"), state_dict_type)[0]
    assert found["all"]["step"] == 5
    assert {name.removeprefix("model.") for name in found["restored"]} == {
        "norm.weight",
        *(f"blocks.{i}.norm{k}.weight" for i in range(3) for k in (1, 2)),
    }
    if state_dict_type == FULL:
        assert all("norm" in name for name in found["all"]["model"])


def fabric_raw(path: str) -> dict[str, Tensor]:
    fabric, state, module = fabric_state("fsdp", SHARDED, 3)
    fabric.load_raw(path, state["model"])
    return weights(module)


def test_fabric_loads_the_state_dict_of_a_plain_module(tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain = NanoGPT().double()
    torch.save(plain.state_dict(), tmp_path / "raw.pt")
    for got in run_ranks(2, fabric_raw, str(tmp_path / "raw.pt")):
        assert_same(got, weights(plain))
