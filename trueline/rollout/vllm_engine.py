"""vLLM behind the engine protocol, in a process of its own; with tensor parallelism vLLM starts others beside it."""

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from vllm import EngineArgs
from vllm import SamplingParams as VllmParams
from vllm.config import StructuredOutputsConfig
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from trueline.data.types import INTERRUPTED, NO_EXPERTS, Completion
from trueline.environments.tools.vllm_structures import BACKEND, vllm_structure
from trueline.monitoring.beats import WORK
from trueline.rollout.engine import EngineSpec, SamplingParams, checked_experts, in_parts
from trueline.rollout.engines import ADAPTER_RANKS
from trueline.runtime.actors import Given, Result
from trueline.runtime.fingerprints import Holding
from trueline.runtime.transport import Bucket, Link
from trueline.sync.vllm import ADAPTER, PlainBucket

CPU_TOKENS_PER_STEP = 4096
RECEIVER = "trueline.sync.vllm.WeightReceiver"
WORKER_SECONDS = 5.0  # that the end of a worker may come behind the error of others who wait for it


class VllmEngine:
    """vLLM's own loop in a thread: it steps while there are requests, and in between does what else it is asked."""

    def __init__(self, spec: EngineSpec) -> None:
        self.version = 0
        self.workers = spec.tensor_parallel
        on_gpu = torch.cuda.is_available()
        self.sleeps = spec.sleeps and on_gpu
        self.apart = spec.adapter_rank > 0
        self.adapter: LoRARequest | None = None  # that requests name, once it is there
        self.tells_experts = spec.experts
        self.asleep = False
        self.keeps = False  # requests that were cut off go on here
        self.open = asyncio.Event()
        self.open.set()
        self.running = 0  # requests, preempted ones included
        self.idle = asyncio.Event()
        self.idle.set()
        self.waiting: dict[str, asyncio.Future[Any]] = {}
        self.asked = 0  # calls that wait for the end of a step
        self.stepping: asyncio.Task[None] | None = None
        self.thread = ThreadPoolExecutor(1)
        options = engine_options(spec, on_gpu)
        self.llm = self.thread.submit(LLMEngine.from_engine_args, EngineArgs(**options)).result()
        if self.workers > 1:
            self.llm.model_executor.register_failure_callback(end_process)

    async def generate(self, tokens: list[int], params: SamplingParams, request: str) -> Completion:
        return await in_parts(self._sample, tokens, params, request, lambda: self.keeps)

    async def _sample(self, tokens: list[int], params: SamplingParams, request: str) -> Completion:
        settings = VllmParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            max_tokens=params.max_new_tokens,
            stop_token_ids=list(params.stop_tokens),
            seed=params.seed,
            structured_outputs=vllm_structure(params.structure),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._run(tokens, settings, request)
        completion = output.outputs[0]
        chosen, sampled = list(completion.token_ids), completion.logprobs
        assert sampled.token_ids == chosen, "vLLM gives log-probs of other tokens than those it sampled"
        reason = INTERRUPTED if completion.finish_reason == "abort" else str(completion.finish_reason)
        asked = self.tells_experts and params.experts and chosen
        experts = checked_experts(completion.routed_experts, len(tokens) + len(chosen)) if asked else NO_EXPERTS
        cached = output.num_cached_tokens or 0
        return Completion.of(chosen, sampled.logprobs, self.version, reason, cached, experts=experts)

    async def score(self, tokens: list[int]) -> list[float]:
        settings = VllmParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        output = await self._run(tokens, settings, f"score-{self.version}")
        entries = output.prompt_logprobs[1:]
        return [entry[token].logprob for entry, token in zip(entries, tokens[1:], strict=True)]

    async def _run(self, tokens: list[int], settings: VllmParams, request: str, *, paused: bool = False) -> Any:
        if not paused:
            await self.open.wait()
        self.running += 1
        self.idle.clear()
        done = self.waiting[request] = asyncio.get_running_loop().create_future()
        try:
            prompt = TokensPrompt(prompt_token_ids=tokens)
            await self._ask(self.llm.add_request, request, prompt, settings, lora_request=self.adapter)
            if self.stepping is None or self.stepping.done():
                self.stepping = asyncio.create_task(self._step())
                self.stepping.add_done_callback(self._stopped)
            return await done
        except asyncio.CancelledError:
            await self._ask(self.llm.abort_request, [request])
            raise
        finally:
            if self.waiting.get(request) is done:  # not one that was asked again under the same name
                del self.waiting[request]
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def _ask(self, method: Callable[Given, Result], *args: Given.args, **named: Given.kwargs) -> Result:
        """Have vLLM's thread make a call, behind the step under way."""
        self.asked += 1
        try:
            return await self._in_thread(partial(method, *args, **named))
        finally:
            self.asked -= 1

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.thread, self._guarded, work)

    def _guarded(self, work: Callable[[], Result]) -> Result:
        """Call vLLM; where it fails because one of its workers is gone, this process ends, to be started again."""
        done = False
        try:
            result = work()
            done = True
            return result
        finally:
            if not done and self.workers > 1 and worker_gone(self.llm.model_executor):
                end_process()

    async def _step(self) -> None:
        while self.waiting:
            self._answer(await self._in_thread(self._steps))

    def _answer(self, outputs: list[Any]) -> None:
        for output in outputs:
            done = self.waiting.get(output.request_id)
            if done is not None and not done.done():  # who asked may have been cancelled
                done.set_result(output)

    def _steps(self) -> list[Any]:
        """Step until a request is finished, or something else is to be done."""
        finished: list[Any] = []
        while not finished and not self.asked and self.llm.has_unfinished_requests():
            finished = [output for output in self.llm.step() if output.finished]
            WORK.move()
        return finished

    def _stopped(self, stepping: asyncio.Task[None]) -> None:
        """Tell those who wait of an error that ended the steps."""
        error = None if stepping.cancelled() else stepping.exception()
        for done in self.waiting.values():
            if error is not None and not done.done():
                done.set_exception(error)

    async def pause(self, mode: str = "wait") -> None:
        """Let all requests end, those that vLLM has preempted too, which would go on under other weights."""
        self.open.clear()
        self.keeps = mode == "keep"
        if mode != "wait":
            self._answer(await self._ask(self._cut_off))
        await self.idle.wait()

    def _cut_off(self) -> list[Any]:
        """Abort all requests, and return what they have so far; vLLM itself tells that to its asynchronous client."""
        states = list(self.llm.output_processor.request_states.values())
        outputs = [state.make_request_output([], None, FinishReason.ABORT, None) for state in states]
        self.llm.abort_request([state.external_req_id for state in states])
        return outputs

    async def resume(self) -> None:
        self.open.set()

    async def sleep(self) -> None:
        if self.sleeps:
            await self.pause("interrupt")  # a request that goes on would compute on memory that is gone
            await self._ask(self.llm.sleep, level=1 if self.apart else 2)  # 1 keeps a copy, of what is not sent again
            self.asleep = True

    async def wake(self, part: str) -> None:
        if self.asleep:
            await self._ask(self.llm.wake_up, tags=[part])
            self.asleep = part == "weights"  # the cache still sleeps

    async def processes(self) -> int:
        return self.workers

    async def connect(self, link: Link, first_rank: int) -> str:
        plain = (list(link.address), list(link.nodes), link.timeout_seconds, link.transport, link.shared)
        reasons: list[str] = await self._ask(self.llm.collective_rpc, "join_trainer", args=(plain, first_rank))
        return next(filter(None, reasons), "")

    async def receive(self, buckets: list[Bucket], version: int) -> list[list[int]]:
        plain = plain_buckets(buckets)
        sums: list[list[int]] = await self._ask(self.llm.collective_rpc, "receive_weights", args=(plain,))
        if not await self._ask(self.llm.reset_prefix_cache):
            raise RuntimeError("vLLM could not empty its prefix cache: it would answer with what old weights cached")
        self.version = version
        if self.apart:
            self.adapter = LoRARequest("policy", ADAPTER, "in memory")
        return sums

    async def load(self, weights: list[tuple[str, Tensor]], version: int) -> None:
        raise RuntimeError("a vLLM engine has a process of its own: send its weights through a broadcast group")

    async def holdings(self) -> list[dict[str, Holding]]:
        found: list[dict[str, Any]] = await self._ask(self.llm.collective_rpc, "weight_holdings")
        return [{name: tuple(held) for name, held in process.items()} for process in found]

    async def bit_sums(self, dtype: str) -> list[dict[str, int]]:
        return await self._ask(self.llm.collective_rpc, "weight_bit_sums", args=(dtype,))

    async def scramble(self) -> None:
        await self._ask(self.llm.collective_rpc, "scramble_weights")

    async def load_noise(self, buckets: list[Bucket]) -> None:
        await self._ask(self.llm.collective_rpc, "load_noise", args=(plain_buckets(buckets),))

    async def cached(self, tokens: list[int]) -> int:
        if self.asleep:
            return 0  # with its memory the cache is given up
        config = self.llm.vllm_config
        length = min(config.cache_config.block_size + 1, config.model_config.max_model_len - 1)
        prompt = (tokens * length)[:length]  # whole blocks alone are cached, and the last token never
        settings = VllmParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        return int((await self._run(prompt, settings, f"cached-{self.version}", paused=True)).num_cached_tokens or 0)


