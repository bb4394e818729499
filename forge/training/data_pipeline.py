"""Data for a run: batches to train on, fixed sets to evaluate on, and the tokenizer between text and ids."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from attrs import frozen

from forge.config import DataConfig, JobConfig
from forge.data import (
    Manifest,
    Mixture,
    Position,
    Stream,
    StreamBatches,
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
    open_hub_stream,
    prefetch,
    prepared,
    read_manifest,
)
from forge.data.batch import Batch
from forge.data.manifest import Split
from forge.data.stream import HUB_STREAM
from forge.data.tokenise import Progress
from forge.errors import DataError
from forge.training.eval import EvalSet
from forge.training.progress import counting_progress
from forge.training.runtime import Runtime

_Fed = tuple[Batch, Position | None]

_ORDER = "order 2"
"""Part of the fingerprint: another one for each way in which the same tokens have become batches."""


@frozen
class DataPipeline:
    """What a run reads."""

    training: Callable[[int], Batch] | StreamBatches  # number of the global batch -> this rank's share; or a stream
    eval_sets: tuple[EvalSet, ...]  # empty without evaluation
    tokenizer: Tokenizer
    samples: int | None  # sequences in one epoch of every source; None = not known
    fingerprint: str  # of the training tokens and their order, to compare on resume

    def batch_at(self, index: int) -> Batch:
        """This rank's share of a global batch, a pure function.

        Raises:
            DataError: the data is a stream.
        """
        if isinstance(self.training, StreamBatches):
            raise DataError("a stream is read forward only: its batches have no function of their number")
        return self.training(index)


class Feed(Iterator[Batch]):
    """The batches that remain, made ahead, and where a stream stands after the one that was given last."""

    def __init__(self, batches: Generator[_Fed, None, None], position: Position | None) -> None:
        self._batches, self.position = batches, position

    def __next__(self) -> Batch:
        batch, self.position = next(self._batches)
        return batch

    def close(self) -> None:
        """End the threads that make batches ahead."""
        self._batches.close()


def open_feed(
    data: DataPipeline,
    config: DataConfig,
    start: int,
    stop: int,
    *,
    position: Position | None = None,
    index_at: Callable[[int], int] = lambda step: step,
    pin: bool = False,
) -> Feed:
    """The batches of updates start .. stop - 1.

    Args:
        position: where a stream stands; what `Feed.position` was after update start - 1.
        index_at: update -> number of the global batch, growing.
        pin: give batches in pinned memory, for a CUDA device.
    """
    read: Callable[[int], _Fed]
    if isinstance(data.training, StreamBatches):
        read, workers = data.training.open(position), 1
    else:
        read, workers = _without_position(data.training), config.workers

    def fed(step: int) -> _Fed:
        batch, after = read(index_at(step))
        return batch.pin_memory() if pin else batch, after

    return Feed(prefetch(fed, start, stop, config.prefetch, workers), position)


def _without_position(batch_at: Callable[[int], Batch]) -> Callable[[int], _Fed]:
    return lambda index: (batch_at(index), None)


@frozen
class Prepared:
    """The prepared folders of a config, by name."""

    sources: dict[str, Path]  # "" is the name of the only one; empty for a stream
    eval_sets: dict[str, Path]  # those of `eval.sets`


def open_data(config: JobConfig, runtime: Runtime, stream: Stream | None = None) -> DataPipeline:
    """`build_data_pipeline` on every rank; where text must be tokenised first, one does it and shows how far it is."""
    folders = _prepare_on_one(config, runtime, streamed=stream is not None)
    return build_data_pipeline(config, stream=stream, folders=folders, rank=runtime.data_rank, ranks=runtime.data_ranks)


def open_eval_sets(config: JobConfig, runtime: Runtime) -> tuple[EvalSet, ...]:
    """The sets of `config.eval.sets` alone, prepared by one rank where they must be, without the training data."""
    return _eval_sets(config, _prepare_on_one(config, runtime, streamed=True))


def _prepare_on_one(config: JobConfig, runtime: Runtime, *, streamed: bool) -> Prepared:
    """`prepare_data` on one rank, while the others wait to find what it has made."""
    folders = None
    if runtime.leads:
        with counting_progress("tokenising documents") as report:
            folders = prepare_data(config, streamed=streamed, progress=report)
    runtime.barrier()
    return folders or prepare_data(config, streamed=streamed)


def prepare_data(config: JobConfig, *, streamed: bool = False, progress: Progress | None = None) -> Prepared:
    """Turn every text that the config names into tokens, once; what is prepared already is left.

    Args:
        streamed: a stream is trained on in the place of `config.data`.

    Raises:
        DataError: see `forge.data.prepared`.
    """

    def folders(named: dict[str, DataConfig]) -> dict[str, Path]:
        return {name: prepared(data, workers=available_cores(), progress=progress) for name, data in named.items()}

    sources, sets = {} if streamed else _sources(config.data), _eval_sources(config)  # what is refused is so at once
    return Prepared(folders(sources), folders(sets))


def build_data_pipeline(
    config: JobConfig,
    *,
    stream: Stream | None = None,
    folders: Prepared | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> DataPipeline:
    """Prepare (once) and open the data of a config.

    Args:
        stream: documents to train on in the place of those that the config names.
        folders: what `prepare_data` gave; None = prepare now.

    Raises:
        DataError: missing, empty, damaged or too short data, or tokens beyond the model's vocabulary.
    """
    folders = prepare_data(config, streamed=stream is not None) if folders is None else folders
    if not folders.sources:
        return _stream_pipeline(config, stream, folders, rank, ranks)
    datasets = {name: _open(config, folder, "train") for name, folder in folders.sources.items()}
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
        training=batch_at,
        eval_sets=_eval_sets(config, folders),
        tokenizer=build_tokenizer(config.data.tokenizer),
        samples=sum(n_samples(dataset, config.train.seq_len) for dataset in datasets.values()),
        fingerprint="; ".join([_ORDER, *(_fingerprint(name, folder) for name, folder in folders.sources.items())]),
    )


def _stream_pipeline(
    config: JobConfig, stream: Stream | None, folders: Prepared, rank: int, ranks: int
) -> DataPipeline:
    if config.data.sources:
        raise DataError("a stream cannot be mixed with data.sources: mix before, or prepare it as a source")
    if config.eval.interval and not config.eval.sets:
        raise DataError("of a stream nothing is held out: name sets to evaluate on in [[eval.sets]]")
    tokenizer, train = build_tokenizer(config.data.tokenizer), config.train
    if tokenizer.eod_id >= config.model.vocab_size:
        raise DataError(
            f"data.tokenizer = '{tokenizer.name}' ends documents with id {tokenizer.eod_id}, outside model.vocab_size"
            f" = {config.model.vocab_size}"
        )
    batches = StreamBatches(
        stream=stream if stream is not None else open_hub_stream(config.data.path),
        encode=tokenizer.encode,
        eod_id=tokenizer.eod_id,
        vocab_size=config.model.vocab_size,
        text_key=config.data.text_key,
        seq_len=train.seq_len,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        isolate_documents=config.data.isolate_documents,
        rank=rank,
        ranks=ranks,
    )
    origin = "of one's own" if stream is not None else config.data.path
    return DataPipeline(batches, _eval_sets(config, folders), tokenizer, None, f"stream {origin}")


def _sources(data: DataConfig) -> dict[str, DataConfig]:
    """The section of each source by its name; of the only one, whose name is empty, where none are listed.

    A stream is no source: there is nothing to prepare.
    """
    if data.path.startswith(HUB_STREAM) and not data.sources:
        return {}
    if not data.sources:
        return {"": data.alone(data.path)}
    for source in data.sources:
        why = "cannot be mixed with other sources; name it as data.path alone, or"
        _refuse_stream(f"data.sources '{source.name}'", source.path, why)
    return {source.name: data.alone(source.path) for source in data.sources}


def _eval_sources(config: JobConfig) -> dict[str, DataConfig]:
    """The section of each further evaluation set by its name: text is evaluated on as a whole."""
    sets = config.eval.sets if config.eval.interval else ()
    for each in sets:
        _refuse_stream(f"eval.sets '{each.name}'", each.path, "has no end to evaluate up to:")
    return {each.name: config.data.alone(each.path, eval_fraction=0.0) for each in sets}


def _refuse_stream(key: str, path: str, why: str) -> None:
    if path.startswith(HUB_STREAM):
        raise DataError(f"{key}: {path} is a stream, which {why} prepare it: 'hf:{path.removeprefix(HUB_STREAM)}'")


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


def _eval_sets(config: JobConfig, folders: Prepared) -> tuple[EvalSet, ...]:
    """What is held out of each source, then the further sets of `eval.sets`."""
    if not config.eval.interval:
        return ()
    further, holding = folders.eval_sets, folders.sources
    holding = {name: folder for name, folder in holding.items() if read_manifest(folder).of("eval")}
    if not holding and not further:
        holding = folders.sources  # opening them says what is missing
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
