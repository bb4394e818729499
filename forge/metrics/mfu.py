"""Model FLOPs utilisation: the model's FLOPs a second over the peak of the devices that it runs on."""

from __future__ import annotations

import re
import time
from functools import lru_cache

import torch

from forge.config import ModelConfig
from forge.errors import ConfigError, RunError
from forge.logging import get_logger
from forge.metrics.flops import matmul_weights_per_token

PEAK_TFLOPS: dict[str, float] = {
    # NVIDIA data centre
    "V100": 125.0,  # fp16: it has no bf16
    "V100-PCIE": 112.0,
    "V100S": 130.0,
    "T4": 65.0,  # fp16
    "A10": 125.0,
    "A10G": 70.0,
    "A30": 165.0,
    "A40": 149.7,
    "A100": 312.0,  # SXM and PCIe
    "A800": 312.0,
    "L4": 121.0,
    "L20": 119.5,
    "L40": 181.0,
    "L40S": 362.0,
    "H20": 148.0,
    "H100": 989.0,  # SXM
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200": 989.0,
    "H200 NVL": 835.0,
    "H800": 989.0,
    "H800 PCIe": 756.0,
    "GH200": 989.0,
    "B100": 1750.0,
    "B200": 2250.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
    # NVIDIA workstation and GeForce; GeForce cards halve the rate when they accumulate in fp32
    "RTX A6000": 154.8,
    "RTX 6000 Ada": 364.2,
    "RTX 3090": 71.0,
    "RTX 3090 Ti": 80.0,
    "RTX 4090": 165.0,
    "RTX 4090 D": 147.0,
    "RTX 5090": 209.5,
    # AMD Instinct; a MI250 shows up as two devices, each with half of the card's 383 (X) or 362
    "MI210": 181.0,
    "MI250": 181.0,
    "MI250X": 191.5,
    "MI300A": 980.6,
    "MI300X": 1307.4,
    "MI325X": 1307.4,
    "MI350X": 2306.9,
    "MI355X": 2516.6,
}
"""Peak dense bf16 TFLOPS with fp32 accumulation of one device, from the vendors' datasheets."""

