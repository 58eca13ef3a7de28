"""Recipes drawn at random: a model, a batch and a layout, most of which fit each other and some of which do not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from paceline.config.check import check, refuse_errors
from paceline.config.load import resolve
from paceline.errors import ConfigError
from tests.training.steps import Job, config_of, sets_of

T = TypeVar("T")
Values = dict[str, object]
WORLD_SIZES = {1: 1, 2: 4, 3: 2, 4: 6, 5: 1, 6: 3, 7: 1, 8: 6}
"""How often each is drawn."""
AXES = {"tp": 3, "pp": 3, "cp": 2, "dp_replicate": 1, "dp_shard": 2}
"""How often a factor of the world size goes to each."""
FACTORS = {2: (2,), 3: (3,), 4: (2, 2), 5: (5,), 6: (2, 3), 7: (7,), 8: (2, 2, 2)}
STAGES = {"1f1b": (1,), "interleaved_1f1b": (2, 2, 3), "zero_bubble": (1, 1, 2), "zbv": (2,)}
"""Stages on a rank that a schedule admits."""
MODES = ("none", "selective", "full")
MOST_LAYERS = 8
RARELY = 0.05
"""Share of the choices that do not look at what fits."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One recipe, and how to draw it again."""

    seed: int
    index: int
    ranks: int
    model: tuple[str, ...]
    """Overrides that decide the result."""
    layout: tuple[str, ...]
    """Overrides that must not."""
    micro: int
    sequences: int
    length: int
    masks: str
    packed: bool

    @property
    def job(self) -> Job:
        return self._job((*self.model, *self.layout), self.micro)

    @property
    def reference(self) -> Job:
        """The same model and batch on one process, in one micro-batch."""
        return self._job(self.model, self.sequences)

    def _job(self, sets: tuple[str, ...], micro: int) -> Job:
        return Job(
            sets=sets,
            micro=micro,
            masks=self.masks,
            steps=2,
            length=self.length,
            dtype=torch.float64,
            sequences=self.sequences,
            packed=self.packed,
        )

    @property
    def axes(self) -> int:
        """Axes along which there is more than one rank; expert axes fold over the others and count beside them."""
        parallel = config_of(self.job).parallel
        sizes = (parallel.tp, parallel.pp, parallel.cp, parallel.dp_replicate, parallel.ep, parallel.etp)
        return sum(size > 1 for size in (*sizes, parallel.shard_degree(self.ranks)))

    def refusal(self) -> ConfigError | None:
        """What the schema or `config.check` has against it."""
        try:
            recipe = resolve({}, sets_of(self.job))
            refuse_errors(check(recipe.config, recipe.registry, self.ranks))
        except ConfigError as refused:
            return refused
        return None

    def __str__(self) -> str:
        sets = " ".join(f"--set '{item}'" for item in sets_of(self.job))
        return (
            f"--recipes-seed={self.seed} --recipes-first={self.index} --recipes=1: {self.ranks} ranks, labels "
            f"{self.masks}{', packed' * self.packed}, {sets}"
        )


def draw(seed: int, index: int) -> Drawn:
    """Recipe number ``index`` of a seed: the same on every machine, whatever was drawn before."""
    dice = _Dice(random.Random(f"{seed}/{index}"))
    ranks = dice.weighed(WORLD_SIZES)
    degrees = _degrees(dice, ranks)
    pipeline = _pipeline(dice, degrees["pp"])
    layers = dice.any(2, 3, 4)
    if not dice.rarely():
        layers = max(layers, degrees["pp"] * int(str(pipeline.get("stages_per_rank", 1))))
    model = _model(dice, ranks, min(layers, MOST_LAYERS))
    dp = degrees["dp_replicate"] * degrees["dp_shard"]
    micro = dice.any(1, 1, 2)
    return Drawn(
        seed=seed,
        index=index,
        ranks=ranks,
        model=(*_sets("model", model), *_capacity(f"{seed}/{index}", model), *_optimizer(dice)),
        layout=(
            *_layout(dice, ranks, degrees, pipeline, model),
            *_expert_kernels(f"{seed}/{index}", model),
            *_fused(f"{seed}/{index}"),
        ),
        micro=micro,
        sequences=dice.any(8, 12) if dice.rarely() else micro * dp * dice.any(1, 2, 3, 4),
        # a multiple of what ring attention and sequence parallelism cut it into, where that is one factor of the world
        length=18 if dice.rarely() else {3: 18, 5: 20, 6: 24, 7: 28}.get(ranks, 16),
        masks=dice.any("none", "uneven", "uneven", "half"),
        packed=dice.chance(0.2),
    )


