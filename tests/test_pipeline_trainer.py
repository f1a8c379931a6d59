"""A pipeline in the Trainer: what hooks, callbacks, metrics and loggers see on each stage is what one process sees."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from pipeline_steps import Sees, Steps, sentences, trainer
from probe import long_run, some
from torch import Tensor

from lightning_par.testing import run_ranks


def same(got: Any, want: Any, where: str = "") -> None:
    """Equal structure, tensors and numbers to 1e-9."""
    if isinstance(want, Tensor):
        # torchmetrics may round a number that it is given to single precision.
        digits = 1e-6 if "mean_loss" in where or "loss_sum" in where else 1e-9
        torch.testing.assert_close(got, want, rtol=digits, atol=1e-9, equal_nan=True, msg=lambda t: f"{where}: {t}")
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            same(got[key], want[key], f"{where}[{key}]")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            same(one, other, f"{where}[{i}]")
    else:
        assert got == pytest.approx(want, rel=1e-9, nan_ok=True) if isinstance(want, float) else got == want, where


def fitted(pipelined: bool, options: dict[str, Any], sizes: tuple[int, int] = (19, 13), **of_steps: str) -> Any:
    module, callback = Steps(**of_steps), Sees()
    host = trainer(pipelined, callbacks=[callback, *options.pop("callbacks", [])], **options)
    host.fit(module, sentences(sizes[0]), sentences(sizes[1]))
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    ends = {"step": host.global_step, "epoch": host.current_epoch, "stopped": host.should_stop}
    metrics = dict(host.callback_metrics)
    return callback.hooks, callback.steps, module.seen, metrics, ends, weights


PARTS = ("hooks", "steps", "seen", "metrics", "ends")


def compare(ranks: int, expected: Any, *args: Any, **kwargs: Any) -> None:
    found = run_ranks(ranks, fitted, True, *args, **kwargs)
    for rank, (*parts, weights) in enumerate(found):
        for name, got, want in zip(PARTS, parts, expected, strict=False):
            same(got, want, f"{name} of rank {rank}")
        for name, weight in weights.items():
            same(weight, expected[-1][name], name)
    assert set().union(*(part[-1] for part in found)) == expected[-1].keys()


# 19 samples in batches of 8: the last one has fewer than there are micro-batches, and ends a short window.
@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, long_run({})], ids=str)
@pytest.mark.parametrize("schedule", some(("1F1B", "Interleaved1F1B", "ZBVZeroBubble"), "1F1B"))
def test_every_hook_and_number_is_that_of_one_process(options: dict[str, Any], schedule: str) -> None:
    [expected] = run_ranks(1, fitted, False, options)
    assert len(expected[0]) > 50
    assert {"on_before_zero_grad", "on_before_backward", "on_validation_batch_end"} <= set(expected[0])
    compare(2, expected, {**options, "pp_schedule": schedule, "pp_microbatches": 4})


@pytest.mark.parametrize("call", [long_run("self.model(x)"), "self.model(**batch)"])
def test_a_step_calls_the_model_in_any_way(call: str) -> None:
    [expected] = run_ranks(1, fitted, False, {"max_epochs": 1}, (8, 8), call=call)
    compare(2, expected, {"max_epochs": 1}, (8, 8), call=call)


@pytest.mark.parametrize("schedule", [long_run("epoch"), "plateau"])
def test_rates_follow_their_schedule(schedule: str) -> None:
    options = {"max_epochs": 3}
    [expected] = run_ranks(1, fitted, False, options, (8, 8), schedule=schedule)
    rates = [step[3] for step in expected[1] if isinstance(step[0], dict)]
    assert len(set(rates)) > 1
    compare(2, expected, options, (8, 8), schedule=schedule)


class Stop(pl.callbacks.EarlyStopping):
    """Stops at the first epoch that is not far better."""

    def __init__(self) -> None:
        super().__init__("val_loss", min_delta=10.0, patience=1)


def stopped(pipelined: bool) -> Any:
    return fitted(pipelined, {"max_epochs": 6, "callbacks": [Stop()]}, (8, 8))


def test_all_stages_stop_early_together() -> None:
    [expected] = run_ranks(1, stopped, False)
    assert expected[4]["epoch"] < 6
    for found in run_ranks(2, stopped, True):
        same(found[4], expected[4])


# Evaluation


def evaluated(pipelined: bool, **options: Any) -> Any:
    module, host = Steps(), trainer(pipelined, **options)
    found = [host.validate(module, sentences(19), verbose=False), host.test(module, sentences(13), verbose=False)]
    return found, host.predict(module, sentences(19)), module.seen


def test_evaluation_alone() -> None:
    [(metrics, predictions, seen)] = run_ranks(1, evaluated, False)
    assert len(predictions) == 3
    for found in run_ranks(2, evaluated, True, pp_microbatches=4):
        same(found, (metrics, predictions, seen))


def test_predictions_stay_on_the_last_stage_where_asked() -> None:
    [(_, predictions, _)] = run_ranks(1, evaluated, False)
    first, last = run_ranks(2, evaluated, True, pp_broadcast_predictions=False)
    assert first[1] == [None] * 3
    same(last[1], predictions)


def several(pipelined: bool) -> Any:
    module, found = Steps(), []
    for epochs in (1, 2):
        host = trainer(pipelined, max_epochs=epochs)
        host.fit(module, sentences(8), sentences(8))
        found.append((host.validate(module, sentences(8), verbose=False), host.predict(module, sentences(8))))
    return found


def test_several_fits() -> None:
    [expected] = run_ranks(1, several, False)
    for found in run_ranks(2, several, True):
        same(found, expected)


# Calls outside of steps


class Samples(Steps):
    """Writes a sentence after each epoch, and draws noise before the model is called."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        self.noisy = noisy
        self.written: list[Tensor] = []
        self.noise: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.noisy:
            ids = batch["input"]["ids"]
            keep = torch.rand(ids.shape) > 0.2
            self.trainer.noise.append(keep.sum().item())  # type: ignore[attr-defined]
            batch = {**batch, "input": {"ids": ids * keep}}
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        text = torch.tensor([[1, 2]])
        for _ in range(3):
            text = torch.cat([text, self.model(text)[:, -1:].argmax(-1)], 1)
        self.written.append(text)