def worker_gone(executor: Any) -> bool:
    """Tell whether one of vLLM's worker processes has ended, or ends in this moment."""
    return executor.is_failed or bool(wait([worker.proc.sentinel for worker in executor.workers], WORKER_SECONDS))


def end_process() -> None:
    sys.stderr.write("a worker process of vLLM is gone\n")
    sys.stderr.flush()
    os._exit(1)


def plain_buckets(buckets: list[Bucket]) -> list[PlainBucket]:
    """Return what vLLM's processes can be sent: nothing of ours to unpickle."""
    return [[(spec.name, list(spec.shape), spec.dtype) for spec in bucket] for bucket in buckets]


def engine_options(spec: EngineSpec, on_gpu: bool) -> dict[str, Any]:
    return {
        "model": spec.model,
        "dtype": spec.dtype,
        "max_model_len": spec.context,
        "tensor_parallel_size": spec.tensor_parallel,
        "max_num_seqs": spec.max_sequences,
        "distributed_executor_backend": "mp" if spec.tensor_parallel > 1 else "uni",
        # The log-probs of the distribution that was sampled from, not of the raw logits.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": RECEIVER,
        "skip_tokenizer_init": not spec.structured,
        "seed": spec.seed,
        "disable_log_stats": True,
        "trust_remote_code": spec.trust_remote_code,
        **(on_gpu_options(spec) if on_gpu else on_cpu_options(spec)),
        **(adapter_options(spec.adapter_rank) if spec.adapter_rank else {}),
        **(structure_options() if spec.structured else {}),
        **({"enable_return_routed_experts": True} if spec.experts else {}),
    }


