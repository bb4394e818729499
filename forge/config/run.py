"""The sections around the training step: distributed, checkpoint, metrics, profiling."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from attrs import field, frozen

from forge.config.checks import boolean, integer, number, one_of, optional, text
from forge.errors import ConfigError

PipelineSchedule = Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"]
MONTH = 30 * 24 * 3600
"""In seconds."""
Reshard = Literal["auto", "always", "never"]


@frozen
class DistributedConfig:
    """Size of each dimension of the device mesh; their product is the world size. And how long ranks wait."""

    SECTION: ClassVar[str] = "distributed"

    dp_replicate: int = field(default=1, validator=integer(least=1))
    """Replicas of the model."""
    dp_shard: int = field(default=-1, validator=integer(least=-1))
    """Ranks that share one replica's parameters, gradients and optimizer state; -1 = the rest of the world."""
    reshard_after_forward: Reshard = field(default="auto", validator=one_of(*get_args(Reshard)))
    """Free gathered parameters until the backward pass; auto = of blocks, and under a pipeline never."""
    prefetch_blocks: int = field(default=0, validator=integer(least=0))
    """Blocks whose parameters are gathered ahead of their turn, explicitly; 0 = as FSDP2 does by itself."""
    tp: int = field(default=1, validator=integer(least=1))
    """Tensor parallel ranks."""
    pp: int = field(default=1, validator=integer(least=1))
    """Pipeline ranks."""
    pp_schedule: PipelineSchedule = field(default="1f1b", validator=one_of(*get_args(PipelineSchedule)))
    """Order of forward and backward passes over the pipeline."""
    pp_virtual_stages: int | None = field(default=None, validator=optional(integer(least=1)))
    """Stages a pipeline rank holds; unset = 2 for interleaved_1f1b, else 1."""
    cp: int = field(default=1, validator=integer(least=1))
    """Context parallel ranks: a sequence is cut over them."""
    ep: int = field(default=1, validator=integer(least=1))
    """Expert parallel ranks."""
    timeout_seconds: float = field(default=1800, validator=number(least=1, most=MONTH))
    """Longest wait of a rank for the others: at the start, while one tokenises the text, and in every collective."""
    watchdog_seconds: float | None = field(default=None, validator=optional(number(least=0, most=MONTH)))
    """A rank without progress for so long is named, with where it hangs, and the run ended; 0 = never; unset = 600 for
    several processes, never for one."""
    health_check_interval: int = field(default=100, validator=integer(least=0))
    """Updates between checks, on several processes, that step, loss, gradient norm and replicas are equal to the bit;
    one is made before each checkpoint too; 0 = none."""

    def __attrs_post_init__(self) -> None:
        if self.dp_shard == 0:
            raise ConfigError("distributed.dp_shard must be -1 (the rest) or >= 1, got 0")


@frozen
class CheckpointConfig:
    """When a run is saved, and what is kept. The last step is always saved."""

    SECTION: ClassVar[str] = "checkpoint"

    interval: int = field(default=0, validator=integer(least=0))
    """Updates between checkpoints; 0 = only the last one."""
    keep_last_n: int = field(default=2, validator=integer(least=1))
    """Newest checkpoints kept."""
    keep_every: int = field(default=0, validator=integer(least=0))
    """Steps divisible by this are milestones and never removed; 0 = no milestones."""
    powers_of_two: int = field(default=0, validator=integer(least=0))
    """Steps 1, 2, 4, ... up to this are saved and never removed, as Pythia's (2023) up to 512; 0 = none."""
    async_save: bool = field(default=False, validator=boolean())
    """Write in the background while training goes on; takes host memory for a copy of what each rank writes."""
    stop_within_seconds: float = field(default=600, validator=number(least=0, most=MONTH))
    """A signal ends the process after so long even if it has not saved yet; 0 = it may take as long as it takes."""

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` updates is saved, whatever else happens."""
        return (self.interval > 0 and step % self.interval == 0) or self._is_early(step)

    def is_milestone(self, step: int) -> bool:
        """Whether the checkpoint of `step` is never removed."""
        return (self.keep_every > 0 and step % self.keep_every == 0) or self._is_early(step)

    def _is_early(self, step: int) -> bool:
        return 0 < step <= self.powers_of_two and step.bit_count() == 1


@frozen
class MetricsConfig:
    """What a run reports, and where."""

    SECTION: ClassVar[str] = "metrics"

    log_interval: int = field(default=10, validator=integer(least=1))
    """Updates between log lines."""
    jsonl: bool = field(default=True, validator=boolean())
    """Write metrics.jsonl, one strict JSON object a line."""
    tensorboard: bool = field(default=True, validator=boolean())
    """Write TensorBoard events."""
    wandb_project: str | None = field(default=None, validator=optional(text()))
    """Weights & Biases project; unset = off."""
    ema_decay: float = field(default=0.95, validator=number(least=0, most=0.999999))
    """Decay of the smoothed loss, bias-corrected."""
    peak_tflops: float | None = field(default=None, validator=optional(number(above=0)))
    """Peak of one device for MFU; unset = by the device's name, or measured on a CPU."""


@frozen
class ProfilingConfig:
    """A window of steps under torch.profiler, and a CUDA memory snapshot."""

    SECTION: ClassVar[str] = "profiling"

    start_step: int = field(default=10, validator=integer(least=1))
    """First step of the window."""
    steps: int = field(default=0, validator=integer(least=0))
    """Steps in the window, written to <run-dir>/profile; 0 = no profiling."""
    memory_snapshot_step: int | None = field(default=None, validator=optional(integer(least=1)))
    """Step at which the CUDA allocator's history is written; unset = never."""
