"""Recipes with adapters that cannot be, each refused with a way out."""

from __future__ import annotations

import pytest

from paceline.config.check import check
from paceline.config.load import resolve
from paceline.errors import ConfigError
from paceline.interop import formats

ON = "lora.rank=4"


def findings(*sets: str) -> dict[str, str]:
    recipe = resolve({}, list(sets))
    formats.register(recipe.registry)
    return {f.id: f"{f.subject} {f.evidence} {f.next_step}" for f in check(recipe.config, recipe.registry, 1)}


@pytest.mark.parametrize(
    ("sets", "identity", "words"),
    [
        (("checkpoint.export=peft",), "config.lora-export", "Set lora.rank"),
        ((ON, "checkpoint.export=hf"), "config.lora-export", "paceline convert RUN"),
        ((ON, "lora.targets=q_down_proj"), "config.lora-targets", "q_proj, k_proj"),
        ((ON, "optim.name=muon"), "config.lora-muon", "optim.name = 'adamw'"),
        ((ON, "lora.base=fp8"), "config.lora-fp8", "train.precision = 'fp8'"),
        ((ON, "lora.base=nf4", "parallel.zero=3"), "config.lora-base-fsdp", "parallel.zero = 1"),
        ((ON, "lora.base=nf4", "train.precision=fp8"), "config.lora-nf4-fp8", "lora.base = 'bf16'"),
        ((ON,), "config.lora-base", "model.init_from"),
        (("lora.alpha=3",), "config.idle-option", "lora.rank = 0"),
    ],
)
def test_refused_or_told(sets: tuple[str, ...], identity: str, words: str) -> None:
    found = findings(*sets)
    assert any(name.startswith(identity) and words in text for name, text in found.items()), found


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("lora.targets=[]",), "lora.targets is empty"),
        (('lora.targets=["all-linear", "q_proj"]',), "names all linears and some of them"),
        (("lora.dora=true", "lora.dropout=0.1"), "does not go with lora.dora"),
        (("lora.dora=true", "lora.base=nf4"), "lora.dora does not go with lora.base"),
        (("lora.targets=lm_head",), "lora.targets"),
    ],
)
def test_the_section_itself(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        resolve({}, [ON, *sets])


def test_a_plain_recipe_hears_nothing_of_adapters() -> None:
    assert not [name for name in findings() if "lora" in name]
