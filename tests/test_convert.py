"""`lightning-par convert`: checkpoints in the formats of plain Lightning, Fabric, Hugging Face and torch."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from probe import long_run, some
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader

from checkpoint_runs import assert_same as assert_same_view
from checkpoint_runs import build, load_run, save_run, train, view
from lightning_par import checkpoint as ckpt
from lightning_par import cli
from lightning_par.checkpoint.reading import StoredTensor
from lightning_par.checkpoint.safetensors_file import write_safetensors
from lightning_par.checkpoint.torch_file import write_torch_file
from lightning_par.testing import run_ranks
from models import LENGTH, VOCABULARY, Llama, NanoGPT, Tokens
from parity import build_strategy, make_trainer

FSDP: tuple[str, dict[str, Any]] = ("FSDP2Strategy", {})
SPECS: dict[str, tuple[int, tuple[str, dict[str, Any]]]] = {
    "fsdp": (2, FSDP),
    "zero1": (2, ("ZeROStrategy", {"stage": 1})),
    "tp": (2, ("MeshStrategy", {"dp_shard_size": 1, "tp_size": 2})),
    "pp": (2, ("MeshStrategy", {"pp_size": 2, "dp_shard_size": 1, "pp_microbatches": 4})),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.uint16, torch.complex64]


def same(one: Any, other: Any, where: str = "") -> None:
    """Raise unless two nested values are equal in kind, dtype and every bit."""
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor), where
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert torch.equal(one.detach().contiguous().view(-1), other.detach().contiguous().view(-1)), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            same(value, other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, (value, its) in enumerate(zip(one, other, strict=True)):
            same(value, its, f"{where}/{i}")
    else:
        assert one == other, where


def stored(tensor: Tensor, name: str = "weight") -> StoredTensor:
    return StoredTensor(name, tuple(tensor.shape), tensor.dtype, 1, (), lambda: tensor)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """The exit status of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["lightning-par", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        return cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)


# -- the formats of files -------------------------------------------------------------------------------------------


def some_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {str(dtype): (torch.randn(3, 5) * 3).to(dtype) for dtype in DTYPES}
    return found | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "odd": torch.ones(3, dtype=torch.int8)}


def places_of_data(path: Path, archive: zipfile.ZipFile) -> list[int]:
    """Where the members of an archive begin after their headers, which end with a name and an extra field."""
    content = path.read_bytes()
    lengths = [(i, struct.unpack_from("<HH", content, i + 26)) for i in (m.header_offset for m in archive.infolist())]
    return [i + 30 + name + extra for i, (name, extra) in lengths]


@pytest.mark.parametrize("options", [{}, {"weights_only": True}, {"mmap": True}])
def test_a_streamed_file_is_what_torch_save_writes(tmp_path: Path, options: dict[str, Any]) -> None:
    """With tensors that were never read, tensors of the caller that share memory, and a parameter."""
    tensors = some_tensors()
    parameter, base = nn.Parameter(torch.randn(4)), torch.arange(6.0)
    beside = {"parameter": parameter, "views": [base[:2], base[2:]], "numbers": (1, "two", None)}
    lazy = {name: stored(tensor) for name, tensor in tensors.items()}
    with open(tmp_path / "file", "wb") as stream:
        write_torch_file(stream, {"tensors": lazy, "again": lazy["scalar"], **beside})
    found = torch.load(tmp_path / "file", **options)
    same(found, {"tensors": tensors, "again": tensors["scalar"], **beside})
    assert found["again"] is found["tensors"]["scalar"]
    assert isinstance(found["parameter"], nn.Parameter)
    first, second = found["views"]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    with zipfile.ZipFile(tmp_path / "file") as archive:
        assert archive.testzip() is None
        # As torch has it, for files that are mapped into memory.
        assert {place % 64 for place in places_of_data(tmp_path / "file", archive)} == {0}


def test_a_safetensors_file_has_every_dtype(tmp_path: Path) -> None:
    tensors = some_tensors()
    with open(tmp_path / "file", "wb") as stream:
        write_safetensors(stream, {name: stored(tensor) for name, tensor in tensors.items()})
    same(load_file(tmp_path / "file"), tensors)
    content = (tmp_path / "file").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    # Each where numbers of its size may lie, for readers that map the file into memory.
    assert not any((8 + length + header[n]["data_offsets"][0]) % t.itemsize for n, t in tensors.items())


