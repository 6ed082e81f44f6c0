"""Sampling with Transformers alone: slow, simple, and it runs wherever PyTorch runs."""

import asyncio
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from trueline.config.model import ModelConfig
from trueline.data.pictures import Picture, Shown
from trueline.data.types import INTERRUPTED, NO_EXPERTS, Completion, experts_of
from trueline.models.loading import DTYPES, load_model
from trueline.models.routing import Recorder
from trueline.models.truncation import Truncation, truncate
from trueline.models.vision import GRIDS, load_vision
from trueline.models.weight_names import WeightNames
from trueline.monitoring.heartbeat import WORK
from trueline.rollout.engine import EngineSpec, RequestBook, RolloutEngine, SamplingParams, sample_in_parts
from trueline.runtime.fingerprints import Holding, as_numbers, bit_sums, holdings, scramble
from trueline.runtime.transport import Bucket, Channel, Link, bucket_noise, bucket_print, bucket_views, try_join

PLACES = "position_ids"


@dataclass(slots=True)
class Request:
    tokens: list[int]
    params: SamplingParams
    completion: asyncio.Future[Completion]
    pictures: tuple[Picture, ...] = ()


class HFEngine(RolloutEngine):
    """Requests that arrive together with prompts of equal length are sampled as one batch."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.book = spec, RequestBook(self.generate)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = ModelConfig(path=spec.model, trust_remote_code=spec.trust_remote_code)
        self.model = load_model(config, DTYPES[spec.dtype]).to(self.device).eval()
        self.names = WeightNames(self.model)
        self.vision = load_vision(config) if spec.pictures else None
        self.recorder = Recorder(self.model) if spec.experts else None
        self.version = 0
        self.waiting: list[Request] = []
        self.serving: asyncio.Task[None] | None = None  # a reference, or it might be collected while it runs
        self.interrupting = False  # running requests end at once
        self.keeps = False  # and continue here
        self.open = asyncio.Event()
        self.open.set()
        self.busy = asyncio.Lock()
        self.channel: Channel | None = None

    async def generate(
        self, tokens: list[int], params: SamplingParams, request: str, shown: Shown | None = None
    ) -> Completion:
        if params.structure is not None:
            raise ValueError(f"rollout.engine=hf cannot enforce a structure (got {params.structure}): use vllm")
        return await sample_in_parts(partial(self._queue, shown), tokens, params, request, lambda: self.keeps)

    async def _queue(self, shown: Shown | None, tokens: list[int], params: SamplingParams, request: str) -> Completion:
        completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.waiting.append(Request(tokens, params, completion, shown.pictures if shown else ()))
        if len(self.waiting) == 1:
            self.serving = asyncio.get_running_loop().create_task(self._serve())
        return await completion

    async def _serve(self) -> None:
        await asyncio.sleep(0.005)  # lets other requests join the batch
        await self.open.wait()
        async with self.busy:
            requests, self.waiting = self.waiting, []
            work = asyncio.to_thread(self._complete, requests, asyncio.get_running_loop())
            (error,) = await asyncio.gather(work, return_exceptions=True)
        for request in requests:
            if error is not None and not request.completion.done():
                request.completion.set_exception(error)

    def _complete(self, requests: list[Request], loop: asyncio.AbstractEventLoop) -> None:
        by_length: dict[int, list[Request]] = {}
        for request in requests:
            by_length.setdefault(len(request.tokens), []).append(request)
        for alike in by_length.values():
            for start in range(0, len(alike), self.spec.max_sequences):
                chosen = alike[start : start + self.spec.max_sequences]
                for request, completion in zip(chosen, self._sample(chosen), strict=True):
                    loop.call_soon_threadsafe(request.completion.set_result, completion)

    def _sample(self, requests: list[Request]) -> list[Completion]:
        rows = len(requests)
        generators = [torch.Generator(self.device) for _ in requests]
        for generator, request in zip(generators, requests, strict=True):
            generator.seed() if request.params.seed is None else generator.manual_seed(request.params.seed)
        tokens: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        reasons = [""] * rows
        inputs = torch.tensor([request.tokens for request in requests], device=self.device)
        cache, experts, given = None, list[Tensor](), self._look(inputs, [request.pictures for request in requests])
        with torch.inference_mode():
            while not all(reasons):
                if self.interrupting:
                    reasons = [reason or INTERRUPTED for reason in reasons]
                    break
                output = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1, **given)
                cache, given = output.past_key_values, next_places(given)
                experts += [self.recorder.of_pass(rows)] if self.recorder is not None else []
                drawn, scores = draw(output.logits[:, -1].float(), requests, tokens, generators)
                for row in [row for row in range(rows) if not reasons[row]]:
                    tokens[row].append(drawn[row])
                    logprobs[row].append(scores[row])
                    params = requests[row].params
                    ending = "length" if len(tokens[row]) >= params.max_new_tokens else ""
                    reasons[row] = "stop" if drawn[row] in params.stop_tokens else ending
                inputs = torch.tensor(drawn, device=self.device)[:, None]
                WORK.move()
        parts = zip(tokens, logprobs, reasons, expert_rows(experts, requests, tokens), strict=True)
        return [Completion.of(row, scores, self.version, reason, experts=sent) for row, scores, reason, sent in parts]

    def _look(self, inputs: Tensor, sequences: list[tuple[Picture, ...]]) -> dict[str, Tensor]:
        """Return what the model takes besides tokens [B, T], if it reads pictures: Transformers would infer less."""
        if (vision := self.vision) is None:
            return {}
        given = vision.pixels(sequences, self.model.dtype, self.device) if any(sequences) else {}
        if vision.family.spatial:
            rows, length = inputs.shape
            grids = given.get(GRIDS, torch.zeros(0, 3, dtype=torch.long))
            places = vision.places(self.model.base_model, inputs.view(-1), [length] * rows, sequences, grids)
            given[PLACES] = places.view(rows, length, 3).permute(2, 0, 1)
        if vision.family.two_way:
            given["token_type_ids"] = (inputs == vision.token).long()
        return given

    async def score(self, tokens: list[int], shown: Shown | None = None) -> list[float]:
        async with self.busy:
            with torch.inference_mode():
                ids = torch.tensor([tokens], device=self.device)
                given = self._look(ids, [shown.pictures if shown else ()])
                scores = self.model(input_ids=ids, use_cache=False, **given).logits[0, :-1].float().log_softmax(-1)
                return scores.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    async def pause(self, mode: str = "wait") -> None:
        self.open.clear()
        self.interrupting, self.keeps = mode != "wait", mode == "keep"
        async with self.busy:
            self.interrupting = False

    async def resume(self) -> None:
        self.open.set()

    async def connect(self, link: Link, first_rank: int) -> str:
        def join() -> None:
            self.channel = link.open_receiver(first_rank, self.device)

        return await asyncio.to_thread(try_join, join)

    async def receive(self, buckets: list[Bucket], version: int) -> list[list[int]]:
        return [await asyncio.to_thread(self._receive, buckets, version)]

    def _receive(self, buckets: list[Bucket], version: int) -> list[int]:
        assert self.channel is not None
        prints = []
        for bucket in buckets:
            buffer = self.channel.receive(bucket)
            self._copy(list(bucket_views(bucket, buffer)))
            prints.append(bucket_print(bucket, buffer))
        self.version = version
        return as_numbers(prints)

    async def load(self, weights: list[tuple[str, Tensor]], version: int) -> None:
        self._copy(weights)
        self.version = version

    async def holdings(self) -> list[dict[str, Holding]]:
        return [holdings(self.model)]

    async def bit_sums(self, dtype: str) -> list[dict[str, int]]:
        return [bit_sums(self.model, DTYPES[dtype])]

    async def scramble(self) -> None:
        scramble(self.model)

    async def load_noise(self, buckets: list[Bucket]) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        for bucket in buckets:
            self._copy(list(bucket_views(bucket, bucket_noise(bucket, generator))))

    def _copy(self, weights: list[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                self.names.load(name, tensor)


def next_places(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the places [3, B, 1] of the next tokens, if places have three dimensions: behind all that came before."""
    return {PLACES: given[PLACES].amax((0, 2), keepdim=True).expand(3, -1, -1) + 1} if PLACES in given else {}