class _Dice:
    def __init__(self, source: random.Random) -> None:
        self.source = source

    def any(self, *values: T) -> T:
        return self.source.choice(values)

    def chance(self, share: float) -> bool:
        return self.source.random() < share

    def rarely(self) -> bool:
        return self.chance(RARELY)

    def weighed(self, weights: Mapping[T, float]) -> T:
        return self.source.choices(list(weights), list(weights.values()))[0]


def _sets(section: str, values: Values) -> tuple[str, ...]:
    def spelled(value: object) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return str(list(value)).replace("'", '"') if isinstance(value, tuple) else str(value)

    return tuple(f"{section}.{name}={spelled(value)}" for name, value in values.items())


# ---- the layout


def _degrees(dice: _Dice, ranks: int) -> dict[str, int]:
    degrees = dict.fromkeys(AXES, 1)
    for factor in FACTORS.get(ranks, ()):
        degrees[dice.weighed(AXES)] *= factor
    if dice.rarely():
        degrees[dice.weighed(AXES)] = dice.any(1, 2, 3, 4)
    return degrees


def _pipeline(dice: _Dice, pp: int) -> Values:
    if pp == 1:
        return {"stages_per_rank": 2} if dice.rarely() else {}
    schedule = dice.any(*STAGES)
    stages = dice.any(1, 2, 3) if dice.rarely() else dice.any(*STAGES[schedule])
    return {"pipeline_schedule": schedule, "stages_per_rank": stages}


