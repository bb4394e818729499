"""The `optimizer` section: one class an optimizer, each with its own defaults.

`--optimizer.name` (or `name` in TOML) chooses the class. Weight decay is decoupled in all of them and acts on
matrices only (hidden, routers, head): no norm, bias or embedding.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import field, frozen

from forge.config.checks import boolean, integer, number, one_of

_beta = number(least=0, most=0.999999)


@frozen
class AdamW:
    """AdamW (Loshchilov & Hutter 2019)."""

    SECTION: ClassVar[str] = "optimizer"

    name: Literal["adamw"] = field(default="adamw", validator=one_of("adamw"))
    """adamw | muon | lion | schedule_free | sgd: chooses the optimizer and its flags."""
    lr: float = field(default=3e-4, validator=number(least=0))
    """Peak learning rate."""
    beta1: float = field(default=0.9, validator=_beta)
    """Decay of the first moment."""
    beta2: float = field(default=0.95, validator=_beta)
    """Decay of the second moment."""
    eps: float = field(default=1e-8, validator=number(above=0))
    """Added to the root of the second moment."""
    weight_decay: float = field(default=0.1, validator=number(least=0))
    """Decoupled weight decay of matrices: hidden, routers, head."""


@frozen
class Muon:
    """Muon (Jordan et al. 2024) on hidden matrices, AdamW on everything else."""

    SECTION: ClassVar[str] = "optimizer"

    name: Literal["muon"] = field(default="muon", validator=one_of("muon"))
    """adamw | muon | lion | schedule_free | sgd: chooses the optimizer and its flags."""
    lr: float = field(default=0.02, validator=number(least=0))
    """Peak learning rate of the hidden matrices."""
    momentum: float = field(default=0.95, validator=_beta)
    """Decay of the momentum."""
    nesterov: bool = field(default=True, validator=boolean())
    """Look one momentum step ahead."""
    ns_steps: int = field(default=5, validator=integer(least=1, most=20))
    """Newton-Schulz iterations."""
    ns_dtype: Literal["auto", "fp32", "bf16"] = field(default="auto", validator=one_of("auto", "fp32", "bf16"))
    """Dtype of the iterations; bf16 is faster, and rounding fills null directions; auto = bf16 on CUDA, else fp32."""
    scaling: Literal["spectral", "rms"] = field(default="spectral", validator=one_of("spectral", "rms"))
    """spectral: sqrt(max(1, rows / cols)) (Jordan); rms: 0.2 sqrt(max(rows, cols)), AdamW's size (Moonshot 2025)."""
    weight_decay: float = field(default=0.1, validator=number(least=0))
    """Decoupled weight decay of matrices: hidden, routers, head."""
    adam_lr: float = field(default=3e-4, validator=number(least=0))
    """Peak learning rate of what AdamW trains: embeddings, head, norms, biases."""
    adam_beta1: float = field(default=0.9, validator=_beta)
    """AdamW's decay of the first moment."""
    adam_beta2: float = field(default=0.95, validator=_beta)
    """AdamW's decay of the second moment."""
    adam_eps: float = field(default=1e-8, validator=number(above=0))
    """AdamW's addition to the root of the second moment."""


@frozen
class Lion:
    """Lion (Chen et al. 2023): the sign of an interpolated momentum."""

    SECTION: ClassVar[str] = "optimizer"

    name: Literal["lion"] = field(default="lion", validator=one_of("lion"))
    """adamw | muon | lion | schedule_free | sgd: chooses the optimizer and its flags."""
    lr: float = field(default=1e-4, validator=number(least=0))
    """Peak learning rate, 3 to 10 times below AdamW's."""
    beta1: float = field(default=0.9, validator=_beta)
    """Share of the momentum in the update's sign."""
    beta2: float = field(default=0.99, validator=_beta)
    """Decay of the momentum."""
    weight_decay: float = field(default=0.3, validator=number(least=0))
    """Decoupled weight decay, 3 to 10 times above AdamW's."""


@frozen
class ScheduleFree:
    """Schedule-free AdamW (Defazio et al. 2024): an average of the iterates instead of a decaying schedule."""

    SECTION: ClassVar[str] = "optimizer"

    name: Literal["schedule_free"] = field(default="schedule_free", validator=one_of("schedule_free"))
    """adamw | muon | lion | schedule_free | sgd: chooses the optimizer and its flags."""
    lr: float = field(default=2.5e-3, validator=number(least=0))
    """Learning rate after warmup."""
    beta1: float = field(default=0.9, validator=number(above=0, most=0.999999))
    """Place of the gradient between z (0) and the average x (1)."""
    beta2: float = field(default=0.95, validator=_beta)
    """Decay of the second moment."""
    eps: float = field(default=1e-8, validator=number(above=0))
    """Added to the root of the second moment."""
    weight_decay: float = field(default=0.1, validator=number(least=0))
    """Decoupled weight decay of matrices (hidden, routers, head), taken at y."""
    warmup_steps: int = field(default=0, validator=integer(least=0))
    """Linear warmup of its own, in updates."""
    r: float = field(default=0.0, validator=number(least=0))
    """Power of the step in the averaging weight."""
    weight_lr_power: float = field(default=2.0, validator=number(least=0))
    """Power of the learning rate in the averaging weight."""


@frozen
class SGD:
    """Stochastic gradient descent with momentum."""

    SECTION: ClassVar[str] = "optimizer"

    name: Literal["sgd"] = field(default="sgd", validator=one_of("sgd"))
    """adamw | muon | lion | schedule_free | sgd: chooses the optimizer and its flags."""
    lr: float = field(default=0.1, validator=number(least=0))
    """Peak learning rate."""
    momentum: float = field(default=0.9, validator=_beta)
    """Decay of the momentum."""
    nesterov: bool = field(default=False, validator=boolean())
    """Look one momentum step ahead."""
    weight_decay: float = field(default=0.0, validator=number(least=0))
    """Decoupled weight decay of matrices: hidden, routers, head."""


OptimizerConfig = AdamW | Muon | Lion | ScheduleFree | SGD
OPTIMIZERS: dict[str, type] = {
    "adamw": AdamW,
    "muon": Muon,
    "lion": Lion,
    "schedule_free": ScheduleFree,
    "sgd": SGD,
}
