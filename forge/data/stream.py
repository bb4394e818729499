"""Streams: documents one after another, whose position is a state: the only data that is no function of a number.

The state is that of the batch that was used, however many are made ahead: `batch_at` returns it beside the batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from forge.data.batch import Batch
from forge.data.batches import Rows, check_batch_size
from forge.errors import DataError

Position = dict[str, Any]
"""Where a stream stands, in plain values that JSON can hold."""

HUB_STREAM = "hf-stream:"


@runtime_checkable
class Stream(Protocol):
    """Documents, each a text, a mapping that holds one, or token ids. `datasets.IterableDataset` is one.

    With a shuffle buffer the latter forgets what the buffer held; shuffle its shards instead.
    """

    def __iter__(self) -> Iterator[Any]:
        """The documents from the position on that was loaded last, else of the epoch from its beginning."""

    def state_dict(self) -> dict[str, Any]:
        """The position after the document that was given last."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Let the next iterator begin at a position."""

    def set_epoch(self, epoch: int, /) -> None:
        """Let the next iterator begin at the start of an epoch."""


class IteratorStream:
    """Any Python iterator as a stream.

    Args:
        make: the documents from the n-th on, anew at every call: `lambda n: itertools.islice(read(), n, None)` skips,
            something that can seek does better.
    """

    def __init__(self, make: Callable[[int], Iterable[Any]]) -> None:
        self._make, self._given = make, 0

    def __iter__(self) -> Iterator[Any]:
        for document in self._make(self._given):
            self._given += 1
            yield document

    def state_dict(self) -> dict[str, Any]:
        """How many documents of the epoch were given."""
        return {"given": self._given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after as many documents."""
        self._given = state_dict["given"]

    def set_epoch(self, epoch: int) -> None:
        """Begin again."""
        self._given = 0


def open_hub_stream(path: str) -> Stream:
    """The stream that 'hf-stream:NAME', ':CONFIG' and ':SPLIT' after it by choice, stands for.

    Args:
        path: NAME and CONFIG as `datasets.load_dataset` takes them, a local folder too; SPLIT is 'train' by default.

    Raises:
        DataError: `datasets` is not installed, or it cannot open the name.
    """
    try:
        datasets: Any = import_module("datasets")
    except ImportError:
        raise DataError(f"{path} needs the package datasets: pip install datasets") from None
    name, _, rest = path.removeprefix(HUB_STREAM).partition(":")
    config, _, split = rest.partition(":")
    try:
        stream: Stream = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:  # the library raises of every kind
        raise DataError(f"{path}: cannot be opened ({(str(error).splitlines() or [''])[0]})") from error
    return stream


@frozen
class StreamBatches:
    """A stream packed into global batches: every rank reads all of it and takes its rows, so the state is one."""

    stream: Stream
    encode: Callable[[str], NDArray[np.int64]]  # a text -> ids
    eod_id: int  # put after each document
    vocab_size: int  # of the model
    text_key: str
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    isolate_documents: bool
    rank: int = 0
    ranks: int = 1

    def open(self, position: Position | None = None) -> Callable[[int], tuple[Batch, Position]]:
        """`batch_at(index)`: this rank's share of that global batch, and the position after it.

        It reads forward only, from the position on, and drops what lies between. An earlier one of the same stream
        must not be used any more.

        Raises:
            ConfigError: the global batch does not divide over micro-batches and ranks.
        """
        share = check_batch_size(self.global_batch_size, self.micro_batch_size, self.ranks)
        packer = _Packer(self, position or {})
        done = 0 if position is None else int(position["batches"])

        def batch_at(index: int) -> tuple[Batch, Position]:
            nonlocal done
            if index < done:
                raise IndexError(f"batch {index} of a stream that has given {done}")
            while done <= index:
                tokens, done = packer.take(self.global_batch_size * self.seq_len), done + 1
            rows = np.lib.stride_tricks.sliding_window_view(tokens, self.seq_len + 1)[:: self.seq_len]
            mine = rows[self.rank * share : (self.rank + 1) * share]
            batch = Rows(mine[:, :-1].copy(), mine[:, 1:].copy()).batch(
                self.eod_id, self.micro_batch_size, self.isolate_documents
            )
            return batch, _plain({"batches": done, **packer.position()})

        return batch_at

    def ids_of(self, document: Any, name: str) -> NDArray[np.int64]:
        """The ids of a document and its end, (n,); the end alone of an empty one.

        Raises:
            DataError: it is no document, or has an id beyond the vocabulary; names the document.
        """
        if isinstance(document, Mapping):
            if self.text_key not in document:
                raise DataError(f"{name} has {', '.join(map(str, document))}, but no data.text_key = {self.text_key!r}")
            document = document[self.text_key]
        ids = self.encode(document) if isinstance(document, str) else np.asarray(document)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise DataError(f"{name} is neither a text nor token ids, but {type(document).__name__}")
        if ids.size and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            raise DataError(f"{name} has ids {ids.min()} to {ids.max()}, outside model.vocab_size = {self.vocab_size}")
        return np.append(ids.astype(np.int64), self.eod_id)


class _Packer:
    """The tokens of a stream's documents in a row, epoch after epoch."""

    def __init__(self, batches: StreamBatches, position: Position) -> None:
        self._batches = batches
        self._epoch, self._before = int(position.get("epoch", 0)), position.get("stream")
        self._document = int(position.get("document", 0))  # how many of the epoch came before the one under way
        self._used = int(position.get("used", 0))  # tokens of the one under way
        self._last: list[int] = position.get("last", [])  # the last target, which is the next input too
        self._read = self._documents(resumed=self._used > 0)
        self._ids = next(self._read) if self._used else np.empty(0, np.int64)

    def position(self) -> Position:
        """Where to begin again."""
        return {
            "epoch": self._epoch, "stream": self._before, "document": self._document, "used": self._used,
            "last": self._last,
        }  # fmt: skip

    def take(self, count: int) -> NDArray[np.int64]:
        """The next `count` tokens after the last one given, which comes before them; (count + 1,)."""
        pieces, wanted = [np.array(self._last, np.int64)], count + 1 - len(self._last)
        while wanted:
            if self._used == len(self._ids):
                self._ids, self._used = next(self._read), 0
            pieces.append(self._ids[self._used : self._used + wanted])
            self._used += len(pieces[-1])
            wanted -= len(pieces[-1])
        tokens = np.concatenate(pieces)
        self._last = [int(tokens[-1])]
        return tokens

    def _documents(self, resumed: bool) -> Generator[NDArray[np.int64], None, None]:
        """The ids of each document; while one is under way, the position is that before it."""
        stream = self._batches.stream
        while True:
            stream.set_epoch(self._epoch)
            if self._before is not None:
                stream.load_state_dict(self._before)
            empty = self._document == 0 and not resumed
            for document in stream:
                name = f"document {self._document} of epoch {self._epoch} of the stream"
                ids = self._batches.ids_of(document, name)
                if len(ids) > 1:
                    empty = False
                    yield ids
                self._before, self._document = stream.state_dict(), self._document + 1
            if empty:
                raise DataError(f"the stream holds no document with a token in epoch {self._epoch}")
            self._epoch, self._before, self._document, resumed = self._epoch + 1, None, 0, False


def _plain(position: Position) -> Position:
    """A copy as a checkpoint keeps it.

    Raises:
        DataError: JSON cannot hold it.
    """
    try:
        copy: Position = json.loads(json.dumps(position))
        return copy
    except (TypeError, ValueError) as error:
        raise DataError(f"the stream's state_dict() must be numbers, texts, lists and dicts: {error}") from None
