"""vLLM as a rollout engine, in its own process; with tensor parallelism vLLM starts more."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache, partial
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from vllm import EngineArgs, ModelRegistry
from vllm import SamplingParams as VllmParams
from vllm.config import StructuredOutputsConfig
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from trueline.data.pictures import Picture, Shown
from trueline.data.types import INTERRUPTED, NO_EXPERTS, Completion
from trueline.environments.tools.vllm_calls import BACKEND, vllm_structure
from trueline.monitoring.heartbeat import WORK
from trueline.monitoring.timing import parts_in_log
from trueline.rollout.engine import (
    EngineSpec,
    RequestBook,
    RolloutEngine,
    SamplingParams,
    check_experts,
    sample_in_parts,
)
from trueline.rollout.engines import ADAPTER_RANKS
from trueline.rollout.vllm_logprobs import Ended, Trust
from trueline.rollout.vllm_receiver import ADAPTER, PlainBucket
from trueline.runtime.actors import Given, Result
from trueline.runtime.fingerprints import Holding
from trueline.runtime.step_thread import StepThread, claim
from trueline.runtime.transport import Bucket, Link

CPU_TOKENS_PER_STEP = 4096
STRUCTURES = StructuredOutputsConfig(backend=BACKEND, disable_any_whitespace=True)
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
RECEIVER = "trueline.rollout.vllm_receiver.WeightReceiver"
PARTS = {  # of a start, by what vLLM logs as each ends
    "Loading model from scratch": "set-up",
    "Starting to load model": "set-up",
    "Loading weights took": "weights",
    "Model loading took": "weights",
    "torch.compile took": "compile",
    "Initial profiling/warmup run took": "compile",
    "Graph capturing finished": "graphs",
}
PROCESSED_GIB = 1  # host memory for pixels, which requests of the same picture share
DECODED = 32  # pictures
WORKER_SECONDS = 5.0  # between the errors of other workers and the end of a dying one


class VllmEngine(RolloutEngine):
    """vLLM in a thread of its own, which requests and other calls reach between two steps."""

    def __init__(self, spec: EngineSpec) -> None:
        self.book = RequestBook(self.generate)
        self.version, self.workers, on_gpu = 0, spec.tensor_parallel, torch.cuda.is_available()
        self.sleeps = spec.sleeps and on_gpu
        self.adapter_only = spec.adapter_rank > 0
        self.adapter: LoRARequest | None = None  # of all requests, once it is loaded
        self.returns_experts = spec.experts
        self.asleep = False
        self.keeps = False  # interrupted requests continue here
        self.open = asyncio.Event()
        self.open.set()
        self.running = 0  # requests, preempted ones included
        self.idle = asyncio.Event()
        self.idle.set()
        self.waiting: dict[str, Future[Any]] = {}
        self.names: dict[str, str] = {}  # of requests in vLLM's workers
        self.thread = StepThread(self._step, self._fail_waiting)
        options = EngineArgs(**engine_options(spec, on_gpu))
        if self.workers == 1:
            import_model(spec)
        with parts_in_log(PARTS):
            self.llm = self.thread.call(LLMEngine.from_engine_args, options).result()
        logging.getLogger("vllm").setLevel(logging.WARNING)  # the start alone is of interest
        if self.workers > 1:
            self.llm.model_executor.register_failure_callback(end_process)
        obstacle = self._keep_logprobs() if spec.lean_logprobs else "rollout.lean_logprobs=false"
        self.keeps_logprobs, self.trust = not obstacle, Trust(obstacle)
        if spec.lean_logprobs:
            self._tell_doubt()

    def _keep_logprobs(self) -> str:
        """Let vLLM's worker keep log-probs; return why it cannot, or nothing."""
        if self.workers > 1:
            return f"rollout.tensor_parallel={self.workers} has several workers"
        reasons: list[str] = self.thread.call(self.llm.collective_rpc, "keep_logprobs").result()
        return reasons[0]

    def _tell_doubt(self) -> None:
        if self.trust.doubt and not self.remark:
            self.remark = f"vLLM is asked for the log-prob of every token, because {self.trust.doubt}"
            logging.getLogger(__name__).warning(self.remark)

    async def generate(
        self, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
    ) -> Completion:
        return await sample_in_parts(partial(self._sample, shown), tokens, params, request, lambda: self.keeps)

    async def _sample(self, shown: Shown | None, tokens: list[int], params: SamplingParams, request: str) -> Completion:
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
            logprobs=None if self.trust.covers(params) else 0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._run(tokens, settings, request, shown)
        completion, cached = output.outputs[0], output.num_cached_tokens or 0
        chosen = list(completion.token_ids)
        logprobs = self._kept_logprobs(output) if settings.logprobs is None else self._own_logprobs(output, params)
        reason = INTERRUPTED if completion.finish_reason == "abort" else str(completion.finish_reason)
        wanted = self.returns_experts and params.experts and chosen
        experts = check_experts(completion.routed_experts, len(tokens) + len(chosen)) if wanted else NO_EXPERTS
        return Completion.of(chosen, logprobs, self.version, reason, cached, experts=experts)

    def _kept_logprobs(self, output: Any) -> list[float]:
        kept, sampled = len(output.kept), len(output.outputs[0].token_ids)
        assert kept == sampled, f"the log-probs of {kept} tokens were kept instead of {sampled}"
        return list(output.kept)

    def _own_logprobs(self, output: Any, params: SamplingParams) -> list[float]:
        """Return vLLM's log-probs, and compare those that were kept with them."""
        chosen, sampled = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        assert sampled.token_ids == chosen, "vLLM gives log-probs of other tokens than those it sampled"
        if not self.trust.doubt:
            self.trust.compare(params, sampled.logprobs, output.kept)
            self._tell_doubt()
        return list(sampled.logprobs)

    async def score(self, tokens: list[int], shown: Shown | None = None) -> list[float]:
        name = f"score-{self.version}"
        output = await self._run(tokens, one_token(prompt_logprobs=0), name, shown, paused=True)
        return [one[token].logprob for one, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]

    async def _run(
        self, tokens: list[int], settings: VllmParams, request: str, shown: Shown | None = None, *, paused: bool = False
    ) -> Any:
        if not paused:
            await self.open.wait()
        self.running += 1
        self.idle.clear()
        done = self.waiting[request] = Future[Any]()
        try:
            prompt = TokensPrompt(prompt_token_ids=tokens) if shown is None else picture_prompt(tokens, shown)
            self.thread.begin(partial(self._guard, partial(self._add, request, prompt, settings)), done)
            output = await asyncio.wrap_future(done)
            check_prompt(output.prompt_token_ids, tokens)
            return output
        except asyncio.CancelledError:
            await self._call(self._drop, request)
            raise
        finally:
            if self.waiting.get(request) is done:  # a new request may have the same name
                del self.waiting[request]
            self.running -= 1
            if not self.running:
                self.idle.set()

    def _add(self, request: str, prompt: TokensPrompt, settings: VllmParams) -> None:
        name = self.llm.add_request(request, prompt, settings, lora_request=self.adapter)
        if self.keeps_logprobs:
            self.names[request] = name

    def _drop(self, request: str) -> None:
        self.llm.abort_request([request])
        if name := self.names.pop(request, ""):
            self._take_logprobs([(name, 0, 0)])

    def _take_logprobs(self, ended: list[Ended]) -> list[list[float]]:
        found: list[list[list[float]]] = self.llm.collective_rpc("take_logprobs", args=(ended,))
        return found[0]

    async def _call(self, method: Callable[Given, Result], *args: Given.args, **named: Given.kwargs) -> Result:
        """Make a call in vLLM's thread, after the current step."""
        return await asyncio.wrap_future(self.thread.call(self._guard, partial(method, *args, **named)))

    def _guard(self, work: Callable[[], Result]) -> Result:
        """Call vLLM; if it fails because a worker process is gone, end this process, so that it is restarted."""
        done = False
        try:
            result = work()
            done = True
            return result
        finally:
            if not done and self.workers > 1:
                executor: Any = self.llm.model_executor
                sentinels = [worker.proc.sentinel for worker in executor.workers]
                if executor.is_failed or wait(sentinels, WORKER_SECONDS):
                    end_process()

    def _step(self) -> bool:
        """Step once, in vLLM's thread; return whether there is more to do."""
        if not self.waiting or not self.llm.has_unfinished_requests():
            return False
        if ended := [output for output in self._guard(self.llm.step) if output.finished]:
            self._deliver(ended)
        WORK.move()
        return True

    def _deliver(self, outputs: list[Any]) -> None:
        """Hand requests that end together back, with the log-probs that were kept of them."""
        if self.keeps_logprobs:
            ended = [(self.names.pop(one.request_id, ""), *lengths_of(one)) for one in outputs]
            for output, kept in zip(outputs, self._take_logprobs(ended), strict=True):
                output.kept = kept
        for output in outputs:
            done = self.waiting.get(output.request_id)
            if done is not None and claim(done):
                done.set_result(output)

    def _fail_waiting(self, error: BaseException) -> None:
        """Pass an error that ended a step to all waiting requests."""
        for done in list(self.waiting.values()):
            if claim(done):
                done.set_exception(error)

    async def pause(self, mode: str = "wait") -> None:
        """Let all requests end, also preempted ones, which would otherwise continue with other weights."""
        self.open.clear()
        self.keeps = mode == "keep"
        if mode != "wait":
            await self._call(self._interrupt)
        await self.idle.wait()

    def _interrupt(self) -> None:
        """Abort all requests, and deliver their tokens so far, as vLLM's asynchronous client does."""
        states = list(self.llm.output_processor.request_states.values())
        outputs = [state.make_request_output([], None, FinishReason.ABORT, None) for state in states]
        self.llm.abort_request([state.external_req_id for state in states])
        self._deliver(outputs)

    async def resume(self) -> None:
        self.open.set()

    async def sleep(self) -> None:
        if self.sleeps:
            await self.pause("interrupt")  # running requests would compute on released memory
            level = 1 if self.adapter_only else 2  # 1 keeps a copy of the weights, which are not sent again
            await self._call(self.llm.sleep, level=level)
            self.asleep = True

    async def wake(self, part: str) -> None:
        if self.asleep:
            await self._call(self.llm.wake_up, tags=[part])
            self.asleep = part == "weights"  # the cache still sleeps

    async def processes(self) -> int:
        return self.workers

    async def connect(self, link: Link, first_rank: int) -> str:
        plain = (list(link.address), list(link.nodes), link.timeout_seconds, link.transport, link.shared)
        reasons: list[str] = await self._call(self.llm.collective_rpc, "join_trainer", args=(plain, first_rank))
        return next(filter(None, reasons), "")

    async def receive(self, buckets: list[Bucket], version: int) -> list[list[int]]:
        plain = plain_buckets(buckets)
        sums: list[list[int]] = await self._call(self.llm.collective_rpc, "receive_weights", args=(plain,))
        await self._empty_caches()
        self.version = version
        if self.adapter_only:
            self.adapter = LoRARequest("policy", ADAPTER, "in memory")
        return sums

    async def _empty_caches(self) -> None:
        """Forget what the old weights have computed of prompts and of pictures."""
        if not await self._call(self.llm.reset_prefix_cache):
            raise RuntimeError("vLLM could not empty its prefix cache, which the old weights have filled")
        await self._call(self.llm.reset_encoder_cache)

    async def load(self, weights: list[tuple[str, Tensor]], version: int) -> None:
        raise RuntimeError("a vLLM engine has its own process: send its weights through a broadcast group")

    async def holdings(self) -> list[dict[str, Holding]]:
        found: list[dict[str, Any]] = await self._call(self.llm.collective_rpc, "weight_holdings")
        return [{name: tuple(held) for name, held in process.items()} for process in found]

    async def bit_sums(self, dtype: str) -> list[dict[str, int]]:
        return await self._call(self.llm.collective_rpc, "weight_bit_sums", args=(dtype,))

    async def scramble(self) -> None:
        await self._call(self.llm.collective_rpc, "scramble_weights")

    async def load_noise(self, buckets: list[Bucket]) -> None:
        await self._call(self.llm.collective_rpc, "load_noise", args=(plain_buckets(buckets),))

    async def cached_tokens(self, tokens: list[int]) -> int:
        if self.asleep:
            return 0  # the cache was released
        config = self.llm.vllm_config
        length = min(config.cache_config.block_size + 1, config.model_config.max_model_len - 1)
        prompt = (tokens * length)[:length]  # only whole blocks are cached, and never the last token
        output = await self._run(prompt, one_token(), f"cached-{self.version}", paused=True)
        return int(output.num_cached_tokens or 0)


