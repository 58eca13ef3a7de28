"""Batched, padded, cached generation writes what reading everything anew for each token would write."""

from __future__ import annotations

import pytest
import torch

from paceline.data.tokenizer import ByteTokenizer
from paceline.errors import ConfigError
from paceline.generate.decode import DecodeParams, generate_ids, generate_text, stream_text
from paceline.generate.sample import SamplingParams
from paceline.models.transformer import Transformer
from tests.generate.small_models import SHAPES, small_model

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3]]


def columns(steps) -> list[list[int]]:
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


@torch.no_grad()
def slowly(model: Transformer, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_equals_full_recomputation(name):
    model = small_model(**SHAPES[name])
    found = columns(generate_ids(model, PROMPTS, DecodeParams(max_tokens=9, sampling=GREEDY)))
    assert found == [slowly(model, prompt, 9) for prompt in PROMPTS]


def test_a_long_prompt_is_read_in_parts(monkeypatch):
    monkeypatch.setattr("paceline.generate.decode._PREFILL_TOKENS", 3)
    model = small_model(sliding_window=4)
    found = columns(generate_ids(model, PROMPTS, DecodeParams(max_tokens=5, sampling=GREEDY)))
    assert found == [slowly(model, prompt, 5) for prompt in PROMPTS]


def test_a_sample_depends_on_its_seed_and_number_alone():
    model = small_model()
    params = DecodeParams(max_tokens=12, seed=4, sampling=SamplingParams(temperature=2.0))
    together = columns(generate_ids(model, PROMPTS, params))
    alone = columns(generate_ids(model, PROMPTS[:1], params))
    assert together[0] == alone[0]
    other = columns(generate_ids(model, PROMPTS[:1], DecodeParams(max_tokens=12, seed=5, sampling=params.sampling)))
    assert other[0] != alone[0]
    last = columns(generate_ids(model, PROMPTS[2:], params, numbers=[2]))
    assert last[0] == together[2]


def test_a_sequence_ends_at_the_stop_token_and_the_others_go_on():
    model = small_model()
    free = columns(generate_ids(model, PROMPTS, DecodeParams(max_tokens=9, sampling=GREEDY)))
    stop = free[0][4]
    steps = list(generate_ids(model, PROMPTS, DecodeParams(max_tokens=9, sampling=GREEDY, stop_id=stop)))
    expected = [row[: row.index(stop)] if stop in row else row for row in free]
    assert columns(steps) == expected
    assert torch.is_grad_enabled()


def test_length_is_bounded_by_the_model():
    model = small_model(max_seq_len=10)
    found = columns(generate_ids(model, PROMPTS, DecodeParams(max_tokens=99, sampling=GREEDY)))
    assert [len(tokens) for tokens in found] == [7, 9, 3]
    with pytest.raises(ConfigError, match="the prompt has 10 tokens, but the model's longest sequence is 10"):
        list(generate_ids(model, [[1] * 10], DecodeParams()))


@pytest.mark.parametrize("name", SHAPES)
def test_the_longest_prompt_of_a_batch_ends_alone(name):
    model = small_model(**SHAPES[name])
    longest = model.config.max_seq_len
    prompts = [[5, 6], [1 + index % 7 for index in range(longest - 3)]]
    found = columns(generate_ids(model, prompts, DecodeParams(max_tokens=12, sampling=GREEDY)))
    assert found == [slowly(model, prompts[0], 12), slowly(model, prompts[1], 3)]


def test_padding_rows_of_the_vocabulary_are_never_drawn():
    model = small_model()
    params = DecodeParams(max_tokens=30, vocab_size=5, sampling=SamplingParams(temperature=3.0))
    assert all(token < 5 for row in columns(generate_ids(model, PROMPTS, params)) for token in row)


def test_penalty_makes_greedy_text_move_on():
    model = small_model()
    plain = columns(generate_ids(model, [[1]], DecodeParams(max_tokens=40, sampling=GREEDY)))[0]
    strong = SamplingParams(temperature=0, repetition_penalty=1e6)
    moved = columns(generate_ids(model, [[1]], DecodeParams(max_tokens=40, sampling=strong)))[0]
    assert len(set(moved)) > len(set(plain))


def test_experts_with_a_capacity_get_prompts_of_one_length_at_a_time():
    model = small_model(num_experts=4, top_k=1, moe={"capacity_factor": 1.0})
    texts = generate_text(model.eval(), _Letters(), ["ab", "c", "de"], DecodeParams(max_tokens=4, sampling=GREEDY))
    for prompt, completion in zip(["ab", "c", "de"], texts, strict=True):
        [alone] = generate_text(model, _Letters(), [prompt], DecodeParams(max_tokens=4, sampling=GREEDY))
        assert completion.token_ids == alone.token_ids


class _Letters:
    """61 ids, one character each; 60 ends a document."""

    name, vocab_size, eod_id, fingerprint = "letters", 61, 60, ""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 65 for letter in text]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids) -> str:
        return "".join(chr(65 + int(token)) for token in ids)


def test_text_and_the_reason_of_its_end():
    model = small_model()
    params = DecodeParams(max_tokens=6, sampling=GREEDY)
    [first, empty] = generate_text(model, _Letters(), ["AB", ""], params)
    assert first.prompt == "AB" and first.finish_reason == "length" and len(first.token_ids) == 6
    assert first.text == _Letters().decode(first.token_ids)
    assert empty.token_ids == slowly(model, [60], 6)
    stop = first.token_ids[3]
    [short] = generate_text(model, _Letters(), ["AB"], DecodeParams(max_tokens=6, sampling=GREEDY, stop_id=stop))
    assert short.finish_reason == "stop" and short.token_ids == first.token_ids[: first.token_ids.index(stop)]


def test_streamed_text_never_shows_half_a_character():
    tokenizer = ByteTokenizer()
    text = "naïve 中文 🙂!"
    ids = tokenizer.encode("start ") + tokenizer.encode(text)
    parts = list(stream_text(tokenizer, ids[:6], iter(ids[6:])))
    assert "".join(parts) == text and "🙂" in parts
    # what never becomes a character is shown at the end, as a replacement
    assert list(stream_text(tokenizer, ids[:6], [0xF0, 0x9F])) == ["\N{REPLACEMENT CHARACTER}"]
