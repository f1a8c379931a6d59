"""LightningCLI with `show`, for any LightningModule and LightningDataModule; `cli.py` imports it when it is needed."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy

from lightning_par.callbacks import (
    CommittedCheckpoint,
    NaNRewind,
    PreemptionGuard,
    RankZeroLogger,
    ThroughputMonitor,
)
from lightning_par.callbacks.committed_checkpoint import committed_checkpoint_of
from lightning_par.errors import ParallelConfigError, Problem, Problems
from lightning_par.strategies import MeshStrategy
from lightning_par.strategies.examples import data_example


@dataclass
class Defaults:
    """Callbacks that `fit` adds where the strategy is one of lightning_par; one of the same class in
    `trainer.callbacks` takes the place of the default.

    Args:
        rank_zero_logger: Add RankZeroLogger: console output that one can read, and a line of metrics.
        throughput_monitor: Add ThroughputMonitor: samples or tokens per second, and where the time of a step goes.
        committed_checkpoint: Add CommittedCheckpoint, every ten minutes, in default_root_dir/checkpoints.
        nan_rewind: Add NaNRewind: steps that are not finite are skipped.
        preemption_guard: Add PreemptionGuard: SIGTERM saves, and ends the run with status 75.
    """

    rank_zero_logger: bool = True
    throughput_monitor: bool = True
    committed_checkpoint: bool = True
    nan_rewind: bool = True
    preemption_guard: bool = True

    def missing(self, trainer: Mapping[str, Any]) -> list[pl.Callback]:
        """Build those that are on, work with the options of a Trainer, and are not in its callbacks."""
        strategy = trainer.get("strategy")
        name = strategy if isinstance(strategy, str) else ""
        if not isinstance(strategy, MeshStrategy) and not name.startswith("par_"):
            return []
        found = [type(one) for one in trainer.get("callbacks") or []]
        added = []
        for field in fields(self):
            cls = CLASSES[field.name]
            if not getattr(self, field.name) or any(issubclass(one, cls) for one in found):
                continue
            if cls is CommittedCheckpoint and not _writes_directories(trainer):
                continue
            added.append(cls())
        return added


CLASSES: dict[str, type[pl.Callback]] = {
    "rank_zero_logger": RankZeroLogger,
    "throughput_monitor": ThroughputMonitor,
    "committed_checkpoint": CommittedCheckpoint,
    "nan_rewind": NaNRewind,
    "preemption_guard": PreemptionGuard,
}


EVALUATIONS = ("validate", "test", "predict")
# Lightning asks torch in a way that the next torch will not have.
_OF_LIGHTNING = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
UNTRUE = {
    False: (_OF_LIGHTNING,),
    True: (
        _OF_LIGHTNING,
        # Only a fit has the callbacks whose states are in its checkpoints.
        "Be aware that when using `ckpt_path`, callbacks used to create",
        # Each sample is evaluated once, or it is said how many are not.
        "Using `DistributedSampler` with the dataloaders",
    ),
}
"""How warnings begin that nobody needs under our strategies: in a fit, and in an evaluation."""


def _writes_directories(trainer: Mapping[str, Any]) -> bool:
    strategy = trainer.get("strategy")
    full = isinstance(strategy, MeshStrategy) and strategy.state_dict_type == "full"
    return trainer.get("enable_checkpointing") is not False and not trainer.get("barebones") and not full


class Trainer(pl.Trainer):
    """Lightning's Trainer, and `show`."""

    def show(
        self, model: pl.LightningModule, datamodule: pl.LightningDataModule | None = None, svg: str | None = None
    ) -> None:
        """Say what the strategy would do to the model; starts no processes and trains nothing.

        Args:
            model: The model to be described.
            datamodule: Gives samples for a step, by which a pipeline is cut; for other layouts it is not used.
            svg: A file for a picture of the schedule of a pipeline.

        Raises:
            ParallelConfigError: If the strategy is not one of lightning_par, or would refuse the configuration.
        """
        if not isinstance(self.strategy, MeshStrategy):
            raise ParallelConfigError(
                Problem(
                    f"trainer.strategy is Lightning's {type(self.strategy).__name__}; show explains strategies of "
                    "lightning_par",
                    'strategy="par_fsdp"',
                )
            )
        # Models that are built late may be too large for this machine: shapes are enough.
        with self.strategy.tensor_init_context(empty_init=True):
            model.configure_model()
        example = None
        if self.strategy.layout.pp_size != 1 and datamodule is not None:
            model._trainer = self
            example = data_example(model, datamodule)
        print(self.strategy.explain(model, self.world_size, example, svg))


