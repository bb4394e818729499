"""Sequences out of a token stream: every batch is a pure function of its step."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from attrs import field, frozen
from numpy.typing import NDArray
from torch import Tensor

from forge.data.batch import IGNORE, Batch
from forge.data.manifest import Split, read_manifest
from forge.data.mixture import Mixture
from forge.data.order import permuted_array
from forge.data.raw import open_listed
from forge.data.shard import Shard
from forge.errors import ConfigError, DataError
from forge.pytree import tree_map


@frozen
class TokenDataset:
    """The token files of one split as one stream."""

    path: Path  # for messages
    shards: tuple[Shard, ...]
    _starts: tuple[int, ...] = field(init=False, repr=False)  # of each shard in the stream

    @_starts.default
    def _find_starts(self) -> tuple[int, ...]:
        return tuple(accumulate((shard.n_tokens for shard in self.shards), initial=0))

    def __attrs_post_init__(self) -> None:
        if len({(shard.vocab_size, shard.eod_id) for shard in self.shards}) != 1:
            raise DataError(f"{self.path}: its token files do not share one vocabulary; prepare them again together")

    @property
    def n_tokens(self) -> int:
        """Tokens in all."""
        return self._starts[-1]

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        return self.shards[0].vocab_size

    @property
    def eod_id(self) -> int:
        """The id that ends a document."""
        return self.shards[0].eod_id

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, 0 where not known."""
        known = all(shard.n_bytes for shard in self.shards)
        return sum(shard.n_bytes for shard in self.shards) / self.n_tokens if known else 0.0

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens start .. stop - 1 of the stream, int64 (stop - start,).

        Raises:
            DataError: a file cannot be read, or an id is not below the vocabulary; names file and offset.
            IndexError: the range is not within the stream.
        """
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.path}, which holds {self.n_tokens}")
        pieces = []
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            shard, offset, end = self.shards[index], self._starts[index], min(stop, self._starts[index + 1])
            try:
                pieces.append(shard.read(start - offset, end - offset))
            except OSError as error:
                raise DataError(
                    f"{shard.path}: cannot be read at offset {start - offset} ({error.strerror})"
                ) from error
            start, index = end, index + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.int64), *pieces])


def open_dataset(folder: Path, split: Split) -> TokenDataset:
    """The stream of one split of a prepared folder.

    Raises:
        DataError: no prepared folder, nothing held out, or a file that is missing or damaged.
    """
    folder, manifest = Path(folder), read_manifest(folder)
    names = manifest.of(split)
    if not names:
        remedy = "prepare it again with data.eval_fraction > 0" if split == "eval" else "give more, or hold out less"
        raise DataError(f"{folder}, made of {manifest.source}: holds no {split} data; {remedy}")
    return TokenDataset(folder, tuple(open_listed(folder, name, manifest) for name in names))


def check_vocab(dataset: TokenDataset, vocab_size: int) -> None:
    """Refuse data whose ids the model has no embedding for.

    Raises:
        DataError: names the data and both sizes.
    """
    if dataset.vocab_size > vocab_size:
        raise DataError(
            f"{dataset.path}: a vocabulary of {dataset.vocab_size} does not fit model.vocab_size = {vocab_size};"
            f" set model.vocab_size to at least {dataset.vocab_size}"
        )


def n_samples(dataset: TokenDataset, seq_len: int) -> int:
    """Sequences in an epoch: sample i reads tokens i*S .. i*S + S, so the last target is the next one's first input.

    Every token but the first is a target once; the last sample is shorter where S does not divide them.
    """
    return -(-max(0, dataset.n_tokens - 1) // seq_len)


def document_ids(ids: NDArray[np.int64], eod_id: int) -> NDArray[np.int64]:
    """The number of each token's document, (..., S) -> (..., S), from 0 in every sequence; the end belongs to it."""
    ended = ids == eod_id
    counted = np.cumsum(ended, axis=-1, dtype=np.int64)
    counted -= ended
    return counted


def build_batch_at(
    datasets: Mapping[str, TokenDataset],
    mixture: Mixture | None = None,
    *,
    seq_len: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_seed: int,
    isolate_documents: bool,
    rank: int = 0,
    ranks: int = 1,
) -> Callable[[int], Batch]:
    """`batch_at(index)`: this rank's share of the global batch of that number, a pure function.

    The global batch is the same whatever the number of ranks: sequences index*G .. index*G + G - 1 of an endless row.
    Rank r takes the r-th run of G/ranks of them, as (A, B, S). Each source is a row of epochs of its own, every epoch a
    fresh permutation of its samples; the mixture says which source is next.

    Args:
        datasets: sources by name; the name is part of the seed of a source's order.
        mixture: of several sources, in their order; gives `source_ids`. None = there is one source.
        isolate_documents: give `doc_ids`, and no target across the end of a document.

    Raises:
        DataError: a source is shorter than one sequence, or they do not share one vocabulary.
        ConfigError: the global batch does not divide over micro-batches and ranks.
    """
    sources = list(datasets.items())
    _require_one_vocabulary(list(datasets.values()))
    samples = [_require_samples(dataset, seq_len, "train.seq_len") for dataset in datasets.values()]
    share = check_batch_size(global_batch_size, micro_batch_size, ranks)

    def batch_at(index: int) -> Batch:
        first = index * global_batch_size + rank * share
        places = np.arange(first, first + share)
        source, position = (np.zeros_like(places), places) if mixture is None else mixture.place(places)
        rows = _empty_rows(share, seq_len)
        for at in np.unique(source):
            (name, dataset), here = sources[at], np.flatnonzero(source == at)
            rows.read(dataset, _sample_index(position[here], samples[at], f"{data_seed}/{name}"), here)
        source_ids = None if mixture is None else torch.from_numpy(source).reshape(-1, micro_batch_size)
        return rows.batch(sources[0][1].eod_id, micro_batch_size, isolate_documents, source_ids)

    return batch_at


