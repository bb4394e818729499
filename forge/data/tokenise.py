"""Documents -> token files in a work folder: in any number of processes, and on from where an earlier call stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice

from attrs import frozen

from forge.data.documents import Document
from forge.data.encode import Encoded, encode_chunk, encode_only
from forge.data.manifest import FileEntry, Split
from forge.data.recipe import Recipe
from forge.data.sources import Place, Source
from forge.data.verify import damaged
from forge.data.work import Journal, Work
from forge.data.workers import map_in_order
from forge.data.writer import SplitWriter
from forge.errors import DataError
from forge.logging import get_logger

Progress = Callable[[int, int], None]
"""Called with (done, in all): bytes of the files, or rows of a dataset."""

SMALL = 1 << 25
"""Bytes of text below which other processes would take longer to start than to do the work."""

_BEGINNING: Place = (0, 0)
_NOTE_SECONDS = 15.0
_SPLITS: tuple[Split, Split] = ("train", "eval")
_log = get_logger(__name__)


def tokenise(
    source: Source, recipe: Recipe, work: Work, *, workers: int, progress: Progress | None
) -> dict[str, FileEntry]:
    """Write the documents of a source as token files; which, in the order of their tokens.

    Each document goes to the side that its name says (`is_held_out`). Where that leaves one side empty, it gets the
    last document; a document that is the only one is cut.

    Raises:
        DataError: no document at all, or a damaged one.
    """
    first, left_out = _first_two(source)
    if not first:
        raise DataError(f"{recipe.path}: every file is empty or not UTF-8 text")
    alone = first[0] if len(first) == 1 else None
    with ExitStack() as stack:
        output = (None if alone else _take_up(source, recipe, work)) or _start(recipe, work)
        for writer in output.writers.values():
            stack.enter_context(closing(writer))
        parts = _only(alone, left_out, source, recipe) if alone else _left(source, output, recipe, workers)
        note = (lambda part: None) if alone else _noting(output, source, recipe, work)
        for part in stack.enter_context(closing(parts)):
            _write(part, output.writers)
            note(part)
            if progress:
                progress(part.done, source.total)
        if recipe.eval_fraction:
            _give_each_side_one(*output.writers.values())
        files = {name: entry for writer in output.writers.values() for name, entry in writer.finish().items()}
    if not files:
        raise DataError(f"{recipe.path}: no document has a token")
    for file in work.folder.iterdir():
        if file.name not in files:  # of an earlier call, before the text changed after the place that it came to
            file.unlink()
    return files


def _first_two(source: Source) -> tuple[list[Document], tuple[str, ...]]:
    """The first documents that are not empty, two at most, and what was left out on the way."""
    left_out = list[str]()
    documents = (
        document for chunk in source.chunks(_BEGINNING) for document in chunk.records.documents(left_out.append)
    )
    return list(islice((document for document in documents if document.text), 2)), tuple(left_out)


def _only(
    document: Document, left_out: tuple[str, ...], source: Source, recipe: Recipe
) -> Generator[Encoded, None, None]:
    """A document that is the only one, cut."""
    sides = encode_only(document, recipe.tokenizer, recipe.eval_fraction)
    yield Encoded(*sides, left_out, _BEGINNING, source.total)


def _left(source: Source, output: _Output, recipe: Recipe, workers: int) -> Generator[Encoded, None, None]:
    """The chunks after what is written, tokenised."""
    encode = partial(encode_chunk, tokenizer=recipe.tokenizer, eval_fraction=recipe.eval_fraction)
    return map_in_order(encode, source.chunks(output.place), workers if source.n_bytes > SMALL else 1)


def _write(part: Encoded, writers: Mapping[Split, SplitWriter]) -> None:
    for message in part.left_out:
        _log.warning("%s", message)
    writers["train"].add(part.train)
    writers["eval"].add(part.held_out)


def _give_each_side_one(train: SplitWriter, held_out: SplitWriter) -> None:
    """Where the names put all documents on one side, the other one gets the last."""
    if train.n_documents + held_out.n_documents < 2:
        return
    if not held_out.n_documents:
        held_out.add(train.take_last())
    elif not train.n_documents:
        train.add(held_out.take_last())


@frozen
class _Output:
    writers: dict[Split, SplitWriter]
    place: Place  # of the source, up to which they are written

    def files(self) -> dict[str, FileEntry]:
        """The finished files."""
        return {name: entry for writer in self.writers.values() for name, entry in writer.files.items()}


def _start(recipe: Recipe, work: Work) -> _Output:
    work.restart()
    return _Output(_writers(recipe, work), _BEGINNING)


def _take_up(source: Source, recipe: Recipe, work: Work) -> _Output | None:
    """Go on from what an earlier call noted, where all of it is still as it was."""
    journal = work.read_journal()
    if journal is None:
        return None
    if journal.recipe != recipe.digest() or journal.source != source.digest(journal.place):
        _log.warning("%s: begun with other settings or another text; it starts again", work.target)
        return None
    bad, writers = damaged(work.folder, journal.files), _writers(recipe, work)
    try:
        if bad:
            raise DataError(f"{work.folder / bad}: damaged")
        for split, writer in writers.items():
            finished = {name: entry for name, entry in journal.files.items() if entry.split == split}
            writer.take_up(finished, journal.partials.get(split))
    except DataError as error:
        _log.warning("%s; the work starts again", error)
        return None
    _log.info("%s: goes on after %d finished files", work.target, len(journal.files))
    return _Output(writers, journal.place)


def _writers(recipe: Recipe, work: Work) -> dict[Split, SplitWriter]:
    ids = {"vocab_size": recipe.tokenizer.vocab_size, "eod_id": recipe.tokenizer.eod_id}
    return {s: SplitWriter(work.folder, s, **ids, shard_tokens=recipe.shard_tokens) for s in _SPLITS}


def _noting(output: _Output, source: Source, recipe: Recipe, work: Work) -> Callable[[Encoded], None]:
    """Note how far the work is whenever a file is finished, and now and then."""
    digest, files, last = recipe.digest(), output.files(), time.monotonic()

    def note(part: Encoded) -> None:
        nonlocal files, last
        if output.files().keys() == files.keys() and time.monotonic() - last < _NOTE_SECONDS:
            return
        files, last = output.files(), time.monotonic()
        partials = {split: writer.sync() for split, writer in output.writers.items()}
        written = {split: partial for split, partial in partials.items() if partial}
        work.write_journal(Journal(digest, source.digest(part.end), part.end, files, written))

    return note
