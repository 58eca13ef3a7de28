"""LLaMA-Factory's descriptions, and the formats of its ten demo files (rewritten here with the same fields)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data.dataset_info import read_entry
from paceline.data.record_formats import read_record
from paceline.data.record_rows import find_record_files, read_rows
from paceline.data.records import BadRowError, Conversation, Judged, Message, Preference, Record, Text, check_record
from paceline.errors import DataError

DEMO = Path(__file__).parent / "llamafactory"
PLAIN = ["user", "assistant"]
CALLED = ["user", "assistant", "tool", "assistant"]
ROLES: dict[str, tuple[str, list[list[str]]]] = {
    "identity": ("sft", [PLAIN, PLAIN]),
    "alpaca_en_demo": ("sft", [PLAIN, PLAIN, PLAIN]),
    "alpaca_zh_demo": ("sft", [PLAIN, PLAIN]),
    "glaive_toolcall_en_demo": ("sft", [CALLED, PLAIN]),
    "glaive_toolcall_zh_demo": ("sft", [CALLED + PLAIN]),
    "dpo_en_demo": ("dpo", [["user", "assistant", "user", "|", "assistant"], ["user", "|", "assistant"]]),
    "dpo_zh_demo": ("reward", [["user", "assistant", "user", "|", "assistant"], ["user", "|", "assistant"]]),
    "kto_en_demo": (
        "kto",
        [
            ["user", "|", "assistant", "good"],
            ["user", "|", "assistant", "bad"],
            [*PLAIN, "user", "|", "assistant", "good"],
        ],
    ),
    "wiki_demo": ("sft", [["text"], ["text"]]),
    "c4_demo": ("pretrain", [["text"], ["text"]]),
}


def records(file: Path, name: str) -> list[Record]:
    entry = read_entry(file, name)
    found = []
    for row in (row for data in find_record_files([entry.path]) for row in read_rows(data)):
        assert not isinstance(row.value, BadRowError)
        found.append(read_record(row.value, entry.layout))
    return found


def roles(record: Record) -> list[str]:
    def of(messages: tuple[Message, ...]) -> list[str]:
        return [message.role for message in messages]

    match record:
        case Conversation():
            return of(record.messages)
        case Preference():
            assert of(record.chosen) == of(record.rejected)
            return [*of(record.prompt), "|", *of(record.chosen)]
        case Judged():
            return [*of(record.prompt), "|", *of(record.answer), "good" if record.desirable else "bad"]
    return ["text"]


@pytest.mark.parametrize("name", ROLES)
def test_a_demo_file_loads(name: str) -> None:
    task, expected = ROLES[name]
    found = records(DEMO, name)
    assert [roles(record) for record in found] == expected
    for record in found:
        check_record(record, task)


def test_what_the_demo_files_say() -> None:
    translated = records(DEMO, "alpaca_en_demo")[1]
    assert isinstance(translated, Conversation)
    assert translated.messages[0].content == "Translate into French.\ngood morning"
    called = records(DEMO, "glaive_toolcall_zh_demo")[0]
    assert isinstance(called, Conversation)
    assert called.messages[1].tool_calls[0]["function"] == {"name": "get_tide", "arguments": {"port": "厦门"}}
    assert called.tools[0]["function"]["name"] == "get_tide"
    assert records(DEMO, "wiki_demo")[1] == Text(pieces=(("A fjord is a long inlet that a glacier carved.", True),))


def write(folder: Path, entry: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.json", **entry}}))
    return folder / "dataset_info.json"


def test_columns_that_are_not_listed_are_not_there(tmp_path: Path) -> None:
    """`input` and `system` are columns by default or by name; a description that lists others drops them."""
    rows = [{"instruction": "a", "input": "b", "output": "c", "system": "d"}]
    file = write(tmp_path, {"columns": {"prompt": "instruction", "response": "output"}}, rows)
    (record,) = records(file, "mine")
    assert isinstance(record, Conversation)
    assert [message.content for message in record.messages] == ["a", "c"]
    file = write(tmp_path, {}, rows)
    (record,) = records(file, "mine")
    assert isinstance(record, Conversation)
    assert [message.content for message in record.messages] == ["a\nb", "c"]


def test_tags_that_are_not_listed_are_not_there(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}]
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    entry = {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    with pytest.raises(BadRowError, match="turn 1 is of 'system'; known are user, assistant"):
        records(write(tmp_path, entry, rows), "mine")
    entry["tags"] = {**tags, "system_tag": "system"}
    (record,) = records(write(tmp_path, entry, rows), "mine")
    assert roles(record) == ["system", "user"]


def test_openai_formatting(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}]
    file = write(tmp_path, {"formatting": "openai", "columns": {"messages": "messages"}}, rows)
    assert roles(records(file, "mine")[0]) == PLAIN


def test_alpaca_pairs_and_labels(tmp_path: Path) -> None:
    columns = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    rows = [{"instruction": "a", "input": "b", "chosen": "c", "rejected": "d"}]
    (record,) = records(write(tmp_path, {"ranking": True, "columns": columns}, rows), "mine")
    assert roles(record) == ["user", "|", "assistant"]
    columns = {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "kto_tag"}
    rows = [{"instruction": "a", "input": "", "output": "c", "kto_tag": False}]  # type: ignore[dict-item]
    (record,) = records(write(tmp_path, {"columns": columns}, rows), "mine")
    assert roles(record) == ["user", "|", "assistant", "bad"]


def test_subset_and_split_choose_in_a_folder(tmp_path: Path) -> None:
    for part in ("en/train", "en/test", "zh/train"):
        file = tmp_path / "set" / f"{part}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"instruction": part, "output": "x"}) + "\n")
    entry = {"mine": {"file_name": "set", "subset": "en", "split": "test"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entry))
    assert read_entry(tmp_path, "mine").path == tmp_path / "set" / "en" / "test.jsonl"


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"file_name": "", "hf_hub_url": "someone/set"}, "not on this disk (hf_hub_url = 'someone/set')"),
        ({"file_name": "other.json"}, "file_name 'other.json' is not there"),
        ({"formating": "sharegpt"}, "unknown key 'formating'"),
        ({"formatting": "vicuna"}, "formatting = 'vicuna'"),
        ({"columns": {"prompts": "x"}}, "unknown column 'prompts'"),
        ({"columns": {"query": "x"}}, "columns has no 'prompt'"),
        ({"ranking": True, "columns": {"prompt": "x"}}, "columns has no 'chosen'"),
        ({"tags": {"rol_tag": "x"}}, "unknown tag 'rol_tag'"),
        ({"num_samples": 0}, "num_samples = 0"),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, entry: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError) as error:
        read_entry(write(tmp_path, entry, [{}]), "mine")
    assert why in error.value.subject
    assert error.value.next_step


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data set 'alpaca_en_dem'") as error:
        read_entry(DEMO, "alpaca_en_dem")
    assert error.value.next_step == "Did you mean 'alpaca_en_demo'?"