# -- plain Lightning and Fabric -------------------------------------------------------------------------------------


class Scheduled(NanoGPT):
    """With a schedule of the learning rate, hyper-parameters and a buffer; embedding and head are tied."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.save_hyperparameters()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Counter(Callback):
    """Has state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": torch.tensor(3)}


class Average(EMAWeightAveraging):
    """Averages from the first step."""

    def __init__(self) -> None:
        super().__init__(decay=0.5)


def data() -> DataLoader[Any]:
    return DataLoader(Tokens(8), batch_size=4)


def save_both(folder: str, spec: tuple[str, dict[str, Any]], callback: type[Callback] = Counter) -> None:
    """The same state as a directory and as the file of `state_dict_type="full"`, after one epoch."""
    torch.manual_seed(3)
    strategy = build_strategy(spec, "trainer")
    trainer = make_trainer(dist.get_world_size(), strategy, max_epochs=1, callbacks=[callback()])
    trainer.fit(Scheduled(), data())
    trainer.save_checkpoint(f"{folder}/directory.ckpt")
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    strategy._state_dict_type = "full"
    trainer.save_checkpoint(f"{folder}/full.ckpt")


class Look(Callback):
    """Notes what a run goes on from, and ends it."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizer = trainer.optimizers[0]
        self.seen = {
            "model": ckpt.full_model_state(pl_module),
            "optimizer": ckpt.full_optimizer_state(pl_module, getattr(optimizer, "_optimizer", optimizer)),
            "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
            "step": (trainer.global_step, trainer.current_epoch),
        }
        # Which implementation an optimizer takes is not a matter of the checkpoint.
        for group in self.seen["optimizer"].get("param_groups", ()):
            group.pop("foreach")
            group.pop("fused")
        trainer.should_stop = True


def begin(path: str, spec: tuple[str, dict[str, Any]] | None) -> dict[str, Any]:
    look = Look()
    torch.manual_seed(17)
    strategy = "auto" if spec is None else build_strategy(spec, "trainer")
    trainer = make_trainer(dist.get_world_size(), strategy, max_epochs=2, callbacks=[look, Counter()])
    trainer.fit(Scheduled(), data(), ckpt_path=path)
    return look.seen


@pytest.mark.parametrize("name", some(SPECS, "fsdp"))
def test_plain_lightning_begins_where_the_strategy_does(tmp_path: Path, name: str) -> None:
    """The converted file is the one that the strategy itself writes, and a plain run that begins there has its bits."""
    ranks, spec = SPECS[name]
    run_ranks(ranks, save_both, str(tmp_path), spec)
    done = ckpt.convert(tmp_path / "directory.ckpt", "lightning")
    assert done.output == str(tmp_path / "converted" / "directory.ckpt")
    found = torch.load(done.output, weights_only=True)
    same(found, torch.load(tmp_path / "full.ckpt", weights_only=True))
    assert found["state_dict"]["model.head.weight"] is found["state_dict"]["model.tokens.weight"] or name == "pp"
    here = run_ranks(ranks, begin, str(tmp_path / "directory.ckpt"), spec)[0]
    there = run_ranks(1, begin, done.output, None)[0]
    assert here["step"] == (2, 1)
    same(there, here)


def test_weights_alone_stay_weights_alone(tmp_path: Path) -> None:
    run_ranks(1, save_both, str(tmp_path), FSDP)
    found = torch.load(ckpt.convert(tmp_path / "weights.ckpt", "lightning").output, weights_only=True)
    assert "optimizer_states" not in found
    loaded = Scheduled.load_from_checkpoint(tmp_path / "converted" / "weights.ckpt")
    assert loaded.hparams.width == 16
    same(dict(loaded.state_dict()), dict(found["state_dict"]))


@pytest.mark.slow
def test_an_average_is_in_the_place_where_lightning_keeps_it(tmp_path: Path) -> None:
    run_ranks(2, save_both, str(tmp_path), FSDP, Average)
    found = torch.load(ckpt.convert(tmp_path / "directory.ckpt", "lightning").output, weights_only=True)
    same(found, torch.load(tmp_path / "full.ckpt", weights_only=True))
    assert found["current_model_state"].keys() == found["state_dict"].keys()


def fabric_both(folder: str, two: bool) -> None:
    strategy = build_strategy(FSDP, "fabric")
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(3)
    net = NanoGPT()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    model.mark_forward_method("loss")
    fabric.backward(model.loss(next(iter(data()))))
    optimizer.step()
    state: dict[str, Any] = {"net": model, "opt": optimizer, "step": 5, "note": [1, "two"]}
    if two:
        state["critic"] = fabric.setup(nn.Linear(4, 3))
    fabric.save(f"{folder}/directory", state)
    strategy._state_dict_type = "full"
    fabric.save(f"{folder}/full", state)


@pytest.mark.parametrize("two", [False, long_run(True)])
def test_plain_fabric_loads_a_converted_checkpoint(tmp_path: Path, two: bool) -> None:
    run_ranks(2, fabric_both, str(tmp_path), two)
    found = torch.load(ckpt.convert(tmp_path / "directory", "lightning").output, weights_only=True)
    same(found, torch.load(tmp_path / "full", weights_only=True))
    assert {"net", "opt", "step", "note"} <= found.keys()


def test_an_unknown_order_of_parameters_is_refused(tmp_path: Path) -> None:
    net, optimizers = build("plain", "adamw")
    train(net, optimizers, 1)
    state = ckpt.optimizer_state(net, optimizers[0]) | {"is_ordered": False}
    ckpt.save_sharded(tmp_path / "run", model=ckpt.model_state(net), optimizers=[state])
    with pytest.raises(ckpt.ExportError, match=r"order(.|\n)*fix: to='dcp'"):
        ckpt.convert(tmp_path / "run", "lightning")
    assert ckpt.convert(tmp_path / "run", "dcp").tensors


def test_a_parameter_of_two_optimizers_is_refused_where_there_is_one_name_for_both(tmp_path: Path) -> None:
    net, _ = build("plain", "sgd")
    states = [ckpt.optimizer_state(net, torch.optim.SGD(net.out.parameters(), lr=0.1)) for _ in range(2)]
    ckpt.save_sharded(tmp_path / "run", model=ckpt.model_state(net), optimizers=states)
    with pytest.raises(ckpt.ExportError, match="in several optimizers"):
        ckpt.convert(tmp_path / "run", "dcp")
    assert len(torch.load(ckpt.convert(tmp_path / "run", "lightning").output)["optimizer_states"]) == 2


# -- torch.distributed.checkpoint -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", [*some(["adamw", "groups", "momentum", "two", "factored", "sgd"], "groups")])
def test_torch_loads_a_plain_directory(tmp_path: Path, kind: str) -> None:
    """Into a module and its optimizers by torch's own functions; training goes on with the same numbers."""
    saved, stepped = run_ranks(2, save_run, str(tmp_path / "run"), "fsdp", kind)[0]
    output = ckpt.convert(tmp_path / "run", "dcp").output
    net, optimizers = build("plain", kind, seed=1)
    model, optimizer = get_state_dict(net, optimizers)
    target = {"model": model, "optimizer": optimizer}
    # Torch has made state for each parameter, and one of them is never used.
    load(target, checkpoint_id=output, no_dist=True, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(net, optimizers, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    found = view(net, optimizers)
    for name, value in saved.items():
        if isinstance(value, Tensor):
            same(found[name], value, name)
    train(net, optimizers, 1, seed=8)
    after = view(net, optimizers)
    for name in dict(net.named_parameters()):
        torch.testing.assert_close(after[name], stepped[name], rtol=1e-12, atol=1e-12)


def test_torch_turns_a_plain_directory_into_its_file(tmp_path: Path) -> None:
    saved, _ = run_ranks(2, save_run, str(tmp_path / "run"), "fsdp", "adamw")[0]
    dcp_to_torch_save(ckpt.convert(tmp_path / "run", "dcp").output, tmp_path / "file")
    found = torch.load(tmp_path / "file", weights_only=True)
    assert found.keys() == {"model", "optimizer"}
    same(found["model"], {name: value for name, value in saved.items() if "/" not in name})
    same(found["optimizer"]["state"]["out.bias"]["exp_avg"], saved["0/out.bias/exp_avg"])
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.005


# -- Hugging Face ---------------------------------------------------------------------------------------------------


class Host(nn.Module):
    """Holds a model as a LightningModule does, with something beside it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.scale = nn.Parameter(torch.ones(3))


def pretrained(name: str) -> Any:
    import transformers

    torch.manual_seed(5)
    llama = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    gpt = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    builders: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama)),
        "tied llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**llama, tie_word_embeddings=True)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**gpt, bos_token_id=1, eos_token_id=2)  # tied
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**llama, num_local_experts=4)),
    }
    return builders[name]().eval()


def save_model(path: Path | str, model: nn.Module) -> None:
    ckpt.save_sharded(path, model=ckpt.model_state(model), about=ckpt.about_model(model))


def names_in(folder: Path | str) -> dict[str, list[int]]:
    """The tensors in the safetensors files of a directory, and their shapes."""
    found: dict[str, list[int]] = {}
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118
                assert name not in found
                found[name] = content.get_slice(name).get_shape()
    return found


@pytest.mark.parametrize("size", [long_run(5_000_000_000), 8_000])
@pytest.mark.parametrize("name", some(["llama", "tied llama", "gpt2", "mixtral"], "gpt2"))
def test_transformers_loads_what_it_would_have_written(tmp_path: Path, name: str, size: int) -> None:
    import transformers

    model = pretrained(name)
    save_model(tmp_path / "run", Host(model))
    done = ckpt.convert(tmp_path / "run", "safetensors", max_shard_size=size)
    assert done.left_out == ("scale",)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(done.output, output_loading_info=True)
    assert not any(report.values())
    tokens = torch.arange(LENGTH)[None]
    assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
    model.save_pretrained(tmp_path / "own", max_shard_size=size)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "own" / file).read_text()) == json.loads(Path(done.output, file).read_text())
    # Transformers divides the experts of this model again when it saves, and takes them either way.
    if name != "mixtral":
        assert names_in(done.output) == names_in(tmp_path / "own")
    if size == 8_000:
        index = json.loads(Path(done.output, "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == names_in(done.output).keys()
        assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
        assert len(set(index["weight_map"].values())) > 1


def test_weights_in_another_dtype(tmp_path: Path) -> None:
    import transformers

    model = pretrained("gpt2")
    save_model(tmp_path / "run", Host(model))
    done = ckpt.convert(tmp_path / "run", "safetensors", dtype=torch.bfloat16)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(done.output)
    assert loaded.dtype == torch.bfloat16
    assert json.loads(Path(done.output, "config.json").read_text())["dtype"] == "bfloat16"
    same(dict(loaded.state_dict()), dict(model.bfloat16().state_dict()))


def test_of_two_models_one_is_chosen(tmp_path: Path) -> None:
    pair = nn.ModuleDict({"teacher": pretrained("gpt2"), "student": pretrained("tied llama")})
    save_model(tmp_path / "run", pair)
    with pytest.raises(ckpt.ExportError, match=r"teacher\. \(GPT2LMHeadModel\)(.|\n)*fix: prefix='teacher\.'"):
        ckpt.convert(tmp_path / "run", "safetensors")
    done = ckpt.convert(tmp_path / "run", "safetensors", prefix="student.")
    assert json.loads(Path(done.output, "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    same(load_file(Path(done.output, "model.safetensors")), {n: p.data for n, p in pair.student.named_parameters()})
    assert all(name.startswith("teacher.") for name in done.left_out)


def test_a_model_of_ones_own_has_its_names_and_no_configuration(tmp_path: Path) -> None:
    model = NanoGPT()
    save_model(tmp_path / "run", model)
    done = ckpt.convert(tmp_path / "run", "safetensors")
    assert "no config.json" in done.notes[0]
    assert names_in(done.output) == {name: list(p.shape) for name, p in model.named_parameters()}
    with pytest.raises(ckpt.ExportError, match=r"no tensor has a name that begins with 'modle\.'"):
        ckpt.convert(tmp_path / "run", "safetensors", tmp_path / "other", prefix="modle.")


def test_what_transformers_could_not_load_is_refused(tmp_path: Path) -> None:
    model = pretrained("gpt2")
    adapter = type("LoraLayer", (nn.Module,), {"__module__": "peft.tuners.lora"})
    model.transformer.h[0].mlp.adapter = adapter()
    save_model(tmp_path / "run", Host(model))
    with pytest.raises(ckpt.ExportError, match=r"has PEFT adapters in it(.|\n)*merge_and_unload"):
        ckpt.convert(tmp_path / "run", "safetensors")
    model = pretrained("gpt2")
    model.config.odd = object()
    save_model(tmp_path / "odd", Host(model))
    with pytest.raises(ckpt.ExportError, match="cannot be written as JSON"):
        ckpt.convert(tmp_path / "odd", "safetensors")
    ckpt.save_sharded(tmp_path / "complex", model={"w": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(ckpt.CheckpointError, match=r"w is torch.complex128(.|\n)*fix: to='lightning'"):
        ckpt.convert(tmp_path / "complex", "safetensors")


def train_llama(folder: str, spec: tuple[str, dict[str, Any]]) -> Any:
    """The checkpoint of a run, and the weights at its end where one rank has all."""
    trainer = make_trainer(dist.get_world_size(), build_strategy(spec, "trainer"), max_epochs=1)
    module = Llama()
    trainer.fit(module, data())
    trainer.save_checkpoint(f"{folder}/run.ckpt")
    return ckpt.full_model_state(module)


@pytest.mark.parametrize("name", some(SPECS))
def test_a_trained_model_goes_to_transformers(tmp_path: Path, name: str) -> None:
    """From a LightningModule under a strategy; nobody says what the model is."""
    import transformers

    ranks, spec = SPECS[name]
    weights = run_ranks(ranks, train_llama, str(tmp_path), spec)[0]
    done = ckpt.convert(tmp_path / "run.ckpt", "safetensors")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(done.output, output_loading_info=True)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert not any(report.values())
    assert not done.left_out
    same({f"model.{name}": value for name, value in loaded.state_dict().items()}, dict(weights))


# -- memory ---------------------------------------------------------------------------------------------------------


def save_rows(path: str, count: int, rows: int) -> None:
    """`count` matrices of `rows` KiB and one optimizer state for each, cut over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine = rows // dist.get_world_size()
    model: dict[str, Any] = {
        f"{i}.weight": DTensor.from_local(torch.full((mine, 256), float(i)), mesh, [Shard(0)]) for i in range(count)
    }
    state = {name: {"exp_avg": value} for name, value in model.items()}
    groups = [{"lr": 0.1, "params": list(model)}]
    ckpt.save_sharded(path, model=model, optimizers=[{"state": state, "param_groups": groups}])


def peak_above(action: Callable[[], Any]) -> float:
    """How far the resident memory of this process rises in an action, in MiB."""

    def measured(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(field))) / 1024

    # What earlier actions have freed would be used again unseen.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = measured("VmRSS")
    action()
    return measured("VmHWM") - before


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux alone sets the peak of memory back")
@pytest.mark.parametrize("to", ["lightning", "safetensors", "dcp"])
def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, to: Any) -> None:
    """64 MiB in tensors of 4 MiB."""
    save_small(tmp_path / "first")
    ckpt.convert(tmp_path / "first", to)
    run_ranks(2, save_rows, f"{tmp_path}/run", 8, 4096)
    assert peak_above(lambda: ckpt.convert(tmp_path / "run", to)) < 32


