"""The verb as a user types it, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.data import app
from paceline.data.indexed import IndexedDataset, bin_path, idx_path
from paceline.errors import ConfigError, DataError

runner = CliRunner()


def call(*arguments: object, code: int = 0) -> str:
    result = runner.invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02d}.txt").write_text(f"Document {i} says: " + " ".join(str(i * k) for k in range(40)))
    return folder


def test_from_text_to_dataset(texts: Path, tmp_path: Path) -> None:
    output = call("train-tokenizer", texts, "--out", tmp_path / "t.json", "--vocab-size", 300)
    assert "vocabulary 300, from 30 files" in output
    command = ("build", texts, "--out", tmp_path / "d", "--tokenizer", tmp_path / "t.json", "--workers", 2)
    output = call(*command, "--valid-share", 0.2)
    assert "d-train" in output and "d-valid" in output and "tokens/s" in output
    output = call("inspect", tmp_path / "d-train", "--samples", 2)
    assert "document 0:" in output and " says: 0 " in output and "median" in output
    output = call("verify", tmp_path / "d-train", tmp_path / "d-valid")
    assert output.count("good.") == 2
    output = call("merge", tmp_path / "d-train", tmp_path / "d-valid", "-o", tmp_path / "all")
    assert "all: 30 documents" in output
    assert "bytes a token" in call("inspect", tmp_path / "all", "--document", 29)


def test_help_reads_like_a_manual() -> None:
    for verb in ("build", "inspect", "verify", "merge", "train-tokenizer"):
        assert f"paceline data {verb}" in call(verb, "--help")


def fails(message: str, *arguments: object) -> DataError:
    with pytest.raises(DataError, match=message) as caught:
        call(*arguments)
    assert caught.value.exit_code == 1 and caught.value.next_step
    return caught.value


def test_verify_finds_damage(texts: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    call("build", texts, "-o", prefix, "-t", "byte")
    fails("holds the token id 256", "verify", prefix, "--vocab-size", 256)
    whole = bin_path(prefix).read_bytes()
    bin_path(prefix).write_bytes(whole[:-2])
    fails("shorter than the index says", "verify", prefix)
    bin_path(prefix).write_bytes(b"\x05\x05" + whole[2:])
    fails("sequence 0 holds the token id 1285", "verify", prefix)
    bin_path(prefix).write_bytes(whole[:-2] + b"\x05\x00")
    fails("document 29 does not end with the end-of-document token 256", "verify", prefix)
    bin_path(prefix).write_bytes(whole)
    index = bytearray(idx_path(prefix).read_bytes())
    index[17] = 4
    idx_path(prefix).write_bytes(bytes(index))
    fails("said to start at byte", "verify", prefix)
    fails("no such file", "verify", tmp_path / "nothing")


def test_paths_that_newcomers_give(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call("build", texts / "00.txt", "-o", "data/d.bin", "-t", "byte")
    for name in ("data/d", "data/d.bin", "data/d.idx"):
        assert "1 document, 1 sequence," in call("verify", name)
        assert "document 0:" in call("inspect", name)
    assert "data/d" in fails("data is a folder, not a dataset", "inspect", "data").evidence
    assert f"relative to {tmp_path}" in fails("no such file", "verify", "other/d.bin").evidence
    (tmp_path / "mine.toml").write_text("[run]")
    for name in ("mine.toml", "gpt2"):
        error = fails("tokenizer", "build", texts, "-o", "data/e", "-t", name)
        assert "src/" not in str(error) and "tokenizer.json" in error.next_step
    assert "gives only" in call("train-tokenizer", texts, "-o", "t.json", "--vocab-size", 400000)
    assert "default: -1" not in call("inspect", "--help")


def test_description_of_another_build(texts: Path, tmp_path: Path) -> None:
    call("build", texts, "-o", tmp_path / "d", "-t", "byte")
    path = tmp_path / "d.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"documents": 7}))
    fails("promises 7 documents, the dataset has 30", "verify", tmp_path / "d")


def test_merge_refuses_other_tokenizers(texts: Path, tmp_path: Path) -> None:
    call("train-tokenizer", texts, "-o", tmp_path / "t.json", "--vocab-size", 300)
    call("build", texts, "-o", tmp_path / "a", "-t", "byte")
    call("build", texts, "-o", tmp_path / "b", "-t", tmp_path / "t.json")
    fails("were made with different tokenizers", "merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "m")
    (tmp_path / "b.json").unlink()
    call("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "m")
    assert IndexedDataset(tmp_path / "m").num_documents == 60 and not (tmp_path / "m.json").exists()


def test_inspect_without_the_tokenizer(texts: Path, tmp_path: Path) -> None:
    call("train-tokenizer", texts, "-o", tmp_path / "t.json", "--vocab-size", 300)
    call("build", texts, "-o", tmp_path / "d", "-t", tmp_path / "t.json")
    (tmp_path / "t.json").unlink()
    output = call("inspect", tmp_path / "d", "--samples", 1, "--tokens", 3)
    assert "no decoding" in output and "document 0:" in output
    fails("there is no document 30", "inspect", tmp_path / "d", "--document", 30)


def test_strict(texts: Path, tmp_path: Path) -> None:
    (texts / "bad.txt").write_bytes(b"\xff")
    fails("bad.txt, line 1, byte 0: invalid UTF-8", "build", texts, "-o", tmp_path / "d", "-t", "byte", "--strict")
    assert "1 invalid UTF-8" in call("build", texts, "-o", tmp_path / "d", "-t", "byte")


def test_inspect_shows_rows_as_a_task_learns_them(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Say fox"}, {"role": "assistant", "content": "fox"}]},
        {"messages": [{"role": "user", "content": "Say nothing"}, {"role": "assistant", "content": ""}]},
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("inspect", path, "--task", "sft", "--tokenizer", "byte", "--template", "chatml", "--seq-len", 128)
    output = call(*command, code=1)
    assert "2 rows, 1 example for sft" in output
    assert f"{path}:2: empty assistant turn" in output
    assert "«fox<|im_end|>»" in output, "what is learned is seen without colours"
    assert "1 sequence of up to 128 tokens, 55.5% full" in output
    found = json.loads(call(*command, "--json", code=1))
    assert found["bad_rows"]["kinds"] == {"empty assistant turn": 1}
    (document,) = found["shown"][0]["documents"]
    assert [(stretch["text"], stretch["learned"]) for stretch in document["stretches"]] == [
        ("<|im_start|>user\nSay fox<|im_end|>\n<|im_start|>assistant\n", False),
        ("fox<|im_end|>", True),
    ]
    pair = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})
    path.write_text(pair + "\n")
    output = call("inspect", path, "--task", "dpo", "--tokenizer", "byte", "--template", "chatml")
    assert ", chosen: " in output and "«b<|im_end|>»" in output and ", rejected: " in output
    error = fails("the tokenizer byte has no chat template", "inspect", path, "--task", "dpo", "--tokenizer", "byte")
    assert error.next_step.startswith("Set --template to the one") and "data." not in error.next_step
    fails("^--template 'chatlm' is no template", *command[:-4], "--template", "chatlm")
    error = fails("holds rows, not a dataset of tokens", "inspect", path)
    assert "--task sft" in error.next_step
    with pytest.raises(ConfigError, match="is no task that reads rows"):
        call("inspect", path, "--task", "ppo")
    with pytest.raises(ConfigError, match=r"data\.mask"):
        call(*command, "--mask", "turns")