def sampled(pipelined: bool) -> list[Tensor]:
    module = Samples()
    trainer(pipelined).fit(module, sentences(16))
    return module.written


def test_a_call_of_the_model_outside_of_a_step() -> None:
    [expected] = run_ranks(1, sampled, False)
    assert len(expected) == 2
    for found in run_ranks(2, sampled, True):
        same(found, expected)


def noise() -> list[float]:
    torch.manual_seed(dist.get_rank())
    module, host = Samples(noisy=True), trainer(True, max_epochs=1, pp_microbatches=2)
    host.noise = []  # type: ignore[attr-defined]
    host.fit(module, sentences(16))
    # The dry runs of the last stage draw too: what they draw is drawn again.
    return sorted(set(host.noise))  # type: ignore[attr-defined]


def test_noise_before_the_model_is_that_of_all_stages() -> None:
    first, second = run_ranks(2, noise)
    assert first == second
    assert len(first) > 2


# Errors


class Manual(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class SecondOrder(Steps):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Contrastive(Steps):
    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self.logits(batch)
        means = logits.mean(1)
        return torch.nn.functional.cross_entropy(means @ means.t(), torch.arange(len(means))), logits.detach()


class Skips(Steps):
    """Returns no loss in the second batch, which tells Lightning to leave it out."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else result


class Raises(Steps):
    """Fails in the second batch, on the last stage alone, where logits are made."""

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        loss, logits = super().losses(batch)
        if self.trainer.global_step == 1 and not logits.isnan().any():
            raise KeyError("a bad sample")
        return loss, logits


def fit_refused(name: str, options: dict[str, Any]) -> str:
    module = globals()[name]()
    try:
        trainer(True, **options).fit(module, sentences(16))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Manual", {}, "Manual optimises manually"),
        ("SecondOrder", {}, "LBFGS looks at the gradient of all parameters as one vector"),
        ("Contrastive", {}, "as the weighted mean of the losses of two micro-batches"),
        ("Skips", {}, "a training step returns its loss"),
        ("Raises", {}, "a bad sample"),
        ("Steps", {"precision": "16-mixed"}, "before the fp16 scaler could scale the loss"),
        ("Steps", {"pp_split": [1, 1]}, "pp_split=[1, 1] is no division of 4 blocks into 2 stages"),
    ],
)
def test_what_cannot_work_is_refused_on_all_ranks(name: str, options: dict[str, Any], said: str) -> None:
    for found in run_ranks(2, fit_refused, name, options, timeout=30):
        assert said in found