@pytest.mark.slow
@pytest.mark.parametrize(("to", "tensors"), [("lightning", 8), ("safetensors", 6), ("dcp", 3)])
def test_large_checkpoints_need_little_memory(tmp_path: Path, to: str, tensors: int) -> None:
    """2 GiB, or 768 MiB of what is converted, in tensors of 128 MiB: less than 600 MB above what the imports need."""
    run_ranks(2, save_rows, str(tmp_path / "run"), tensors, 128 * 1024)
    code = (
        "import resource, sys, lightning_par.checkpoint as ckpt\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak(); ckpt.convert(*sys.argv[1:]); print(peak() - before, 'lightning' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run"), to]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=110)
    above, with_lightning = result.stdout.split()
    assert int(above) < 600e6
    assert with_lightning == "False"


# -- outputs, several checkpoints, exit statuses --------------------------------------------------------------------


SMALL = {"a.weight": (4, 3), "b.weight": (5,), "c.weight": (2,)}


def save_small(path: Path, value: float = 1.0, step: int | None = None) -> None:
    ckpt.save_sharded(path, model={name: torch.full(shape, value) for name, shape in SMALL.items()})
    if step is not None:
        manifest = json.loads((path / "MANIFEST.json").read_text())
        (path / "MANIFEST.json").write_text(json.dumps(manifest | {"step": step}))


