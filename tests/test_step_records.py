"""Steps on micro-batches log, count and collect what one step on the batch does, on the stages that run no step too."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_par.errors import ParallelConfigError
from lightning_par.parallel.pipeline.microbatches import split
from lightning_par.strategies.step_metrics import named_metrics
from lightning_par.strategies.step_records import discarding, emit, merge_records, recording, share_metrics
from step_modules import CLASSES, PARTS, Logging, Note, Plain, close, in_parts, loader

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")


class InParts(SingleDeviceStrategy):
    def _in_parts(self, name: str, *args: Any) -> Any:
        module = self.lightning_module
        merged, output = in_parts(module, getattr(module, name), *args)
        emit(module, merged)
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_parts("training_step", *args)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_parts("validation_step", *args)


class Steps(pl.Callback):
    """What a logger and a callback see after each batch and epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _take(self, trainer: pl.Trainer, outputs: Any = None) -> None:
        metrics = {**trainer.logged_metrics, **trainer.callback_metrics, **trainer.progress_bar_metrics}
        outputs = {k: v for k, v in outputs.items() if k != "loss"} if isinstance(outputs, dict) else outputs
        self.seen.append((metrics, outputs))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self._take(trainer, outputs)

    def on_validation_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self._take(trainer, outputs)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._take(trainer)

    def on_fit_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._take(trainer)


def fitted(strategy: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    module, callback = Logging(), Steps()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        precision="64-true",
        strategy=strategy,
        callbacks=[callback],
        logger=False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, loader(), loader())
    return callback.seen, module.seen()


def test_a_trainer_sees_one_step() -> None:
    steps, attributes = fitted(InParts("cpu"))
    expected_steps, expected_attributes = fitted("auto")
    assert len(steps) == 2 * (3 + 3 + 1) + 1
    names = set().union(*(metrics for metrics, _ in steps))
    assert {"train_f1_step", "train_auroc_epoch", "val_correlation_epoch", "grouped_recall_g", "val_updated"} <= names
    close(steps, expected_steps)
    close(attributes, expected_attributes)


def stages(batches: int = 2) -> tuple[Any, Any, Any, Callable[[], None]]:
    """A first stage that runs no step, a last stage, a module that runs whole steps, and what undoes sharing."""
    torch.manual_seed(1)
    whole = Note().double()
    first, last = copy.deepcopy(whole), copy.deepcopy(whole)
    # What the last stage gives to the broadcast; `first` computes after it, as all ranks do in the same order.
    queue: list[bytes] = []

    def give(state: Any) -> Any:
        queue.append(pickle.dumps(state))
        return state

    undo = [share_metrics(last, give), share_metrics(first, lambda state: pickle.loads(queue.pop(0)))]
    for _, batch in zip(range(batches), loader(), strict=False):
        merged, _ = in_parts(last, last.validation_step, batch, 0)
        emit(last, merged)
        emit(first, merged)
        whole.validation_step(batch, 0)
    assert queue == []

    def undo_all() -> None:
        for one in undo:
            one()

    return first, last, whole, undo_all


def test_a_stage_that_runs_no_step_has_the_metrics_of_the_last() -> None:
    first, last, whole, undo = stages()
    close(first.noted, last.noted)
    for (_, value, given, _), (_, expected, expected_given, _) in zip(first.noted, whole.noted, strict=True):
        close(value, expected)
        assert given.items() <= {"batch_size": None, "sync_dist": False, **expected_given}.items()
    assert [(one[0], one[3]) for one in first.noted] == [(one[0], one[3]) for one in whole.noted]
    for _ in range(2):
        for name, metric in named_metrics(whole.metrics["val_"]).items():
            values = [stage.metrics["val_"].get_submodule(name).compute() for stage in (last, first)]
            close(values, [metric.compute()] * 2)
    for stage in (last, first, whole):
        for metric in named_metrics(stage).values():
            metric.reset()
    # Nothing is left, neither in lists that two metrics would share, and the next epoch is right.
    assert all(not metric.update_called for metric in named_metrics(first).values())
    batch = next(iter(loader()))
    for stage in (last, whole):
        m = stage.metrics["val_"]
        m["auroc"].update(stage.layer(batch[0]), batch[2])
        m["grouped"].update(stage.layer(batch[0]), batch[2])
    for name in ("auroc", "grouped"):
        values = [stage.metrics["val_"][name].compute() for stage in (last, first)]
        close(values, [whole.metrics["val_"][name].compute()] * 2)
    undo()
    assert all(not hasattr(metric.compute.__wrapped__, "__wrapped__") for metric in named_metrics(first).values())


