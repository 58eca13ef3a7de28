"""A model of our own in the hands of other programs: its tokenizer, and where a text ends."""

from __future__ import annotations

import hashlib
import json
import logging
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from paceline.checkpoint.locate import folder_name
from paceline.config.data import DataConfig
from paceline.config.run import RunConfig
from paceline.data.sidecar import Sidecar, sidecar_path, write_sidecar
from paceline.interop import compare
from paceline.interop.convert import Options, convert
from paceline.interop.peft_write import convert_adapter
from paceline.interop.sources import open_source
from tests.interop import hub_folders as hub
from tests.interop.test_training import recipe_of
from tests.interop.test_training import run as train
from tests.training.runs import tiny, write_text

WORDS = [chr(ord("a") + i) for i in range(26)] + ["</s>"] + [f"<{i}>" for i in range(70)]
STOP = 40
NAMED = WORDS.index("</s>")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder as training leaves it: a checkpoint, the tokenizer under its own name; its dataset beside it."""
    folder, data = tmp_path / "runs/mine", tmp_path / "data"
    kept = folder / "tokenizer/mine-tokenizer.json"
    kept.parent.mkdir(parents=True)
    Tokenizer(BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[])).save(str(kept))
    sidecar = Sidecar(
        tokenizer="gone.json",
        tokenizer_fingerprint=hashlib.sha256(kept.read_bytes()).hexdigest(),
        vocab_size=len(WORDS),
        eod_id=STOP,
        eod_appended=True,
        documents=1,
        tokens=2,
        text_bytes=2,
    )
    write_sidecar(data, sidecar)
    opened = open_source(hub.save("llama", tmp_path / "hub"))
    ours = replace(opened, template=None, sidecars={}, recipe=RunConfig(data=DataConfig(train=str(data))))
    convert(ours, folder / "checkpoints" / folder_name(3), Options(to="paceline"))
    return folder


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def ids(folder: Path) -> list[Any]:
    files = (folder / "config.json", folder / "generation_config.json")
    return [content(file)[key] for file in files for key in ("bos_token_id", "eos_token_id")]


def test_the_tokenizer_goes_along_and_the_dataset_says_where_a_text_ends(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = convert(open_source(run), tmp_path / "hf", Options(to="hf", dtype="bf16"))
    assert done.warnings == () and ids(tmp_path / "hf") == [STOP] * 4
    assert content(tmp_path / "hf/tokenizer_config.json")["eos_token"] == WORDS[STOP]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs("bcd").input_ids == [1, 2, 3] and theirs.eos_token_id == STOP
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").generation_config.eos_token_id == STOP


def test_a_checkpoint_keeps_them_too(run: Path, tmp_path: Path) -> None:
    convert(open_source(run), tmp_path / "ours", Options(to="paceline"))
    assert (tmp_path / "ours/hub/tokenizer.json").is_file()
    sidecar_path(tmp_path / "data").unlink()
    convert(open_source(tmp_path / "ours"), tmp_path / "hf", Options(to="hf"))
    assert ids(tmp_path / "hf") == [STOP] * 4 and (tmp_path / "hf/tokenizer_config.json").is_file()


def test_without_its_dataset_the_tokenizer_decides(run: Path, tmp_path: Path) -> None:
    sidecar_path(tmp_path / "data").unlink()
    assert convert(open_source(run), tmp_path / "hf", Options(to="hf")).warnings == ()
    assert ids(tmp_path / "hf") == [NAMED] * 4


def test_a_dataset_of_another_tokenizer_says_nothing(run: Path, tmp_path: Path) -> None:
    file = sidecar_path(tmp_path / "data")
    file.write_text(json.dumps(content(file) | {"tokenizer_fingerprint": "0" * 64}))
    convert(open_source(run), tmp_path / "hf", Options(to="hf"))
    assert ids(tmp_path / "hf") == [NAMED] * 4


def test_what_is_not_known_is_told_and_null(run: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    (run / "tokenizer/mine-tokenizer.json").unlink()
    sidecar_path(tmp_path / "data").unlink()
    tokenizer, end = convert(open_source(run), tmp_path / "hf", Options(to="hf")).warnings
    assert tokenizer.startswith("No tokenizer goes along") and end.startswith("Which token ends a text is not known")
    assert ids(tmp_path / "hf") == [None] * 4
    assert AutoConfig.from_pretrained(tmp_path / "hf").eos_token_id is None
    assert convert(open_source(run), tmp_path / "meg", Options(to="megatron")).warnings == ()
    assert "--like" in convert(open_source(tmp_path / "meg"), tmp_path / "back", Options(to="hf")).warnings[-1]


def test_a_hub_config_keeps_its_ids(tmp_path: Path) -> None:
    """Of another shape too, and in another family."""
    source = hub.save("llama", tmp_path / "hub")
    hub.change_config(source, bos_token_id=7, eos_token_id=[8, 9])
    convert(open_source(source), tmp_path / "mistral", Options(to="hf", model_type="mistral"))
    config = content(tmp_path / "mistral/config.json")
    assert (config["model_type"], config["bos_token_id"], config["eos_token_id"]) == ("mistral", 7, [8, 9])


@pytest.mark.parametrize("data", ["text", "synthetic"])
def test_an_export_of_a_run_says_it_too(data: str, tmp_path: Path) -> None:
    where = write_text(tmp_path / "data") if data == "text" else data
    train(
        2 if data == "text" else 1,
        [*tiny(tmp_path / "run", where, steps=1), "model.vocab_size=300", "checkpoint.export=hf"],
    )
    (folder,) = (tmp_path / "run/exports").iterdir()
    assert ids(folder) == ([256] * 4 if data == "text" else [None] * 4)


def test_only_the_known_noise_is_kept_from_the_user(caplog: pytest.LogCaptureFixture) -> None:
    from transformers.utils import logging as theirs

    theirs.enable_progress_bar()
    with compare._quiet():
        assert not theirs.is_progress_bar_enabled()
        for name, begins in compare.NOISE.items():
            # as the library does: the beginning may hold a place for an argument
            logging.getLogger(name).warning(begins, *["it"] * begins.count("%s"))
            logging.getLogger(name).warning("something else")
    assert theirs.is_progress_bar_enabled()
    assert [record.getMessage() for record in caplog.records] == ["something else"] * len(compare.NOISE)
    logging.getLogger("torchao").warning("Failed to load it.so")
    assert "Failed to load it.so" in caplog.text


# ---- chat templates

OWN = "{% for m in messages %}own {{ m.role }}: {{ m.content }}</s>{% endfor %}"
OTHER = "{% for m in messages %}other {{ m.role }}: {{ m.content }}</s>{% endfor %}"
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """A hub folder whose template is written in both of the places that there are."""
    folder = hub.save("llama", tmp_path / "chat")
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": OWN, "eos_token": "</s>", "tokenizer_class": "TokenizersBackend"})
    )
    (folder / "chat_template.jinja").write_text(OWN)
    return folder


def write_tokenizer(folder: Path, *more: str) -> Path:
    folder.mkdir(exist_ok=True)
    letters = [*string.ascii_letters, *":.|<>/", "Ġ", "Ċ"]
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", *more])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def learn(model: Path, folder: Path, *more: str) -> Path:
    """A step on two turns; ``folder`` holds the run."""
    rows = folder.with_suffix(".jsonl")
    rows.write_text(json.dumps({"messages": TURNS}) + "\n")
    wanted = ["task.kind=sft", "train.steps=1", "train.seq_len=128", "train.global_batch_size=1", "data.split="]
    train(1, [*recipe_of(model, folder, str(rows)), *wanted, *more])
    return folder


def rendered(folder: Path) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(folder).apply_chat_template(TURNS, tokenize=False))


@pytest.mark.parametrize("more", [(), ("lora.rank=2", "checkpoint.export=peft")], ids=["all weights", "adapters"])
def test_the_template_that_was_used_goes_along(more: tuple[str, ...], chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text(OTHER)
    run = learn(chat_model, tmp_path / "run", f"data.template={tmp_path / 'other.jinja'}", *more)
    (export,) = (tmp_path / "run/exports").iterdir()
    if more:
        convert_adapter(run, tmp_path / "adapter")
    convert(open_source(run), tmp_path / "merged", Options(to="hf"))
    convert(open_source(run), tmp_path / "ours", Options(to="paceline"))
    convert(open_source(tmp_path / "ours"), tmp_path / "again", Options(to="hf"))
    for folder in (export, tmp_path / "merged", tmp_path / "again", *((tmp_path / "adapter",) if more else ())):
        assert rendered(folder) == "other user: Hi</s>other assistant: Yes</s>", folder
        assert OWN not in (folder / "tokenizer_config.json").read_text()


def test_without_another_one_the_model_s_own_goes_along(chat_model: Path, tmp_path: Path) -> None:
    learn(chat_model, tmp_path / "run")
    (export,) = (tmp_path / "run/exports").iterdir()
    assert rendered(export) == "own user: Hi</s>own assistant: Yes</s>"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (export / name).read_bytes() == (chat_model / name).read_bytes()


def test_another_tokenizer_than_the_model_s_goes_along_with_its_own_files(chat_model: Path, tmp_path: Path) -> None:
    """With a token more, and its template in a file of its own."""
    (chat_model / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    other = write_tokenizer(tmp_path / "tokenizer", "<stop>")
    (other / "chat_template.jinja").write_text(OTHER.replace("</s>", "<stop>"))
    (other / "tokenizer_config.json").write_text('{"eos_token": "<stop>", "tokenizer_class": "TokenizersBackend"}')
    learn(chat_model, tmp_path / "run", f"data.tokenizer={other}")
    (export,) = (tmp_path / "run/exports").iterdir()
    assert rendered(export) == "other user: Hi<stop>other assistant: Yes<stop>"
    assert not (export / "special_tokens_map.json").exists()
    assert (export / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


CHATTY = "{% for m in messages %}{{ m.role }}: {{ m.content }}<stop>{% endfor %}"


def test_the_turn_s_end_of_another_template_ends_a_text(chat_model: Path, tmp_path: Path) -> None:
    """Behind the ids that are there; the model's own template leaves them as they are."""
    write_tokenizer(chat_model, "<stop>")
    tokenizer = Tokenizer.from_file(str(chat_model / "tokenizer.json"))
    end, stop = tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<stop>")
    (chat_model / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "temperature": 0.6}))
    more = chat_model / "additional_chat_templates" / "tool_use.jinja"
    more.parent.mkdir()
    more.write_text(OWN)
    (tmp_path / "other.jinja").write_text(CHATTY)
    own = learn(chat_model, tmp_path / "own")
    adapters = learn(chat_model, tmp_path / "adapters", "lora.rank=2", "checkpoint.export=peft")
    assert next((adapters / "exports").glob("*/additional_chat_templates/tool_use.jinja")).read_text() == OWN
    other = learn(chat_model, tmp_path / "other", f"data.template={tmp_path / 'other.jinja'}")
    for run, ids, tools in ((own, end, True), (other, [end, stop], False)):
        (export,) = (run / "exports").iterdir()
        convert(open_source(run), tmp_path / f"{run.name}-merged", Options(to="hf"))
        convert(open_source(run), tmp_path / f"{run.name}-ours", Options(to="paceline"))
        convert(open_source(tmp_path / f"{run.name}-ours"), tmp_path / f"{run.name}-again", Options(to="hf"))
        for folder in (export, tmp_path / f"{run.name}-merged", tmp_path / f"{run.name}-again"):
            assert content(folder / "generation_config.json") == {"eos_token_id": ids, "temperature": 0.6}, folder
            # templates for tools that the model has learned nothing by would be taken before the one that it has
            assert (folder / "additional_chat_templates" / "tool_use.jinja").exists() == tools, folder


def test_settings_are_made_where_there_are_none(chat_model: Path, tmp_path: Path) -> None:
    write_tokenizer(chat_model, "<stop>")
    (tmp_path / "other.jinja").write_text(CHATTY)
    run = learn(chat_model, tmp_path / "run", f"data.template={tmp_path / 'other.jinja'}")
    (export,) = (run / "exports").iterdir()
    first, stop = content(chat_model / "config.json")["eos_token_id"], content(export / "tokenizer.json")
    number = next(token["id"] for token in stop["added_tokens"] if token["content"] == "<stop>")
    assert content(export / "generation_config.json")["eos_token_id"] == (
        [first, number] if first is not None else number
    )
