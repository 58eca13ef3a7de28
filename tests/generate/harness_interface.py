"""The part of lm-evaluation-harness 0.4.13's interface that `generate/harness.py` stands on, for machines without it.

Written from its documentation: `TemplateLM.loglikelihood` encodes and calls `_loglikelihood_tokens`; windows of a
rolling likelihood predict each token once, with as much before it as fits. Where the package is installed, tests take
it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

VERSION = "0.4.13"


def provide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in where `import lm_eval` finds it, unless the package is there."""
    if find_spec("lm_eval") is not None:
        return
    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.utils")}
    modules["lm_eval"].__path__ = modules["lm_eval.api"].__path__ = []  # type: ignore[attr-defined]
    modules["lm_eval.api.model"].TemplateLM = TemplateLM  # type: ignore[attr-defined]
    modules["lm_eval.utils"].get_rolling_token_windows = rolling_windows  # type: ignore[attr-defined]
    modules["lm_eval.utils"].make_disjoint_window = disjoint  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "paceline.generate.harness", raising=False)


class TemplateLM:
    def __init__(self) -> None:
        self.cache_hook = SimpleNamespace(add_partial=lambda *_: None)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        encoded = []
        for context, continuation in (request.args for request in requests):
            if context:
                before = self.tok_encode(context)  # type: ignore[attr-defined]
                behind = self.tok_encode(context + continuation)[len(before) :]  # type: ignore[attr-defined]
            else:
                before = [self.prefix_token_id]  # type: ignore[attr-defined]
                behind = self.tok_encode(continuation, add_special_tokens=False)  # type: ignore[attr-defined]
            encoded.append(((context, continuation), before, behind))
        return self._loglikelihood_tokens(encoded)  # type: ignore[attr-defined]


def rolling_windows(token_list: list[int], prefix_token: int, max_seq_len: int, context_len: int) -> list[Any]:
    assert context_len == 1
    stream = [prefix_token, *token_list]
    pairs = []
    for start in range(0, len(token_list), max_seq_len):
        end = min(start + max_seq_len, len(token_list))
        pairs.append((stream[max(0, end - max_seq_len) : end], token_list[start:end]))
    return pairs


def disjoint(pair: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    before, behind = pair
    return before[: len(before) - len(behind) + 1], behind
