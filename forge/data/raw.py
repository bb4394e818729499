"""Token files read where they lie: headerless `.bin` (nanoGPT), `.npy`, and forge's own without a manifest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from attrs import evolve

from forge.data.documents import find_documents, is_hidden, matches, read_bytes
from forge.data.manifest import FileEntry, Manifest, Split
from forge.data.recipe import Recipe
from forge.data.shard import MAGIC, Shard, open_npy, open_raw, open_shard
from forge.data.stored import Stored
from forge.errors import DataError

TOKEN_FILES = (".bin", ".npy")
AUTO = "auto"

_HELD_OUT = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|eval)(?:$|[^a-z])")
_BLOCKS, _BLOCK = 16, 1 << 15  # blocks and tokens in each that a digest covers
_SEARCHED = 1 << 24  # tokens in which the end of a document is looked for


def find_token_files(path: str) -> list[Path]:
    """The token files that a path stands for, by name; none where it stands for text.

    Args:
        path: a `.bin` or `.npy` file, a folder of such files, or a glob that matches nothing else.

    Raises:
        DataError: a folder holds text beside token files, so that it is not clear what is meant.
    """
    given = Path(path).expanduser()
    if given.is_file():
        return [given] if given.suffix in TOKEN_FILES else []
    if not given.is_dir():
        found = matches(path)
        return sorted(found) if all(file.suffix in TOKEN_FILES for file in found) else []
    found = sorted(file for file in given.iterdir() if file.suffix in TOKEN_FILES and not is_hidden(file.name))
    text = _text_beside(path) if found else None
    if text:
        raise DataError(
            f"{path}: holds tokens ({found[0].name}) and text ({text.name}); name the files that are meant, such as"
            f" {given}/*{found[0].suffix}"
        )
    return found


def _text_beside(path: str) -> Path | None:
    """A document of a folder that holds token files."""
    with suppress(DataError):
        return next((file for file in find_documents(path) if file.suffix not in TOKEN_FILES), None)
    return None


def list_token_files(files: Sequence[Path], recipe: Recipe) -> dict[str, FileEntry]:
    """Entries of a manifest that refer to token files where they are.

    Held out are the files whose name says so (`val`, `valid`, `validation`, `eval`), for a single file also the one
    beside it (`val.bin` for `train.bin`); where there are none, `eval_fraction` of the tokens, the last ones.

    Raises:
        DataError: a file is damaged, or not of this dtype and vocabulary.
    """
    held_out = [file for file in files if _HELD_OUT.search(file.stem.lower())]
    train = [file for file in files if file not in held_out]
    if not train:
        train, held_out = held_out, []
    elif len(files) == 1 and recipe.eval_fraction:
        held_out = _beside(files[0])
    entries = {
        f"{split}-{index:05d}": _entry(split, file, recipe)
        for split, some in _sides(train, held_out)
        for index, file in enumerate(some)
    }
    return entries if held_out or not recipe.eval_fraction else _hold_out_the_end(entries, recipe)


def _sides(train: Sequence[Path], held_out: Sequence[Path]) -> list[tuple[Split, Sequence[Path]]]:
    return [("train", train), ("eval", held_out)]


def open_listed(folder: Path, name: str, manifest: Manifest) -> Shard:
    """A token file that a manifest lists, or the part of it that the manifest takes.

    Raises:
        DataError: it is missing, damaged, or not as long as the manifest says.
    """
    entry, shard = manifest.files[name], open_whole(folder, name, manifest)
    if not entry.file and entry.tokens == shard.n_tokens:
        return shard
    if not entry.file or entry.start + entry.tokens > shard.n_tokens:
        raise DataError(
            f"{shard.path}: {shard.n_tokens} tokens where the manifest says {entry.start + entry.tokens}; prepare the"
            " data again"
        )
    return _part(shard, entry.start, entry.tokens)


def open_whole(folder: Path, name: str, manifest: Manifest) -> Shard:
    """All of a token file that a manifest lists.

    Raises:
        DataError: it is missing or damaged.
    """
    entry = manifest.files[name]
    path = Path(entry.file) if entry.file else folder / name
    return _open(path, entry.raw, manifest.vocab_size, manifest.eod_id)


def digest(shard: Shard) -> str:
    """The SHA-256 of a file's number of tokens and of 16 blocks of 32,768 tokens, spread from its first to its last.

    It tells most files apart, and most damage, without reading all; small files are covered whole.
    """
    sha256 = hashlib.sha256(shard.n_tokens.to_bytes(8, "little"))
    for start, stop in _sampled(shard.n_tokens):
        sha256.update(shard.tokens[start:stop].tobytes())
    return sha256.hexdigest()


def _entry(split: Split, file: Path, recipe: Recipe) -> FileEntry:
    vocab_size, eod_id = recipe.tokenizer.vocab_size, recipe.tokenizer.eod_id
    raw = "npy" if file.suffix == ".npy" else "" if _is_forges(file) else recipe.raw_dtype
    if raw == AUTO:
        raw = "uint16" if vocab_size <= 1 << 16 else "uint32"
    shard = _open(file, raw, vocab_size, eod_id)
    if (shard.vocab_size, shard.eod_id) != (vocab_size, eod_id):
        raise DataError(
            f"{file}: tokens of a vocabulary of {shard.vocab_size} whose documents end with {shard.eod_id}, where"
            f" tokenizer = '{recipe.tokenizer.name}' has {vocab_size} and {eod_id}; name the one that made them"
        )
    blocks = [shard.read(start, stop) for start, stop in _sampled(shard.n_tokens)]
    if raw == "uint16" and shard.n_tokens >= 1024 and not any(block[1::2].any() for block in blocks):
        raise DataError(f"{file}: every second 16-bit token is 0: these are 32-bit tokens; set raw_dtype to uint32")
    return FileEntry(split, shard.n_tokens, len(shard.doc_ends), shard.n_bytes, digest(shard), str(file.resolve()), raw)


def _open(path: Path, raw: str, vocab_size: int, eod_id: int) -> Shard:
    if raw == "npy":
        return open_npy(path, vocab_size, eod_id)
    return open_raw(path, raw, vocab_size, eod_id) if raw else open_shard(path)


def _is_forges(file: Path) -> bool:
    return read_bytes(file, len(MAGIC)) == MAGIC


def _sampled(n_tokens: int) -> Iterator[tuple[int, int]]:
    """Blocks of tokens spread over a file; each begins at an even place."""
    blocks = min(_BLOCKS, -(-n_tokens // _BLOCK))
    last = max(0, n_tokens - _BLOCK)
    for index in range(blocks):
        start = last * index // max(1, blocks - 1) & ~1
        yield start, min(start + _BLOCK + 1, n_tokens)


def _beside(file: Path) -> list[Path]:
    """The held-out file of a training file, if there is one."""
    words = ("val", "valid", "validation", "eval") if "train" in file.name else ()
    places = (file.with_name(file.name.replace("train", word)) for word in words)
    return [place for place in places if place.is_file()][:1]


def _hold_out_the_end(entries: dict[str, FileEntry], recipe: Recipe) -> dict[str, FileEntry]:
    """Cut the last tokens off, behind the end of a document where one is near."""
    total = sum(entry.tokens for entry in entries.values())
    left = total - max(1, round(total * recipe.eval_fraction))  # to train on
    train, held_out = dict[str, FileEntry](), dict[str, FileEntry]()
    for name, entry in entries.items():
        at = min(left, entry.tokens)
        if 0 < at < entry.tokens:
            shard = _open(Path(entry.file), entry.raw, recipe.tokenizer.vocab_size, recipe.tokenizer.eod_id)
            at = _after_a_document(shard, at)
        left = max(0, left - entry.tokens)
        if at == entry.tokens:
            train[name] = entry
            continue
        if at:
            train[name] = evolve(entry, tokens=at, documents=0, bytes=0)
            entry = evolve(entry, start=at, tokens=entry.tokens - at, documents=0, bytes=0)
        held_out[f"eval-{len(held_out):05d}"] = evolve(entry, split="eval")
    return train | held_out


def _after_a_document(shard: Shard, start: int) -> int:
    """The place after the first end of a document from `start` on, in half of the rest; `start` if none is there."""
    rest = min(_SEARCHED, (shard.n_tokens - start) // 2)
    ends = np.flatnonzero(shard.tokens[start : start + rest] == shard.eod_id)
    return start + int(ends[0]) + 1 if ends.size else start


def _part(shard: Shard, start: int, n_tokens: int) -> Shard:
    """A run of a shard's tokens; what is known of the whole is not known of a part."""
    if n_tokens == shard.n_tokens:
        return shard
    assert isinstance(shard.tokens, Stored)
    return evolve(shard, tokens=shard.tokens.part(start, n_tokens), doc_ends=np.empty(0, np.uint64), n_bytes=0)
