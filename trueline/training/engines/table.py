"""The table of training engines: what is known before a process imports one."""

from collections.abc import Callable
from dataclasses import dataclass, field

from trueline.config.base import ConfigError, Tree
from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig
from trueline.models.loading import ModelFacts
from trueline.training.engines import deepspeed_config, fsdp2_config
from trueline.training.engines.division import WHOLE, Division, Sizes


def nothing(ranks: RanksConfig, model: ModelConfig, section: str) -> None:
    """Refuse no keys."""


def no_experts(ranks: RanksConfig, model: ModelConfig, facts: ModelFacts, section: str) -> None:
    """Refuse to divide experts by an engine that does not."""
    if (size := ranks.deepspeed.expert_parallel) > 1:
        raise ConfigError(
            f"{section}.deepspeed.expert_parallel={size}: {section}.engine={ranks.engine} does not divide experts: set "
            f"it to 1, or {section}.engine=deepspeed"
        )


@dataclass(frozen=True, slots=True)
class TrainRow:
    """What is known of an engine before a process imports it."""

    path: str  # of a class that follows TrainEngine and is made from a Scorer, a WorkerSpec and a device
    package: str = ""  # must be installed
    brought_by: str = ""  # what installs it
    local: bool = False  # it can run in the process of the run
    several_ranks: bool = True  # that have joined torch.distributed before it is made
    masters: bool = True  # float32 weights besides those that compute in bfloat16
    offloads: tuple[str, ...] = ("moments", "optimizer", "all")
    # What so many ranks, which hold the same layers, divide of a model in this type.
    division: Callable[[RanksConfig, str, int], Division] = lambda ranks, dtype, alike: WHOLE
    # Elements, in the compute type, that a rank holds besides while it works: of the model, and of its largest parts.
    working: Callable[[TrainingConfig, str, Sizes], float] = lambda ranks, dtype, sizes: 0.0
    check: Callable[[TrainingConfig, ModelConfig, str], None] = nothing  # refuses keys of a section that cannot work
    # Refuses keys of a section that cannot work with a model.
    suits: Callable[[RanksConfig, ModelConfig, ModelFacts, str], None] = no_experts
    compiles: Callable[[RanksConfig], bool] = lambda ranks: True  # layers, where no key says so and it pays
    # Why gradients cannot be discarded, or nothing.
    keeps_gradients: Callable[[RanksConfig], str] = lambda ranks: ""
    words: Callable[[RanksConfig], str] = lambda ranks: ""  # how it shards a trained model
    sharded: Tree = field(default_factory=dict)  # keys of a section that shard weights, too
    on_host: Tree = field(default_factory=dict)  # keys of a section that keep most of a model on the host
    keys: tuple[str, ...] = ()  # and sections (with a dot) of the configuration that no other engine reads
    # Of a function of a WorkerSpec and a device that returns a ShareOut, or None for models that are read whole.
    share_out: str = ""
    environment: Callable[[RanksConfig, int], dict[str, str]] = lambda ranks, gpus: {}  # of its processes


TRAIN_ENGINES = {
    "deepspeed": TrainRow(
        "trueline.training.engines.deepspeed_engine:DeepSpeedEngine",
        package="deepspeed",
        brought_by="trueline itself on Linux",
        division=deepspeed_config.division,
        working=deepspeed_config.working,
        check=deepspeed_config.check,
        suits=deepspeed_config.check_experts,
        compiles=lambda ranks: ranks.deepspeed.zero_stage < 3,
        keeps_gradients=deepspeed_config.keeps_gradients,
        words=deepspeed_config.words,
        sharded={"deepspeed": {"zero_stage": 3}},
        on_host={"offload": "optimizer"},
        keys=("deepspeed.",),
        share_out="trueline.training.engines.deepspeed_engine:share_out",
        environment=deepspeed_config.environment,
    ),
    "fsdp2": TrainRow(
        "trueline.training.engines.fsdp2_engine:FSDP2Engine",
        offloads=("moments", "all"),
        division=fsdp2_config.division,
        working=fsdp2_config.working,
        check=fsdp2_config.check,
        words=fsdp2_config.words,
        compiles=lambda ranks: False,  # tried on CPUs alone
        sharded={"replicas": 1},
        on_host={"offload": "all"},
        keys=("fsdp2.", "replicas"),
        share_out="trueline.training.engines.fsdp2_engine:share_out",
        environment=fsdp2_config.environment,
    ),
    "torch": TrainRow(
        "trueline.training.engines.torch_engine:TorchEngine",
        local=True,
        several_ranks=False,
        masters=False,
        offloads=("moments",),
    ),
}


def kept_gradients(ranks: RanksConfig) -> str:
    """Return the key, below its section, with which an engine cannot discard gradients, or nothing."""
    return TRAIN_ENGINES[ranks.engine].keeps_gradients(ranks)
