"""The example: its data is real and repeatable, its model is a GPT that learns."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from examples.nanogpt import NanoGPT, TextData, data, model


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Three files of words, 4000 bytes each."""
    for name in ("b", "a", "sub/c"):
        write(tmp_path / f"{name}.txt", (f"{name} is a word in a line of text\n" * 200).encode()[:4000])
    return tmp_path


def test_the_example_knows_nothing_of_this_package() -> None:
    for module in (model, data):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [name for name in names if name.startswith("lightning_par")]


def test_the_default_text_is_the_standard_library() -> None:
    files = data.find_stdlib()
    assert files == sorted(files)
    assert all(path.suffix == ".py" and not {"test", "tests", "site-packages"} & set(path.parts) for path in files)
    assert 1_000_000 < sum(path.stat().st_size for path in files) <= 1.2 * data.STDLIB_BYTES
    module = TextData()
    module.setup("fit")
    assert 2.5 < module.unigram_loss < 4.0


def test_the_last_tenth_of_each_file_is_for_validation(text: Path) -> None:
    module = TextData(str(text), block_size=16, batch_size=4)
    module.setup("fit")
    assert [path.name for path in module.files] == ["a.txt", "b.txt", "c.txt"]
    assert len(module.train.tokens) == 3 * 3600
    assert len(module.val.tokens) == 3 * 400
    assert bytes(module.val.tokens[400:800].tolist()) == (text / "b.txt").read_bytes()[3600:]
    assert len(module.train) == (3 * 3600 - 1) // 16
    assert len(module.train_dataloader()) == len(module.train) // 4
    assert len(module.val_dataloader()) == math.ceil(len(module.val) / 4)


def test_samples_are_the_same_whoever_asks(text: Path) -> None:
    first, second = (TextData(str(text), block_size=16) for _ in range(2))
    for module in (first, second):
        module.setup("fit")
    for index in (0, 5, len(first.train) - 1):
        x, y = first.train[index]
        assert x.dtype == y.dtype == torch.int64
        assert x.shape == y.shape == (16,)
        assert torch.equal(x[1:], y[:-1])
        assert torch.equal(x, second.train[index][0])
    assert torch.equal(first.train[0][1][-1:], first.train[1][0][:1])
    with pytest.raises(IndexError, match="block 675 of 674"):
        first.train[675]


def test_a_single_file_and_odd_names_are_text(tmp_path: Path) -> None:
    single = write(tmp_path / "corpus" / "part-0001", b"some text " * 100)
    write(tmp_path / "corpus" / ".hidden", b"some text " * 100)
    write(tmp_path / "corpus" / ".git" / "config", b"some text " * 100)
    write(tmp_path / "corpus" / "image", b"\x89PNG\0\0")
    assert data.find_text(single) == data.find_text(single.parent) == [single]
    assert data.find_text(tmp_path / "corpus" / ".hidden")


def test_a_path_without_text_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'.*nowhere', which does not exist; give a text file or a folder"):
        TextData(str(tmp_path / "nowhere"))
    write(tmp_path / "image", b"\x89PNG\0\0")
    write(tmp_path / "empty", b"")
    with pytest.raises(ValueError, match=r"no text: looked for files that .* no NUL byte .* among 2 file\(s\)"):
        TextData(str(tmp_path))
    module = TextData(str(write(tmp_path / "short", b"short text")), block_size=16)
    with pytest.raises(ValueError, match=r"1 file\(s\) leave 9 bytes for a split, less than one sample of 17"):
        module.setup("fit")


def test_the_unigram_loss_is_that_of_the_byte_frequencies(tmp_path: Path) -> None:
    # Nine tenths are half a, half b; the validation part has only a: log 2 where smoothing is negligible.
    path = write(tmp_path / "ab", b"ab" * 45_000 + b"a" * 10_000)
    module = TextData(str(path), block_size=16)
    module.setup("fit")
    assert module.unigram_loss == pytest.approx(math.log(2), abs=5e-3)


def small(**options: int) -> NanoGPT:
    torch.manual_seed(0)
    return NanoGPT(**{"block_size": 16, "layers": 2, "heads": 2, "width": 32, "warmup_steps": 5, **options})  # type: ignore[arg-type]


def test_an_untrained_model_knows_nothing() -> None:
    module = NanoGPT()
    tokens = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(0))
    loss = module.loss((tokens[:, :-1], tokens[:, 1:]))
    assert float(loss.detach()) == pytest.approx(math.log(256), rel=0.02)


def test_the_head_is_the_embedding() -> None:
    module = small()
    assert module.head.weight is module.tokens.weight
    assert "head.weight" not in dict(module.named_parameters())


def test_it_is_causal() -> None:
    module = small().eval()
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    with torch.no_grad():
        difference = (module(tokens) - module(changed)).abs().amax((0, 2))
    assert float(difference[:10].max()) == 0
    assert float(difference[10:].min()) > 0
    with pytest.raises(ValueError, match="17 tokens is longer than model.block_size, 16"):
        module(torch.zeros(1, 17, dtype=torch.long))


def test_samples_repeat_and_keep_the_mode() -> None:
    module = small().train()
    first = module.sample(b"def ", 30)
    assert first == module.sample(b"def ", 30)
    assert first.startswith(b"def ")
    assert len(first) == 34
    assert module.training


def test_thirty_steps_reduce_the_loss(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_everything(0)
    module = small(sample_bytes=5)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=30,
        val_check_interval=30,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        limit_val_batches=5,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, datamodule=TextData(str(text), block_size=16, batch_size=8))
    metrics = trainer.callback_metrics
    assert float(metrics["loss"]) < 4.5
    assert float(metrics["val_loss"]) < 4.5
    assert float(metrics["tok/s"]) > 0
    groups = trainer.optimizers[0].param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert {p.dim() for p in groups[0]["params"]} == {2}
    assert {p.dim() for p in groups[1]["params"]} == {1}
    # The cosine has come down to a tenth of the highest rate.
    assert groups[0]["lr"] == pytest.approx(0.1 * 3e-3, rel=1e-3)
    output = capsys.readouterr().out
    assert f"validation loss {float(metrics['val_loss']):.3f} nats/byte; a unigram model has " in output
    assert "a sample that starts with 'def ':" in output
