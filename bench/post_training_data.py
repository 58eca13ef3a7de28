"""Made-up conversations with the lengths of real ones, and a tokenizer of any vocabulary, for `bench/post_training.py`.

    python bench/post_training_data.py data/post-training/llama3 --vocab 128256 --seq-len 8192 --rows 128

Writes rows.jsonl (messages of a user and an assistant, in several turns) and tokenizer.json (a word, a token: any
vocabulary that a model has, evenly used, so that routers see all of it). Numbers of tokens are log-normal, as in public
collections: median about 540, mean about 890, cut at a row. With --whole every conversation fills a row.
The same arguments give the same bytes; a folder that has them is left alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

MEDIAN_LOG, SPREAD = 6.3, 1.0
"""Of the logarithm of a conversation's tokens."""
PROMPT = 0.3
"""Share of a turn that the user says."""
SHORTEST, MARKS = 48, 6
"""Tokens of a conversation; of the marks around what two say in a turn, as the template `chatml` has them."""
TURNS = 3
"""At most."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=128, help="rows that the conversations fill, packed")
    parser.add_argument("--whole", action="store_true", help="every conversation as long as a row")
    options = parser.parse_args()
    write(options.folder, vocab=options.vocab, seq_len=options.seq_len, rows=options.rows, whole=options.whole)


def write(folder: Path, *, vocab: int, seq_len: int, rows: int, whole: bool) -> None:
    """The marker is written last: a folder without it is written anew."""
    made = {"vocab": vocab, "seq_len": seq_len, "rows": rows, "whole": whole, "version": 2}
    marker = folder / "made.json"
    if marker.is_file() and json.loads(marker.read_text()) == made:
        return
    folder.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    tokenizer(vocab).save(str(folder / "tokenizer.json"))
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for row in conversations(vocab=vocab, seq_len=seq_len, rows=rows, whole=whole):
            file.write(json.dumps(row) + "\n")
    marker.write_text(json.dumps(made) + "\n")


def tokenizer(vocab: int) -> Tokenizer:
    """``vocab`` words; the marks of turns are special tokens."""
    words = {name: index for index, name in enumerate(SPECIAL)}
    words |= {f"w{index}": index for index in range(len(SPECIAL), vocab)}
    made = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(SPECIAL[:3]))
    return made


def conversations(*, vocab: int, seq_len: int, rows: int, whole: bool) -> Iterator[dict[str, Any]]:
    """As many as fill ``rows`` rows of ``seq_len`` tokens."""
    chance = np.random.default_rng(20_250_101)
    left = rows * seq_len
    longest = seq_len - MARKS * (1 if whole else TURNS)
    while left > 0:
        drawn = int(chance.lognormal(MEDIAN_LOG, SPREAD))
        length = longest if whole else min(max(drawn, SHORTEST), longest)
        turns = 1 if whole else int(chance.integers(1, TURNS + 1))
        messages = []
        for _ in range(turns):
            said = max(2, length // turns)
            asked = max(1, int(PROMPT * said))
            for role, words in (("user", asked), ("assistant", said - asked)):
                ids = chance.integers(len(SPECIAL), vocab, words)
                messages.append({"role": role, "content": " ".join(f"w{each}" for each in ids)})
        left -= length
        yield {"messages": messages}


if __name__ == "__main__":
    main()
