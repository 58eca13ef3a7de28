"""Which flags does a Megatron-LM command line give? A table of those that are known, and what was given of them.

A flag is *read* where it decides the model, the layout, the batch, memory or speed; *passive* where it decides none of
these (files, logging, the learning rate's course). Anything else is unknown and listed, never dropped. Old spellings
(2020 to 2023) and those of Megatron-DeepSpeed are understood as today's.

Source: Megatron-LM's `arguments.py` of 2021 to 2026, as its example scripts use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.planner.shell_words import is_open

_READ_VALUES = """
num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels seq-length
max-position-embeddings position-embedding-type rotary-base rotary-percent rotary-scaling-factor normalization
norm-epsilon init-method-std attention-dropout hidden-dropout vocab-size padded-vocab-size pad-vocab-size-to
make-vocab-size-divisible-by tokenizer-type tokenizer-model tokenizer-name-or-path vocab-file window-size
q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mscale mscale-all-dim mtp-num-layers
num-experts moe-router-topk moe-ffn-hidden-size moe-layer-freq moe-shared-expert-intermediate-size moe-aux-loss-coeff
moe-z-loss-coeff moe-router-load-balancing-type moe-router-score-function moe-router-num-groups moe-router-group-topk
moe-router-topk-scaling-factor moe-router-bias-update-rate moe-router-dtype moe-token-dispatcher-type
moe-expert-capacity-factor moe-token-drop-policy num-shared-experts
micro-batch-size global-batch-size train-iters train-samples lr min-lr weight-decay adam-beta1 adam-beta2 adam-eps
clip-grad lr-warmup-iters lr-warmup-samples lr-warmup-fraction seed optimizer
fp8-format fp8-recipe fp4-format attention-backend transformer-impl
tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size
expert-tensor-parallel-size num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout
microbatch-group-size-per-virtual-pipeline-stage cp-comm-type data-parallel-sharding-strategy
num-distributed-optimizer-instances recompute-granularity recompute-method recompute-num-layers
optimizer-offload-fraction ddp-bucket-size main-grads-dtype exp-avg-dtype exp-avg-sq-dtype zero-stage
cuda-graph-impl log-interval pp-partition-method
"""

_READ_SWITCHES = """
group-query-attention multi-latent-attention qk-layernorm swiglu squared-relu openai-gelu disable-bias-linear
add-qkv-bias untie-embeddings-and-output-weights use-rotary-position-embeddings no-position-embedding
apply-layernorm-1p embed-layernorm moe-router-enable-expert-bias moe-router-pre-softmax moe-grouped-gemm
moe-permute-fusion moe-router-fusion moe-shared-expert-overlap moe-router-force-load-balancing
moe-use-legacy-grouped-gemm
bf16 fp16 fp8-param-gather sequence-parallel use-distributed-optimizer overlap-grad-reduce overlap-param-gather
overlap-param-gather-with-optimizer-step use-megatron-fsdp use-custom-fsdp use-torch-fsdp2 grad-reduce-in-bf16
use-precision-aware-optimizer optimizer-cpu-offload recompute-activations checkpoint-activations
distribute-saved-activations account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
no-overlap-p2p-communication tp-comm-overlap no-async-tensor-model-parallel-allreduce
no-gradient-accumulation-fusion cross-entropy-loss-fusion use-flash-attn no-masked-softmax-fusion
overlap-moe-expert-parallel-comm delay-wgrad-compute manual-gc log-throughput deepspeed
deepspeed-activation-checkpointing no-pipeline-parallel check-for-nan-in-loss-and-grad
no-check-for-nan-in-loss-and-grad use-tp-pp-dp-mapping
"""

_PASSIVE_VALUES = """
data-cache-path data-impl merge-file split save load load-format tensorboard-dir tensorboard-queue-size
tensorboard-log-interval wandb-project wandb-exp-name wandb-save-dir wandb-entity save-interval eval-interval
eval-iters exit-interval exit-duration-in-mins distributed-backend distributed-timeout-minutes ckpt-format
dist-ckpt-format num-workers valid-num-workers dataloader-type lr-decay-style lr-decay-iters lr-decay-samples
lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples lr-warmup-init decoupled-lr decoupled-min-lr loss-scale
initial-loss-scale min-loss-scale loss-scale-window hysteresis fp8-margin fp8-interval fp8-amax-history-len
fp8-amax-compute-algo empty-unused-memory-level profile-step-start profile-step-end timing-log-level
timing-log-option manual-gc-interval tiktoken-pattern eod-mask-loss-value local-rank node-rank master-addr
master-port hf-tokenizer-path extra-vocab-size max-padding-length dataset train-mode embedding-init-method-std
start-weight-decay end-weight-decay weight-decay-incr-style rotary-seq-len-interpolation-factor rotary-interleaved
deepspeed_config deepspeed-config kill-switch-path train-weighted-split-paths-path
valid-weighted-split-paths-path DDP-impl ds-pipeline-enabled attention-sink-k rope-scaling-factor
retro-workdir yaml-cfg save-retain-interval non-persistent-save-interval async-strategy
ckpt-fully-parallel-save-process-group fp8-wgrad-override logging-level log-memory-interval per-split-data-args-path
nccl-communicator-config-path ddp-num-buckets
"""

_PASSIVE_SWITCHES = """
use-mcore-models mock-data no-load-optim no-load-rng no-save-optim no-save-rng finetune use-checkpoint-args
use-mp-args-from-checkpoint-args exit-on-missing-checkpoint override-opt_param-scheduler
override-opt-param-scheduler use-checkpoint-opt_param-scheduler profile use-pytorch-profiler
record-memory-history log-timers-to-tensorboard log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard
log-memory-to-tensorboard log-params-norm log-num-zeros-in-grad log-world-size-to-tensorboard log-progress
log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard no-create-attention-mask-in-dataloader
create-attention-mask-in-dataloader no-mmap-bin-files reset-position-ids reset-attention-mask eod-mask-loss
use-cpu-initialization attention-softmax-in-fp32 apply-query-key-layer-scaling no-query-key-layer-scaling
no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm
calculate-per-token-loss decoupled-weight-decay use-contiguous-parameters-in-local-ddp
no-contiguous-buffers-in-local-ddp abort-on-unmet-fused-kernel-constraints no-async-save async-save
ckpt-fully-parallel-load use-dist-ckpt auto-detect-ckpt-format dist-ckpt-strictness transformer-pipeline
enable-shared-expert adlr-autoresume no-initialization test-mode one-logger-async no-one-logger disable-mscale
use-legacy-models accumulate-allreduce-grads-in-fp32 no-ckpt-fully-parallel-save te-rng-tracker sft
enable-experimental log-straggler moe-per-layer-logging use-fused-weighted-squared-relu
no-align-grad-reduce align-param-gather no-align-param-gather rotary-interleaved use-rope-scaling
use-one-sent-docs data-efficiency no-data-sharding verify-integrity deterministic-mode exit-signal-handler
"""

_MANY = """data-path train-data-path valid-data-path test-data-path rampup-batch-size recompute-modules
hierarchical-context-parallel-sizes offload-modules cuda-graph-scope cuda-graph-modules profile-ranks
load-iteration log-energy"""

_OLD = {
    "model-parallel-size": "tensor-model-parallel-size",
    "batch-size": "micro-batch-size",
    "warmup": "lr-warmup-fraction",
    "use-custom-fsdp": "use-megatron-fsdp",
    "layernorm-epsilon": "norm-epsilon",
    "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers",
    "fp8-hybrid": "fp8-format",
    "num-key-value-heads": "num-query-groups",
    "rope-theta": "rotary-base",
    "pad-vocab-size-to": "padded-vocab-size",
}
"""Earlier spellings, and those of descendants."""

VALUES = frozenset((_READ_VALUES + _PASSIVE_VALUES).split()) | {
    old for old in _OLD if old not in ("use-custom-fsdp", "fp8-hybrid")
}
SWITCHES = frozenset((_READ_SWITCHES + _PASSIVE_SWITCHES).split()) | {"use-custom-fsdp", "fp8-hybrid"}
MANY = frozenset(_MANY.split())
PASSIVE = frozenset((_PASSIVE_VALUES + _PASSIVE_SWITCHES).split()) | {
    name for name in MANY if name not in ("rampup-batch-size", "recompute-modules")
}
KNOWN = VALUES | SWITCHES | MANY


@dataclass(frozen=True, kw_only=True)
class UnknownFlag:
    """A flag that is not in the table."""

    name: str
    values: tuple[str, ...]
    near: str
    """A known one that is spelled like it; empty if there is none."""

    def __str__(self) -> str:
        return " ".join((f"--{self.name}", *self.values))


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What was given, by today's names without the dashes."""

    given: dict[str, tuple[str, ...]]
    unknown: tuple[UnknownFlag, ...]
    repeated: tuple[str, ...]
    """Given more than once with different values; the last one counts."""
    open: dict[str, str]
    """Values that hold a variable which nothing sets."""
    bare: tuple[str, ...] = ()
    """Given without the value that they need."""

    def on(self, *names: str) -> bool:
        """Whether one of them was given."""
        return any(name in self.given for name in names)

    def text(self, name: str, default: str = "") -> str:
        """Its value; the default where it was not given or has an open value."""
        values = self.given.get(name, ())
        return values[0] if values and name not in self.open else default

    def integer(self, name: str, default: int) -> int:
        """Its value.

        Raises:
            ConfigError: it is no whole number.
        """
        return int(self.number(name, default, whole=True))

    def degree(self, name: str, default: int) -> int:
        """Its value, 1 or more.

        Raises:
            ConfigError: it is less, or no whole number.
        """
        value = self.integer(name, default)
        if value < 1:
            raise ConfigError(
                f"--{name} {value} is less than 1", next_step=f"Give --{name} 1 or more, or leave it out."
            )
        return value

    def number(self, name: str, default: float, *, whole: bool = False) -> float:
        text = self.text(name)
        if name in self.open:
            raise ConfigError(
                f"--{name} is {self.open[name]}, which nothing in the script sets",
                next_step=f"Say what it is: paceline plan megatron ... --env {_variable(self.open[name])}=VALUE",
            )
        if not text:
            return default
        try:
            return int(text.replace("_", "")) if whole else float(text.replace("_", ""))
        except ValueError as error:
            kind = "whole number" if whole else "number"
            raise ConfigError(
                f"--{name} {text} is no {kind}", next_step=f"Give --{name} a {kind}, or leave it out."
            ) from error


