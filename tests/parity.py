"""The truth test of design 5.4: a run on several ranks against the same run in one process, number by number."""

from __future__ import annotations

import functools
import importlib
import math
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.distributed.tensor import Shard

from lightning_par.parallel.apply import parallelized
from lightning_par.parallel.gradients import grad_norm
from lightning_par.parallel.shards import full_tensor
from lightning_par.parallel.tensor.fused import feature_orders
from lightning_par.testing import run_ranks
from models import MODELS, loader

BATCH = 2
# What callbacks write beside a run.
_SCRATCH = tempfile.TemporaryDirectory()
LAYOUTS: dict[str, tuple[int, tuple[str, dict[str, Any]]]] = {
    "ddp": (2, ("DataParallelStrategy", {})),
    "zero1": (2, ("ZeROStrategy", {"stage": 1})),
    "zero2": (2, ("ZeROStrategy", {"stage": 2})),
    "fsdp": (2, ("FSDP2Strategy", {})),
    "hsdp2x2": (4, ("HSDPStrategy", {"dp_shard_size": 2})),
}


@dataclass(frozen=True)
class Run:
    """What to train and how; `accumulate` counts the accumulation steps of one rank.

    The model is one of `MODELS`, or a "module:class". Comparisons of loss curves need no gradients: to gather them in
    each step takes longer than the steps.
    """

    model: str = "nanogpt"
    accumulate: int = 1
    clip: float | None = None
    steps: int = 3
    precision: str = "64-true"
    host: str = "trainer"
    losses_only: bool = False
    batch_size: int = BATCH
    model_options: tuple[tuple[str, Any], ...] = ()

    def batches(self, rank: int | None, ranks: int) -> list[list[int]]:
        """Batches of one data rank, or with None those of all ranks in the order one process would take them."""
        everyone = [
            [[(b * self.batch_size + j) * ranks + r for j in range(self.batch_size)] for r in range(ranks)]
            for b in range(self.steps * self.accumulate)
        ]
        return [batch for row in everyone for batch in (row if rank is None else row[rank : rank + 1])]

    def build(self) -> pl.LightningModule:
        torch.manual_seed(3)
        module, _, name = self.model.rpartition(":")
        cls = getattr(importlib.import_module(module), name) if module else MODELS[name]
        return cls(**dict(self.model_options))


@dataclass
class Record:
    """What a run leaves behind, as full tensors; `gradients` and `norms` are taken before clipping, step by step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def take_gradients(self, module: torch.nn.Module) -> None:
        named = {n: p for n, p in module.named_parameters() if p.grad is not None}
        self.gradients.append(in_original_order(module, {n: p.grad for n, p in named.items()}))
        handle = parallelized(module)
        if handle is not None and handle.pipeline is not None:
            # Over all stages; nothing is that large.
            self.norms.append(float(handle.clip_grad_norm_(math.inf)))
        else:
            self.norms.append(float(grad_norm(named.values())))

    def take_weights(self, module: torch.nn.Module) -> None:
        self.weights = in_original_order(module, dict(module.named_parameters()))


def in_original_order(module: torch.nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full values of parameters or gradients, the features of fused ones as in the undivided module."""
    orders = feature_orders(module)
    full = gathered({name: value.detach() for name, value in values.items()})
    return {name: orders[name].original(full[name]) if name in orders else full[name] for name in values}


