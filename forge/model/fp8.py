"""FP8 products in the blocks' projections, by torchao, from outside and without a change of names."""

from __future__ import annotations

import torch
from torch import nn

from forge.errors import ConfigError, RunError
from forge.model.transformer import Transformer

_ALIGNED = 16
"""Rows and columns of an fp8 product come in multiples of this."""


def check_fp8(device: torch.device, compute_dtype: torch.dtype) -> None:
    """Refuse a device without fp8 products, and a dtype that they do not return.

    Raises:
        RunError: no CUDA device of capability 8.9 (Ada, Hopper) or newer.
        ConfigError: the compute dtype is not bf16.
    """
    if device.type != "cuda":
        raise RunError(f"train.fp8 = true needs a CUDA device of capability 8.9 or newer, and this is a {device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise RunError(
            f"train.fp8 = true needs capability 8.9 or newer, and {torch.cuda.get_device_name(device)} has"
            f" {capability[0]}.{capability[1]}: set train.fp8 = false"
        )
    if compute_dtype != torch.bfloat16:
        raise ConfigError("train.fp8 = true returns bf16 from fp8 products: set train.precision = bf16")


def apply_fp8(model: Transformer, *, ranks: int = 1, emulate: bool = False) -> None:
    """Let the blocks' projections multiply in fp8, with one scale a tensor, found anew in every step.

    Experts, routers, embedding and head stay in the compute dtype. Before tensor parallelism, whose hooks go on the
    modules that are put in here.

    Args:
        ranks: over which tensor parallelism will cut each projection.
        emulate: compute the products in fp32, on tensors rounded to fp8; on any device, to look at the rounding.

    Raises:
        ConfigError: torchao is not installed.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise ConfigError("train.fp8 = true needs torchao: pip install torchao, or leave the key off") from None
    convert_to_float8_training(
        model.blocks,
        config=Float8LinearConfig(emulate=emulate),
        module_filter_fn=lambda module, _: takes_fp8(module, ranks),
    )


def takes_fp8(module: nn.Module, ranks: int = 1) -> bool:
    """Whether it is a projection both of whose sides fp8 products can take, cut over `ranks` ranks."""
    sides = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (1,)
    return all(side % (_ALIGNED * ranks) == 0 for side in sides)