def check_batch_size(global_batch_size: int, micro_batch_size: int, ranks: int) -> int:
    """The sequences of each rank.

    Raises:
        ConfigError: the global batch does not divide over micro-batches and ranks.
    """
    if global_batch_size % (micro_batch_size * ranks):
        raise ConfigError(
            f"train.global_batch_size = {global_batch_size} is not divisible by train.micro_batch_size"
            f" = {micro_batch_size} x {ranks} data-parallel ranks"
        )
    return global_batch_size // ranks


@frozen
class EvalBatches:
    """A fixed, finite set of batches, made anew at every iteration; the last one may be smaller."""

    dataset: TokenDataset
    samples: NDArray[np.int64] = field(eq=False, repr=False)  # (n,)
    seq_len: int
    batch_size: int
    isolate_documents: bool

    def __len__(self) -> int:
        """Batches."""
        return -(-len(self.samples) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.samples), self.batch_size):
            index = self.samples[start : start + self.batch_size]
            rows = _empty_rows(len(index), self.seq_len)
            rows.read(self.dataset, index, np.arange(len(index)))
            yield rows.batch(self.dataset.eod_id, len(index), self.isolate_documents)


def eval_batches(
    dataset: TokenDataset, *, seq_len: int, batch_size: int, batches: int, isolate_documents: bool
) -> EvalBatches:
    """The evaluation set: every sample once, in order; spread evenly over the data where that holds more.

    Args:
        batches: most batches, each (1, batch_size, S).

    Raises:
        DataError: the data is shorter than one sequence.
    """
    samples = _require_samples(dataset, seq_len, "train.seq_len")
    wanted = min(samples, batches * batch_size)
    index = np.arange(wanted) * samples // wanted
    return EvalBatches(dataset, index, seq_len, batch_size, isolate_documents)


def share_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """This rank's sequences of a batch that every rank has, as many as any other's.

    Where they do not divide evenly, the last ones are repeated without a target: they add nothing.
    """
    rows = batch.labels.shape[1]
    each = -(-rows // ranks)
    place = torch.arange(rank * each, (rank + 1) * each)
    share = tree_map(lambda x: x[:, place.clamp(max=rows - 1)], batch)
    share.labels[:, place >= rows] = IGNORE
    return share


def _require_samples(dataset: TokenDataset, seq_len: int, key: str) -> int:
    if dataset.n_tokens <= seq_len:
        raise DataError(
            f"{dataset.path}: {dataset.n_tokens} tokens, one sequence of {key} = {seq_len} needs {seq_len + 1};"
            f" give more text or lower {key}"
        )
    return n_samples(dataset, seq_len)


def _require_one_vocabulary(datasets: Sequence[TokenDataset]) -> None:
    first = datasets[0]
    for other in datasets[1:]:
        if (other.vocab_size, other.eod_id) != (first.vocab_size, first.eod_id):
            raise DataError(
                f"{other.path} and {first.path} have different vocabularies, of {other.vocab_size} and"
                f" {first.vocab_size} ids: prepare both with one tokenizer"
            )


def _sample_index(positions: NDArray[np.int64], samples: int, seed: str) -> NDArray[np.int64]:
    """The sample at each place of a source's endless row of epochs, (n,) -> (n,)."""
    epochs, within = np.divmod(positions, samples)
    index = np.empty_like(within)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
        index[here] = permuted_array(within[here], samples, int.from_bytes(digest, "little"))
    return index


@frozen
class Rows:
    """Sequences being read: inputs, and each one's successor as its label; int64 (n, S) each."""

    inputs: NDArray[np.int64]
    labels: NDArray[np.int64]

    def read(self, dataset: TokenDataset, samples: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Read samples into the given places; after the last token of the data there is no target."""
        seq_len = self.inputs.shape[1]
        for place, sample in zip(places.tolist(), samples.tolist(), strict=True):
            start = sample * seq_len
            ids = dataset.read(start, min(start + seq_len + 1, dataset.n_tokens))
            targets = len(ids) - 1
            self.inputs[place, :targets], self.labels[place, :targets] = ids[:-1], ids[1:]
            if targets < seq_len:
                self.inputs[place, targets:], self.labels[place, targets:] = dataset.eod_id, IGNORE

    def batch(
        self, eod_id: int, micro_batch_size: int, isolate_documents: bool, source_ids: Tensor | None = None
    ) -> Batch:
        """The rows as (A, B, S), in order."""
        doc_ids = None
        if isolate_documents:
            self.labels[self.inputs == eod_id] = IGNORE
            doc_ids = document_ids(self.inputs, eod_id)

        def grouped(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).reshape(-1, micro_batch_size, array.shape[1])

        documents = None if doc_ids is None else grouped(doc_ids)
        return Batch(grouped(self.inputs), grouped(self.labels), documents, source_ids)


def _empty_rows(count: int, seq_len: int) -> Rows:
    return Rows(np.empty((count, seq_len), np.int64), np.empty((count, seq_len), np.int64))