def import_model(spec: EngineSpec) -> None:
    """Import the model's class here: vLLM would inspect it in a process that imports all of vLLM again.

    Not where vLLM forks workers, which must happen before a class has a chance to initialise CUDA.
    """
    settings = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
    for name in settings.architectures or ():
        if (known := ModelRegistry.models.get(name)) is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


@lru_cache(DECODED)
def pixels_of(picture: Picture) -> Any:
    """Return the pixels of a picture, which the completions of a group ask for one after the other."""
    return picture.decode()


def picture_prompt(tokens: list[int], shown: Shown) -> TokensPrompt:
    """Return a prompt with one placeholder for each picture: vLLM itself makes the tokens of pictures.

    Where it finds those tokens already, it adds others and computes something else without an error.
    """
    pictures = [pixels_of(picture) for picture in shown.pictures]
    return TokensPrompt(prompt_token_ids=shown.shorten(tokens), multi_modal_data={"image": pictures})


def check_prompt(found: list[int], tokens: list[int]) -> None:
    """Refuse a prompt in which vLLM has other tokens than the trainer."""
    if found == tokens:
        return
    pairs = enumerate(zip(found, tokens, strict=False))
    place = next((at for at, (one, other) in pairs if one != other), min(len(found), len(tokens)))
    raise RuntimeError(
        f"vLLM has made other tokens of a prompt than the trainer: {len(found)} instead of {len(tokens)}, the first "
        f"difference at token {place} ({found[place : place + 5]} instead of {tokens[place : place + 5]}): its "
        "processor of pictures and that of Transformers differ for this model"
    )


