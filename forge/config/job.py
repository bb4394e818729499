"""`JobConfig`: every section, and the checks that span sections."""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen

from forge.config.checks import text
from forge.config.data import DataConfig, EvalConfig
from forge.config.model import ModelConfig
from forge.config.optimizer import AdamW, OptimizerConfig, ScheduleFree
from forge.config.run import CheckpointConfig, DistributedConfig, MetricsConfig, ProfilingConfig
from forge.config.scheduler import WSD, Constant, Cosine, NoSchedule, SchedulerConfig
from forge.config.train import TrainConfig
from forge.errors import ConfigError

WARMUP_SHARE = 0.05
DECAY_SHARE = 0.2


@frozen
class JobConfig:
    """A training run: the model, the data, the step, and what is reported and kept."""

    SECTION: ClassVar[str] = ""

    run_dir: str = field(default="runs/default", validator=text())
    """Folder of all that the run writes; a run started again in it resumes."""
    model: ModelConfig = field(factory=ModelConfig)
    train: TrainConfig = field(factory=TrainConfig)
    optimizer: OptimizerConfig = field(factory=AdamW)
    scheduler: SchedulerConfig = field(factory=Cosine)
    data: DataConfig = field(factory=DataConfig)
    eval: EvalConfig = field(factory=EvalConfig)
    distributed: DistributedConfig = field(factory=DistributedConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    metrics: MetricsConfig = field(factory=MetricsConfig)
    profiling: ProfilingConfig = field(factory=ProfilingConfig)

    def __attrs_post_init__(self) -> None:
        if self.train.seq_len > self.model.max_seq_len:
            raise ConfigError(
                f"train.seq_len = {self.train.seq_len} exceeds model.max_seq_len = {self.model.max_seq_len}:"
                " shorten the one or raise the other"
            )
        if self.train.global_batch_size % self.train.micro_batch_size:
            raise ConfigError(
                f"train.global_batch_size = {self.train.global_batch_size} is not divisible by"
                f" train.micro_batch_size = {self.train.micro_batch_size}"
            )
        if self.train.max_rollbacks and not self.checkpoint.interval:
            raise ConfigError(
                f"train.max_rollbacks = {self.train.max_rollbacks} needs checkpoints to go back to: set"
                " checkpoint.interval"
            )
        if self.model.restart_positions and not self.data.isolate_documents:
            raise ConfigError(
                "model.restart_positions = true needs data.isolate_documents = true: without it nothing says where a"
                " document starts"
            )
        if self.model.attention_backend == "flex" and self.train.activation_checkpointing == "selective":
            raise ConfigError(
                "train.activation_checkpointing = selective cannot keep what flex_attention returns: choose full, or"
                " another model.attention_backend"
            )
        if self.train.cuda_graphs and not self.train.compile:
            raise ConfigError("train.cuda_graphs = true replays what train.compile = true compiles: set that too")
        for name in {source.name for source in self.data.sources} & {each.name for each in self.eval.sets}:
            raise ConfigError(f"eval.sets: {name!r} is the name of a data source too, whose held-out part has it")
        self._check_schedule()

    def _check_schedule(self) -> None:
        steps, scheduler = self.train.steps, self.scheduler
        if isinstance(self.optimizer, ScheduleFree):
            if self.train.ema_decay is not None:
                raise ConfigError("train.ema_decay: optimizer.name = schedule_free keeps an average already: unset one")
            if not isinstance(scheduler, (Constant, NoSchedule)):
                raise ConfigError(
                    f"scheduler.name = {scheduler.name} decays, and optimizer.name = schedule_free replaces the decay:"
                    " add --scheduler.name none"
                )
            if self.optimizer.warmup_steps >= steps:
                raise ConfigError(
                    f"optimizer.warmup_steps = {self.optimizer.warmup_steps} must be less than train.steps = {steps}"
                )
        if isinstance(scheduler, NoSchedule):
            return
        if scheduler.warmup_steps is not None and scheduler.warmup_steps >= steps:
            raise ConfigError(
                f"scheduler.warmup_steps = {scheduler.warmup_steps} must be less than train.steps = {steps}"
            )
        if isinstance(scheduler, WSD) and self.warmup_steps + (scheduler.stable_steps or 0) >= steps:
            raise ConfigError(
                f"scheduler.stable_steps = {scheduler.stable_steps} after {self.warmup_steps} of warmup leaves no"
                f" update to decay in: their sum must be less than train.steps = {steps}"
            )

    @property
    def warmup_steps(self) -> int:
        """Updates of linear warmup: as given, else 5 % of the run."""
        if isinstance(self.scheduler, NoSchedule):
            return 0
        if self.scheduler.warmup_steps is not None:
            return self.scheduler.warmup_steps
        return int(self.train.steps * WARMUP_SHARE)

    def accumulation_steps(self, data_ranks: int = 1) -> int:
        """Micro-batches an update on each of `data_ranks` ranks.

        Raises:
            ConfigError: the global batch cannot be cut evenly.
        """
        sequences = self.train.micro_batch_size * data_ranks
        if self.train.global_batch_size % sequences:
            raise ConfigError(
                f"train.global_batch_size = {self.train.global_batch_size} is not divisible by"
                f" train.micro_batch_size = {self.train.micro_batch_size} x {data_ranks} data-parallel ranks"
            )
        return self.train.global_batch_size // sequences
