"""How a policy's adapters reach the engines: apart where those hold adapters, else merged, and what merging loses."""

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.models.loading import ModelFacts
from trueline.models.lora import DEVIATION, arriving_share, first_change
from trueline.rollout.engines import ROLLOUT_ENGINES


def adapter_sync(config: RLConfig, facts: ModelFacts, gpus: int) -> str:
    """Fill in model.lora.sync, or refuse adapters apart where engines cannot hold them or the weights beside them."""
    lora = config.model.lora
    if not lora.rank:
        return lora.sync
    reason = obstacle(config, gpus)
    if lora.sync == "adapter" and reason:
        raise ConfigError(f"model.lora.sync=adapter: {reason}; set model.lora.sync=merged")
    if lora.sync == "auto":
        return "merged" if reason or doubt(config, facts) else "adapter"
    return lora.sync


def obstacle(config: RLConfig, gpus: int) -> str:
    """Say why engines cannot hold adapters beside the trainer's other weights; empty: they can."""
    lora, engine = config.model.lora, config.rollout.engine
    largest, dtypes = max(ROLLOUT_ENGINES[engine].adapter_ranks, default=0), (config.model.dtype, config.rollout.dtype)
    if lora.rank > largest:
        return f"rollout.engine={engine} has no room for rank {lora.rank} (up to {largest})"
    if lora.quantize:
        return "model.lora.quantize=true has the trainer compute with 4-bit weights, which engines do not hold"
    if dtypes == ("bfloat16", "float32"):
        return "model.dtype=bfloat16 rounds the weights beside adapters, and rollout.dtype=float32 does not"
    if gpus and config.rollout.dtype == "float32":
        return f"rollout.engine={engine} multiplies adapters on GPUs in bfloat16, and rollout.dtype=float32"
    return ""


def doubt(config: RLConfig, facts: ModelFacts) -> str:
    """Say which layers an engine may hold no adapters on; who knows that it does sets model.lora.sync=adapter."""
    targets, engine = config.model.lora.targets, config.rollout.engine
    row = ROLLOUT_ENGINES[engine]
    if facts.kind not in row.adapter_models:
        return f"rollout.engine={engine} is not known to hold adapters on all layers of a model_type={facts.kind}"
    others = [name for name in targets.split(",") if targets != "all-linear" and name not in row.adapter_layers]
    return f"rollout.engine={engine} is not known to hold adapters on {', '.join(others)}" if others else ""


def adapter_lines(config: RLConfig, facts: ModelFacts, gpus: int) -> list[str]:
    """Say what a plan tells of adapters: how they are sent, and what is lost of an update where they are merged."""
    lora, dtype = config.model.lora, config.rollout.dtype
    if not lora.rank:
        return []
    if lora.apart():
        return ["adapters   sent alone; engines hold them beside the weights that they have loaded"]
    why = obstacle(config, gpus) or doubt(config, facts) or "model.lora.sync=merged"
    change = first_change(lora, config.training.peak_rate(), facts.hidden_size)
    arrives = arriving_share(change, dtype)
    return [
        f"adapters   merged into what engines get ({why}); of an update that moves weights by {change:.1e}, "
        f"as AdamW's first does, {arrives:.0%} arrives and {1 - arrives:.0%} is lost in the rounding to {dtype} (for "
        f"weights of deviation {DEVIATION:g})"
    ]