@pytest.mark.parametrize("on_step", [False, True])
def test_states_are_merged_over_data_ranks_after_sharing(on_step: bool) -> None:
    def gathered(value: Tensor, group: Any) -> list[Tensor]:
        # What another data rank has.
        return [value, value * 2]

    def step(module: Any, x: Tensor) -> None:
        module.sum(x)
        module.values(x)

    options: Any = {
        "dist_sync_fn": gathered,
        "distributed_available_fn": lambda: True,
        "dist_sync_on_step": on_step,
    }
    modules = [Plain(step) for _ in range(3)]
    for module in modules:
        module.sum = SumMetric(**options)
        module.values = CatMetric(**options)
    last, first, whole = modules
    shared: list[Any] = []
    share_metrics(last, lambda state: shared.append(copy.deepcopy(state)) or state)
    share_metrics(first, lambda state: shared.pop(0))
    for x in (torch.arange(7.0), torch.arange(4.0)):
        merged, _ = in_parts(last, lambda batch: step(last, batch[0]), (x,))
        emit(first, merged)
        step(whole, x)
        assert float(first.sum._forward_cache) == float(whole.sum._forward_cache) == x.sum() * (3 if on_step else 1)
    for name in ("sum", "values"):
        values = [getattr(module, name).compute() for module in modules]
        close(values, [values[2]] * 3)
        assert values[0].sum() == 3 * (21 + 6)
    # The merged states were those of one computation.
    assert float(first.sum.sum_value) == 21 + 6


def test_the_first_stage_collects_what_one_step_collects() -> None:
    first, last, whole, _ = stages()
    close(first.seen(), last.seen())
    close(first.seen(), whole.seen())
    assert type(first.by_kind) is defaultdict


def test_nothing_is_left_of_recording_or_discarding() -> None:
    torch.manual_seed(1)
    module = Logging().double()
    batch = next(iter(loader()))
    before = {name: {**vars(m)} for name, m in module.named_modules()}
    with discarding(module):
        module.validation_step(batch, 0)
    after = {name: vars(m) for name, m in module.named_modules()}
    for name, attributes in before.items():
        assert attributes.keys() == after[name].keys()
        # A tensor that was written in place is given back as a copy.
        assert all(attributes[key] is after[name][key] for key in attributes if key != "total"), name
    assert module.total == 0
    assert module.losses == []
    assert dict(module.by_kind) == {}

    class Stopped(BaseException):
        pass

    def end(*args: Any) -> None:
        raise Stopped

    # On a stage but the last the step is ended from inside, after it has logged and counted.
    handle = module.layer.register_forward_pre_hook(end)

    def step() -> None:
        module.steps += 1
        module.log("start", 1.0)
        module.validation_step(batch, 0)

    with pytest.raises(Stopped), recording(module):
        step()
    handle.remove()
    assert (module.steps, "log" in vars(module), "log_dict" in vars(module)) == (0, False, False)
    assert all("forward" not in vars(metric) for metric in named_metrics(module).values())


def merged_step(step: Callable[[Any, Tensor], Any], rows: int = 7) -> tuple[Any, Any]:
    """A module after a step in parts, and one after a step on the whole."""
    x = torch.arange(rows, dtype=torch.float64)
    modules = [Plain(step), Plain(step)]
    merged, _ = in_parts(modules[0], lambda batch: step(modules[0], batch[0]), (x,))
    emit(modules[0], merged)
    step(modules[1], x)
    return modules[0], modules[1]


def test_values_that_only_some_parts_log() -> None:
    def step(module: Any, x: Tensor) -> None:
        if x[0] > 2:
            module.log("late", x.mean(), batch_size=len(x))
        module.log("twice", x.sum(), reduce_fx="sum")
        module.log("twice", x.sum() * 2, reduce_fx="sum")
        module.log("least", x.min(), reduce_fx=min, sync_dist=True)
        module.log("count", x.numel())
        module.log("whole", len(x) * 0 + 3)

    module, _ = merged_step(step)
    noted = {(name, index): (float(v), kw) for index, (name, v, kw, _) in enumerate(module.noted)}
    assert noted["least", 2] == (0, {"sync_dist": True})
    assert noted["twice", 0][0] == 21
    assert noted["twice", 1][0] == 42
    assert noted["whole", 4] == (3, {})
    assert noted["late", 5] == (pytest.approx(4.5), {"batch_size": 4})


def test_where_losses_are_sums_they_are_summed_and_others_averaged() -> None:
    def step(module: Any, x: Tensor) -> Tensor:
        loss = x.square().sum()
        module.log("loss", loss)
        module.log("mean", x.mean())
        module.log("rate", 0.1)
        return loss

    x = torch.arange(7.0)
    modules, records = [Plain(step), Plain(step)], []
    for part in split(x, PARTS):
        with recording(modules[0], records) as record:
            record.loss = step(modules[0], part)
        records.append(record)
    emit(modules[0], merge_records(modules[0], records, [1.0] * PARTS, [3, 2, 2]))
    step(modules[1], x)
    close(modules[0].noted, modules[1].noted)