_BF16_FLOPS_PER_CLOCK = {(7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 512, (8, 9): 512, (9, 0): 4096,
                         (10, 0): 8192, (10, 3): 8192, (12, 0): 512}  # fmt: skip
"""Of one multiprocessor, by compute capability, as the datasheets' peaks imply; the slower where cards differ."""

_CPU_SECONDS = 0.8  # of products in all

_logger = get_logger(__name__)


def estimate_model_flops_per_token(config: ModelConfig, seq_len: int | None = None) -> int:
    """FLOPs a token of forward and backward by PaLM's convention, 6 P + 12 L H head_dim S (2022, appendix B).

    P counts the matrices that a token passes: the head (tied or not) and the active experts, but neither the embedding,
    which is a lookup, nor norms, biases and routers. The attention term is that of full attention whatever the mask.

    Args:
        config: the model.
        seq_len: tokens of the sequences trained on; unset = `config.max_seq_len`.
    """
    weights = matmul_weights_per_token(config)
    attention = config.n_layers * config.query_heads * config.head_width * (seq_len or config.max_seq_len)
    return 6 * (sum(weights.values()) - weights["router"]) + 12 * attention


def compute_mfu(
    config: ModelConfig,
    tokens_per_sec: float,
    num_gpus: int = 1,
    gpu_peak_tflops: float | None = None,
    seq_len: int | None = None,
) -> float:
    """Share of the devices' peak that the model's FLOPs (`estimate_model_flops_per_token`) take, 0 to 1.

    Args:
        config: the model.
        tokens_per_sec: over all devices.
        num_gpus: devices.
        gpu_peak_tflops: peak of one; unset = that of CUDA device 0, or of the CPU where there is none.
        seq_len: tokens of the sequences trained on; unset = `config.max_seq_len`.

    Raises:
        ConfigError: no device, or a peak that is not positive.
    """
    if gpu_peak_tflops is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        gpu_peak_tflops = device_peak_tflops(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    if num_gpus < 1 or gpu_peak_tflops <= 0:
        raise ConfigError(
            f"MFU needs at least one device and a positive peak, got {num_gpus} x {gpu_peak_tflops} TFLOPS"
        )
    return estimate_model_flops_per_token(config, seq_len) * tokens_per_sec / (num_gpus * gpu_peak_tflops * 1e12)


def device_peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak of the device: by its name in bf16 on a GPU, whatever the dtype; measured in the dtype on a CPU."""
    if device.type == "cuda":
        return get_gpu_peak_tflops(device.index or 0)
    return measure_cpu_peak_tflops(dtype)


def get_gpu_peak_tflops(device: int = 0) -> float:
    """Peak dense bf16 TFLOPS of a CUDA (or ROCm) device; an unknown name warns and is estimated.

    Raises:
        RunError: there is no such device.
    """
    if device >= torch.cuda.device_count():
        raise RunError(f"no CUDA device {device}: set metrics.peak_tflops, or use measure_cpu_peak_tflops on a CPU")
    name = torch.cuda.get_device_name(device)
    known = peak_tflops_by_name(name)
    if known is not None:
        return known
    properties = torch.cuda.get_device_properties(device)
    estimate = estimate_peak_tflops(
        (properties.major, properties.minor),
        properties.multi_processor_count,
        getattr(properties, "clock_rate", 1_500_000) / 1e6,
        amd=torch.version.hip is not None,
    )
    _warn_unknown(name, estimate)
    return estimate


@lru_cache
def _warn_unknown(name: str, estimate: float) -> None:
    """Once for each name: the peak is asked for again and again."""
    _logger.warning("peak of %r is not known: MFU assumes %.4g TFLOPS; set metrics.peak_tflops", name, estimate)


def peak_tflops_by_name(name: str) -> float | None:
    """Peak dense bf16 TFLOPS by the device's name, the longest known name that it contains as a word; None = unknown.

    Laptop chips and MIG slices bear the name of the whole card and are unknown.
    """
    if re.search(r"\b(laptop|max-q|mig)\b", name, re.IGNORECASE):
        return None
    for known in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(known)}(?![A-Za-z0-9])", name, re.IGNORECASE):
            return PEAK_TFLOPS[known]
    return None


def estimate_peak_tflops(
    capability: tuple[int, int], multiprocessors: int, clock_ghz: float, *, amd: bool = False
) -> float:
    """Multiprocessors x clock x FLOPs a clock, the latter of the newest known capability not above the given one."""
    older = [known for known in _BF16_FLOPS_PER_CLOCK if known <= capability]
    per_clock = 1024 if amd else _BF16_FLOPS_PER_CLOCK[max(older)] if older else 128  # AMD: that of CDNA 2
    return multiprocessors * clock_ghz * per_clock / 1e3


def measure_cpu_peak_tflops(dtype: torch.dtype = torch.float32) -> float:
    """What this process's threads reach in large matrix products, TFLOPS; measured once, in under a second.

    Products grow while the time allows, and the fastest counts, so that a CPU without instructions for the dtype is not
    kept busy for minutes. Draws no random numbers.
    """
    return _measure_cpu(dtype, torch.get_num_threads())


@lru_cache
def _measure_cpu(dtype: torch.dtype, threads: int) -> float:
    end = time.perf_counter() + _CPU_SECONDS
    best, size = 0.0, 64
    while True:
        matrix = torch.ones(size, size, dtype=dtype)
        torch.mm(matrix, matrix)  # the first of a size also picks its kernel
        seconds = _seconds_of_products(matrix, until=time.perf_counter() + _CPU_SECONDS / 20)
        best = max(best, 2 * size**3 / seconds)
        if size >= 4096 or time.perf_counter() + 2 * 8 * seconds > end:  # the next size would not fit twice
            break
        size *= 2
    seconds = _seconds_of_products(matrix, until=end)
    return max(best, 2 * size**3 / seconds) / 1e12


def _seconds_of_products(matrix: torch.Tensor, until: float) -> float:
    """The fastest of one or more: what others do on the machine only ever adds."""
    fastest, start = float("inf"), time.perf_counter()
    while True:
        torch.mm(matrix, matrix)
        now = time.perf_counter()
        fastest, start = min(fastest, max(now - start, 1e-9)), now
        if now + fastest > until:
            return fastest
