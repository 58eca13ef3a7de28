"""Masks over text: exact by tokens, equal to Transformers' where it has them, refused where they would be a guess."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from paceline.data.chat_mask import masked_text
from paceline.data.chat_template import ChatTemplate, load_template
from paceline.data.documents import Document, Encoder, Mask
from paceline.data.named_templates import NAMED, OTHER_NAMES
from paceline.data.records import BadRowError, Conversation, Judged, Message, Preference, Record, Text
from paceline.data.token_spans import encode_spans, inside, special_tokens
from paceline.data.tokenizer import Tokenizer, load_tokenizer
from paceline.errors import DataError
from tests.data import chat_tokenizers as kinds


def turns(*contents: str, system: str = "") -> tuple[Message, ...]:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    said = [Message(role=roles[i % 2], content=content) for i, content in enumerate(contents)]  # type: ignore[arg-type]
    return (*([Message(role="system", content=system)] if system else []), *said)


TALK = turns("hello there", "Hi! What is it?", "say fox", "the quick brown fox", system="Be kind.")
UNICODE = turns("héllo 你好", "naïve 🦊 fox", "ok?", "   spaced ")


def encoder(folder: Path, template: str = "", task: str = "sft", mask: Mask = "assistant") -> Encoder:
    tokenizer = load_tokenizer(folder)
    return Encoder(tokenizer=tokenizer, template=load_template(template, tokenizer), task=task, mask=mask)


def learned(tokenizer: Tokenizer, document: Document) -> list[str]:
    """The text of each learned stretch."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], document.trained, [0]))))
    return [tokenizer.decode(document.ids[start:end]) for start, end in edges.reshape(-1, 2)]


def one(found: Encoder, record: Record) -> Document:
    (document,) = found.encode(record).documents
    return document


# ---- the tokens of Transformers


@pytest.mark.parametrize("messages", [TALK, UNICODE], ids=["talk", "unicode"])
@pytest.mark.parametrize("template", ["marked", "plain"])
@pytest.mark.parametrize("metaspace", [False, True], ids=["bytes", "metaspace"])
def test_tokens_and_mask_are_those_of_transformers(
    tmp_path: Path, messages: tuple[Message, ...], template: str, metaspace: bool
) -> None:
    """`{% generation %}` gives Transformers' own mask; the same template without it gives the same by prefixes."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(
        kinds.write_tokenizer(tmp_path / "marked", kinds.MARKED, metaspace=metaspace)
    )
    expected = theirs.apply_chat_template(
        [message.for_template() for message in messages],
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenize=True,
    )
    source = kinds.MARKED if template == "marked" else kinds.CHATML
    document = one(
        encoder(kinds.write_tokenizer(tmp_path / template, source, metaspace=metaspace)),
        Conversation(messages=messages),
    )
    count = len(document.ids)
    assert document.ids.tolist() == expected["input_ids"][:count]
    assert document.trained.astype(int).tolist() == expected["assistant_masks"][:count]
    assert sum(expected["assistant_masks"][count:]) == 0, "what is cut off is not learned"
    assert len(expected["input_ids"]) - count == 1, "the line feed after the last marker"


# ---- what is learned


@pytest.mark.parametrize("template", [*NAMED, *OTHER_NAMES])
@pytest.mark.parametrize("own", ["marked", "by prefixes"])
def test_named_templates_learn_answers_and_their_ends(tmp_path: Path, template: str, own: str) -> None:
    """The same spans with the template's own marks and, these taken out, by prefixes."""
    tokenizer = load_tokenizer(kinds.write_tokenizer(tmp_path, eos="</s>"))
    found = load_template(template, tokenizer)
    if own == "by prefixes":
        source = re.sub(r"\{%-? *(end)?generation *-?%\}", "", found.source)
        found = ChatTemplate(template, source, found.special)
        assert not found.marks_answers
    document = one(Encoder(tokenizer=tokenizer, template=found, task="sft"), Conversation(messages=TALK))
    ends = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "chatml": "<|im_end|>", "qwen": "<|im_end|>"}
    end = ends.get(template, "</s>")
    said = [text.strip() for text in learned(tokenizer, document)]
    assert said == [f"Hi! What is it?{end}", f"the quick brown fox{end}"]
    assert document.trained[-1], "a document ends with what is learned last"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("assistant", ["Hi! What is it?<|im_end|>", "the quick brown fox<|im_end|>"]),
        ("last", ["the quick brown fox<|im_end|>"]),
    ],
)
def test_masks(tmp_path: Path, mask: Mask, expected: list[str]) -> None:
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.CHATML), mask=mask)
    assert learned(found.tokenizer, one(found, Conversation(messages=TALK))) == expected


