"""A model of ours as lm-evaluation-harness sees it: its own interface, filled in.

Imported where tasks are asked for; needs the package (the extra `eval`; written for 0.4.13).

Tokens are those that its interface for Transformers would make: with what the tokenizer itself puts before a text (a
beginning-of-sequence token), which `Speaker.begins` holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from paceline.data.chat_template import ChatTemplate
from paceline.data.messages import read_messages
from paceline.generate.decode import DecodeParams, equal_length_batches, generate_ids, has_capacity
from paceline.generate.likelihood import Likelihood, likelihoods
from paceline.generate.load import Speaker
from paceline.generate.sample import SamplingParams

MAX_NEW_TOKENS = 256
"""Of an answer, where the task does not say."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class PacelineLM(TemplateLM):
    """What tasks ask: how likely continuations are, how likely a text is, and what comes next."""

    backend = "causal"

    def __init__(self, speaker: Speaker, *, batch_size: int = 8, template: ChatTemplate | None = None) -> None:
        super().__init__()
        self.speaker = speaker
        self.batch_size = batch_size
        self.template = template

    # ---- tokens

    @property
    def eot_token_id(self) -> int:
        return self.speaker.tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty context becomes."""
        return self.speaker.begins[0] if self.speaker.begins else self.eot_token_id

    @property
    def max_length(self) -> int:
        return self.speaker.config.model.max_seq_len

    @property
    def max_gen_toks(self) -> int:
        return MAX_NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        """Names the requests that the harness caches."""
        template = "" if self.template is None else f"__{self.template.fingerprint[:16]}"
        return f"{self.speaker.tokenizer.fingerprint[:16]}{template}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids = [int(token) for token in self.speaker.tokenizer.encode(string)]
        before = list(self.speaker.begins)
        # a chat template has written it into the text already
        begun = add_special_tokens is None and ids[: len(before)] == before
        return ids if add_special_tokens is False or begun else [*before, *ids]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        assert self.template is not None, "the command line asks for chat only with a template"
        return self.template.render(read_messages(chat_history), prompt=add_generation_prompt).text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return None if self.template is None else self.template.source

    # ---- what is asked

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found = self._likelihoods([(context, continuation) for _, context, continuation in requests])
        for (request, *_), answer in zip(requests, found, strict=True):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, tuple(answer))
        return [(answer.log_prob, answer.is_greedy) for answer in found]

    def _likelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Likelihood]:
        return likelihoods(self.speaker.model, pairs, batch_size=self.batch_size)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[int, tuple[list[int], list[int]]]] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            parts = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(number, make_disjoint_window(part)) for part in parts]
        sums = [0.0] * len(requests)
        for (number, _), found in zip(windows, self._likelihoods([pair for _, pair in windows]), strict=True):
            sums[number] += found.log_prob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts: list[str] = [""] * len(requests)
        for options, numbers in _alike(requests):
            ids = {number: self._context(requests[number].args[0], options) for number in numbers}
            numbers = sorted(numbers, key=lambda number: -len(ids[number]))
            for start in range(0, len(numbers), self.batch_size):
                batch = numbers[start : start + self.batch_size]
                for number, text in zip(batch, self._answers([ids[n] for n in batch], batch, options), strict=True):
                    texts[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts

    def _context(self, text: str, options: Mapping[str, Any]) -> list[int]:
        """Its newest tokens that leave room for an answer."""
        room = max(1, self.max_length - _max_new_tokens(options))
        return self.tok_encode(text)[-room:] or [self.prefix_token_id]

    def _answers(self, prompts: Sequence[list[int]], numbers: Sequence[int], options: Mapping[str, Any]) -> list[str]:
        params = DecodeParams(
            max_tokens=_max_new_tokens(options),
            sampling=_sampling(options),
            stop_ids=self.speaker.stop_ids,
            vocab_size=self.speaker.tokenizer.vocab_size,
        )
        until = _until(options)
        parted = equal_length_batches(prompts) if has_capacity(self.speaker.model) else [list(range(len(prompts)))]
        texts = [""] * len(prompts)
        for part in parted:
            part_prompts = [prompts[index] for index in part]
            for index, text in zip(
                part, self._grow(part_prompts, [numbers[i] for i in part], params, until), strict=True
            ):
                texts[index] = text
        return texts

    def _grow(
        self, prompts: Sequence[list[int]], numbers: Sequence[int], params: DecodeParams, until: Sequence[str]
    ) -> list[str]:
        grown: list[list[int]] = [[] for _ in prompts]
        texts: list[str] = [""] * len(prompts)
        open_rows = set(range(len(prompts)))
        for tokens in generate_ids(self.speaker.model, prompts, params, numbers=numbers):
            for row in sorted(open_rows):
                token = tokens[row]
                if token is None:
                    open_rows.discard(row)
                    continue
                grown[row].append(token)
                texts[row] = self.speaker.tokenizer.decode(grown[row])
                if any(stop in texts[row] for stop in until):
                    open_rows.discard(row)
            if not open_rows:
                break
        return [_before(text, until) for text in texts]


def _alike(requests: Sequence[Any]) -> list[tuple[Mapping[str, Any], list[int]]]:
    """Requests with the same options, which can share a batch."""
    groups: dict[str, tuple[Mapping[str, Any], list[int]]] = {}
    for number, request in enumerate(requests):
        options = request.args[1]
        groups.setdefault(repr(sorted(options.items())), (options, []))[1].append(number)
    return list(groups.values())


def _max_new_tokens(options: Mapping[str, Any]) -> int:
    return int(next((options[name] for name in _LENGTHS if options.get(name) is not None), MAX_NEW_TOKENS))


def _sampling(options: Mapping[str, Any]) -> SamplingParams:
    """Greedy unless `do_sample` or a temperature above 0 says otherwise."""
    temperature = float(options.get("temperature") or 0.0)
    drawn = options.get("do_sample")
    if drawn is False or (drawn is None and temperature == 0.0):
        return SamplingParams(temperature=0.0)
    return SamplingParams(
        temperature=temperature or 1.0,
        top_k=max(0, int(options.get("top_k") or 0)),
        top_p=float(options.get("top_p") or 1.0),
        min_p=float(options.get("min_p") or 0.0),
    )


def _until(options: Mapping[str, Any]) -> list[str]:
    said = options.get("until") or []
    return [said] if isinstance(said, str) else [stop for stop in said if stop]


def _before(text: str, until: Sequence[str]) -> str:
    for stop in until:
        text = text.split(stop, 1)[0]
    return text
