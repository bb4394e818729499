"""Text -> a folder of token files, whole or not at all, and a cache of such folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from forge.config import DataConfig
from forge.data.documents import STDLIB
from forge.data.manifest import Manifest, is_prepared, write_manifest
from forge.data.raw import find_token_files, list_token_files
from forge.data.recipe import SHARD_TOKENS, Recipe
from forge.data.sources import find_source, path_digest
from forge.data.tokenise import Progress, tokenise
from forge.data.tokenizer import Tokenizer, build_tokenizer
from forge.data.work import work_folder
from forge.errors import DataError


def prepare(
    path: str,
    out_dir: Path,
    tokenizer: Tokenizer,
    *,
    eval_fraction: float,
    text_key: str = "text",
    raw_dtype: str = "auto",
    shard_tokens: int = SHARD_TOKENS,
    workers: int = 1,
    progress: Progress | None = None,
) -> Manifest:
    """Turn documents into token files (`train-00000.bin`, ..., `eval-00000.bin`, ...) and `manifest.json`.

    All is written to a folder beside `out_dir` that is renamed at the end (`forge.data.work`). The same call after an
    interruption goes on from there. The result does not depend on the number of workers, nor on interruptions.

    Of token files the result is a manifest that refers to them.

    Args:
        path: what is read; it, `text_key`, `raw_dtype`, `eval_fraction` and `shard_tokens` as in `Recipe`.
        out_dir: the folder to make; its parents are made too.
        workers: processes to tokenise in, where there is much to do.

    Raises:
        DataError: no readable text, an id outside the vocabulary, damage (named by file and line or row), `out_dir`
            holds something, or it cannot be written.
    """
    out_dir = Path(out_dir)
    recipe = Recipe(path, tokenizer, eval_fraction, text_key, raw_dtype, shard_tokens)
    manifest = _make(out_dir, recipe, workers, progress) if _is_free(out_dir) else None
    if manifest is None:
        raise DataError(f"{out_dir}: exists already; remove it, or choose another folder")
    return manifest


def prepared(config: DataConfig, *, workers: int = 1, progress: Progress | None = None) -> Path:
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
    recipe = Recipe(config.path, tokenizer, config.eval_fraction, config.text_key, config.raw_dtype)
    folder = Path(config.cache_dir).expanduser() / _cache_key(recipe)
    if not is_prepared(folder):
        _make(folder, recipe, workers, progress)
    return folder


def _cache_key(recipe: Recipe) -> str:
    tokens = find_token_files(recipe.path)
    parts = (path_digest(recipe.path, tokens), recipe.digest())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _is_free(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _make(out_dir: Path, recipe: Recipe, workers: int, progress: Progress | None) -> Manifest | None:
    """Make a folder; None where another process has just made it."""
    tokens = find_token_files(recipe.path)
    source = None if tokens else find_source(recipe.path, recipe.text_key)
    try:
        with work_folder(out_dir) as work:
            if not _is_free(out_dir):
                return None
            if source is None:
                work.restart()
                files = list_token_files(tokens, recipe)
            else:
                files = tokenise(source, recipe, work, workers=workers, progress=progress)
            tokenizer = recipe.tokenizer
            ids = (tokenizer.name, tokenizer.vocab_size, tokenizer.eod_id)
            manifest = Manifest(recipe.path, *ids, recipe.eval_fraction, files)
            write_manifest(work.folder, manifest)
            work.publish()
    except OSError as error:
        raise DataError(f"{out_dir}: cannot be written ({error.strerror})") from error
    return manifest
