"""The `[parallel]` section: how the model is spread over ranks, and what is traded for memory."""

from __future__ import annotations

import difflib
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from paceline.config.base import Section
from paceline.errors import ConfigError

RecomputeMode = Literal["none", "selective", "full"]


class ParallelConfig(Section):
    """How the model is spread over ranks, and what is traded for memory."""

    tp: int = Field(1, ge=1)
    """Tensor parallel: heads, MLP widths, the vocabulary and the residual stream's sequence cut over so many ranks."""
    pp: int = Field(1, ge=1)
    """Pipeline parallel: layers cut into so many stages."""
    cp: int = Field(1, ge=1)
    """Context parallel: each sequence cut over so many ranks."""
    ep: int = Field(1, ge=1)
    """Expert parallel: experts spread over so many ranks of a pipeline stage, whatever else lies there."""
    etp: int = Field(1, ge=1)
    """Tensor parallel inside an expert."""
    dp_replicate: int = Field(1, ge=1)
    """Data parallel with whole copies of the (sharded) state: the outer part of HSDP."""
    dp_shard: int = Field(0, ge=0)
    """Data parallel over which the state is sharded, as far as `zero` says; 0 = all ranks that are left."""
    zero: Literal[0, 1, 2, 3] = 1
    """What is sharded over `dp_shard`: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    order: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    """Axes from outermost to innermost: neighbouring ranks differ in the last one."""
    pipeline_schedule: Literal["1f1b", "interleaved_1f1b", "zero_bubble", "zbv"] = "1f1b"
    """Order of forward and backward passes over the stages; `zero_bubble` and `zbv` split the backward pass."""
    stages_per_rank: int = Field(1, ge=1)
    """Runs of layers on a pipeline rank: 1 for `1f1b`, 2 or more for `interleaved_1f1b`, 2 for `zbv`, any number for
    `zero_bubble`."""
    pipeline_layout: tuple[int, ...] = ()
    """Layers of each stage; empty = cut by cost."""
    cp_method: Literal["ring", "ulysses"] = "ring"
    """Context parallel by passing keys and values around, or by all-to-all over heads."""
    bucket_mb: int = Field(100, ge=1)
    """Size of one gradient bucket of the flat engine (zero 0 and 1), in MiB."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are summed over ranks."""
    accumulate_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the flat engine (zero 0 and 1) sums gradients over micro-batches; FSDP does it in
    `reduce_dtype`."""
    fused_weight_gradients: bool = False
    """Matrix products of the flat engine's backward add weight gradients to their buckets themselves, in place of a
    gradient that is written, read and added; fp8 products, which cannot add, write the first micro-batch's (with bf16
    sums). Without effect under `zero` 2 and 3 and schedules that split the backward pass."""
    expert_kernels: Literal["plain", "grouped", "triton"] = "plain"
    """What computes the experts of a mixture: operations of torch; kernels of ours around torch's grouped products; or
    products of ours too, which pick an expert's tokens while they load. With `fused_weight_gradients` the last two add
    the experts' weight gradients to the buckets themselves."""
    expert_dispatch: Literal["all_to_all", "all_gather"] = "all_to_all"
    """How tokens come to the experts of other ranks: each to its experts; or all to all ranks, for few ranks and many
    experts a token, with `expert_kernels` other than `plain`: nothing waits for the number of rows."""
    recompute: RecomputeMode | tuple[RecomputeMode, ...] = "none"
    """What backward computes again instead of storing: `none`, `selective`, `full`, or one of these for each layer."""
    compile: bool = False
    """Compile each block (one graph, used by every layer) and the chunked loss with torch.compile."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lives in pinned host memory: `optimizer` = masters and moments; `parameters` = also sharded parameters."""

    @property
    def engine(self) -> Literal["flat", "fsdp"]:
        """The data-parallel engine: flat buffers for zero 0 and 1, FSDP2 for 2 and 3."""
        return "flat" if self.zero <= 1 else "fsdp"

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self.pp > 1 and self.pipeline_schedule in ("zero_bubble", "zbv")

    @property
    def adds_weight_gradients(self) -> bool:
        """Whether products add weight gradients to buckets."""
        return self.fused_weight_gradients and self.engine == "flat" and not self.splits_backward

    @property
    def stages(self) -> int:
        """Runs of layers that the model is cut into: pp * stages_per_rank."""
        return self.pp * self.stages_per_rank

    def shard_degree(self, world_size: int) -> int:
        """`dp_shard`, or what is left of `world_size` where it is 0.

        Raises:
            ConfigError: the degrees do not multiply to the world size.
        """
        fixed = self.model_ranks * self.dp_replicate
        if self.dp_shard == 0 and world_size % fixed == 0:
            return world_size // fixed
        if fixed * self.dp_shard == world_size:
            return self.dp_shard
        asked = " x ".join(
            f"{name} {value}"
            for name in ("tp", "pp", "cp", "dp_replicate", "dp_shard")
            if (value := getattr(self, name)) > 1 or (name == "dp_shard" and value == 1)
        )
        fit = (
            f"parallel.dp_shard = {world_size // fixed} fits; 0 takes whatever is left."
            if world_size % fixed == 0
            else f"tp * pp * cp * dp_replicate must divide {world_size}."
        )
        ranks = f"{world_size} ranks that there are" if world_size > 1 else "1 rank that there is"
        raise ConfigError(
            f"the recipe asks for {asked}, which does not make the {ranks}",
            evidence=f"tp * pp * cp * dp_replicate = {fixed}; times dp_shard it must be the world size.",
            next_step=fit,
        )

    def dp_degree(self, world_size: int) -> int:
        """Ranks that read different data: dp_replicate * dp_shard."""
        return self.dp_replicate * self.shard_degree(world_size)

    @field_validator("recompute", mode="before")
    @classmethod
    def _known_modes(cls, value: Any) -> Any:
        modes = get_args(RecomputeMode)
        listed = isinstance(value, list | tuple)
        unknown = [mode for mode in (value if listed else (value,)) if mode not in modes]
        if not unknown and value:
            return value
        near = difflib.get_close_matches(str(unknown[0]), modes, n=1) if unknown else []
        subject = f"parallel.recompute = {value!r} is no mode of recomputation"
        if listed:
            subject = (
                f"parallel.recompute is a list with {unknown[0]!r}, which is no mode"
                if unknown
                else ("parallel.recompute = [] names no mode")
            )
        raise ConfigError(
            subject,
            evidence=f"The modes are {', '.join(map(repr, modes))}: one for all layers, or a list with one for each.",
            next_step=(f"Did you mean {near[0]!r}? " if near else "")
            + "For example: --set parallel.recompute=selective, or for two layers --set "
            '\'parallel.recompute=["full", "none"]\'.',
        )

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        if sorted(self.order) != sorted(axes):
            raise ConfigError(
                f"parallel.order = {list(self.order)} is not an order of the axes",
                evidence=f"Each of {', '.join(axes)} must appear once.",
                next_step=f"Leave it out for the usual order {list(axes)}, or list all five.",
            )
        if self.zero == 3 or self.offload != "parameters":
            return self
        raise ConfigError(
            f"parallel.offload = 'parameters' needs parallel.zero = 3 (it is {self.zero})",
            evidence="Only sharded parameters can stay in host memory between uses.",
            next_step="Set parallel.zero = 3, or parallel.offload = 'optimizer'.",
        )
