"""vLLM behind the engine protocol. It lives in a process of its own, together with vLLM's."""

import asyncio
from typing import Any

import torch
from torch import Tensor
from vllm import AsyncEngineArgs
from vllm import SamplingParams as VllmParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from trueline.data.types import Completion
from trueline.rollout.engine import EngineSpec, SamplingParams
from trueline.runtime.fingerprints import Holding
from trueline.runtime.transport import Bucket, Link

CPU_TOKENS_PER_STEP = 4096
RECEIVER = "trueline.sync.vllm.WeightReceiver"


class VllmEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self.version = 0
        self.workers = spec.tensor_parallel
        on_gpu = torch.cuda.is_available()
        self.sleeps = spec.sleeps and on_gpu
        self.asleep = False
        self.open = asyncio.Event()
        self.open.set()
        self.running = 0  # requests, preempted ones included
        self.idle = asyncio.Event()
        self.idle.set()
        place = on_gpu_options(spec) if on_gpu else on_cpu_options(spec)
        self.llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=spec.model,
                dtype=spec.dtype,  # type: ignore[arg-type]
                max_model_len=spec.context,
                tensor_parallel_size=spec.tensor_parallel,
                max_num_seqs=spec.max_sequences,
                distributed_executor_backend="mp" if spec.tensor_parallel > 1 else "uni",
                # The log-probs of the distribution that was sampled from, not of the raw logits.
                logprobs_mode="processed_logprobs",
                worker_extension_cls=RECEIVER,
                skip_tokenizer_init=True,
                seed=spec.seed,
                disable_log_stats=True,
                trust_remote_code=spec.trust_remote_code,
                **place,
            )
        )

    async def generate(self, tokens: list[int], params: SamplingParams, request: str) -> Completion:
        settings = VllmParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            max_tokens=params.max_new_tokens,
            stop_token_ids=list(params.stop_tokens),
            seed=params.seed,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._run(tokens, settings, request)
        completion = output.outputs[0]
        chosen = list(completion.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, chosen, strict=True)]
        return Completion(chosen, logprobs, self.version, str(completion.finish_reason))

    async def score(self, tokens: list[int]) -> list[float]:
        settings = VllmParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        output = await self._run(tokens, settings, f"score-{self.version}")
        entries = output.prompt_logprobs[1:]
        return [entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)]

    async def _run(self, tokens: list[int], settings: VllmParams, request: str) -> Any:
        await self.open.wait()
        self.running += 1
        self.idle.clear()
        try:
            outputs = [output async for output in self.llm.generate({"prompt_token_ids": tokens}, settings, request)]
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()
        return outputs[-1]

    async def pause(self) -> None:
        """Pause, and empty the prefix cache, which holds what the old weights made of a prompt.

        vLLM's own wait does not count requests that it has preempted, which would go on under other weights.
        """
        self.open.clear()
        await self.idle.wait()
        await self.llm.pause_generation(mode="wait", clear_cache=True)

    async def resume(self) -> None:
        await self.llm.resume_generation()
        self.open.set()

    async def sleep(self) -> None:
        if self.sleeps:
            await self.llm.sleep(level=2)
            self.asleep = True

    async def wake(self, part: str) -> None:
        if self.asleep:
            await self.llm.wake_up(tags=[part])
            self.asleep = part == "weights"  # the cache still sleeps

    async def processes(self) -> int:
        return self.workers

    async def connect(self, link: Link, first_rank: int) -> None:
        plain = (list(link.address), link.world, link.timeout_seconds, link.transport, link.shared)
        await self.llm.collective_rpc("join_trainer", args=(plain, first_rank))

    async def receive(self, buckets: list[Bucket], version: int) -> list[list[int]]:
        plain = [[(spec.name, list(spec.shape), spec.dtype) for spec in bucket] for bucket in buckets]
        sums = await self.llm.collective_rpc("receive_weights", args=(plain,))
        if not await self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not empty its prefix cache: it would answer with what old weights cached")
        self.version = version
        return sums

    async def load(self, weights: list[tuple[str, Tensor]], version: int) -> None:
        raise RuntimeError("a vLLM engine has a process of its own: send its weights through a broadcast group")

    async def holdings(self) -> list[dict[str, Holding]]:
        found = await self.llm.collective_rpc("weight_holdings")
        return [{name: tuple(held) for name, held in process.items()} for process in found]

    async def bit_sums(self, dtype: str) -> list[dict[str, int]]:
        return await self.llm.collective_rpc("weight_bit_sums", args=(dtype,))

    async def scramble(self) -> None:
        await self.llm.collective_rpc("scramble_weights")

    async def cached(self, tokens: list[int]) -> int:
        settings = VllmParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        return int((await self._run(tokens, settings, f"cached-{self.version}")).num_cached_tokens or 0)


def on_gpu_options(spec: EngineSpec) -> dict[str, Any]:
    return {
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "enable_sleep_mode": spec.sleeps,
        "enforce_eager": not spec.cuda_graphs,
    }


def on_cpu_options(spec: EngineSpec) -> dict[str, Any]:
    """Return options by which prompts are read in one piece: vLLM 0.32 on a CPU dies when one with a seed is cut in
    two, because it sets back the random generator's offset, which CPU generators do not have.
    """
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(spec.context, CPU_TOKENS_PER_STEP),
    }
