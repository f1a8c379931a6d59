"""A small GPT over bytes of text: an ordinary LightningModule and DataModule that know nothing of lightning_par."""

from examples.nanogpt.data import TextData
from examples.nanogpt.model import NanoGPT

__all__ = ["NanoGPT", "TextData"]
