"""Chat templates by name, for tokenizers that bring none. The markers are the families' own; the templates are ours.

Each says in ``{% generation %}`` what the assistant's part is, its end marker included, so masks are exact.
"""

from __future__ import annotations

from collections.abc import Mapping

_SYSTEM_FIRST = """\
{%- set system = messages[0].content if messages[0].role == "system" else "" -%}
{%- set turns = messages[1:] if messages[0].role == "system" else messages -%}
"""
_NO_TOOLS = """\
{%- if tools %}{{ raise_exception("this template has no place for tools") }}{% endif -%}
"""
_NO_CALLS = """\
{%- if message.role == "tool" or message.tool_calls %}\
{{ raise_exception("this template has no place for tool calls and their answers") }}{% endif -%}
"""

_CHATML = (
    _SYSTEM_FIRST
    + """\
{%- if tools -%}
<|im_start|>system
{{ system ~ "\n\n" if system }}You may call these functions; each line is the JSON description of one.
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>
Answer with a call as JSON: <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
{% elif system -%}
<|im_start|>system
{{ system }}<|im_end|>
{% endif -%}
{%- for message in turns -%}
{%- if message.role == "assistant" -%}
<|im_start|>assistant
{% generation -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ "\n" if message.content or not loop.first }}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{%- endgeneration %}

{% elif message.role == "tool" -%}
{{ "<|im_start|>user" if loop.first or loop.previtem.role != "tool" }}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != "tool" -%}
<|im_end|>
{% endif -%}
{%- else -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
)

_LLAMA3 = (
    _SYSTEM_FIRST
    + """\
{{- bos_token -}}
{%- if system or tools -%}
<|start_header_id|>system<|end_header_id|>

{{ system }}
{%- if tools -%}
{{ "\n\n" if system }}You may call these functions. Answer with a call as JSON: {"name": NAME, "parameters": OBJECT}
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
{%- endif -%}
<|eot_id|>
{%- endif -%}
{%- for message in turns -%}
<|start_header_id|>{{ "ipython" if message.role == "tool" else message.role }}<|end_header_id|>

{% if message.role == "assistant" -%}
{%- if message.tool_calls and message.tool_calls | length > 1 -%}
{{ raise_exception("this template has one tool call a turn") }}
{%- endif -%}
{%- generation -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{"name": {{ call.function.name | tojson }}, "parameters": {{ call.function.arguments | tojson }}}
{%- endfor -%}
<|eot_id|>
{%- endgeneration -%}
{%- else -%}
{{ message.content }}<|eot_id|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% endif -%}
"""
)

_MISTRAL = (
    _NO_TOOLS
    + _SYSTEM_FIRST
    + """\
{{- bos_token -}}
{%- for message in turns -%}
"""
    + _NO_CALLS
    + """\
{%- if message.role == "assistant" -%}
{%- generation %} {{ message.content }}{{ eos_token }}{% endgeneration -%}
{%- else -%}
[INST] {{ system ~ "\n\n" if system and loop.first }}{{ message.content }} [/INST]
{%- endif -%}
{%- endfor -%}
"""
)

_GEMMA = (
    _NO_TOOLS
    + _SYSTEM_FIRST
    + """\
{{- bos_token -}}
{%- for message in turns -%}
"""
    + _NO_CALLS
    + """\
<start_of_turn>{{ "model" if message.role == "assistant" else "user" }}
{% if message.role == "assistant" -%}
{%- generation %}{{ message.content }}<end_of_turn>{% endgeneration %}

{% else -%}
{{ system ~ "\n\n" if system and loop.first }}{{ message.content }}<end_of_turn>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<start_of_turn>model
{% endif -%}
"""
)

_ZEPHYR = (
    _NO_TOOLS
    + """\
{%- for message in messages -%}
"""
    + _NO_CALLS
    + """\
<|{{ message.role }}|>
{% if message.role == "assistant" -%}
{%- generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}

{% else -%}
{{ message.content }}{{ eos_token }}
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{% endif -%}
"""
)

_ALPACA = (
    _NO_TOOLS
    + _SYSTEM_FIRST
    + """\
{{- bos_token -}}
{{- system ~ "\n\n" if system -}}
{%- for message in turns -%}
"""
    + _NO_CALLS
    + """\
{%- if message.role == "assistant" -%}
### Response:
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}


{% else -%}
### Instruction:
{{ message.content }}

{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
### Response:
{% endif -%}
"""
)

_VICUNA = (
    _NO_TOOLS
    + _SYSTEM_FIRST
    + """\
{{- bos_token -}}
{{- system ~ "\n\n" if system -}}
{%- for message in turns -%}
"""
    + _NO_CALLS
    + """\
{%- if message.role == "assistant" -%}
ASSISTANT:{% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}

{% else -%}
USER: {{ message.content }}
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}ASSISTANT:{% endif -%}
"""
)

NAMED: Mapping[str, str] = {
    "chatml": _CHATML,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
    "gemma": _GEMMA,
    "zephyr": _ZEPHYR,
    "alpaca": _ALPACA,
    "vicuna": _VICUNA,
}
MARKERS: Mapping[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
}
"""Texts of templates that are control tokens in the tokenizers of their families; those of others are plain text."""
OTHER_NAMES: Mapping[str, str] = {"qwen": "chatml"}
"""Families that take a template of another name."""
