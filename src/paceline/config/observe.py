"""The `[observe]` section: what is recorded, and where it goes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Section, Several
from paceline.errors import ConfigError

OF_RECORD = (
    "record_limit_mb",
    "capture_at",
    "capture_steps",
    "capture_ranks",
    "stall_seconds",
    "prometheus_port",
)
"""Options that need `ObserveConfig.record`."""


class ObserveConfig(Section):
    """What is recorded, and where it goes. `metrics.jsonl` in the run folder is always written."""

    log_interval: int = Field(10, ge=1)
    """Write a line of metrics every so many steps. Other steps never wait for the device."""
    record: bool = True
    """Keep the record of every step that `paceline explain` reads: phases, waits, machine. No step waits for it."""
    record_limit_mb: int = Field(64, ge=1)
    """MiB of it on disk for each rank; then the oldest part is dropped, but for the beginning of the run."""
    capture_at: tuple[int, ...] = ()
    """Steps at which a capture begins: the PyTorch profiler, with names of modules and phases. `paceline explain RUN
    --capture N` asks a running job for one."""
    capture_steps: int = Field(3, ge=1)
    """Steps of a capture."""
    capture_ranks: tuple[int, ...] = (0,)
    """Ranks that are captured; empty = all."""
    stall_seconds: float = Field(120.0, ge=0)
    """A step that lasts longer than this and than ten usual ones is reported, with every rank's place and stack, for
    `paceline explain`; 0 = never. Needs `record`."""
    prometheus_port: int = Field(0, ge=0, lt=65536)
    """Serve the newest step to Prometheus on this port, plus the rank on the node, on all interfaces; 0 = off. Needs
    `record`."""
    tensorboard: bool = True
    wandb_project: str = ""
    """Weights & Biases project; empty = off. Needs `paceline[wandb]`."""
    mlflow_experiment: str = ""
    """MLflow experiment; empty = off. Needs `paceline[mlflow]`."""
    trackio_project: str = ""
    """Trackio project; empty = off. Needs `paceline[trackio]`."""
    flops_convention: Literal["causal", "full"] = "causal"
    """`causal` counts half of the attention scores, `full` all of them. Recomputation is counted by neither."""
    peak_tflops: float = Field(0.0, ge=0)
    """Peak of one device for MFU; 0 = the datasheet's dense figure for this device and precision, if it is known."""
    progress: Literal["auto", "live", "lines", "none"] = "auto"
    """What the terminal shows: a live display on a terminal, else a line per logged step."""
    sample_prompts: Several[str] = ()
    """At the end of the run the model continues these texts, or answers them where it has learned from turns; empty =
    no samples."""
    sample_interval: int = Field(0, ge=0)
    """Also while it trains: at every so many evaluations (`train.eval_interval`), by the weights of that step, into
    `samples.jsonl`; 0 = at the end alone."""
    sample_tokens: int = Field(100, ge=1)
    """Tokens of such a sample."""
    sample_temperature: float = Field(0.8, ge=0)
    """0 takes the likeliest token each time."""

    @model_validator(mode="after")
    def _check(self) -> ObserveConfig:
        for name, least in (("capture_at", 1), ("capture_ranks", 0)):
            wrong = [value for value in getattr(self, name) if value < least]
            if wrong:
                raise ConfigError(
                    f"observe.{name} holds {wrong[0]}, which is less than {least}",
                    next_step="Steps count from 1, ranks from 0.",
                )
        return self
