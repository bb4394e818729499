"""What is timed: shapes where something else is the bottleneck each time, and what forge has to reach in them."""

from __future__ import annotations

from typing import Literal

from attrs import evolve, frozen

from forge.config import AdamW, JobConfig, ModelConfig, MoEConfig, Muon, NoSchedule, TrainConfig

Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]


@frozen
class Regime:
    """A model, a batch, how often they are timed, and the targets."""

    name: str
    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    seq_len: int
    batch: int  # sequences an update
    steps: int  # updates a turn: the clock is read once for all of them
    repeats: int  # turns of each side
    speed_target: float = 1.0  # forge's tokens/s over the best peer's, at least
    memory_target: float = 1.0  # forge's peak memory over the smallest peer's, at most
    gemm_target: float | None = None  # forge's FLOP/s over the GEMM rate, at least
    compiled: bool = False  # forge's model with train.compile, the peers as they are
    accumulation: int = 1  # micro-batches an update, forge alone
    experts: int = 0  # of which each token is sent to two
    optimizer: Literal["adamw", "muon"] = "adamw"

    @property
    def tokens(self) -> int:
        """Tokens an update."""
        return self.batch * self.seq_len


_CPU = (
    Regime("large vocabulary", 32000, 256, 4, 4, 256, 8, 1, 11, speed_target=1.5, memory_target=0.65),
    Regime("compute bound", 4096, 512, 8, 8, 256, 8, 1, 11, gemm_target=0.9),
    Regime("overhead bound", 257, 64, 2, 2, 32, 4, 50, 21, speed_target=1.3),
    Regime("long context", 4096, 128, 2, 2, 4096, 1, 1, 11),
    Regime("mixture of experts", 4096, 256, 4, 4, 256, 8, 1, 11, experts=8),
    Regime("muon", 4096, 256, 4, 4, 256, 8, 1, 11, optimizer="muon"),
)
_CUDA = (
    evolve(_CPU[0], vocab_size=128256, dim=1024, n_heads=16, seq_len=1024, steps=5),
    evolve(_CPU[1], vocab_size=32000, dim=2048, n_layers=16, n_heads=16, seq_len=2048, steps=3),
    _CPU[2],
    evolve(_CPU[3], vocab_size=32000, dim=1024, n_layers=8, n_heads=16, batch=4, steps=3),
    evolve(_CPU[4], vocab_size=32000, dim=1024, n_layers=8, n_heads=16, seq_len=1024, steps=3),
    evolve(_CPU[5], vocab_size=32000, dim=1024, n_layers=8, n_heads=16, seq_len=1024, steps=3),
)
"""The same bottlenecks on a device some thousand times faster: what keeps two cores busy is all overhead there."""


def regimes_for(device: Device) -> tuple[Regime, ...]:
    """The regimes of a kind of device."""
    return _CUDA if device == "cuda" else _CPU


def timed_precision(device: Device) -> Precision:
    """Dtype of the forward and backward pass that is timed; parameters are fp32 on both sides."""
    return "bf16" if device == "cuda" else "fp32"


def job_config(regime: Regime, device: Device, precision: Precision) -> JobConfig:
    """The regime as a forge job; the peer takes every number from it."""
    return JobConfig(
        model=ModelConfig(
            dim=regime.dim,
            n_layers=regime.n_layers,
            n_heads=regime.n_heads,
            vocab_size=regime.vocab_size,
            max_seq_len=regime.seq_len,
            moe=MoEConfig(n_experts=regime.experts, aux_loss_weight=0.0),
        ),
        train=TrainConfig(
            seq_len=regime.seq_len,
            global_batch_size=regime.batch,
            micro_batch_size=regime.batch // regime.accumulation,
            device=device,
            precision=precision,
            compile=regime.compiled,
            compile_scope="model" if regime.n_layers <= 2 else "block",
            grad_clip_norm=1.0,
        ),
        optimizer=Muon(ns_dtype="bf16") if regime.optimizer == "muon" else AdamW(),  # as torch's Muon does
        scheduler=NoSchedule(),
    )