def on_gpu_options(spec: EngineSpec) -> dict[str, Any]:
    measured = {"gpu_memory_utilization": spec.gpu_memory_utilization}
    # Beside models that load at the same time nothing can be measured; vLLM still asks that this share is free.
    told = {"kv_cache_memory_bytes": spec.cache_bytes, "gpu_memory_utilization": 0.01}
    return {
        "enable_sleep_mode": spec.sleeps,
        "enforce_eager": not spec.cuda_graphs,
        **(told if spec.cache_bytes else measured),
    }


def adapter_options(rank: int) -> dict[str, Any]:
    room = next(room for room in ADAPTER_RANKS if room >= rank)
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}


def structure_options() -> dict[str, Any]:
    """Return options by which requests are checked as they are compiled: one that only compiling refuses ends vLLM."""
    return {"structured_outputs_config": StructuredOutputsConfig(backend=BACKEND, disable_any_whitespace=True)}


def has_states(spec: EngineSpec) -> bool:
    """Tell whether some layers keep a state in place of keys and values."""
    settings = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code).get_text_config()
    return any(kind in ("conv", "linear_attention", "mamba") for kind in settings.to_dict().get("layer_types") or ())


def on_cpu_options(spec: EngineSpec) -> dict[str, Any]:
    """Return options by which prompts are read in one piece: vLLM 0.32 on a CPU dies when one with a seed is cut in
    two, because it sets back the random generator's offset, which CPU generators do not have.
    """
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(spec.context, CPU_TOKENS_PER_STEP),
        **({"enable_prefix_caching": False} if has_states(spec) else {}),  # of states it would cut prompts too
    }