def gathered(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the full values; collective.

    What is cut along one dimension of one mesh comes with one collective, as one for each takes longer than the steps.
    """
    full: dict[str, Tensor] = {}
    alike: dict[Any, list[str]] = defaultdict(list)
    for name, value in values.items():
        cuts = [(i, p) for i, p in enumerate(getattr(value, "placements", ())) if not p.is_replicate()]
        if len(cuts) == 1 and type(cuts[0][1]) is Shard:
            alike[value.device_mesh, *cuts[0], value.dtype].append(name)
        else:
            full[name] = full_tensor(value).clone()
    for (mesh, mesh_dim, cut, _), names in alike.items():
        ranks = mesh.size(mesh_dim)
        # `torch.chunk`: all ranks have as many rows as the first, but for the last ones.
        wholes = {name: torch.empty(values[name].shape, device="meta").movedim(cut.dim, 0).shape for name in names}
        padded = {name: (-(-shape[0] // ranks), *shape[1:]) for name, shape in wholes.items()}
        mine = []
        for name in names:
            part = values[name].to_local().movedim(cut.dim, 0)
            mine += [part.flatten(), part.new_zeros(math.prod(padded[name]) - part.numel())]
        flat = torch.cat(mine)
        every = [torch.empty_like(flat) for _ in range(ranks)]
        dist.all_gather(every, flat, mesh.get_group(mesh_dim))
        pieces = torch.stack(every).split([math.prod(shape) for shape in padded.values()], dim=1)
        for name, piece in zip(names, pieces, strict=True):
            whole = piece.reshape(ranks * padded[name][0], *padded[name][1:])[: wholes[name][0]]
            full[name] = whole.movedim(0, cut.dim).clone(memory_format=torch.contiguous_format)
    return full


class Recorder(pl.Callback):
    def __init__(self, losses_only: bool = False) -> None:
        self.record = Record()
        self.losses_only = losses_only

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Lightning hands out the loss divided by the accumulation steps.
        self.record.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.losses_only:
            self.record.take_gradients(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not self.losses_only:
            self.record.take_weights(pl_module)


def make_trainer(devices: int, strategy: Any, **options: Any) -> pl.Trainer:
    """A quiet Trainer on CPU."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "default_root_dir": _SCRATCH.name,
    }
    if options.get("precision") == "16-mixed":
        # The flag alone becomes bf16-mixed on CPU. The scale is small enough that no layout overflows by itself.
        del options["precision"]
        options["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **(quiet | options))


def model_size(spec: tuple[str, dict[str, Any]]) -> int:
    """Number of ranks that see the same samples."""
    return int(spec[1].get("tp_size", 1)) * int(spec[1].get("pp_size", 1))


def data_rank(spec: tuple[str, dict[str, Any]], ranks: int) -> int:
    """Which samples this rank sees: stages are the outermost axis, tp is the innermost."""
    return dist.get_rank() // int(spec[1].get("tp_size", 1)) % (ranks // model_size(spec))


def build_strategy(spec: tuple[str, dict[str, Any]], host: str) -> Any:
    """Build a strategy by class name on the rank that uses it."""
    from lightning_par import strategies
    from lightning_par.strategies import fabric

    name, options = spec
    return getattr(strategies if host == "trainer" else fabric, name)(**options)


def train(run: Run, ranks: int, spec: tuple[str, dict[str, Any]] | None) -> Record:
    """Train on this rank of `ranks`; without a strategy, train as one process what `ranks` data ranks would train."""
    same = 1 if spec is None else model_size(spec)
    rank = None if spec is None else data_rank(spec, ranks)
    data = loader(run.batches(rank, ranks // same))
    accumulate = run.accumulate * (ranks if spec is None else 1)
    devices = 1 if spec is None else ranks
    strategy = "auto" if spec is None else build_strategy(spec, run.host)
    return (_train_with_fabric if run.host == "fabric" else _train_with_trainer)(
        run, data, accumulate, devices, strategy
    )


def _train_with_trainer(run: Run, data: Any, accumulate: int, devices: int, strategy: Any) -> Record:
    recorder = Recorder(run.losses_only)
    trainer = make_trainer(
        devices,
        strategy,
        max_steps=run.steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=run.clip,
        precision=run.precision,
        callbacks=[recorder],
    )
    trainer.fit(run.build(), data)
    return recorder.record


def _train_with_fabric(run: Run, data: Any, accumulate: int, devices: int, strategy: Any) -> Record:
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, precision=run.precision)
    fabric.launch()
    module = run.build()
    module.log = lambda *args, **kwargs: None
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    record = Record()
    for i, batch in enumerate(fabric.setup_dataloaders(data, use_distributed_sampler=False)):
        last = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last and devices > 1):
            loss = model.training_step(batch, i)
            fabric.backward(loss / accumulate)
        record.losses.append(loss.item())
        if last:
            if not run.losses_only:
                record.take_gradients(module)
            if run.clip:
                fabric.clip_gradients(model, optimizer, max_norm=run.clip)
            optimizer.step()
            optimizer.zero_grad()
    if not run.losses_only:
        record.take_weights(module)
    return record


@functools.lru_cache(maxsize=64)
def reference(run: Run, ranks: int) -> Record:
    """The same training in one process, in the pool's first worker."""
    return run_ranks(1, train, run, ranks, None)[0]


def assert_same_training(
    run: Run, ranks: int, spec: tuple[str, dict[str, Any]], *, data_ranks: int | None = None
) -> list[Record]:
    """Losses, every gradient, the norm and the weights after the last step equal those of one process.

    Differences are relative to the largest value of the kind. The bounds are those of design section 7: 1e-9 in fp64;
    in fp32 1e-5 for losses and gradients and 1e-6 for weights.
    """
    records = run_ranks(ranks, train, run, ranks, spec)
    loose, tight = (1e-9, 1e-9) if run.precision == "64-true" else (1e-5, 1e-6)
    data_ranks = data_ranks or ranks // model_size(spec)
    expected = reference(run, data_ranks)
    pp_size = int(spec[1].get("pp_size", 1))
    if pp_size == 1:
        compare(records, expected, loose, tight, data_ranks=data_ranks)
        return records
    held = set().union(*(record.weights for record in records))
    assert held == expected.weights.keys(), f"no stage has {expected.weights.keys() - held}"
    size = ranks // pp_size
    for stage in range(pp_size):
        whole = [_completed(record, expected) for record in records[stage * size : (stage + 1) * size]]
        compare(whole, expected, loose, tight, data_ranks=data_ranks)
    return records


def _completed(record: Record, expected: Record) -> Record:
    """The record of one stage, what other stages have filled in."""
    gradients = zip(expected.gradients, record.gradients, strict=True)
    return replace(
        record,
        gradients=[
            # A parameter of the stage without a gradient stays out.
            {**{n: g for n, g in everywhere.items() if n not in record.weights}, **own}
            for everywhere, own in gradients
        ],
        weights={**expected.weights, **record.weights},
    )


def compare(
    records: Sequence[Record],
    expected: Record,
    tolerance: float,
    weights_tolerance: float,
    *,
    data_ranks: int | None = None,
) -> None:
    """Assert that each rank's record agrees with the reference."""
    data_ranks = data_ranks or len(records)
    for rank, record in enumerate(records):
        mine = _doubles(expected.losses)[rank * data_ranks // len(records) :: data_ranks]
        _close(f"losses of rank {rank}", _doubles(record.losses), mine, tolerance)
        assert len(record.gradients) == len(expected.gradients) > 0
        for step, (got, want) in enumerate(zip(record.gradients, expected.gradients, strict=True)):
            assert got.keys() == want.keys(), f"step {step}: gradients of {got.keys() ^ want.keys()}"
            largest = max(float(g.abs().max()) for g in want.values())
            for name in want:
                _close(f"rank {rank}, step {step}: gradient of {name}", got[name], want[name], tolerance, largest)
        _close(f"norms of rank {rank}", _doubles(record.norms), _doubles(expected.norms), tolerance)
        assert record.weights.keys() == expected.weights.keys()
        largest = max(float(w.abs().max()) for w in expected.weights.values())
        for name, want in expected.weights.items():
            _close(f"rank {rank}: weights of {name}", record.weights[name], want, weights_tolerance, largest)


def _close(what: str, got: Tensor, want: Tensor, tolerance: float, largest: float | None = None) -> None:
    largest = float(want.abs().max()) if largest is None else largest
    worst = float((got.double() - want.double()).abs().max())
    assert worst <= tolerance * largest, f"{what} differ by {worst / largest:.2e} of the largest value"


def _doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