def lengths_of(output: Any) -> tuple[int, int]:
    """Return the tokens of a request's prompt, and how many were sampled."""
    return len(output.prompt_token_ids), len(output.outputs[0].token_ids)


def one_token(**settings: Any) -> VllmParams:
    return VllmParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **settings)


def end_process() -> None:
    sys.stderr.write("a worker process of vLLM is gone\n")
    sys.stderr.flush()
    os._exit(1)


def plain_buckets(buckets: list[Bucket]) -> list[PlainBucket]:
    """Return the buckets as plain values, which vLLM's processes can unpickle."""
    return [[(spec.name, list(spec.shape), spec.dtype) for spec in bucket] for bucket in buckets]


def engine_options(spec: EngineSpec, on_gpu: bool) -> dict[str, Any]:
    room = next(room for room in ADAPTER_RANKS if room >= spec.adapter_rank)
    lora = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}
    return {
        "model": spec.model,
        "dtype": spec.dtype,
        "max_model_len": spec.context,
        "tensor_parallel_size": spec.tensor_parallel,
        "max_num_seqs": spec.max_sequences,
        "distributed_executor_backend": "mp" if spec.tensor_parallel > 1 else "uni",
        # Log-probs of the distribution that was sampled from, not of the raw logits.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": RECEIVER,
        "skip_tokenizer_init": not (spec.structured or spec.pictures),  # vLLM's processors of pictures need it
        "seed": spec.seed,
        "disable_log_stats": True,
        "trust_remote_code": spec.trust_remote_code,
        **(on_gpu_options(spec) if on_gpu else on_cpu_options(spec)),
        **(lora if spec.adapter_rank else {}),
        # Checked while requests are compiled: a structure that only compiling refuses would end vLLM.
        **({"structured_outputs_config": STRUCTURES} if spec.structured else {}),
        **({"enable_return_routed_experts": True} if spec.experts else {}),
        **({"speculative_config": NGRAMS} if spec.speculative else {}),
        **({"limit_mm_per_prompt": {"image": spec.pictures, "video": 0}} if spec.pictures else {}),
        **({"mm_processor_cache_gb": PROCESSED_GIB} if spec.pictures else {}),
    }


def on_gpu_options(spec: EngineSpec) -> dict[str, Any]:
    memory: dict[str, Any] = {"gpu_memory_utilization": spec.gpu_memory_utilization}
    if spec.cache_bytes:  # nothing can be measured while models load; vLLM still requires this share to be free
        memory = {"kv_cache_memory_bytes": spec.cache_bytes, "gpu_memory_utilization": 0.01}
    return {"enable_sleep_mode": spec.sleeps, "enforce_eager": not spec.cuda_graphs, **memory}


def has_states(spec: EngineSpec) -> bool:
    """Tell whether some layers keep a state instead of keys and values."""
    settings = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code).get_text_config()
    return any(kind in ("conv", "linear_attention", "mamba") for kind in settings.to_dict().get("layer_types") or ())


def on_cpu_options(spec: EngineSpec) -> dict[str, Any]:
    """Return options that keep prompts in one chunk: vLLM 0.32 on CPUs dies when a prompt with a seed is split,
    because it resets the offset of the random generator, which CPU generators do not have.
    """
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(spec.context, CPU_TOKENS_PER_STEP),
        **({"enable_prefix_caching": False} if has_states(spec) else {}),  # it would split prompts as well
    }
