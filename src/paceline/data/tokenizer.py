"""Text to token ids and back: Hugging Face ``tokenizer.json``, SentencePiece ``.model``, and plain bytes.

No special tokens are added on encoding: the end-of-document token is appended by whoever builds a dataset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.kept_tokenizer import is_run, tokenizer_of_run
from paceline.errors import DataError

EOD_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "<|im_end|>",
    "[SEP]",
)
"""Names looked for, in this order, when no end-of-document token is named."""


class Tokenizer(Protocol):
    """What data building and generation need of a tokenizer."""

    name: str
    """the path, or "byte": what `load_tokenizer` takes"""
    vocab_size: int
    """largest id + 1, added special tokens included"""
    eod_id: int
    """end of document"""
    fingerprint: str
    """sha256 of the tokenizer's file: the same ids for the same text"""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray]:
        """Ids of each text, as integer arrays; much faster than one by one."""
        ...

    def decode(self, ids: Sequence[int] | NDArray) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and 256 as the end of a document. Needs no file and no training."""

    name = "byte"
    vocab_size = 257
    eod_id = 256
    fingerprint = hashlib.sha256(b"paceline byte tokenizer: 256 bytes + end of document").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode("utf-8", errors="replace")


class HFTokenizer:
    """A Hugging Face ``tokenizer.json``, run by the `tokenizers` library."""

    def __init__(self, path: str | Path, eod_token: str = "") -> None:
        from tokenizers import Tokenizer as Backend

        self.name = str(path)
        self._eod_token = eod_token
        content = _read_bytes(Path(path))
        self.fingerprint = hashlib.sha256(content).hexdigest()
        try:
            self.backend: Any = Backend.from_str(content.decode("utf-8"))
        except Exception as error:
            raise _not_a_tokenizer(path, str(error)) from error
        # a file may carry the truncation and padding of the model it was made for; a dataset must hold all of the text
        self.backend.no_truncation()
        self.backend.no_padding()
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_id = _find_eod(self.name, vocabulary, eod_token)

    def __reduce__(self) -> tuple[Any, ...]:
        return (HFTokenizer, (self.name, self._eod_token))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray]:
        # the fast variant leaves out offsets, which nobody reads here
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        text: str = self.backend.decode([int(i) for i in ids], skip_special_tokens=False)
        return text


class SentencePieceTokenizer:
    """A SentencePiece ``.model`` (unigram or BPE)."""

    def __init__(self, path: str | Path, eod_token: str = "") -> None:
        from sentencepiece import SentencePieceProcessor

        self.name = str(path)
        self._eod_token = eod_token
        content = _read_bytes(Path(path))
        self.fingerprint = hashlib.sha256(content).hexdigest()
        try:
            self.backend: Any = SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            # the library's own text names a line of its source
            what = "It cannot be read as a SentencePiece model, as which any file but .json is read."
            raise _not_a_tokenizer(path, what) from error
        self.vocab_size = int(self.backend.vocab_size())
        if not eod_token and self.backend.eos_id() >= 0:
            self.eod_id = int(self.backend.eos_id())
        else:
            pieces = {self.backend.id_to_piece(i): i for i in range(self.vocab_size)}
            self.eod_id = _find_eod(self.name, pieces, eod_token)

    def __reduce__(self) -> tuple[Any, ...]:
        return (SentencePieceTokenizer, (self.name, self._eod_token))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, out_type=int)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray]:
        # one thread: data building runs a process per core already
        return [np.array(ids, dtype=np.int32) for ids in self.backend.encode(list(texts), out_type=int, num_threads=1)]

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        text: str = self.backend.decode([int(i) for i in ids])
        return text


def load_tokenizer(path: str | Path, eod_token: str = "") -> Tokenizer:
    """``byte``, a ``tokenizer.json``, a SentencePiece ``.model``, a folder that holds one of these files, or a run,
    whose tokenizer is taken.

    Args:
        eod_token: name of the end-of-document token; empty = looked for among `EOD_NAMES`.
    Raises:
        DataError: no such file, not a tokenizer, or no end-of-document token.
    """
    if str(path) == "byte":
        return ByteTokenizer()
    file = Path(path)
    if file.is_dir():
        found = [file / name for name in ("tokenizer.json", "tokenizer.model") if (file / name).is_file()]
        if not found and is_run(file):
            return load_tokenizer(_of_run(file), eod_token)
        if not found:
            raise DataError(
                f"{file}: no tokenizer.json and no tokenizer.model in this folder",
                next_step="Name the tokenizer's file, or train one with `paceline data train-tokenizer`.",
            )
        file = found[0]
    if not file.is_file():
        raise DataError(
            f"{file}: no such tokenizer",
            evidence="A tokenizer is a tokenizer.json, a SentencePiece .model, a folder with one, a run, or the word "
            "`byte`; names of a model hub are not looked up.",
            next_step="Give the path of a tokenizer.json (download it first), or train one with "
            "`paceline data train-tokenizer`.",
        )
    if file.suffix == ".json":
        return HFTokenizer(file, eod_token)
    return SentencePieceTokenizer(file, eod_token)


def _of_run(folder: Path) -> str:
    found = tokenizer_of_run(folder)
    # a recipe may name a folder: not the run itself again, nor what is gone
    if not found or (found != "byte" and (not Path(found).exists() or Path(found).resolve() == folder.resolve())):
        raise DataError(
            f"{folder}: this run has no tokenizer",
            evidence="None was kept in its folder (tokenizer/, hub/), and its recipe names none that is here.",
            next_step="Name the tokenizer that its data were made with: its tokenizer.json, or `byte`.",
        )
    return found


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read", evidence=str(error), next_step="Check the permissions.") from error


def _not_a_tokenizer(path: str | Path, why: str) -> DataError:
    return DataError(
        f"{path}: not a usable tokenizer",
        evidence=why[:300],
        next_step="Give a Hugging Face tokenizer.json or a SentencePiece .model; an empty or Git LFS pointer file is "
        "a common cause.",
    )


def _find_eod(name: str, vocabulary: dict[str, int], eod_token: str) -> int:
    wanted = (eod_token,) if eod_token else EOD_NAMES
    for token in wanted:
        if token in vocabulary:
            return vocabulary[token]
    raise DataError(
        f"{name}: no end-of-document token" + (f" named {eod_token!r}" if eod_token else ""),
        evidence="Looked for " + ", ".join(wanted) + ".",
        next_step="Name one with --eod-token; it must be in the vocabulary.",
    )