def _layout(
    dice: _Dice, ranks: int, degrees: Mapping[str, int], pipeline: Values, model: Mapping[str, object]
) -> tuple[str, ...]:
    values: Values = {**degrees, **pipeline}
    if dice.chance(0.5):
        values["dp_shard"] = 0
    experts = int(str(model.get("num_experts", 0)))
    if experts or dice.rarely():
        # more stages than ranks are drawn too, to be refused
        values |= _expert_degrees(dice, max(1, ranks // degrees["pp"]), experts)
    values["zero"] = dice.weighed({0: 1, 1: 3, 2: 1, 3: 2})
    if dice.chance(0.25):
        values["order"] = tuple(dice.source.sample(list(AXES), len(AXES)))
    layers = int(str(model["num_layers"]))
    stages = degrees["pp"] * int(str(pipeline.get("stages_per_rank", 1)))
    if degrees["pp"] > 1 and (dice.rarely() or (layers >= stages and dice.chance(0.3))):
        values["pipeline_layout"] = _cut(dice, layers, stages)
    values["cp_method"] = dice.any("ring", "ring", "ulysses")
    values["recompute"] = dice.any("none", "none", *MODES[1:], tuple(dice.any(*MODES) for _ in range(layers)))
    if dice.chance(0.15):
        values["offload"] = dice.any("optimizer", "optimizer", "parameters")
    kernels = {
        "loss_kernel": dice.any("chunked", "plain"),
        "attention_kernel": dice.any("auto", "reference"),
        "loss_chunk_tokens": dice.any(3, 8, 2048),
    }
    return (*_sets("parallel", values), *_sets("train", kernels))


def _expert_kernels(seed: str, model: Mapping[str, object]) -> tuple[str, ...]:
    """From dice of its own: the rest of a recipe is what it was before there were these options."""
    dice = _Dice(random.Random(f"{seed}/experts"))
    if not model.get("num_experts") or dice.chance(0.3):
        return ()
    kernels = dice.any("grouped", "triton")
    dispatch = dice.any("all_to_all", "all_gather")
    return _sets("parallel", {"expert_kernels": kernels, "expert_dispatch": dispatch})


def _capacity(seed: str, model: Mapping[str, object]) -> tuple[str, ...]:
    """So small now and then that a rank may be left without any assignment."""
    small = model.get("num_experts") and _Dice(random.Random(f"{seed}/capacity")).chance(0.15)
    return ("model.moe.capacity_factor=0.2",) if small else ()


def _fused(seed: str) -> tuple[str, ...]:
    """From dice of its own, too."""
    dice = _Dice(random.Random(f"{seed}/fused"))
    switches = ("optim.fused_update", "parallel.fused_weight_gradients")
    return tuple(f"{switch}=true" for switch in switches if dice.chance(0.3))


def _expert_degrees(dice: _Dice, ranks: int, experts: int) -> Values:
    if dice.rarely():
        return {"ep": dice.any(1, 2, 3, 4), "etp": dice.any(1, 2, 4)}
    ep = dice.any(*(size for size in range(1, ranks + 1) if ranks % size == 0 and experts % size == 0))
    return {"ep": ep, "etp": dice.any(*(size for size in range(1, ranks // ep + 1) if ranks // ep % size == 0))}


def _cut(dice: _Dice, layers: int, stages: int) -> tuple[int, ...]:
    """Any layers for each stage, and at least one."""
    if layers < stages:
        return (1,) * stages
    ends = sorted(dice.source.sample(range(1, layers), stages - 1))
    return tuple(end - start for start, end in zip([0, *ends], [*ends, layers], strict=True))


# ---- what is trained


def _optimizer(dice: _Dice) -> tuple[str, ...]:
    return _sets(
        "optim",
        {
            "name": dice.any("adamw", "adamw", "adamw", "muon"),
            "lr": 0.01,
            # what AdamW makes of a gradient that is zero but for rounding
            "eps": 1e-5,
            "weight_decay": dice.any(0.0, 0.1),
            "grad_clip": dice.any(0.0, 0.5),
        },
    )


def _model(dice: _Dice, ranks: int, layers: int) -> Values:
    """Heads and widths that as many ranks divide, or a factor of them."""
    heads = {3: 6, 5: 5, 6: 6, 7: 7}.get(ranks, dice.any(4, 8))
    if dice.rarely():
        heads = 6
    width = 4 * heads
    values: Values = {
        "num_layers": layers,
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": dice.any(*(size for size in range(1, heads + 1) if heads % size == 0)),
        "ffn_size": 2 * width,
        "vocab_size": dice.any(64, 67, 96),
        "init_std": 0.2,
        "norm": dice.any("rmsnorm", "layernorm"),
        "norm_unit_offset": dice.chance(0.2),
        "post_norm": dice.chance(0.25),
        "activation": dice.any("swiglu", "swiglu", "geglu", "gelu_tanh", "gelu"),
        "qkv_bias": dice.chance(0.3),
        "attention_out_bias": dice.chance(0.3),
        "mlp_bias": dice.chance(0.3),
        "tie_embeddings": dice.chance(0.5),
        "embedding_scale": dice.chance(0.2),
        "logit_softcap": dice.any(0.0, 0.0, 5.0),
        "scaled_residual_init": dice.chance(0.5),
    }
    values |= _latent_attention(dice) if dice.chance(0.15) else _attention(dice)
    if dice.chance(0.45):
        values |= _experts(dice, ranks, width)
    if dice.chance(0.15):
        values |= {"mtp_layers": dice.any(1, 2)}
    return values


def _attention(dice: _Dice) -> Values:
    return {
        "position": dice.any("rope", "rope", "learned", "none"),
        "rope_fraction": dice.any(1.0, 1.0, 0.5),
        "qk_norm": dice.chance(0.3),
        "sliding_window": dice.any(0, 0, 5),
        "sliding_window_period": dice.any(1, 2),
        "attention_softcap": dice.any(0.0, 0.0, 3.0),
    }


def _latent_attention(dice: _Dice) -> Values:
    return {
        "attention": "mla",
        "kv_lora_rank": 8,
        "q_lora_rank": dice.any(0, 6),
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": dice.any(2, 4),
        "v_head_dim": dice.any(3, 4),
        "position": "learned" if dice.rarely() else "rope",
    }


def _experts(dice: _Dice, ranks: int, width: int) -> Values:
    top_k = dice.any(1, 2, 2, 3)
    experts = {3: 6, 5: 5, 6: 6, 7: 7}.get(ranks, dice.any(4, 8))
    groups = dice.any(1, 1, 2) if experts % 2 == 0 else 1
    period = dice.any(1, 1, 2)
    return {
        "num_experts": experts,
        "top_k": top_k,
        # a width that every part of the ranks divides
        "moe.ffn_size": {5: 20, 7: 28}.get(ranks, 24),
        "moe.layer_period": period,
        "moe.layer_offset": 1 if dice.rarely() else dice.any(0, period - 1),
        "moe.first_dense_layers": dice.any(0, 0, 0, 1),
        "moe.num_shared_experts": dice.any(0, 0, 1, 2),
        "moe.shared_ffn_size": dice.any(0, width),
        "moe.shared_gate": dice.chance(0.3),
        "moe.score": dice.any("softmax", "sigmoid"),
        "moe.normalize_top_k": dice.chance(0.5),
        "moe.score_scale": dice.any(1.0, 1.5),
        "moe.num_groups": groups,
        "moe.top_k_groups": groups if dice.chance(0.5) or top_k > experts // groups else 1,
        "moe.group_score": dice.any("max", "top2_sum"),
        "moe.bias_balance": dice.chance(0.4),
        "moe.aux_loss_coef": dice.any(0.0, 0.1),
        "moe.z_loss_coef": dice.any(0.0, 0.01),
        "moe.capacity_factor": dice.any(0.0, 0.0, 1.0, 1.5),
    }