def parse_flags(words: Sequence[str]) -> Flags:
    """Sorts the words behind the program into flags and their values."""
    given: dict[str, tuple[str, ...]] = {}
    unknown: list[UnknownFlag] = []
    repeated: list[str] = []
    unset: dict[str, str] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--"):
            continue  # the value of nothing: what an unset variable leaves, or a stray backslash
        spelled, equals, attached = word[2:].partition("=")
        end = at
        while end < len(words) and not words[end].startswith("--"):
            end += 1
        values = (attached,) if equals else tuple(words[at:end])
        name = _known(spelled)
        if name is None:
            unknown.append(UnknownFlag(name=spelled, values=values, near=_near(spelled)))
            continue
        known_name = _OLD.get(name, name)
        if name in VALUES:
            values = values[:1]
        elif name in SWITCHES:
            values = values if equals else ()
        if known_name in given and given[known_name] != values:
            repeated.append(known_name)
        given[known_name] = values
        if open_values := [value for value in values if is_open(value)]:
            unset[known_name] = open_values[0]
        else:
            unset.pop(known_name, None)
        at += 0 if equals else len(values)
    bare = tuple(name for name, values in given.items() if name in VALUES and not values)
    return Flags(given=given, unknown=tuple(unknown), repeated=tuple(repeated), open=unset, bare=bare)


def _known(spelled: str) -> str | None:
    for name in (spelled, spelled.replace("_", "-")):
        if name in KNOWN:
            return name
    return None


def _near(spelled: str) -> str:
    found = difflib.get_close_matches(spelled.replace("_", "-"), sorted(KNOWN), n=1, cutoff=0.82)
    return found[0] if found else ""


def _variable(text: str) -> str:
    return text.strip("${}").split(":")[0] or "NAME"
