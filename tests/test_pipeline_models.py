"""What a model does inside and around its blocks: dropout, statistics, texts that it writes, bf16."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import transformers
from pipeline_models import Mix, Small
from pipeline_steps import Steps, sentences, trainer
from probe import long_run
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par.parallel.shards import full_tensor
from lightning_par.testing import run_ranks
from tensor_blocks import GQA


class DropMix(Mix):
    """Keeps what its dropout has let through."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        if self.training:
            self.masks.append(mask.detach())
        return super().forward(x * mask)


class Dropped(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks = nn.ModuleList(DropMix(Small.width) for _ in range(Small.layers)).double()


def masks(options: dict[str, Any]) -> Any:
    """The masks of this rank's blocks, and its gradients."""
    torch.manual_seed(1)
    module = Dropped()
    gradients = {}

    class Keep(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradients.update({n: full_tensor(p.grad) for n, p in pl_module.named_parameters() if p.grad is not None})

    data = sentences(32)
    if dist.get_world_size() > 2:
        # Both data ranks see the same samples, so that only dropout differs.
        data = DataLoader(data.dataset, batch_sampler=[list(range(8))], collate_fn=data.collate_fn)
    trainer(True, max_steps=1, pp_size=2, callbacks=[Keep()], **options).fit(module, data)
    # The run that has shown the chain has called all blocks once.
    return {
        name: block.masks for name, block in module.model.blocks.named_children() if len(block.masks) > 1
    }, gradients


def test_dropout_differs_between_blocks_and_micro_batches_and_is_replayed() -> None:
    plain = run_ranks(2, masks, {"pp_microbatches": 4})
    again = run_ranks(2, masks, {"pp_microbatches": 4, "pp_options": {"activation_checkpointing": "full"}})
    every = []
    for (kept, gradients), (recomputed, others) in zip(plain, again, strict=True):
        assert len(kept) == 2
        for name, of_block in kept.items():
            # Of the step without gradients that learns dtypes, and of the micro-batches; then those of recomputations.
            every += of_block[-4:]
            assert len(recomputed[name]) == len(of_block) + 4
            for mask in of_block[-4:]:
                assert sum(torch.equal(mask, other) for other in recomputed[name]) >= 2
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=0, atol=1e-12)
    assert len({mask.numpy().tobytes() for mask in every}) == len(every) == 16


def test_dropout_differs_between_data_ranks() -> None:
    found = run_ranks(4, masks, {"pp_options": {"dp_replicate_size": 2}})
    for stage in (0, 1):
        (one, _), (other, _) = found[2 * stage : 2 * stage + 2]
        assert one.keys() == other.keys()
        for name in one:
            assert not any(torch.equal(a, b) for a in one[name][-4:] for b in other[name][-4:])


class Normalised(Steps):
    """Normalises with the statistics of what it sees, beside and inside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.model.norm = Statistics(Small.width)


class Statistics(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def warned() -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(True, max_steps=1).fit(Normalised(), sentences(8))
    return [str(one.message) for one in caught]


def test_statistics_of_micro_batches_are_warned_of() -> None:
    first, second = run_ranks(2, warned)
    assert [one.partition(" normalises each of the 4 micro-batches")[0] for one in first if "BatchNorm" in one] == [
        "'model.norm' (BatchNorm)"
    ]
    assert not any("BatchNorm" in one for one in second)


class Writer(pl.LightningModule):
    """A language model of Hugging Face that writes after each epoch and in its predictions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        config = transformers.LlamaConfig(**{**GQA, "num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": None})
        self.model = transformers.LlamaForCausalLM(config)
        self.written: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input"]["ids"], labels=batch["targets"]).loss

    def on_train_epoch_end(self) -> None:
        prompt = torch.tensor([[1, 2, 3]])
        with torch.no_grad():
            self.written.append(self.model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=False))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def written(pipelined: bool) -> list[Tensor]:
    module = Writer()
    options = {"pp_options": {"blocks": "model.model.layers.*"}} if pipelined else {}
    trainer(pipelined, max_epochs=1, **options).fit(module, sentences(16))
    return module.written


def test_a_language_model_writes() -> None:
    [expected] = run_ranks(1, written, False)
    for found in run_ranks(2, written, True):
        assert [text.tolist() for text in found] == [text.tolist() for text in expected]


def mixed(pipelined: bool) -> Any:
    module = Steps()
    host = trainer(pipelined, precision="bf16-mixed", max_epochs=1)
    host.fit(module, sentences(16), sentences(8))
    dtypes = {p.dtype for p in module.parameters()}
    return {name: float(value) for name, value in host.callback_metrics.items()}, dtypes


@pytest.mark.parametrize("ranks", [2, long_run(4)])
def test_mixed_precision_is_that_of_one_process(ranks: int) -> None:
    [(expected, _)] = run_ranks(1, mixed, False)
    for metrics, dtypes in run_ranks(ranks, mixed, True):
        assert dtypes == {torch.float32}
        for name in ("loss_epoch", "val_loss", "mean_loss_epoch"):
            assert metrics[name] == pytest.approx(expected[name], rel=5e-3)
