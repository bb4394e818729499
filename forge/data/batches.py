"""Sequences out of a token stream: every batch is a pure function of its step."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from attrs import field, frozen
from numpy.typing import NDArray
from torch import Tensor

from forge.data.batch import IGNORE, Batch
from forge.data.manifest import Split, read_manifest
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
            DataError: an id is not below the vocabulary; names file, offset and id.
            IndexError: the range is not within the stream.
        """
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.path}, which holds {self.n_tokens}")
        pieces = []
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            offset, end = self._starts[index], min(stop, self._starts[index + 1])
            pieces.append(self.shards[index].read(start - offset, end - offset))
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
        raise DataError(f"{folder}: holds no {split} data; prepare it again with data.eval_fraction > 0")
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
    """Sequences in an epoch: sample i reads tokens i*S .. i*S + S, so the last target is the next one's first input."""
    return max(0, dataset.n_tokens - 1) // seq_len


def document_ids(ids: NDArray[np.int64], eod_id: int) -> NDArray[np.int64]:
    """The number of each token's document, (..., S) -> (..., S), from 0 in every sequence; the end belongs to it."""
    ended = (ids == eod_id).astype(np.int64)
    return np.cumsum(ended, axis=-1) - ended


def build_batch_at(
    dataset: TokenDataset,
    *,
    seq_len: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_seed: int,
    isolate_documents: bool,
    rank: int = 0,
    ranks: int = 1,
) -> Callable[[int], Batch]:
    """`batch_at(step)`: this rank's share of the global batch of a step, a pure function.

    The global batch is the same whatever the number of ranks: sequences step*G .. step*G + G - 1 of an endless row of
    epochs, each a fresh permutation of the samples. Rank r takes the r-th run of G/ranks of them, as (A, B, S).

    Args:
        isolate_documents: give `doc_ids`, and no target across the end of a document.

    Raises:
        DataError: the data is shorter than one sequence.
        ConfigError: the global batch does not divide over micro-batches and ranks.
    """
    samples = _require_samples(dataset, seq_len, "train.seq_len")
    if global_batch_size % (micro_batch_size * ranks):
        raise ConfigError(
            f"train.global_batch_size = {global_batch_size} is not divisible by train.micro_batch_size"
            f" = {micro_batch_size} x {ranks} data-parallel ranks"
        )
    share = global_batch_size // ranks

    def batch_at(step: int) -> Batch:
        first = step * global_batch_size + rank * share
        index = _sample_index(np.arange(first, first + share), samples, data_seed)
        return _batch(dataset, index, seq_len, micro_batch_size, isolate_documents)

    return batch_at


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
            yield _batch(self.dataset, index, self.seq_len, len(index), self.isolate_documents)


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
    samples = n_samples(dataset, seq_len)
    if samples == 0:
        raise DataError(
            f"{dataset.path}: {dataset.n_tokens} tokens, one sequence of {key} = {seq_len} needs {seq_len + 1};"
            f" give more text or lower {key}"
        )
    return samples


def _sample_index(places: NDArray[np.int64], samples: int, data_seed: int) -> NDArray[np.int64]:
    """The sample at each place of the endless row of epochs, (n,) -> (n,)."""
    epochs, within = np.divmod(places, samples)
    index = np.empty_like(within)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        digest = hashlib.blake2b(f"{data_seed}/{epoch}".encode(), digest_size=8).digest()
        index[here] = permuted_array(within[here], samples, int.from_bytes(digest, "little"))
    return index


def _batch(
    dataset: TokenDataset, samples: NDArray[np.int64], seq_len: int, micro_batch_size: int, isolate_documents: bool
) -> Batch:
    """The given samples as (A, B, S), in order."""
    rows = np.stack([dataset.read(int(i) * seq_len, int(i) * seq_len + seq_len + 1) for i in samples])
    inputs, labels = rows[:, :-1].copy(), rows[:, 1:].copy()
    doc_ids = None
    if isolate_documents:
        labels[inputs == dataset.eod_id] = IGNORE
        doc_ids = document_ids(inputs, dataset.eod_id)

    def grouped(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).reshape(-1, micro_batch_size, seq_len)

    return Batch(grouped(inputs), grouped(labels), None if doc_ids is None else grouped(doc_ids))