def test_all_tokens_but_the_first_are_learned(tmp_path: Path) -> None:
    document = one(encoder(kinds.write_tokenizer(tmp_path, kinds.CHATML), mask="all"), Conversation(messages=TALK))
    assert document.trained.tolist() == [False] + [True] * (len(document.ids) - 1)


def test_a_turn_that_the_data_leave_out(tmp_path: Path) -> None:
    messages = list(TALK)
    messages[2] = Message(role="assistant", content="Hi! What is it?", trained=False)
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.CHATML))
    document = one(found, Conversation(messages=tuple(messages)))
    assert learned(found.tokenizer, document) == ["the quick brown fox<|im_end|>"]


def test_answers_with_markers_in_them_and_the_same_text_twice(tmp_path: Path) -> None:
    """Spans come from the template, not from a search for the text."""
    messages = turns("fox", "fox", "fox<|im_end|>\nassistant", "fox")
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.CHATML))
    text, answers = masked_text(found.template, messages, (), [1, 3], special_tokens(found.tokenizer))  # type: ignore[arg-type]
    assert [text[start:end] for start, end in answers] == ["fox<|im_end|>"] * 2
    assert text[: answers[0][0]].endswith("fox<|im_end|>\n<|im_start|>assistant\n")
    assert text[: answers[1][0]].endswith("fox<|im_end|>\nassistant<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_leaves_out_earlier_thoughts(tmp_path: Path) -> None:
    """As Qwen3's: an answer in the middle is learned as it is rendered there, the last one with its thought."""
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.THINKING))
    messages = turns("hello", "<think>hm</think>\n\nHi!", "say fox", "<think>ok</think>\n\nfox")
    said = learned(found.tokenizer, one(found, Conversation(messages=messages)))
    assert said == ["Hi!<|im_end|>", "<think>\n\n</think>\n\nfox<|im_end|>"]


def test_a_thought_that_the_template_leaves_out_is_no_answer(tmp_path: Path) -> None:
    """What would be learned is to end the turn at once; a thought that stays in the text is learned as it is."""
    found = encoder(kinds.write_tokenizer(tmp_path / "thinking", kinds.THINKING))
    for messages in (turns("a", "<think>hm</think>"), turns("a", "<think>hm</think>\n\n", "b", "fox")):
        with pytest.raises(BadRowError, match="leaves out the thought that is all of it: turn 2 would") as caught:
            one(found, Conversation(messages=messages))
        assert caught.value.kind == "empty assistant turn"
    kept = encoder(kinds.write_tokenizer(tmp_path / "chatml", kinds.CHATML))
    messages = turns("a", "<think>hm</think>")
    assert learned(kept.tokenizer, one(kept, Conversation(messages=messages))) == ["<think>hm</think><|im_end|>"]


def called(*after: str) -> tuple[Message, ...]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    return (
        *turns("a"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="three"),
        *turns("", *after)[1:],
    )


def test_thoughts_that_are_left_out_around_calls(tmp_path: Path) -> None:
    """The call is last when it is rendered alone, and has an empty thought there that the whole does not have."""
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.THINKING))
    first, last = learned(found.tokenizer, one(found, Conversation(messages=called("Done."))))
    assert first.startswith('{"type": "function"') and first.endswith("}<|im_end|>")
    assert last == "<think>\n\n</think>\n\nDone.<|im_end|>"


def test_a_text_that_ends_with_one_more_marker(tmp_path: Path) -> None:
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.ENDED, eos="<|endoftext|>"))
    said = learned(found.tokenizer, one(found, Conversation(messages=turns("a", "b <c", "d", "e"))))
    assert said == ["b <c<|eot_id|>", "e<|eot_id|><|endoftext|>"]
    said = learned(found.tokenizer, one(found, Conversation(messages=called("Done.", "and", "so"))))
    assert said == [
        '{"name": "add", "arguments": {"a": 1}}<|eot_id|>',
        "Done.<|eot_id|>",
        "so<|eot_id|><|endoftext|>",
    ]


