"""`paceline generate` over several processes says what one says, and with an adapter what PEFT's merge would say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from tests.cli.commands import paceline
from tests.interop import hub_folders as hub
from tests.interop.test_speak import WORDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = hub.save("qwen3_moe", tmp_path_factory.mktemp("model") / "hf")
    Tokenizer(BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[])).save(str(source / "tokenizer.json"))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [40, 26]}))
    return source


def test_two_processes_write_what_one_writes(folder: Path) -> None:
    ask = ["generate", str(folder), "-p", "bcd", "-p", "a", "-t", "0.7", "-n", "12", "--device", "cpu", "--json"]
    one, two = paceline(*ask), paceline(*ask, "--tp", "2")
    assert one.returncode == 0 and one.stdout.count("\n") == 2
    assert two.stdout == one.stdout, two.stderr


def test_a_degree_that_the_heads_forbid_is_refused_before_a_process_starts(folder: Path) -> None:
    done = paceline("generate", str(folder), "--device", "cpu", "--tp", "3")
    assert done.returncode == 2
    assert "cannot be spread over 3 ranks" in done.stderr and "--tp 1, 2, 4" in done.stderr
