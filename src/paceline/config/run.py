"""The root of a recipe, and the checks that need more than one section."""

from __future__ import annotations

from pydantic import Field

from paceline.config.base import Section, Several
from paceline.config.checkpoint import CheckpointConfig
from paceline.config.cluster import ClusterConfig
from paceline.config.data import DataConfig
from paceline.config.lora import LoraConfig
from paceline.config.model import ModelConfig
from paceline.config.observe import ObserveConfig
from paceline.config.optim import OptimConfig
from paceline.config.parallel import ParallelConfig
from paceline.config.task import TaskConfig
from paceline.config.train import TrainConfig


class RunSection(Section):
    """The run itself."""

    name: str = "run"
    """Name of the run."""
    dir: str = ""
    """Where everything of this run is written; empty = `runs/{name}`."""
    seed: int = Field(1234, ge=0, lt=2**32)
    """Decides weights, order of samples and dropout."""
    deterministic: bool = False
    """Only kernels that give the same bits every time; slower on GPUs."""
    plugins: Several[str] = ()
    """Python modules, or paths of .py files, that register presets, data sources, tasks or hooks."""

    @property
    def folder(self) -> str:
        return self.dir or f"runs/{self.name}"


class RunConfig(Section):
    """A whole recipe."""

    run: RunSection = RunSection()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    task: TaskConfig = TaskConfig()
    lora: LoraConfig = LoraConfig()
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    cluster: ClusterConfig = ClusterConfig()

    def learns(self, name: str) -> bool:
        """Whether the parameter ``name`` of the model is trained."""
        return not self.lora.on or self.lora.learns(name)