def expert_rows(experts: list[Tensor], requests: list[Request], tokens: list[list[int]]) -> list[np.ndarray]:
    """Return the experts of each request's prompt and tokens, without those recorded after its end."""
    if not experts:
        return [NO_EXPERTS] * len(requests)
    rows = zip(torch.cat(experts, dim=1).numpy(), requests, tokens, strict=True)
    lengths = [(row, len(one.tokens) + len(mine) if one.params.experts else 0) for row, one, mine in rows]
    return [experts_of(row[: length - 1], length) if length else NO_EXPERTS for row, length in lengths]


def draw(
    logits: Tensor, requests: list[Request], sampled: list[list[int]], generators: list[torch.Generator]
) -> tuple[list[int], list[float]]:
    """Sample one token per row; return it with its log-prob under the distribution it was sampled from."""
    rows = zip(logits, requests, sampled, strict=True)
    shaped = [shape_logits(row, request.params, request.tokens + tokens) for row, request, tokens in rows]
    scores = torch.log_softmax(torch.stack(shaped), dim=-1)
    chosen = [
        torch.multinomial(row.exp(), 1, generator=generator) if request.params.temperature else row.argmax()[None]
        for row, request, generator in zip(scores, requests, generators, strict=True)
    ]
    drawn = torch.cat(chosen)
    return drawn.tolist(), scores.gather(-1, drawn[:, None])[:, 0].tolist()


def shape_logits(logits: Tensor, params: SamplingParams, before: list[int]) -> Tensor:
    """Return the logits [V] to sample from, minus infinity for excluded tokens."""
    if params.repetition_penalty != 1:
        places = torch.tensor(before, device=logits.device)
        known = logits[places]
        penalty = params.repetition_penalty
        logits = logits.index_put((places,), torch.where(known > 0, known / penalty, known * penalty))
    if not params.temperature:
        return logits
    return truncate(logits / params.temperature, Truncation.of(params))
