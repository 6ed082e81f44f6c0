"""What a plan knows of FSDP2 without importing it."""

from trueline.config.base import ConfigError
from trueline.config.model import ModelConfig, RanksConfig, TrainingConfig
from trueline.training.engines.division import Division, Sizes

AT_ONCE = 2  # blocks whose weights are gathered: the current one and the next


def copies(ranks: RanksConfig, alike: int) -> int:
    """Return how many copies of a model there are on ranks that hold the same parts of its layers."""
    return ranks.replicas or (1 if isinstance(ranks, TrainingConfig) else alike)


def reshards(ranks: RanksConfig, shards: int) -> bool:
    """Return whether weights in the compute type are freed after every pass of a block, or once a step."""
    return shards > 1 if ranks.fsdp2.reshard is None else ranks.fsdp2.reshard


def reduces_each_pass(ranks: RanksConfig, shards: int) -> bool:
    return shards > 1 if ranks.fsdp2.reduce_each_pass is None else ranks.fsdp2.reduce_each_pass


def division(ranks: RanksConfig, dtype: str, alike: int) -> Division:
    shards, trained = alike // copies(ranks, alike), isinstance(ranks, TrainingConfig)
    return Division(shards, shards, shards, casts=trained and dtype == "bfloat16")


def working(ranks: TrainingConfig, dtype: str, sizes: Sizes) -> float:
    """Return the elements of gathered weights, and of gradients that are not sharded yet."""
    casts = 1 if dtype == "bfloat16" else 0
    shards = sizes.alike // copies(ranks, sizes.alike)
    blocks = AT_ONCE if reshards(ranks, shards) else sizes.blocks
    gathered = sizes.tables + blocks * sizes.block()
    fresh = AT_ONCE * (1 + 2 * casts) * sizes.block()  # gradients of blocks, in both types while they are reduced
    sums = 0.0 if reduces_each_pass(ranks, shards) or shards == 1 else (1 + casts) * sizes.model
    return gathered + fresh + sums


def environment(ranks: RanksConfig, gpus: int) -> dict[str, str]:
    return {}


def words(ranks: RanksConfig) -> str:
    return f"{ranks.replicas} replicas" if (ranks.replicas or 1) > 1 else "fully sharded"


def check(ranks: TrainingConfig, model: ModelConfig, section: str) -> None:
    """Refuse keys that cannot work together."""
    alike = ranks.ranks and ranks.ranks // model.tensor_parallel
    if alike and ranks.replicas and alike % ranks.replicas:
        raise ConfigError(
            f"{section}.replicas={ranks.replicas} does not divide the {alike} ranks that share the model: set "
            f"{section}.replicas or {section}.ranks={ranks.ranks} so that it does"
        )
    if ranks.compile and model.tensor_parallel > 1:
        raise ConfigError(
            f"{section}.compile=true does not work with tensor parallelism: set model.tensor_parallel=1 (got "
            f"{model.tensor_parallel})"
        )
