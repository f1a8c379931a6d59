"""One run of a module's own step on its first samples, from which a tensor-parallel plan sees how blocks are called."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric

from lightning_par.parallel import tensor
from lightning_par.parallel._compat import map_tensors, no_torch_modes
from lightning_par.strategies import _compat

_SAMPLES = 2


def step_example(trainer: pl.Trainer, module: pl.LightningModule) -> tensor.Example | None:
    """The step of the run that begins, on the first samples of its data; None where they cannot be had.

    Nothing is logged, metrics stay as they are, and no iterator of the data is begun: a later one sees all samples.
    """
    name, loop = _compat.step_and_loop(trainer)
    return _example(name, module, _compat.loader_of_run(loop))


def data_example(module: pl.LightningModule, datamodule: pl.LightningDataModule) -> tensor.Example | None:
    """The training step of a module on the first samples of a data module, without a run of the Trainer."""
    datamodule.prepare_data()
    datamodule.setup("fit")
    return _example("training_step", module, datamodule.train_dataloader())


def _example(name: str, module: pl.LightningModule, loader: Any) -> tensor.Example | None:
    step, trainer = getattr(module, name), module.trainer
    parameters = list(inspect.signature(step).parameters.values())
    if loader is None or not parameters or parameters[0].name == "dataloader_iter":
        return None
    # Indices of the batch and of the loader, where the step asks for them.
    indices = [0 for p in parameters[1:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]

    def run() -> Any:
        # The data are real, whatever the module is run with.
        with no_torch_modes():
            batch = first_samples(loader)
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        precision: Any = trainer.precision_plugin
        batch = map_tensors(lambda tensor: tensor.to(device), precision.convert_input(batch))
        with _quiet(module), precision.train_step_context():
            return step(batch, *indices)

    return tensor.Example(f"{name} on the first {_SAMPLES} samples", run)


def first_samples(loader: Any) -> Any:
    """Collate the first samples of a loader's dataset as a batch.

    Raises:
        TypeError: If the dataset has no order, or if the loader is of an unknown kind.
    """
    if isinstance(loader, DataLoader):
        dataset = loader.dataset
        if isinstance(dataset, IterableDataset):
            raise TypeError("an IterableDataset cannot be read twice")
        if loader.batch_sampler is None:
            return loader.collate_fn(dataset[0])
        return loader.collate_fn([dataset[i % len(dataset)] for i in range(_SAMPLES)])  # type: ignore[arg-type]
    iterables = getattr(loader, "iterables", loader)
    one_after_another = getattr(loader, "_mode", "") == "sequential"
    if isinstance(iterables, Mapping):
        parts = {key: first_samples(part) for key, part in iterables.items()}
        return next(iter(parts.values())) if one_after_another else parts
    if isinstance(iterables, list | tuple) and iterables:
        return first_samples(iterables[0]) if one_after_another else [first_samples(part) for part in iterables]
    raise TypeError(f"{type(loader).__name__} is no loader with samples that can be taken twice")


@contextmanager
def _quiet(module: pl.LightningModule) -> Iterator[None]:
    """Let a step leave no trace: nothing is logged, and metrics are afterwards as before."""
    metrics = [(metric, copy.deepcopy(vars(metric))) for metric in module.modules() if isinstance(metric, Metric)]
    containers = [(value, copy.copy(value)) for value in vars(module).values() if isinstance(value, list | dict | set)]
    attributes = dict(vars(module))
    silenced = ("log", "log_dict", "print", "manual_backward")
    vars(module).update(dict.fromkeys(silenced, _nothing))
    trainer: Any = module.trainer
    loggers, trainer.loggers = trainer.loggers, []
    try:
        yield
    finally:
        trainer.loggers = loggers
        vars(module).clear()
        vars(module).update(attributes)
        for container, content in containers:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        for metric, state in metrics:
            vars(metric).update(state)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
