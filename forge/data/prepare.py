"""Text -> a folder of token files, whole or not at all, and a cache of such folders."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forge.config import DataConfig
from forge.data.documents import (
    STDLIB,
    Document,
    find_documents,
    readable_documents,
    relative_name,
    source_root,
    split_documents,
)
from forge.data.manifest import FileEntry, Manifest, Split, is_prepared, read_manifest, write_manifest
from forge.data.shard import FORMAT_VERSION, write_shard
from forge.data.tokenizer import BYTES, Tokenizer, build_tokenizer
from forge.errors import DataError

Progress = Callable[[int, int], None]
"""Called with (documents done, documents in all)."""

_FOREIGN_SCRATCH_AGE = 86400.0  # seconds after which another machine's scratch folder counts as abandoned


def prepare(
    path: str,
    out_dir: Path,
    tokenizer: Tokenizer,
    *,
    eval_fraction: float,
    progress: Progress | None = None,
) -> Manifest:
    """Turn text into `train.bin`, `eval.bin` (where anything is held out) and `manifest.json`.

    All is written to a folder beside `out_dir` and renamed at the end; what an interrupted call left there is removed
    by the next one.

    Args:
        path: as `find_documents` takes it.
        out_dir: the folder to make; its parents are made too.
        eval_fraction: share of the documents held out.

    Raises:
        DataError: no readable text, an id outside the vocabulary, `out_dir` holds something, or it cannot be written.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise DataError(f"{out_dir}: exists already; remove it, or choose another folder")
    return _prepare_into(out_dir, path, tokenizer, eval_fraction, progress)


def prepared(config: DataConfig, *, progress: Progress | None = None) -> Path:
    """The prepared folder of a config: `data.path` itself where it is one, else made once below `data.cache_dir`.

    The cache's key covers the files' names, sizes and times, the tokenizer's content and the split. Several processes
    may ask at once. The tokenizer of the result is the one that its manifest names.

    Raises:
        DataError: see `prepare` and `build_tokenizer`.
    """
    given = Path(config.path).expanduser()
    if config.path != STDLIB and is_prepared(given):
        return given
    tokenizer = build_tokenizer(config.tokenizer)
    folder = Path(config.cache_dir).expanduser() / _cache_key(config.path, tokenizer, config.eval_fraction)
    if not is_prepared(folder):
        _prepare_into(folder, config.path, tokenizer, config.eval_fraction, progress)
    return folder


def _prepare_into(
    out_dir: Path, path: str, tokenizer: Tokenizer, eval_fraction: float, progress: Progress | None
) -> Manifest:
    documents = readable_documents(find_documents(path))
    if not documents:
        raise DataError(f"{path}: every file is empty or not UTF-8 text")
    train, held = split_documents(documents, source_root(path), eval_fraction)
    report = _counter(len(train) + len(held), progress)
    try:
        with _scratch_folder(out_dir) as scratch:
            files = {"train.bin": _write_split(scratch, "train", train, tokenizer, report)}
            if held:
                files["eval.bin"] = _write_split(scratch, "eval", held, tokenizer, report)
            name, vocab_size, eod_id = tokenizer.name, tokenizer.vocab_size, tokenizer.eod_id
            manifest = Manifest(path, name, vocab_size, eod_id, eval_fraction, files)
            write_manifest(scratch, manifest)
            _publish(scratch, out_dir, manifest)
    except OSError as error:
        raise DataError(f"{out_dir}: cannot be written ({error.strerror})") from error
    return manifest


def _write_split(
    folder: Path, split: Split, documents: Sequence[Document], tokenizer: Tokenizer, report: Callable[[], None]
) -> FileEntry:
    def encoded() -> Iterator[NDArray[np.int64]]:
        for document in documents:
            yield tokenizer.encode(document.text())
            report()

    file, n_bytes = folder / f"{split}.bin", sum(document.n_bytes for document in documents)
    shard = write_shard(file, encoded(), vocab_size=tokenizer.vocab_size, eod_id=tokenizer.eod_id, n_bytes=n_bytes)
    with file.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    return FileEntry(split, shard.n_tokens, len(shard.doc_ends), n_bytes, digest)


def _counter(total: int, progress: Progress | None) -> Callable[[], None]:
    done = count(1)

    def report() -> None:
        if progress is not None:
            progress(next(done), total)

    return report


@contextmanager
def _scratch_folder(out_dir: Path) -> Iterator[Path]:
    """A folder beside `out_dir`, gone afterwards; its name says whose it is, so that dead ones can be told."""
    parent = out_dir.parent
    parent.mkdir(parents=True, exist_ok=True)
    for entry in parent.iterdir():
        if entry.name.startswith(f".{out_dir.name}.") and entry.name.endswith(".tmp") and _is_abandoned(entry, out_dir):
            shutil.rmtree(entry, ignore_errors=True)
    scratch = parent / f".{out_dir.name}.{_process_space()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _process_space() -> str:
    """What process ids are unique within: the machine and, with containers, the namespace."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}-{namespace.stat().st_ino if namespace.exists() else 0}"


def _is_abandoned(scratch: Path, out_dir: Path) -> bool:
    """Whether the process that made a scratch folder is gone; on another machine, whether it was long silent."""
    owner, pid, _ = scratch.name.removesuffix(".tmp").rsplit(".", 2)
    if owner == f".{out_dir.name}.{_process_space()}" and pid.isdigit():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False
    try:
        times = [scratch.stat().st_mtime, *(file.stat().st_mtime for file in scratch.iterdir())]
    except FileNotFoundError:  # its owner has just finished
        return False
    return time.time() - max(times) > _FOREIGN_SCRATCH_AGE


def _publish(scratch: Path, out_dir: Path, manifest: Manifest) -> None:
    """Rename the folder into place; another process that was first with the same content is as good."""
    try:
        scratch.rename(out_dir)
    except OSError:
        if not is_prepared(out_dir) or read_manifest(out_dir).files != manifest.files:
            raise
        return
    folder = os.open(out_dir.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _cache_key(path: str, tokenizer: Tokenizer, eval_fraction: float) -> str:
    root = source_root(path)
    files = [(relative_name(file, root), file.stat().st_size, file.stat().st_mtime_ns) for file in find_documents(path)]
    content = "" if tokenizer.name == BYTES else hashlib.sha256(Path(tokenizer.name).read_bytes()).hexdigest()
    parts = (FORMAT_VERSION, str(root.resolve()), tokenizer.name, content, eval_fraction, files)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]