def test_attributes_of_other_kinds() -> None:
    def step(module: Any, x: Tensor) -> None:
        module.best = min(getattr(module, "best", float("inf")), 5.0)
        module.ready = True
        module.indices["last"] = 7
        module.correct += (x > 2).sum()
        module.phase = 1j * float(x.mean())
        module.vocabulary["new"] = 1

    pairs = []
    for parts in (True, False):
        module: Any = Plain(step)
        module.indices, module.correct, module.best = {}, torch.tensor(0), float("inf")
        module.vocabulary = {str(index): index for index in range(2000)}
        x = torch.arange(7.0)
        if parts:
            merged, _ = in_parts(module, lambda batch, module=module: step(module, batch[0]), (x,))
            assert (module.best, module.indices, module.correct) == (float("inf"), {}, 0)
            emit(module, merged)
        else:
            step(module, x)
        names = ("best", "ready", "indices", "correct", "vocabulary")
        pairs.append(({name: getattr(module, name) for name in names}, module.phase.imag))
    close(*pairs)


def test_metrics_that_agree_on_a_part_do_not_share_their_states() -> None:
    classes = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    logits = F.one_hot(classes.where(classes != 3, 0), CLASSES).float()

    def step(module: Any, x: Tensor, y: Tensor) -> None:
        module.both.update(x, y)

    results = []
    for parts in (True, False):
        module: Any = Plain(step)
        # The first three samples have no class 3.
        module.both = MetricCollection(
            {str(i): MulticlassAccuracy(CLASSES, ignore_index=i, average="micro") for i in (None, 3)}
        )
        if parts:
            in_parts(module, lambda batch, module=module: step(module, *batch), (logits, classes))
        else:
            step(module, logits, classes)
        results.append((module.both.compute(), module.both.compute_groups))
    close(results[0][0], {"None": torch.tensor(6 / 7), "3": torch.tensor(1.0)})
    assert results[0] == results[1]


def test_wrapped_metrics_are_averaged() -> None:
    def step(module: Any, x: Tensor) -> None:
        module.log_dict(module.wrapped((x > 3).long(), (x > 4).long()))
        module.composed(x)
        module.log("composed", module.composed)

    module = Plain(step)
    module.wrapped = ClasswiseWrapper(MulticlassAccuracy(2, average=None))
    module.composed = MeanMetric() + 1
    merged, _ = in_parts(module, lambda batch: step(module, batch[0]), (torch.arange(7.0),))
    emit(module, merged)
    noted = {name: float(value) for name, value, *_ in module.noted}
    # The recall of class 0 is 1, 1/2 and, as it has no sample, 0 in the micro-batches.
    assert noted == {
        "multiclassaccuracy_0": pytest.approx(3 / 7 + 1 / 2 * 2 / 7),
        "multiclassaccuracy_1": pytest.approx(2 / 7),
        "composed": 4,
    }


@pytest.mark.parametrize("rows", [7, 6])
def test_items_that_are_samples_are_all_kept(rows: int) -> None:
    def step(module: Any, x: Tensor) -> None:
        module.losses.extend(f"{value}" for value in x.tolist())
        if rows == 7:  # in micro-batches of equal size these may be one of each step
            module.window.extend(x.tolist())
        module.by_kind["new"].append(x)
        module.samples += len(x)
        module.made = module.samples

    module, whole = merged_step(step, rows)
    assert (module.losses, module.window) == (whole.losses, whole.window)
    assert torch.equal(module.by_kind["new"][0], whole.by_kind["new"][0])
    assert (module.samples, len(module.by_kind["new"])) == (rows, 1)


def _log_group(module: Any, x: Tensor) -> None:
    module.log("x", x.mean(), sync_dist_group=object())


def _log_custom(module: Any, x: Tensor) -> None:
    module.log("x", x.mean(), reduce_fx=torch.std)


def _log_text(module: Any, x: Tensor) -> None:
    module.log("x", "text")


def _log_other_arguments(module: Any, x: Tensor) -> None:
    module.log("x", x.mean(), on_step=bool(x[0] == 0))


def _log_hidden(module: Any, x: Tensor) -> None:
    module.log("x", MeanMetric())


def _append_unequally(module: Any, x: Tensor) -> None:
    module.losses.extend(value for value in x if value > 1)


def _append_samples(module: Any, x: Tensor) -> None:
    module.losses.extend(x)


@pytest.mark.parametrize(
    ("step", "rows", "message"),
    [
        (_log_group, 7, "'x' is logged with sync_dist_group.*\n.*leave it out"),
        (_log_custom, 7, "reduce_fx=.*std.*\n.*torchmetrics"),
        (_log_text, 7, "a str is logged as 'x'"),
        (_log_other_arguments, 7, "'on_step': True} in one micro-batch and {'on_step': False} in another"),
        (_log_hidden, 7, "the MeanMetric that is logged as 'x' is no submodule"),
        (_append_unequally, 7, r"of 3, 2, 2 samples, have appended 1, 2, 2 items to self.losses"),
        (_append_samples, 6, r"of 2, 2, 2 samples, have appended 2, 2, 2 items to self.losses"),
    ],
)
def test_what_cannot_be_made_into_one_step_is_refused(step: Any, rows: int, message: str) -> None:
    with pytest.raises(ParallelConfigError, match=message):
        merged_step(step, rows)
