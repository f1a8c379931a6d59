"""Numbers by which ranks find out whether they hold the same bytes, without showing them to each other."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_par.parallel.shards import to_local

# Words at a time: as many as a core keeps in its cache; elsewhere enough that starting a kernel costs little.
_CPU_CHUNK, _CHUNK = 1 << 16, 1 << 22
_FACTOR = 0x2545F4914F6CDD1D  # odd


class Fingerprint:
    """Makes 64 bits of the bytes of a tensor and of their order, the same whatever number of threads adds them up.

    A change of one word of 32 bits always shows; of any others, all but surely.
    """

    def __init__(self) -> None:
        self._weights: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a tensor of one int64, of what this rank holds."""
        content = to_local(tensor.detach()).contiguous().view(-1).view(torch.uint8)
        weights = self._weights_on(content.device)
        total = torch.zeros((), dtype=torch.int64, device=content.device)
        for chunk in content.split(4 * len(weights)):
            if chunk.numel() % 4:
                chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 4))
            words = chunk.view(torch.int32)
            # Whole numbers that run over lose nothing: an odd factor can be undone.
            total = total * _FACTOR + (words.to(torch.int64) * weights[: words.numel()]).sum()
        return total

    def _weights_on(self, device: torch.device) -> Tensor:
        """Odd numbers, the same on all ranks."""
        if self._weights is None or self._weights.device != device:
            count = _CPU_CHUNK if device.type == "cpu" else _CHUNK
            generator = torch.Generator().manual_seed(1)
            drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator, dtype=torch.int64)
            self._weights = (drawn | 1).to(device)
        return self._weights