class LightningParCLI(LightningCLI):
    """The commands `fit`, `validate`, `test`, `predict` and `show` for `--model` and `--data` given by class path."""

    def __init__(self) -> None:
        super().__init__(
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=Trainer,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "lightning-par"},
        )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        # The other commands take them too, so that one file serves all.
        parser.add_argument(
            "--resume",
            type=Literal["auto"] | None,
            default=None,
            help="auto: fit goes on from the newest whole checkpoint of the run, or starts afresh where there is none",
        )
        parser.add_class_arguments(Defaults, "defaults")
        return parser

    def before_instantiate_classes(self) -> None:
        """Look at what the parser cannot know, before any process is started.

        Raises:
            ParallelConfigError: If `ckpt_path` does not exist, or an evaluation is to find one by itself.
        """
        config = self.config[self.subcommand]
        path = config.get("ckpt_path")
        if self.subcommand in EVALUATIONS and config.get("resume") == "auto" and not path:
            raise ParallelConfigError(
                Problem(
                    f"resume: auto is for fit, and {self.subcommand} would use new weights", "--ckpt_path CHECKPOINT"
                )
            )
        if config.get("defaults", False) is None:
            raise ParallelConfigError(
                Problem("defaults is null; each of them is true or false", "--defaults.nan_rewind false")
            )
        if path and path not in ("best", "last", "hpc") and "://" not in path and not path.startswith("registry"):
            _refuse_missing_checkpoint(Path(path))
        if self.subcommand == "show" and not torch.accelerator.is_available():
            # Nothing runs, so a machine without the accelerator may ask what would happen on one with it.
            config.trainer.accelerator = "cpu"

    def instantiate_classes(self) -> None:
        """Build data, model and Trainer.

        Raises:
            ParallelConfigError: What a strategy or callback refused, as it said it: the parser would bury it in a list
                of the types that it may have.
        """
        refused: list[ParallelConfigError] = []

        def build(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return cls(*args, **kwargs)
            except ParallelConfigError as error:
                refused.append(error)
                raise

        for kind in (Strategy, pl.Callback):
            self.parser.add_instantiator(build, kind, subclasses=True)
        try:
            super().instantiate_classes()
        except ValueError:
            if refused:
                raise refused[0] from None
            raise
        if isinstance(self.trainer.strategy, MeshStrategy):
            for text in UNTRUE[self.subcommand in EVALUATIONS]:
                warnings.filterwarnings("ignore", message=text)
        if self.subcommand == "fit" and self.config[self.subcommand].get("resume") == "auto":
            resume_automatically(self.trainer)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[pl.Callback]) -> pl.Trainer:
        defaults = self._get(self.config_init, "defaults")
        if self.subcommand == "fit" and isinstance(defaults, Defaults):
            given = config.get("callbacks") or []
            known = {**config, "callbacks": [*(given if isinstance(given, list) else [given]), *callbacks]}
            callbacks = [*callbacks, *defaults.missing(known)]
        return super()._instantiate_trainer(config, callbacks)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Name the Trainer methods that are commands, each with the arguments that are not options."""
        return {**LightningCLI.subcommands(), "show": {"model", "datamodule"}}


def resume_automatically(trainer: pl.Trainer) -> None:
    """Let `fit` go on from where the callbacks of a Trainer save.

    Raises:
        ParallelConfigError: If no callback says where that is.
    """
    committed = committed_checkpoint_of(trainer)
    if committed is not None:
        committed.resume = "auto"
        return
    strategy = trainer.strategy
    places = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
    directories = [str(place) for place in places if place is not None]
    problems = Problems()
    if not directories:
        problems.add(
            "--resume auto: no callback says in which directory the run saves",
            "trainer.callbacks: [{class_path: lightning_par.callbacks.CommittedCheckpoint, init_args: {dirpath: "
            "checkpoints}}]",
        )
    if not isinstance(strategy, MeshStrategy):
        problems.add(
            f"--resume auto needs a strategy of lightning_par, and this is {type(strategy).__name__}",
            "--trainer.strategy par_ddp",
        )
    elif strategy.state_dict_type != "sharded":
        problems.add(
            "--resume auto looks for checkpoint directories, and with state_dict_type full the run saves files",
            "state_dict_type: sharded; or --ckpt_path FILE",
        )
    problems.raise_if_any()
    assert isinstance(strategy, MeshStrategy)
    strategy.resume_from(directories[0], "size")


def _refuse_missing_checkpoint(path: Path) -> None:
    if path.exists():
        return
    beside = [str(path.parent / name) for name in sorted(os.listdir(path.parent))] if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), beside, n=1) or [p for p in beside if p.endswith(".ckpt")][:1]
    raise ParallelConfigError(Problem(f"ckpt_path {path} does not exist", f"--ckpt_path {near[0]}" if near else ""))
