"""Data for a run: batches to train on, fixed sets to evaluate on, and the tokenizer between text and ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from forge.config import DataConfig, JobConfig
from forge.data import (
    Manifest,
    Mixture,
    TokenDataset,
    Tokenizer,
    available_cores,
    build_batch_at,
    build_mixture,
    build_tokenizer,
    check_vocab,
    eval_batches,
    n_samples,
    open_dataset,
    prepared,
    read_manifest,
)
from forge.data.batch import Batch
from forge.data.manifest import Split
from forge.errors import DataError
from forge.training.eval import EvalSet

Progress = Callable[[int, int], None]
"""Called with (documents done, documents in all) while text becomes tokens."""

_ORDER = "order 2"
"""Part of the fingerprint: another one for each way in which the same tokens have become batches."""


@frozen
class DataPipeline:
    """What a run reads."""

    batch_at: Callable[[int], Batch]  # number of the global batch -> this rank's share, pure
    eval_sets: tuple[EvalSet, ...]  # empty without evaluation
    tokenizer: Tokenizer
    samples: int  # sequences in one epoch of every source
    fingerprint: str  # of the training tokens and their order, to compare on resume


def prepare_data(config: JobConfig, *, progress: Progress | None = None) -> None:
    """Turn every text that the config names into tokens, once; what is prepared already is left.

    Raises:
        DataError: see `forge.data.prepared`.
    """
    for data in (*_sources(config.data).values(), *_eval_sources(config).values()):
        prepared(data, workers=available_cores(), progress=progress)


def build_data_pipeline(
    config: JobConfig, *, progress: Progress | None = None, rank: int = 0, ranks: int = 1
) -> DataPipeline:
    """Prepare (once) and open the data of a config.

    Raises:
        DataError: missing, empty, damaged or too short data, or tokens beyond the model's vocabulary.
    """
    prepare_data(config, progress=progress)
    folders = {name: prepared(data) for name, data in _sources(config.data).items()}
    datasets = {name: _open(config, folder, "train") for name, folder in folders.items()}
    batch_at = build_batch_at(
        datasets,
        _mixture(config),
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
        eval_sets=_eval_sets(config, folders) if config.eval.interval else (),
        tokenizer=build_tokenizer(config.data.tokenizer),
        samples=sum(n_samples(dataset, config.train.seq_len) for dataset in datasets.values()),
        fingerprint="; ".join([_ORDER, *(_fingerprint(name, folder) for name, folder in folders.items())]),
    )


def _sources(data: DataConfig) -> dict[str, DataConfig]:
    """The section of each source by its name; of the only one, whose name is empty, where none are listed."""
    if not data.sources:
        return {"": data.alone(data.path)}
    return {source.name: data.alone(source.path) for source in data.sources}


def _eval_sources(config: JobConfig) -> dict[str, DataConfig]:
    """The section of each further evaluation set by its name: text is evaluated on as a whole."""
    sets = config.eval.sets if config.eval.interval else ()
    return {each.name: config.data.alone(each.path, eval_fraction=0.0) for each in sets}


def _mixture(config: JobConfig) -> Mixture | None:
    if not config.data.sources:
        return None
    size = config.train.global_batch_size
    changes = [(step * size, weights) for step, weights in config.data.weights_by_step()]
    return build_mixture(changes, config.data.temperature)


def _open(config: JobConfig, folder: Path, split: Split) -> TokenDataset:
    """A split of a prepared folder, whose tokens must be those of the config's tokenizer and within the model's."""
    _check_tokenizer(config, folder, read_manifest(folder))
    dataset = open_dataset(folder, split)
    check_vocab(dataset, config.model.vocab_size)
    return dataset


def _eval_sets(config: JobConfig, folders: dict[str, Path]) -> tuple[EvalSet, ...]:
    """What is held out of each source, then the further sets of `eval.sets`."""
    further = {name: prepared(data) for name, data in _eval_sources(config).items()}
    holding = {name: folder for name, folder in folders.items() if read_manifest(folder).of("eval")}
    if not holding and not further:
        holding = folders  # opening them says what is missing
    sets = [_eval_set(config, name, folder, "eval", held_out=True) for name, folder in holding.items()]
    for name, folder in further.items():
        split: Split = "eval" if read_manifest(folder).of("eval") else "train"
        sets.append(_eval_set(config, name, folder, split, held_out=False))
    return tuple(sets)


def _eval_set(config: JobConfig, name: str, folder: Path, split: Split, *, held_out: bool) -> EvalSet:
    dataset = _open(config, folder, split)
    batches = eval_batches(
        dataset,
        seq_len=config.train.seq_len,
        batch_size=config.eval.batch_size,
        batches=config.eval.batches,
        isolate_documents=config.data.isolate_documents,
    )
    return EvalSet(name, batches, dataset.bytes_per_token, held_out)


def _fingerprint(name: str, folder: Path) -> str:
    digests = " ".join(entry.sha256 for entry in read_manifest(folder).of("train").values())
    return f"{name}: {digests}" if name else digests


def _check_tokenizer(config: JobConfig, folder: Path, manifest: Manifest) -> None:
    """Refuse tokens that another tokenizer made."""
    tokenizer = build_tokenizer(config.data.tokenizer)
    if (tokenizer.vocab_size, tokenizer.eod_id) != (manifest.vocab_size, manifest.eod_id):
        raise DataError(
            f"{folder} was tokenised by '{manifest.tokenizer}' ({manifest.vocab_size} ids), not by"
            f" data.tokenizer = '{config.data.tokenizer}' ({tokenizer.vocab_size} ids): set it to the former"
        )
