"""Immutable configs: one attrs class a section, validated on construction. No torch."""

from forge.config.data import DataConfig, DataPhase, DataSource, EvalConfig, EvalSource
from forge.config.job import JobConfig
from forge.config.model import ModelConfig, MoEConfig
from forge.config.optimizer import OPTIMIZERS, SGD, AdamW, Lion, Muon, OptimizerConfig, ScheduleFree
from forge.config.run import CheckpointConfig, DistributedConfig, MetricsConfig, PipelineSchedule, ProfilingConfig
from forge.config.scheduler import REX, SCHEDULERS, WSD, Constant, Cosine, Linear, NoSchedule, SchedulerConfig
from forge.config.toml import (
    config_from_dict,
    config_to_dict,
    config_to_toml,
    diff_configs,
    flatten_config,
    load_config,
    save_config,
)
from forge.config.train import FreezeStage, TrainConfig

__all__ = [
    "OPTIMIZERS", "REX", "SCHEDULERS", "SGD", "WSD", "AdamW", "CheckpointConfig", "Constant", "Cosine", "DataConfig",
    "DataPhase", "DataSource", "DistributedConfig", "EvalConfig", "EvalSource", "FreezeStage", "JobConfig", "Linear",
    "Lion", "MetricsConfig", "MoEConfig", "ModelConfig", "Muon", "NoSchedule", "OptimizerConfig", "PipelineSchedule",
    "ProfilingConfig", "ScheduleFree", "SchedulerConfig", "TrainConfig", "config_from_dict", "config_to_dict",
    "config_to_toml", "diff_configs", "flatten_config", "load_config", "save_config",
]  # fmt: skip
