"""Data for a run: batches to train on, a fixed set to evaluate on, and the tokenizer between text and ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attrs import frozen

from forge.config import JobConfig
from forge.data import (
    Manifest,
    Tokenizer,
    build_batch_at,
    build_tokenizer,
    check_vocab,
    eval_batches,
    n_samples,
    open_dataset,
    prepared,
    read_manifest,
)
from forge.data.batch import Batch
from forge.errors import DataError


@frozen
class DataPipeline:
    """What a run reads."""

    batch_at: Callable[[int], Batch]  # step -> batch, pure
    eval_batches: Iterable[Batch] | None  # the same finite set at every iteration; None without held-out data
    tokenizer: Tokenizer
    bytes_per_token: float  # of the held-out text
    samples: int  # sequences in one epoch
    fingerprint: str  # of the training tokens, to compare on resume


def build_data_pipeline(
    config: JobConfig, *, progress: Callable[[int, int], None] | None = None, rank: int = 0, ranks: int = 1
) -> DataPipeline:
    """Prepare (once) and open the data of a config.

    Args:
        progress: called with (documents done, documents in all) while text becomes tokens.

    Raises:
        DataError: missing, empty, damaged or too short data, or tokens beyond the model's vocabulary.
    """
    folder = prepared(config.data, progress=progress)
    manifest = read_manifest(folder)
    train = open_dataset(folder, "train")
    check_vocab(train, config.model.vocab_size)
    held_out, bytes_per_token = None, train.bytes_per_token
    if config.eval.interval:
        dataset = open_dataset(folder, "eval")
        held_out = eval_batches(
            dataset,
            seq_len=config.train.seq_len,
            batch_size=config.eval.batch_size,
            batches=config.eval.batches,
            isolate_documents=config.data.isolate_documents,
        )
        bytes_per_token = dataset.bytes_per_token
    batch_at = build_batch_at(
        train,
        seq_len=config.train.seq_len,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        data_seed=config.train.data_seed,
        isolate_documents=config.data.isolate_documents,
        rank=rank,
        ranks=ranks,
    )
    return DataPipeline(
        batch_at=batch_at,
        eval_batches=held_out,
        tokenizer=_tokenizer(config, manifest),
        bytes_per_token=bytes_per_token,
        samples=n_samples(train, config.train.seq_len),
        fingerprint=" ".join(entry.sha256 for entry in manifest.of("train").values()),
    )


def _tokenizer(config: JobConfig, manifest: Manifest) -> Tokenizer:
    """The config's tokenizer, which must be the one that made the tokens."""
    tokenizer = build_tokenizer(config.data.tokenizer)
    if (tokenizer.vocab_size, tokenizer.eod_id) != (manifest.vocab_size, manifest.eod_id):
        raise DataError(
            f"{config.data.path} was tokenised by '{manifest.tokenizer}' ({manifest.vocab_size} ids), not by"
            f" data.tokenizer = '{config.data.tokenizer}' ({tokenizer.vocab_size} ids): set it to the former"
        )
    return tokenizer
