"""Turns become the ids that Transformers would ask with, and answers end where the template says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from paceline.cli.generate import command
from paceline.data.chat_template import load_template
from paceline.data.named_templates import NAMED
from paceline.data.records import Message
from paceline.data.tokenizer import ByteTokenizer, load_tokenizer
from paceline.errors import ConfigError, DataError
from paceline.generate.chat import Question, answer_ends, asked, prompt_ids, read_questions
from tests.generate.test_load import save_run

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer with ChatML's control tokens and its template, as a hub folder has them."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": NAMED["chatml"], "eos_token": "<|endoftext|>", "tokenizer_class": "TokenizersBackend"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def call(*arguments: object):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_ids_are_those_of_transformers(tokenizer_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_folder / "tokenizer.json"), eos_token="<|endoftext|>")
    expected = theirs.apply_chat_template(
        TURNS, chat_template=NAMED["chatml"], add_generation_prompt=True, return_dict=False
    )
    tokenizer = load_tokenizer(tokenizer_folder / "tokenizer.json")
    template = load_template("", tokenizer)
    question = Question(messages=tuple(Message(**turn) for turn in TURNS))
    assert prompt_ids(template, tokenizer, question) == list(expected)
    # the end of an answer is no end of a document
    assert answer_ends(template, tokenizer, (tokenizer.eod_id,)) == (256, 258)


def test_a_template_without_control_tokens_adds_none() -> None:
    tokenizer = ByteTokenizer()
    assert answer_ends(load_template("vicuna", tokenizer), tokenizer, (256,)) == (256,)


def test_questions_of_files(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(TURNS))
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"messages": TURNS[n:]}) + "\n" for n in (0, 1)))
    assert [turn["content"] for turn in read_questions(tmp_path / "one.json")[0].as_dicts()] == [
        "Be brief.",
        "Hi",
        "Hello.",
        "Bye",
    ]
    first, second = read_questions(tmp_path / "two.jsonl", system="Be kind.")
    # a conversation that has a system prompt keeps it
    assert first.messages[0].content == "Be brief." and second.messages[0].content == "Be kind."
    assert [len(question.messages) for question in (first, second)] == [4, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [\n', "line 2"),
        (json.dumps({"messages": TURNS[:3]}), "line 1: the last turn is the assistant's"),
        ('{"messages": [{"role": "pilot", "content": "a"}]}', "pilot"),
        ('{"messages": []}', "the last turn is nobody's"),
    ],
)
def test_bad_questions_are_told_with_their_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(DataError) as caught:
        read_questions(tmp_path / "q.jsonl")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
            "leaves a turn of the system out",
        ),
        ("{{ raise_exception('System role not supported') }}", "refuses these turns"),
    ],
)
def test_a_template_without_the_asked_role_is_told(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(source)
    template = load_template(str(tmp_path / "t.jinja"), ByteTokenizer())
    with pytest.raises(DataError, match=message) as caught:
        prompt_ids(template, ByteTokenizer(), asked(["Hi"], system="Be brief.")[0])
    assert "--template chatml" in caught.value.next_step


def test_thoughts_that_a_template_cuts_out_are_no_turn_left_out(tmp_path: Path) -> None:
    """As Qwen3's and DeepSeek-R1's do with all answers but the last."""
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1].lstrip() }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    template = load_template(str(tmp_path / "t.jinja"), ByteTokenizer())
    thought = Message(role="assistant", content="<think>\nA greeting.\n</think>\n\nHello.")
    turns = (Message(role="user", content="Hi"), thought, Message(role="user", content="Bye"))
    ids = prompt_ids(template, ByteTokenizer(), Question(messages=turns))
    assert bytes(ids).decode() == "<user>Hi\n<assistant>Hello.\n<user>Bye\n<assistant>"
    # the same where nothing but thoughts is left
    only = (turns[0], Message(role="assistant", content="<think>\nA greeting.\n</think>"), turns[2])
    assert bytes(prompt_ids(template, ByteTokenizer(), Question(messages=only))).decode().count("<assistant>") == 2


def test_the_command_answers(tmp_path: Path) -> None:
    save_run(tmp_path / "run", {"tokenizer": "byte", "template": "chatml"}, max_seq_len=256)
    ask = ["--temperature", 0, "--max-tokens", 8, "--device", "cpu"]
    alone = call(tmp_path / "run", "--chat", "--prompt", "Hi", "--system", "Be brief.", *ask)
    assert alone.exit_code == 0 and not alone.stdout.startswith("Hi")
    (tmp_path / "q.jsonl").write_text(json.dumps({"messages": TURNS[:2]}) + "\n" + json.dumps({"messages": TURNS}))
    lines = [
        json.loads(line)
        for line in call(tmp_path / "run", "--messages", tmp_path / "q.jsonl", "--json", *ask).stdout.splitlines()
    ]
    assert [len(line["messages"]) for line in lines] == [2, 4]
    assert lines[0]["text"] + "\n" == alone.stdout
    # as one text, written out by hand
    text = load_template("chatml", ByteTokenizer()).render(asked(["Hi"], "Be brief.")[0].messages, prompt=True).text
    plain = json.loads(call(tmp_path / "run", "--prompt", text, "--json", *ask).stdout)
    assert plain["token_ids"] == lines[0]["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("--chat",), ConfigError, "--chat without a prompt"),
        (("--system", "x", "--prompt", "a"), ConfigError, "--system without --chat"),
        (("--chat", "--prompt", "a"), DataError, "has no chat template"),
        (("--chat", "--prompt", "a", "--template", "chatlm"), DataError, "Did you mean 'chatml'"),
        (("--messages", "none.jsonl"), DataError, "nothing to read"),
    ],
)
def test_bad_use_is_told(arguments: tuple[str, ...], kind: type, message: str, tmp_path: Path) -> None:
    save_run(tmp_path, {"tokenizer": "byte"})
    done = call(tmp_path, "--device", "cpu", *arguments)
    assert isinstance(done.exception, kind) and message in str(done.exception)
