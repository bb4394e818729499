"""Text -> token ids and back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from forge.errors import DataError

BYTES = "bytes"

_END_OF_DOCUMENT = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>", "<eod>", "[EOS]", "[SEP]",
)  # fmt: skip


class Tokenizer(Protocol):
    """What turns text into ids; `eod_id` ends each document and never comes out of `encode`."""

    @property
    def name(self) -> str:
        """What `build_tokenizer` makes it from."""

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""

    @property
    def eod_id(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids of a text, (n,)."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; the end of a document and ids without a meaning give nothing."""


@frozen
class ByteTokenizer:
    """UTF-8 bytes 0..255, and 256 for the end of a document."""

    name: str = field(default=BYTES, init=False)
    vocab_size: int = field(default=257, init=False)
    eod_id: int = field(default=256, init=False)

    def encode(self, text: str) -> NDArray[np.int64]:
        """The UTF-8 bytes of a text; what UTF-8 cannot hold (a lone surrogate) becomes `?`."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of bytes, with U+FFFD where they are not UTF-8; ids that are no byte give nothing."""
        return bytes(int(token) for token in ids if 0 <= int(token) < 256).decode("utf-8", errors="replace")


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()


@frozen
class JsonTokenizer:
    """A `tokenizer.json` of Hugging Face `tokenizers`.

    Special tokens written out in a text are encoded as ordinary text, so that no document can end itself.

    Raises:
        DataError: the file is missing, is no tokenizer, or has no token that ends a document.
    """

    path: Path = field(converter=_absolute)
    _inner: Any = field(init=False, repr=False, eq=False)
    name: str = field(init=False)
    vocab_size: int = field(init=False)
    eod_id: int = field(init=False)

    def __reduce__(self) -> tuple[type[JsonTokenizer], tuple[Path]]:
        """Another process reads the file itself: pickled, the library's object forgets `encode_special_tokens`."""
        return JsonTokenizer, (self.path,)

    @_inner.default
    def _load(self) -> Any:
        if not self.path.is_file():
            raise DataError(f"{self.path}: no such file; data.tokenizer is 'bytes' or the path of a tokenizer.json")
        import tokenizers  # slow to import, and the byte tokenizer does without

        try:
            inner = tokenizers.Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises bare Exception
            reason = (str(error).splitlines() or [""])[0]
            raise DataError(f"{self.path}: not a tokenizer.json ({reason})") from error
        inner.encode_special_tokens = True
        return inner

    @name.default
    def _name(self) -> str:
        return str(self.path)

    @vocab_size.default
    def _vocab_size(self) -> int:
        # Ids may have gaps, so the number of tokens is not enough.
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=0) + 1

    @eod_id.default
    def _eod_id(self) -> int:
        for token in _END_OF_DOCUMENT:
            token_id = self._inner.token_to_id(token)
            if token_id is not None:
                return token_id
        raise DataError(f"{self.path}: no token that ends a document; add one of {', '.join(_END_OF_DOCUMENT)}")

    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids of a text, without the special tokens that the file's template would add; surrogates become `?`."""
        text = text.encode("utf-8", errors="replace").decode()
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special and unknown ones give nothing."""
        known = [int(token) for token in ids if 0 <= int(token) < self.vocab_size]
        return self._inner.decode(known, skip_special_tokens=True)


def build_tokenizer(name: str) -> Tokenizer:
    """'bytes', or the tokenizer of a `tokenizer.json`.

    Raises:
        DataError: the file is missing, is no tokenizer, or has no token that ends a document.
    """
    return ByteTokenizer() if name == BYTES else JsonTokenizer(name)
