"""What devices can compute at most, as their vendors state it."""

from __future__ import annotations

import re

# TFLOP/s of dense matrices (no structured sparsity), by dtype, from the vendors' data sheets: NVIDIA A100 (2020),
# H100 and GH200 (2023), H200 (2024), HGX B200 (2024), L4, L40S, A10, A40, RTX A6000, V100, T4, Ada and Ampere
# whitepapers (RTX 4090, 3090: with fp32 accumulation); AMD Instinct MI250X (of one of its two dies, which is one
# device), MI300X, MI325X and MI355X. The first pattern found in the name of the device counts.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"GB200", {"fp64": 40, "fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000}),
    (r"B200", {"fp64": 37, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500}),
    (r"H[12]00 NVL", {"fp64": 60, "fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1671}),
    (r"H100 PCIe", {"fp64": 51, "fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513}),
    (r"G?H[12]00", {"fp64": 67, "fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}),
    (r"A100", {"fp64": 19.5, "fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}),
    (r"L40S", {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733}),
    (r"L4", {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5}),
    (r"A10", {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125}),
    (r"A40", {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7}),
    (r"RTX A6000", {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8}),
    (r"RTX 4090", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2}),
    (r"RTX 3090", {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71}),
    (r"V100-SXM2", {"fp64": 7.8, "fp32": 15.7, "fp16": 125}),
    (r"V100-PCIE", {"fp64": 7, "fp32": 14, "fp16": 112}),
    (r"T4", {"fp32": 8.1, "fp16": 65}),
    (r"MI355X", {"fp64": 78.6, "fp32": 157.3, "bf16": 2516, "fp16": 2516, "fp8": 5033}),
    (r"MI3(00|25)X", {"fp64": 163.4, "fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}),
    (r"MI250X", {"fp64": 47.9, "fp32": 47.9, "bf16": 191.5, "fp16": 191.5}),
)
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")


def peak_flops(device_name: str, dtype: str) -> float | None:
    """The peak of a device.

    Args:
        device_name: As `torch.cuda.get_device_name` gives it.
        dtype: Of the matrix products: one of `DTYPES`.

    Returns:
        FLOP per second, dense; None where this table does not know it, as for every CPU.
    """
    for pattern, peaks in _PEAKS:
        if re.search(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])", device_name):
            found = peaks.get(dtype)
            return None if found is None else found * 1e12
    return None
