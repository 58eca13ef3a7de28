"""Trains a byte-level BPE tokenizer on raw text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.data.atomic import write_text
from paceline.data.tokenizer import HFTokenizer
from paceline.errors import DataError

EOD_TOKEN = "<|endoftext|>"
SMALLEST_VOCAB = 257
"""256 bytes and the end of a document"""


def train_tokenizer(texts: Iterable[str], output: str | Path, *, vocab_size: int) -> HFTokenizer:
    """Writes a ``tokenizer.json``: byte-level BPE with GPT-2's word pattern, any text can be encoded and decoded
    exactly.

    The same texts give the same file. The end-of-document token has id 0.

    Raises:
        DataError: no text, a vocabulary that is too small, an output that cannot be written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCAB:
        raise DataError(
            f"a vocabulary of {vocab_size} is too small",
            evidence=f"256 bytes and the end-of-document token take {SMALLEST_VOCAB} ids.",
            next_step="Choose for instance --vocab-size 8192.",
        )
    seen = 0

    def counted() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            seen += len(text)
            yield text

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(counted(), trainer)
    if not seen:
        raise DataError("there is no text to train a tokenizer on", next_step="Check the inputs: are they empty?")
    write_text(output, backend.to_str(pretty=True))
    return HFTokenizer(output)
