"""Asks a Hugging Face folder one question, with Transformers alone.

python examples/fine_tune/ask.py FOLDER "What is the capital of France?"
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, question: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    turns = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**asked, max_new_tokens=40, do_sample=False)
    print(tokenizer.decode(ids[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
