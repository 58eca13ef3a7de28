"""What lm-evaluation-harness would be told is what the model says, read one text at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paceline.config.run import RunConfig
from paceline.data.chat_template import load_template
from paceline.data.tokenizer import ByteTokenizer
from paceline.errors import ConfigError
from paceline.generate import likelihood
from paceline.generate.decode import DecodeParams, generate_text
from paceline.generate.likelihood import likelihoods
from paceline.generate.load import Speaker
from paceline.generate.sample import SamplingParams
from tests.generate.harness_interface import provide
from tests.generate.small_models import SHAPES, small_model

LONGEST = 24


@dataclass
class Request:
    args: tuple


def speaker(begins: tuple[int, ...] = (), **shape: object) -> Speaker:
    model = small_model(vocab_size=260, max_seq_len=LONGEST, **shape)
    return Speaker(model=model, tokenizer=ByteTokenizer(), config=RunConfig(model=model.config), begins=begins)


@torch.no_grad()
def by_hand(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    total, greedy = 0.0, True
    for number, token in enumerate(continuation):
        read = (context + continuation[:number])[-LONGEST:]
        logits = model(torch.tensor([read])).logits[0, -1].float()
        total += float(logits.log_softmax(-1)[token])
        greedy &= int(logits.argmax()) == token
    return total, greedy


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch):
    provide(monkeypatch)
    from paceline.generate.harness import PacelineLM

    return lambda told, **more: PacelineLM(told, batch_size=2, **more)


@pytest.mark.parametrize("name", ["gqa", "gpt2", "deepseek"])
def test_likelihoods_in_batches_are_those_of_each_pair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = speaker(**SHAPES[name]).model
    pairs = [([1, 2, 3], [4]), ([9], [8, 7, 6, 5]), ([5] * 10, [6, 6]), ([1], [2])]
    likeliest = int(model(torch.tensor([[1]])).logits[0, -1].argmax())
    pairs.append(([1], [likeliest]))
    expected = [by_hand(model, *pair) for pair in pairs]
    assert expected[-1][1] and not all(greedy for _, greedy in expected)
    for numbers in (likelihood.LOGIT_NUMBERS, 260 * 12):  # the second: one pair at a time
        monkeypatch.setattr(likelihood, "LOGIT_NUMBERS", numbers)
        found = likelihoods(model, pairs, batch_size=3)
        assert [one.log_prob for one in found] == pytest.approx([total for total, _ in expected], abs=1e-4)
        assert [one.is_greedy for one in found] == [greedy for _, greedy in expected]


def test_a_pair_longer_than_the_model_keeps_its_end() -> None:
    model = speaker().model
    context = list(range(40))
    (found,) = likelihoods(model, [(context, [7])], batch_size=1)
    assert found.log_prob == pytest.approx(by_hand(model, context, [7])[0], abs=1e-4)


def test_continuations(lm) -> None:
    told = speaker()
    pairs = [("abc", "d"), ("", "xy"), ("a longer text", " ends"), ("abc", "e")]
    found = lm(told).loglikelihood([Request(args=pair) for pair in pairs])
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        before = list(context.encode()) or [256]
        expected = by_hand(told.model, before, list(continuation.encode()))
        assert total == pytest.approx(expected[0], abs=1e-4) and greedy == expected[1]


@pytest.mark.parametrize("length", [5, LONGEST, LONGEST + 1, 3 * LONGEST + 7])
def test_a_rolling_likelihood_predicts_each_token_once(lm, length: int) -> None:
    told = speaker()
    text = ("the quick brown fox " * 6)[:length]
    (found,) = lm(told).loglikelihood_rolling([Request(args=(text,))])
    ids = [256, *text.encode()]
    total = 0.0
    for start in range(1, len(ids), LONGEST):
        end = min(start + LONGEST, len(ids))
        window = torch.tensor([ids[max(0, end - 1 - LONGEST) : end - 1]])
        with torch.no_grad():
            log_probs = told.model(window).logits[0].float().log_softmax(-1)
        count = end - start
        total += float(log_probs[-count:].gather(1, torch.tensor(ids[start:end])[:, None]).sum())
    assert found == pytest.approx(total, abs=1e-3)


def test_answers_end_at_the_stop_text(lm) -> None:
    told = speaker()
    params = DecodeParams(max_tokens=8, sampling=SamplingParams(temperature=0), stop_ids=(256,), vocab_size=257)
    free = [one.text for one in generate_text(told.model, told.tokenizer, ["abc", "a longer text"], params)]
    options = {"max_gen_toks": 8, "do_sample": False}
    requests = [
        Request(args=("abc", {**options, "until": []})),
        Request(args=("a longer text", {**options, "until": []})),
    ]
    assert lm(told).generate_until(requests) == free
    stop = free[0][3]
    stopped = lm(told).generate_until(
        [Request(args=(text, {**options, "until": stop})) for text in ("abc", "a longer text")]
    )
    assert stopped == [text.split(stop)[0] for text in free] and stopped[0] != free[0]


def test_what_the_tokenizer_puts_before_a_text_is_put_there_once(lm) -> None:
    model = lm(speaker(begins=(258,)))
    assert model.tok_encode("ab") == [258, 97, 98] and model.tok_encode("ab", add_special_tokens=False) == [97, 98]
    assert model.prefix_token_id == 258 and lm(speaker()).prefix_token_id == 256


def test_turns_become_a_prompt(lm) -> None:
    template = load_template("chatml", ByteTokenizer())
    model = lm(speaker(), template=template)
    text = model.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert model.tokenizer_name != lm(speaker()).tokenizer_name


def test_without_the_package_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from paceline.cli import evaluate_tasks

    monkeypatch.setattr(evaluate_tasks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--tasks a,b needs lm-evaluation-harness") as caught:
        evaluate_tasks.refuse_missing(evaluate_tasks.Wanted(tasks=("a", "b")))
    assert "-e '.[eval]'" in caught.value.next_step


def test_results_are_told_as_a_table(tmp_path: Path) -> None:
    from paceline.cli.evaluate_tasks import _scores

    results = {"arc": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.01, "sample_len": 7}}
    text = _scores(results, {"arc": 5}, limit=7).to_text()
    assert "arc" in text and "0.2500" in text and "0.0100" in text and "7 questions of each task only" in text