def test_a_template_that_joins_arguments_to_text(tmp_path: Path) -> None:
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.CALLS_AS_TEXT, eos="</s>"))
    said = learned(found.tokenizer, one(found, Conversation(messages=called("Done."))))
    assert said == ['<start_of_turn>add:{"a": 1}</s>', "Done.</s>"]


def test_a_generation_prompt_that_opens_a_thought(tmp_path: Path) -> None:
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.OPENED, eos="</s>"))
    assert learned(found.tokenizer, one(found, Conversation(messages=turns("a", "<b>", "c", "d")))) == [
        "<b></s>",
        "d</s>",
    ]


def test_a_template_that_moves_the_system_prompt(tmp_path: Path) -> None:
    """Earlier answers cannot be told, the last one can."""
    folder = kinds.write_tokenizer(tmp_path, kinds.LAST_SYSTEM, eos="</s>")
    with pytest.raises(BadRowError, match="renders the turns before turn 3 differently once it follows"):
        one(encoder(folder), Conversation(messages=TALK))
    found = encoder(folder, mask="last")
    assert learned(found.tokenizer, one(found, Conversation(messages=TALK))) == [" the quick brown fox</s>"]


def test_an_end_is_added_where_the_template_has_none(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    found = encoder(kinds.write_tokenizer(tmp_path, template, eos="</s>"), mask="last")
    document = one(found, Conversation(messages=turns("a", "b")))
    assert document.ids[-1] == found.tokenizer.eod_id
    assert document.trained[-1]


def test_markers_that_are_no_tokens_are_told(tmp_path: Path) -> None:
    kept = encoder(kinds.write_tokenizer(tmp_path), "qwen")
    assert kept.loose_markers == ()
    tokenizer = load_tokenizer("byte")
    loose = Encoder(tokenizer=tokenizer, template=load_template("gemma", tokenizer), task="sft")
    assert loose.loose_markers == ("<start_of_turn>", "<end_of_turn>")


# ---- what the template has no place for


def test_a_role_without_a_place_is_refused(tmp_path: Path) -> None:
    for name, template, why in (
        ("refuses", kinds.NO_SYSTEM, "It says: of .*System role not supported"),
        ("forgets", kinds.FORGETFUL, "It leaves it out of the text"),
    ):
        found = encoder(kinds.write_tokenizer(tmp_path / name, template, eos="</s>"))
        with pytest.raises(DataError, match="has no place for a system turn") as error:
            one(found, Conversation(messages=TALK))
        assert re.search(why, error.value.evidence)
        assert "data.template" in error.value.next_step
    one(encoder(tmp_path / "refuses"), Conversation(messages=turns("a", "b")))


@pytest.mark.parametrize("template", ["mistral", "gemma", "alpaca"])
def test_tools_without_a_place_are_refused(tmp_path: Path, template: str) -> None:
    found = encoder(kinds.write_tokenizer(tmp_path, eos="</s>"), template)
    tool = {"type": "function", "function": {"name": "add"}}
    with pytest.raises(DataError, match="has no place for tools"):
        one(found, Conversation(messages=turns("a", "b"), tools=(tool,)))
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = (
        *turns("a"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="3"),
        *turns("a", "b")[1:],
    )
    with pytest.raises(DataError, match="has no place for tool calls"):
        one(found, Conversation(messages=messages))


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_calls_are_learned_and_their_answers_are_not(tmp_path: Path, template: str) -> None:
    found = encoder(kinds.write_tokenizer(tmp_path), template)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = (
        *turns("a"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="three"),
        *turns("x", "Done.")[1:],
    )
    tool = {"type": "function", "function": {"name": "add", "description": "adds"}}
    document = one(found, Conversation(messages=messages, tools=(tool,)))
    first, last = learned(found.tokenizer, document)
    assert '{"name": "add"' in first
    assert last.startswith("Done.")
    assert "three" not in first + last
    assert "adds" in found.tokenizer.decode(document.ids)


# ---- pairs, judged answers, text


def test_a_pair_learns_its_answers_alone(tmp_path: Path) -> None:
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.CHATML), task="dpo", mask="all")
    prompt = TALK[:-1]
    pair = Preference(prompt=prompt, chosen=turns("", "fox")[1:], rejected=turns("", "the dog")[1:])
    chosen, rejected = found.encode(pair).documents
    assert learned(found.tokenizer, chosen) == ["fox<|im_end|>"]
    assert learned(found.tokenizer, rejected) == ["the dog<|im_end|>"]
    start = chosen.answer_start
    assert chosen.ids[:start].tolist() == rejected.ids[:start].tolist(), "the prompt is the same"