def spoil(path: Path) -> None:
    """Turn a bit in the middle of the tensors of a checkpoint."""
    file = next(path.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("to", ["lightning", "safetensors", "dcp"])
def test_nothing_is_written_over_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    save_small(tmp_path / "run", 1.0)
    arguments = ["convert", tmp_path / "run", "--to", to, "--output", tmp_path / "deep" / "out"]
    assert run(monkeypatch, *arguments) == 0
    assert "3 tensors, 76 B" in capsys.readouterr().out
    before = content_of(tmp_path / "deep")
    assert run(monkeypatch, *arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert content_of(tmp_path / "deep") == before
    save_small(tmp_path / "run", 2.0)
    assert run(monkeypatch, *arguments, "--overwrite") == 0
    after = content_of(tmp_path / "deep")
    assert after.keys() == before.keys()
    assert after != before


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_convert_did_not_write_is_never_replaced(tmp_path: Path) -> None:
    save_small(tmp_path / "run")
    thesis = tmp_path / "folder"
    thesis.mkdir()
    (thesis / "thesis.txt").write_text("keep me")
    for to in ("lightning", "safetensors", "dcp"):
        with pytest.raises(ckpt.ExportError, match="not of an earlier call"):
            ckpt.convert(tmp_path / "run", to, thesis, overwrite=True)
        for output in (tmp_path / "run", tmp_path / "run" / "inside"):
            with pytest.raises(ckpt.ExportError, match="in the checkpoint itself"):
                ckpt.convert(tmp_path / "run", to, output, overwrite=True)
    with pytest.raises(ckpt.ExportError, match=r"not of an earlier call(.|\n)*a file"):
        ckpt.convert(tmp_path / "run", "dcp", thesis / "thesis.txt", overwrite=True)
    assert content_of(thesis) == {"thesis.txt": b"keep me"}


@pytest.mark.parametrize("to", ["lightning", "safetensors", "dcp"])
def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any) -> None:
    """A tensor that cannot be read, after another one was written; a disk that does not take what was written."""
    save_small(tmp_path / "run")
    read = torch.load
    calls: list[Any] = []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        # Beside the tensors at most two other files are read.
        if len(calls) == 4:
            raise OSError(5, "Input/output error")
        return read(*arguments, **options)

    monkeypatch.setattr(torch, "load", failing)
    with pytest.raises(Exception, match="Input/output error"):
        ckpt.convert(tmp_path / "run", to)
    monkeypatch.setattr(torch, "load", read)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(5, "the disk is gone")))
    with pytest.raises((OSError, ckpt.CheckpointError), match="disk is gone"):
        ckpt.convert(tmp_path / "run", to)
    assert os.listdir(tmp_path / "converted") == []


