"""The same run on one process and sharded over four by FSDP2: the processes start themselves, on CPUs with gloo.

On GPUs it is `torchrun --nproc-per-node 4 cli.py`; only who starts the processes differs.
"""

import email
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from forge.config import AdamW, DataConfig, DistributedConfig, JobConfig, MetricsConfig, ModelConfig, TrainConfig


def train(run_dir):
    """What every process does; the launcher's variables say which of how many it is."""
    from forge.training import run_training

    config = JobConfig(
        run_dir=run_dir,
        model=ModelConfig(dim=64, n_layers=2, vocab_size=257, max_seq_len=64),
        train=TrainConfig(steps=6, seq_len=64, global_batch_size=8, micro_batch_size=2, device="cpu"),
        optimizer=AdamW(lr=3e-3),
        data=DataConfig(path=str(Path(email.__file__).parent), cache_dir=f"{Path(run_dir).parent}/tokens"),
        distributed=DistributedConfig(dp_shard=-1),
        metrics=MetricsConfig(log_interval=1),
    )
    run_training(config)


def start(run_dir, ranks):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    command = [sys.executable, __file__, run_dir]
    processes = [subprocess.Popen(command, env={**os.environ, **job, **place}) for place in places]
    assert [process.wait() for process in processes] == [0] * ranks
    logged = map(json.loads, Path(run_dir, "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in logged if "train/loss" in line]


if sys.argv[1:]:
    train(sys.argv[1])
else:
    with tempfile.TemporaryDirectory() as folder:
        alone, sharded = start(f"{folder}/alone", 1), start(f"{folder}/sharded", 4)
    for step, (one, four) in enumerate(zip(alone, sharded, strict=True), start=1):
        print(f"step {step}: loss {one:.6f} on one process, {four:.6f} on four")
