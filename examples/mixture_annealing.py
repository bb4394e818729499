"""Two sources mixed by weight, then annealed on one of them at a lower rate; the loss of each is logged by name."""

import email
import json
import tempfile
import unittest
from pathlib import Path

from forge.config import AdamW, DataConfig, DataSource, JobConfig, MetricsConfig, ModelConfig, TrainConfig
from forge.training import run_training


def source(name, module, weight):
    return DataSource(name=name, path=str(Path(module.__file__).parent), weight=weight)


with tempfile.TemporaryDirectory() as folder:
    config = JobConfig(
        run_dir=f"{folder}/run",
        model=ModelConfig(dim=64, n_layers=2, vocab_size=257, max_seq_len=64),
        train=TrainConfig(steps=30, seq_len=64, global_batch_size=10, micro_batch_size=10),
        optimizer=AdamW(lr=3e-3),
        data=DataConfig(
            sources=(source("mail", email, 0.8), source("tests", unittest, 0.2)),
            anneal_start_step=20,
            anneal_weights={"tests": 1.0},
            anneal_lr_scale=0.5,
            cache_dir=f"{folder}/tokens",
        ),
        metrics=MetricsConfig(log_interval=5),
    )
    run_training(config)
    for line in Path(f"{folder}/run/metrics.jsonl").read_text().splitlines():
        logged = json.loads(line)
        shown = {
            key: round(value, 3) for key, value in logged.items() if key.startswith(("train/loss/", "train/tokens/"))
        }
        if shown:
            print(f"step {logged['step']}: {shown}")