def test_of_a_run_the_newest_valid_checkpoint_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By step, whatever the dates of the files; one that is not valid is named and passed over."""
    for name, step in (("c", 30), ("a", 200), ("b", 100)):
        save_small(tmp_path / "run" / name, step, step)
    spoil(tmp_path / "run" / "a")
    (tmp_path / "run" / ".attempt-x").mkdir()
    (tmp_path / "run" / "last").symlink_to(tmp_path / "run" / "a")
    assert run(monkeypatch, "convert", tmp_path / "run", "--to", "safetensors") == 0
    told = capsys.readouterr()
    assert str(tmp_path / "run" / "b") in told.out
    assert f"{tmp_path / 'run' / 'a'} is not valid and was passed over: the content of" in told.err
    written = tmp_path / "run" / "converted" / "b-safetensors" / "model.safetensors"
    assert load_file(written)["b.weight"].tolist() == [100.0] * 5
    # What was written is not taken for a checkpoint of the run.
    assert run(monkeypatch, "convert", tmp_path / "run", "--to", "dcp") == 0
    assert {Path(one.path).name for one in ckpt.candidates(tmp_path / "run")} == {"a", "b", "c"}


def test_exit_statuses_of_convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_small(tmp_path / "run")
    save_small(tmp_path / "unnamed")
    (tmp_path / "unnamed" / "MANIFEST.json").unlink()
    (tmp_path / "file.ckpt").write_text("")
    to = ("--to", "dcp")
    assert run(monkeypatch, "convert", tmp_path / "run") == 2
    assert run(monkeypatch, "convert", tmp_path / "run", "--to", "onnx") == 2
    assert run(monkeypatch, "convert", tmp_path / "run", *to, "--max-shard-size", "big") == 2
    assert run(monkeypatch, "convert", tmp_path / "run", *to, "--dtype", "bfloat16") == 2
    assert run(monkeypatch, "convert", tmp_path / "nowhere", *to) == 2
    assert run(monkeypatch, "convert", tmp_path / "file.ckpt", *to) == 2
    assert "is a file, not a checkpoint directory" in capsys.readouterr().err
    assert run(monkeypatch, "convert", tmp_path / "unnamed", *to) == 1
    assert "has no MANIFEST.json" in capsys.readouterr().err
    spoil(tmp_path / "run")
    assert run(monkeypatch, "convert", tmp_path / "run", *to) == 1
    assert "its CRC-32 is not" in capsys.readouterr().err
    assert run(monkeypatch, "convert", tmp_path / "run", "--to", "lightning", "--verify", "size") in (0, 1)


def test_a_checkpoint_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from where it is; only the output is local."""
    net, optimizers = build("plain", "adamw")
    train(net, optimizers, 1)
    url = f"memory://{tmp_path.name}/run"
    state = [ckpt.optimizer_state(net, optimizer) for optimizer in optimizers]
    ckpt.save_sharded(url, model=ckpt.model_state(net), optimizers=state)
    with pytest.raises(ckpt.ExportError, match=r"is a URL(.|\n)*fix: output="):
        ckpt.convert(url, "lightning")
    ckpt.convert(url, "lightning", tmp_path / "out")
    found = torch.load(tmp_path / "out", weights_only=True)
    same(found["state_dict"], dict(net.state_dict()))
    same(found["optimizer_states"][0]["state"], optimizers[0].state_dict()["state"])
    assert run(monkeypatch, "inspect", url, "--verify", "checksum") == 0


class Unknown:
    """Stands for a class whose module is not on the path later."""


def test_classes_that_are_not_found_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save_sharded(tmp_path / "run", model={"w": torch.ones(2)}, meta={"hyper_parameters": {"x": Unknown()}})
    monkeypatch.delattr(sys.modules[__name__], "Unknown")
    with pytest.raises(
        ckpt.CheckpointError, match=r"classes that are not found here(.|\n)*Unknown(.|\n)*fix: run this"
    ):
        ckpt.convert(tmp_path / "run", "lightning")


def test_a_load_after_a_conversion_is_the_load_before(tmp_path: Path) -> None:
    """Converting changes nothing in the checkpoint."""
    saved, _ = run_ranks(2, save_run, str(tmp_path / "run"), "fsdp", "adamw")[0]
    before = content_of(tmp_path / "run")
    ckpt.convert(tmp_path / "run", "lightning")
    assert content_of(tmp_path / "run") == before
    assert_same_view(saved, run_ranks(2, load_run, str(tmp_path / "run"), "fsdp", "adamw")[0][0])
