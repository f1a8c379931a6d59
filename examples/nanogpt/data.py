"""Text as bytes: a user's own files, or the source code of the Python standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256
STDLIB_BYTES = 4_000_000
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def find_text(path: str | Path) -> list[Path]:
    """List the text files at a path: the file itself, or all below a folder but hidden ones, sorted.

    A text file is one that is not empty and has no NUL byte in its first 8 KiB.

    Raises:
        FileNotFoundError: If there is nothing at the path.
        ValueError: If there is no text in it.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"data.path is {str(path)!r}, which does not exist; give a text file or a folder")
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    visible = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    text = [p for p in visible if _is_text(p)]
    if not text:
        raise ValueError(
            f"data.path is {str(path)!r}, which holds no text: looked for files that are not empty and have no NUL "
            f"byte in their first 8 KiB, among {len(visible)} file(s); give a text file or a folder of them"
        )
    return text


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(8192)
    return bool(head) and b"\0" not in head


def find_stdlib() -> list[Path]:
    """List source files of the standard library without its tests: every k-th, so that they stay below 4 MB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not _NOT_SOURCE & set(p.relative_to(root).parts))
    return files[:: 1 + sum(p.stat().st_size for p in files) // STDLIB_BYTES]


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive blocks of a text: sample `i` is block `i` and the same block one byte further, both int64."""

    def __init__(self, tokens: Tensor, block_size: int) -> None:
        self.tokens = tokens
        self.block_size = block_size

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index * self.block_size
        window = self.tokens[start : start + self.block_size + 1].long()
        return window[:-1], window[1:]


class TextData(LightningDataModule):
    """Blocks of text for next-byte prediction; the last tenth of each file is for validation.

    Args:
        path: A text file, or a folder of text files. By default the source code of the Python standard library.
        block_size: Length of a sample, in bytes.
        batch_size: Samples in a batch, on each process.
    """

    def __init__(self, path: str | None = None, block_size: int = 128, batch_size: int = 16) -> None:
        super().__init__()
        self.files = find_text(path) if path is not None else find_stdlib()
        self.block_size = block_size
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Read the files and split them; the same on every process."""
        texts = [path.read_bytes() for path in self.files]
        cuts = [len(text) * 9 // 10 for text in texts]
        self.train = self._blocks([text[:cut] for text, cut in zip(texts, cuts, strict=True)])
        self.val = self._blocks([text[cut:] for text, cut in zip(texts, cuts, strict=True)])

    def _blocks(self, texts: list[bytes]) -> Blocks:
        blocks = Blocks(torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8), self.block_size)
        if not len(blocks):
            raise ValueError(
                f"{len(self.files)} file(s) leave {len(blocks.tokens)} bytes for a split, less than one sample of "
                f"{self.block_size + 1}; give more text, or a smaller data.block_size"
            )
        return blocks

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.val, batch_size=self.batch_size)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    @property
    def unigram_loss(self) -> float:
        """What a model that knows only how often each byte occurs in training loses on validation, in nats per byte."""
        train, val = (
            torch.bincount(split.tokens.int(), minlength=VOCABULARY).double() for split in (self.train, self.val)
        )
        train += 1  # Laplace's rule, for bytes that occur in validation only
        return float(-(val @ (train / train.sum()).log()) / val.sum())
