"""What is to be predicted? A model, a layout and a batch as plain numbers, and the machines they run on.

The seam of the planner: `costs/step.py: predict(workload, cluster, profile) -> StepEstimate`. A `Workload` is made from
a recipe (`Workload.of(config)`), from a row of a published table (`planner/published.py`), from a Megatron command
line, or by `dataclasses.replace(workload, tp=4, pp=2)` in a search. It accepts layouts that Paceline itself refuses
(foreign systems have run them); what no system can run, `Workload.why_not(gpus)` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.costs.adapters import count_adapters, frozen_layer_bytes, layer_channels
from paceline.costs.hardware import Hardware
from paceline.costs.reference import extra_head_forwards, has_copy, runs_reference

Precision = Literal["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step. Degrees that are not given are 1; data parallelism takes the GPUs that are left."""

    model: ModelConfig
    seq_len: int
    micro_batch_size: int
    """Sequences that a rank computes at a time."""
    global_batch_size: int
    """Sequences of an optimizer step, over all ranks."""
    precision: Precision = "bf16"

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp_replicate: int = 1
    """Copies of the sharded state (HSDP); data parallelism in all is what the GPUs leave."""
    zero: Literal[0, 1, 2, 3] = 1
    """What is sharded over data-parallel ranks: 1 optimizer state, 2 also gradients, 3 also parameters."""
    stages_per_rank: int = 1
    """Runs of layers on a pipeline rank (interleaving)."""
    schedule: str = ""
    """Of `costs/pipeline.py`; empty = `1f1b`, or `interleaved_1f1b` with more than one stage a rank."""
    pipeline_layout: tuple[int, ...] = ()
    """Layers of each stage; empty = cut as the profile's framework does."""
    cp_method: Literal["ring", "ulysses"] = "ring"
    sequence_parallel: bool = True
    """With tp: the residual stream is cut along the sequence."""
    scattered_sends: bool = True
    """Ranks of tp that hold the same activations send a part each between stages, and gather them there."""

    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = ()
    """What `selective` recomputes, where a framework names modules: core_attn, mlp, moe, moe_act, layernorm; or
    second_linear: every second product and all that is cheap (torchtitan)."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    compile: bool = False
    fused_attention: bool = True
    """False materialises the scores."""
    flash4: bool = False
    """FlashAttention-4, in place of the fastest kernel of the framework."""
    chunked_loss: bool = False
    """Head and loss in slices of tokens, so that the logits are never whole."""
    loss_chunk_tokens: int = 2048
    accumulate_bf16: bool = False
    """Gradients are summed over micro-batches in bf16 instead of fp32."""
    reads_any_gradient: bool = False
    """The optimizer takes such sums as they are; otherwise it gets a copy of its shard in fp32."""
    reduce_bf16: bool = False
    """Gradients travel in bf16."""
    fused_weight_gradients: bool = False
    """Products add weight gradients to the sums themselves."""
    experts_in_bf16: bool = False
    """Whatever the precision of other products."""
    fused_experts: bool = False
    """Rows are copied, activated and summed by kernels that keep no copies (`parallel.expert_kernels`)."""
    dispatcher_permutes: bool = False
    """The kernels that send rows of experts also put them in order (HybridEP, DeepEP): half of the copies."""
    expert_epilogues: bool = False
    """Products of experts also activate and cast what they make (cuDNN's fused grouped products)."""
    clamped_experts: bool = False
    """Experts clamp gate and up before they activate them, by operators of their own (Megatron-Core's
    `activation_func_clamp_value`). Counted in time; what they keep more is not."""
    overlaps_experts: bool = False
    """Rows of experts are sent while another micro-batch is computed (Megatron-LM's
    `--overlap-moe-expert-parallel-comm`)."""
    fp8_attention: bool = False
    """Attention's core multiplies in 8 bits."""
    fp8_head: bool = False
    """The head's product is in 8 bits too."""
    fp8_weight_cache: bool = False
    casts_weights: bool = False
    """Weights are cast to 8 bits at each use, not once a step."""
    fp8_rowwise: bool = False
    """A scale for each row of a product instead of one for a tensor."""
    fp8_delayed: bool = False
    """Scales of earlier steps: inputs and gradients are cast in one reading, not two."""
    frozen_weights: bool = False
    """LoRA: no gradients, optimizer states and reductions of the model's own weights."""
    adapters: int = 0
    """Parameters of adapters beside frozen weights."""
    adapter_channels: float = 0.0
    """Channels that adapters of a layer read and write, over the layers' mean (`costs/adapters.py: layer_channels`)."""
    widens_weights: bool = False
    """Frozen weights in 4 bits are made 16 bits wide for each product."""
    frozen_bytes: float = 0.0
    """An element of the layers' frozen weights, in the mean, where that is another number than computing takes
    (`lora.base`); those outside of layers are kept as they are computed with."""
    persistent_products: bool = False
    """On Hopper and later, by a cuBLAS whose kernels write a tile while they compute the next one (CUDA 13)."""
    document_tokens: float = 0.0
    """Length of the document that a token lies in, in the mean, where documents share rows and do not see each other;
    0 = attention sees whole rows."""
    reference_copy: bool = False
    """The weights of a reference model are there too."""
    reference_forward: bool = False
    """A reference model runs over every micro-batch, forward alone."""
    extra_head_forwards: int = 0
    """How often logits are computed beyond once."""
    async_tp: bool = False
    """Communication of tensor parallelism is cut up and overlapped with its products."""

    @classmethod
    def of(cls, config: RunConfig) -> Workload:
        """What a recipe asks for."""
        parallel, train = config.parallel, config.train
        modes = parallel.recompute
        mode: Recompute = modes if isinstance(modes, str) else _most_frequent(modes)
        return cls(
            model=config.model,
            seq_len=train.seq_len,
            micro_batch_size=train.micro_batch_size,
            global_batch_size=train.global_batch_size,
            precision=train.precision,
            tp=parallel.tp,
            pp=parallel.pp,
            cp=parallel.cp,
            ep=parallel.ep,
            etp=parallel.etp,
            dp_replicate=parallel.dp_replicate,
            zero=parallel.zero,
            stages_per_rank=parallel.stages_per_rank,
            schedule=parallel.pipeline_schedule,
            pipeline_layout=parallel.pipeline_layout,
            cp_method=parallel.cp_method,
            recompute=mode,
            offload=parallel.offload,
            optimizer=config.optim.name,
            compile=parallel.compile,
            fused_attention=train.attention_kernel != "reference",
            flash4=train.attention_kernel == "flash4",
            chunked_loss=train.loss_kernel == "chunked",
            loss_chunk_tokens=train.loss_chunk_tokens,
            accumulate_bf16=parallel.accumulate_dtype == "bf16",
            reads_any_gradient=config.optim.reads_any_gradient,
            reduce_bf16=parallel.reduce_dtype == "bf16",
            fused_weight_gradients=parallel.adds_weight_gradients,
            experts_in_bf16=not (train.fp8_experts and parallel.expert_kernels != "plain"),
            fused_experts=config.model.is_moe and parallel.expert_kernels != "plain",
            fp8_head=train.precision == "fp8" and train.fp8_head,
            casts_weights=train.precision == "fp8"
            and not (train.fp8_weight_cache and parallel.zero <= 1)
            and config.lora.base != "fp8",
            fp8_rowwise=train.precision == "fp8" and train.fp8_scaling == "rowwise",
            # operators of torch read each tensor for its largest number all the same
            fp8_delayed=train.precision == "fp8"
            and train.fp8_scaling == "delayed"
            and train.fp8_cast_kernel == "triton",
            # without bf16 weights beside them, two copies in fp8 are as large as one in bf16
            fp8_weight_cache=train.precision == "fp8"
            and train.fp8_weight_cache
            and not train.fp8_weights_only
            and parallel.zero <= 1,
            persistent_products=True,
            document_tokens=config.data.document_tokens,
            reference_copy=has_copy(config),
            reference_forward=runs_reference(config),
            extra_head_forwards=extra_head_forwards(config),
            frozen_weights=config.lora.on,
            adapters=count_adapters(config.model, config.lora) if config.lora.on else 0,
            adapter_channels=layer_channels(config.model, config.lora) if config.lora.on else 0.0,
            frozen_bytes=frozen_layer_bytes(config),
            widens_weights=config.lora.on and config.lora.base == "nf4",
        )

    @property
    def width(self) -> float:
        """Bytes of a weight as it is computed with; fp8 products are made from bf16."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def seen_tokens(self) -> float:
        """Of the sequence that attention sees."""
        return min(self.document_tokens or self.seq_len, self.seq_len)

    @property
    def stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def schedule_name(self) -> str:
        return self.schedule or ("interleaved_1f1b" if self.stages_per_rank > 1 else "1f1b")

    @property
    def is_v_shaped(self) -> bool:
        """Stages go down the ranks and back up: the first and the last one lie on rank 0."""
        return self.pp > 1 and self.schedule_name == "zbv"

    @property
    def head_rank(self) -> int:
        """Position in the pipeline of the last stage, with the head and the loss."""
        return 0 if self.is_v_shaped else self.pp - 1

    @property
    def model_ranks(self) -> int:
        return self.tp * self.pp * self.cp

    def dp(self, gpus: int) -> int:
        """Ranks that read different data."""
        return max(1, gpus // self.model_ranks)

    def micro_batches(self, gpus: int) -> int:
        """Of one data-parallel rank, in one step."""
        return max(1, self.global_batch_size // (self.dp(gpus) * self.micro_batch_size))

    @property
    def tokens(self) -> int:
        """Of one optimizer step."""
        return self.global_batch_size * self.seq_len

    def why_not(self, gpus: int) -> str:
        """Why nobody can run this on so many GPUs; empty if it can be run."""
        if gpus % self.model_ranks:
            return f"tp {self.tp} x pp {self.pp} x cp {self.cp} does not divide {gpus} GPUs"
        if self.stages > self.model.num_layers + 2:  # some count embedding and head as layers
            return f"{self.model.num_layers} layers cannot be cut into {self.stages} stages"
        if self.global_batch_size % (self.dp(gpus) * self.micro_batch_size):
            return (
                f"a global batch of {self.global_batch_size} is not a multiple of dp {self.dp(gpus)} x micro-batch "
                f"{self.micro_batch_size}"
            )
        if (gpus // self.pp) % (self.ep * self.etp):
            return f"ep {self.ep} x etp {self.etp} does not divide the {gpus // self.pp} ranks of a pipeline stage"
        return ""


def _most_frequent(modes: tuple[Recompute, ...]) -> Recompute:
    return max(sorted(set(modes)), key=modes.count)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines, as many as needed, all alike."""

    gpu: Hardware
    gpus: int
    gpus_per_node: int = 8
    node_gb_per_s: float = 50.0
    """Between nodes: per GPU, per direction, of its own network card (or its share of one). 400 Gb/s = 50."""
    fast_domain: int = 0
    """GPUs joined by NVLink or its like; 0 = those of a node (NVL72: 72)."""
    host_gb_per_s: float = 100.0
    """Of a node's memory, read and written by its processors while they update offloaded states; its GPUs' ranks share
    it. Assumed: about half of what eight channels of DDR4-3200 carry (205 GB/s). A desktop's two have less."""
    oversubscription: float = 1.0
    """How many times less than the sum of its nodes' links the network's core carries; 1 = rail-optimized, full
    bisection."""

    @cached_property
    def domain(self) -> int:
        return self.fast_domain or self.gpus_per_node

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def name(self) -> str:
        return f"{self.gpus} x {self.gpu.name}"


INTERCONNECTS: dict[str, tuple[float, str]] = {
    "ib100": (12.5, "one 100 Gb/s EDR card a GPU"),
    "ib200": (25.0, "one 200 Gb/s HDR card a GPU (Selene: arXiv:2104.04473)"),
    "ib400": (50.0, "one 400 Gb/s NDR card a GPU (DGX H100, GB200 NVL72)"),
    "ib800": (100.0, "one 800 Gb/s ConnectX-8 card a GPU (B300, GB300)"),
    "roce400": (50.0, "one 400 Gb/s RoCE card a GPU"),
    "efa400": (50.0, "EFA: 3200 Gb/s for a node of 8 (p5)"),
    "opa50": (6.25, "half of a 100 Gb/s Omni-Path card a GPU: four cards for a node of 8 (Jean Zay)"),
    "efa100": (6.25, "EFA v1: 400 Gb/s for a node of 8 (p4d)"),
    "eth100": (1.5625, "one 100 Gb/s card for a node of 8"),
    "eth25": (0.39, "one 25 Gb/s card for a node of 8"),
}
"""GB/s per GPU and direction between nodes, and what that is."""
