"""Fine-tune a Hugging Face model with its lower half frozen: `python examples/finetune_frozen.py [FOLDER TEXT]`.

Without a folder, a small model that forge trains and exports first stands in for a downloaded one.
"""

import email
import json
import sys
import tempfile
from pathlib import Path

from attrs import evolve

from forge.checkpoint import checkpoint_path
from forge.checkpoint.huggingface import export_checkpoint, import_folder
from forge.config import AdamW, DataConfig, FreezeStage, JobConfig, ModelConfig, TrainConfig
from forge.training import run_training
from forge.training.reload import load_run


def small_model(folder):
    """Twenty steps on `json`, as a folder that transformers could read."""
    config = JobConfig(
        run_dir=str(folder / "pretrained"),
        model=ModelConfig(dim=64, n_layers=4, vocab_size=257, max_seq_len=64),
        train=TrainConfig(steps=20, seq_len=64, global_batch_size=8, micro_batch_size=8),
        optimizer=AdamW(lr=3e-3),
        data=DataConfig(path=str(Path(json.__file__).parent), cache_dir=str(folder / "tokens")),
    )
    run_training(config)
    export_checkpoint(checkpoint_path(folder / "pretrained" / "checkpoints", 20), folder / "hf", shard_bytes=10**9)
    return folder / "hf"


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    source, text = map(Path, sys.argv[1:]) if sys.argv[1:] else (small_model(folder), Path(email.__file__).parent)
    family, config = import_folder(source, folder / "run")
    print(f"imported: {family} with {config.model.n_layers} blocks")
    lower = tuple(f"blocks.{layer}.*" for layer in range(config.model.n_layers // 2))
    stages = (FreezeStage(("embeddings", *lower)), FreezeStage(lower[-1:], frozen=False, start_step=10))
    train = evolve(config.train, steps=20, global_batch_size=8, freeze=stages)
    data = evolve(config.data, path=str(text), cache_dir=str(folder / "tokens"))
    before = load_run(folder / "run").state.params
    state = run_training(evolve(config, train=train, data=data, optimizer=AdamW(lr=1e-3)))
    for name, p in state.params.items():
        if name.endswith("wq.weight") or name == "embed.weight":
            print(f"{name}: moved by {float((p - before[name]).norm()):.4f}")
