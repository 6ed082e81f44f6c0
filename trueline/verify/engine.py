"""The rollout engine: its log-probs are the trainer's, and do not depend on what it samples beside."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from trueline.data.types import Completion, Sample
from trueline.plan.resolve import check_engines, check_rollout, resolve_rollout
from trueline.rollout.engine import RolloutEngine, SamplingParams
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.runs.processes import engine_specs, open_loop, open_processes
from trueline.runtime.actors import Actor
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.placement import Layout
from trueline.verify.comparison import Comparison, Rows, compare, compare_logprobs
from trueline.verify.divisions import guard
from trueline.verify.subject import LOGS, Subject, free_memory, open_plain, plain_rows

MATCHING = 1e-4  # mean gap in nats; engines have kernels of their own, which round more often
COPIES = 3  # completions of each prompt
QUARTERS = 4
ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class SampledCompletions:
    prompts: list[list[int]]
    completions: list[Completion]

    def samples(self) -> list[Sample]:
        found = []
        for prompt, completion in zip(self.prompts, self.completions, strict=True):
            tokens = torch.tensor([*prompt, *completion.tokens.tolist()])
            found.append(Sample(tokens, torch.arange(len(tokens)) >= len(prompt)))
        return found

    def logprobs(self) -> Rows:
        return [one.logprobs for one in self.completions]


@dataclass(frozen=True, slots=True)
class OpenEngine:
    subject: Subject
    actor: Actor[RolloutEngine]
    loop: EventLoop
    max_new_tokens: int

    def prompts(self) -> list[list[int]]:
        """Return prompts of several lengths, each several times."""
        samples = self.subject.samples
        longest = self.subject.config.tokens or 0
        found = [sample.tokens[: longest - self.max_new_tokens].tolist() for sample in samples]
        return [prompt for prompt in found for _ in range(COPIES)]

    def sample(self, temperature: float, *, alone: bool) -> SampledCompletions:
        prompts, stops = self.prompts(), self.subject.chat.sampled_stops()

        async def one(number: int) -> Completion:
            params = SamplingParams(temperature, self.max_new_tokens, stops, self.subject.config.seed + number)
            name = f"{temperature}-{alone}-{number}"
            return await self.actor.call(RolloutEngine.generate, prompts[number], params, name)

        async def every() -> list[Completion]:
            if alone:
                return [await one(number) for number in range(len(prompts))]
            return [*await asyncio.gather(*map(one, range(len(prompts))))]

        return SampledCompletions(prompts, self.loop.run(every(), "sampling"))


def compare_engine(subject: Subject) -> Iterator[Comparison]:
    with open_engine(subject) as engine:
        drawn = engine.sample(1.0, alone=False)
        greedy, lonely = engine.sample(0.0, alone=False), engine.sample(0.0, alone=True)
    yield from guard(ENGINE, partial(compare_sampled, subject, drawn))
    yield compare_batches(subject, greedy, lonely)


@contextmanager
def open_engine(subject: Subject) -> Iterator[OpenEngine]:
    config, machine, logs = subject.config, subject.machine, subject.folder / LOGS
    check_engines(config, "rollout")
    tokens = config.tokens or 0
    room = {"max_new_tokens": max(tokens // 4, 4), "max_prompt_tokens": tokens - max(tokens // 4, 4)}
    asked = config.rollout.with_keys(room)
    rollout = resolve_rollout(asked, subject.facts, [tokens], 1, config.model.dtype, machine.gpus)
    check_rollout(rollout, config.model, subject.facts, machine)
    layout = Layout(0, 1, rollout.tensor_parallel)
    logs.mkdir(exist_ok=True)
    with ExitStack() as stack:
        processes = stack.enter_context(open_processes(machine, layout, logs, config.runtime))
        loop = stack.enter_context(open_loop(config.timeout_seconds))
        target = ROLLOUT_ENGINES[rollout.engine].target(rollout)
        (actor,) = processes.engines(target, engine_specs(config.model, rollout, layout, config.seed))
        stack.callback(actor.stop)
        loop.run(actor.call(RolloutEngine.processes), "start of the engine")
        yield OpenEngine(subject, actor, loop, rollout.max_new_tokens)


def compare_sampled(subject: Subject, drawn: SampledCompletions) -> list[Comparison]:
    """Compare what the engine said of its tokens with what plain Transformers says of them."""
    samples = drawn.samples()
    expected = plain_rows(open_plain(subject.config.model), samples)
    free_memory()
    limits = subject.limits._replace(mean=max(subject.limits.mean, MATCHING), largest=np.inf)
    whole = compare_logprobs(ENGINE, expected, drawn.logprobs(), limits, f"{len(samples)} completions")
    gaps = [np.abs(one - other) for one, other in zip(expected, drawn.logprobs(), strict=True)]
    return [
        whole,
        by_part("by position", dict(positions(gaps)), limits.mean),
        by_part("by prompt length", dict(lengths(drawn, gaps)), limits.mean),
    ]


def by_part(what: str, parts: dict[str, float], limit: float) -> Comparison:
    """Compare the worst part; a fault of late positions or long prompts vanishes in the mean of all."""
    return compare(ENGINE, f"log-probs {what}", max(parts.values()), limit, words(parts), **parts)


def words(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {gap:.0e}" for name, gap in parts.items())


def positions(gaps: Rows) -> Iterator[tuple[str, float]]:
    longest = max(map(len, gaps))
    for quarter in range(QUARTERS):
        low, high = quarter * longest // QUARTERS, (quarter + 1) * longest // QUARTERS
        if any(len(one) > low for one in gaps) and high > low:
            yield f"{low + 1}-{high}", float(np.concatenate([one[low:high] for one in gaps]).mean())


def lengths(drawn: SampledCompletions, gaps: Rows) -> Iterator[tuple[str, float]]:
    sizes = sorted({len(prompt) for prompt in drawn.prompts})
    for size in sizes:
        chosen = [one for prompt, one in zip(drawn.prompts, gaps, strict=True) if len(prompt) == size]
        yield str(size), float(np.concatenate(chosen).mean())


def compare_batches(subject: Subject, together: SampledCompletions, alone: SampledCompletions) -> Comparison:
    """Compare greedy completions that were sampled together and one by one, up to the first other token."""
    gaps, same = [], 0
    for one, other in zip(together.completions, alone.completions, strict=True):
        count = min(len(one.tokens), len(other.tokens))
        differs = np.flatnonzero(one.tokens[:count] != other.tokens[:count])
        common = int(differs[0]) if len(differs) else count
        same += common == len(one.tokens) == len(other.tokens)
        gaps.append(np.abs(one.logprobs[:common] - other.logprobs[:common]))
    gap, limit = float(np.concatenate(gaps).mean()), max(subject.limits.mean, MATCHING)
    every = len(together.completions)
    remark = f"{same} of {every} greedy completions have the same tokens"
    return compare("engine, alone or in a batch", "log-probs", gap, limit, remark, same_tokens=same / every)