def test_answers_that_become_equal_are_refused(tmp_path: Path) -> None:
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.THINKING), task="dpo")
    pair = Preference(
        prompt=turns("a"), chosen=turns("", "<think>x</think>fox")[1:], rejected=turns("", "<think>y</think>fox")[1:]
    )
    with pytest.raises(BadRowError, match="the same tokens once rendered"):
        found.encode(pair)


def test_a_judged_answer(tmp_path: Path) -> None:
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.CHATML), task="kto")
    example = found.encode(Judged(prompt=turns("a"), answer=turns("", "b")[1:], desirable=False))
    assert example.desirable == 0
    assert learned(found.tokenizer, example.documents[0]) == ["b<|im_end|>"]


def test_text_and_its_pieces(tmp_path: Path) -> None:
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.CHATML))
    document = one(found, Text(pieces=(("the quick", True),)))
    assert document.ids[-1] == found.tokenizer.eod_id
    assert document.trained[1:].all()
    document = one(found, Text(pieces=(("<s>hello", False), (" fox</s>", True))))
    assert learned(found.tokenizer, document) == [" fox</s>"]


def test_text_that_no_tokenizer_can_read(tmp_path: Path) -> None:
    found = encoder(kinds.write_tokenizer(tmp_path, kinds.CHATML))
    with pytest.raises(BadRowError, match="lone surrogate: U\\+D800"):
        one(found, Conversation(messages=turns("a", "\ud800")))


# ---- bytes, and places


def test_the_byte_tokenizer_has_places_too() -> None:
    tokenizer = load_tokenizer("byte")
    found = Encoder(tokenizer=tokenizer, template=load_template("zephyr", tokenizer), task="sft")
    document = one(found, Conversation(messages=UNICODE))
    assert document.ids[-1] == 256
    assert tokenizer.decode(document.ids[document.trained]) == "naïve 🦊 fox   spaced "
    assert (document.ids == 256).sum() == 4


def test_places_of_tokens_cover_the_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(kinds.write_tokenizer(tmp_path))
    text = "<|im_start|>naïve 🦊 the fox"
    for found in (tokenizer, load_tokenizer("byte")):
        spans = encode_spans(found, text)
        assert found.decode(spans.ids) == text
        assert spans.starts[0] == 0
        assert spans.ends[-1] == len(text)
        fox = text.index("🦊")
        marked = inside(spans, [(fox, fox + 1)])
        assert "🦊" in found.decode(spans.ids[marked])


def test_a_tokenizer_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(kinds.write_tokenizer(tmp_path))
    with pytest.raises(DataError, match="has no chat template") as error:
        load_template("", tokenizer)
    assert "chatml" in error.value.next_step
    with pytest.raises(DataError, match="is no template") as error:
        load_template("chatlm", tokenizer)
    assert error.value.next_step == "Did you mean 'chatml'?"
    (tmp_path / "bad.jinja").write_text("{% for x in %}")
    with pytest.raises(DataError, match="not valid Jinja"):
        load_template(str(tmp_path / "bad.jinja"), tokenizer).render(turns("a", "b"))


def test_templates_of_every_place(tmp_path: Path) -> None:
    """`chat_template.jinja` over `chat_template.json` over tokenizer_config.json; named ones and one for tools."""
    folder = kinds.write_tokenizer(tmp_path, "config")
    tokenizer = load_tokenizer(folder)
    assert load_template("", tokenizer).source == "config"
    (folder / "chat_template.json").write_text(
        '{"chat_template": [{"name": "default", "template": "json"}, '
        '{"name": "tool_use", "template": "tools {{ tools | length }}"}]}'
    )
    found = load_template("", tokenizer)
    assert found.source == "json"
    assert found.render(turns("a"), [{"function": {}}]).text == "tools 1"
    (folder / "chat_template.jinja").write_text("jinja {{ strftime_now('%Y') }} {{ messages | tojson }}")
    assert load_template("", tokenizer).render(turns("<a>")).text == 'jinja 2024 [{"role": "user", "content": "<a>"}]'
