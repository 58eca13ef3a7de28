"""Small tokenizers with the control tokens of chat templates, and templates of the kinds that are met."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MARKERS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<s>",
    "</s>",
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THINKING = (  # thoughts of all but the last answer are left out, and the last one always has some
    "{% for message in messages %}"
    "{% set said = message['content'].split('</think>')[-1].lstrip('\\n') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ said }}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OPENED = (  # the generation prompt opens a thought, the answers do not have it
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|im_start|>' + message['content'] }}"
    "{% else %}{{ '<|im_end|>' + message['content'] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|><think>\\n' }}{% endif %}"
)
ENDED = (  # a text that is over ends with one more marker (as Phi-4-mini's)
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_end|>' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_end|>' }}{% else %}{{ eos_token }}{% endif %}"
)
CALLS_AS_TEXT = (  # as DeepSeek-R1's: arguments are joined to text, and a turn of calls has no text
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>' }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<start_of_turn>' + call.function.name + ':' + call.function.arguments + '</s>' }}{% endfor %}"
    "{% if message['content'] is not none %}{{ message['content'] + '</s>' }}{% endif %}"
    "{% else %}{{ '<|im_end|>' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
LAST_SYSTEM = (  # the system prompt stands with the last user turn, wherever that is
    "{% set turns = messages[1:] if messages[0]['role'] == 'system' else messages %}{{ '<s>' }}"
    "{% for message in turns %}{% if message['role'] == 'user' %}"
    "{% if loop.last or loop.index == turns | length - 1 %}"
    "{{ '[INST] ' + messages[0]['content'] + message['content'] }}"
    "{% else %}{{ '[INST] ' + message['content'] }}{% endif %}{{ ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + '</s>' }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
FORGETFUL = "{% for message in messages if message['role'] != 'system' %}{{ message['content'] + '</s>' }}{% endfor %}"


def write_tokenizer(folder: Path, template: str = "", *, eos: str = "<|im_end|>", metaspace: bool = False) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json.

    Args:
        metaspace: spaces are part of words as in Llama 2, and bytes stand in for characters that are not known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer(models.BPE(unk_token="<unk>" if metaspace else None, byte_fallback=metaspace))
    backend.pre_tokenizer = (
        pre_tokenizers.Metaspace(prepend_scheme="first")
        if metaspace
        else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    backend.decoder = decoders.Metaspace() if metaspace else decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640 if metaspace else 320,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))] if metaspace else [],
        initial_alphabet=[] if metaspace else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox says hello to the user and the assistant " * 4], trainer)
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
