"""Experts that an engine tells: of all tokens but the last, over parts, turns and updates of the weights."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.letters import rows_of, run_letters
from tests.support.mixtures import LAYERS, TOP_K, chosen_by
from tests.support.tiny import make_tiny_mixture
from tests.support.tool_calls import TOOL_TEMPLATE, TOOLS
from trueline.data.chat import ChatFormat
from trueline.data.messages import Message
from trueline.data.types import UNKNOWN_EXPERT, Completion, Prompt, Trajectory, to_samples
from trueline.environments.base import Environment, EpisodeResult, Policy
from trueline.models.routing import Replay
from trueline.rollout.engine import EngineSpec, SamplingParams, check_experts
from trueline.rollout.episode import Episodes
from trueline.rollout.hf_engine import HFEngine
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.rollout.session import EpisodeLimits
from trueline.runtime.actors import LocalActor

PROMPT, OTHER = [5, 80, 33, 7], [9, 41, 200, 17]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_mixture(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest.fixture(scope="module")
def moved(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model after an update that changes what its routers choose."""
    folder = tmp_path_factory.mktemp("moved")
    model = AutoModelForCausalLM.from_pretrained(mixture)
    torch.manual_seed(7)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.2 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    return folder


def spec(folder: Path, *, experts: bool = True) -> EngineSpec:
    return EngineSpec(str(folder), "float32", 250, 1, 8, 0, 0.4, False, False, False, experts=experts)


def used(folder: Path, use: Callable[[HFEngine], Awaitable[Any]], *, experts: bool = True) -> Any:
    async def run() -> Any:
        return await use(HFEngine(spec(folder, experts=experts)))

    return asyncio.run(run())


def weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return list(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def known(experts: np.ndarray) -> np.ndarray:
    return (experts != UNKNOWN_EXPERT).all(axis=(1, 2))


def choice(folder: Path, tokens: list[int]) -> np.ndarray:
    return chosen_by(folder, torch.tensor(tokens)).numpy()


def test_the_engine_tells_the_experts_of_all_tokens_but_the_last(mixture: Path) -> None:
    async def use(engine: HFEngine) -> list[Completion]:
        asked = [(PROMPT, 3), (OTHER, 6), ([*PROMPT, 44], 5)]  # two of them are sampled as one batch
        calls = [engine.generate(tokens, SamplingParams(1.0, most, (), 3), str(most)) for tokens, most in asked]
        return list(await asyncio.gather(*calls))

    for prompt, completion in zip([PROMPT, OTHER, [*PROMPT, 44]], used(mixture, use), strict=True):
        tokens = [*prompt, *completion.tokens.tolist()]
        assert completion.experts.shape == (len(tokens), LAYERS, TOP_K) and completion.experts.dtype == np.int8
        assert known(completion.experts).tolist() == [True] * (len(tokens) - 1) + [False]
        np.testing.assert_array_equal(completion.experts[:-1], choice(mixture, tokens)[:-1])
        cut = completion.shorten(2)
        np.testing.assert_array_equal(cut.experts, completion.experts[: len(prompt) + 2])


def test_an_engine_that_is_not_asked_tells_none(mixture: Path) -> None:
    untold = SamplingParams(1.0, 3, (), experts=False)
    for params, told in ((SamplingParams(1.0, 3, ()), False), (untold, True)):
        found = used(mixture, lambda engine, params=params: engine.generate(PROMPT, params, "one"), experts=told)
        assert len(found.tokens) == 3 and len(found.experts) == 0 and len(found.shorten(1).experts) == 0


def test_parts_under_other_weights_keep_the_experts_that_each_was_drawn_by(mixture: Path, moved: Path) -> None:
    async def use(engine: HFEngine) -> Completion:
        steps: list[None] = []
        engine.model.register_forward_hook(lambda *_: steps.append(None))
        asked = asyncio.ensure_future(engine.generate(PROMPT, SamplingParams(1.0, 200, (), 3), "one"))
        while len(steps) < 10:
            await asyncio.sleep(0.001)
        await engine.pause("keep")
        await engine.load(weights(moved), 1)
        await engine.resume()
        return await asked

    completion = used(mixture, use)
    tokens, first = [*PROMPT, *completion.tokens.tolist()], len(PROMPT) + int((completion.versions == 0).sum())
    assert len(PROMPT) < first < len(tokens)
    assert known(completion.experts).tolist() == [True] * (len(tokens) - 1) + [False]
    old, new = choice(mixture, tokens), choice(moved, tokens)
    np.testing.assert_array_equal(completion.experts[: first - 1], old[: first - 1])
    np.testing.assert_array_equal(completion.experts[first - 1 : -1], new[first - 1 : -1])
    assert (old != new).mean() > 0.1


class TwoTurns(Environment):
    """A policy that is given a tool's result between its replies, and new weights if there are any."""

    def __init__(self, engine: HFEngine, update: Path | None) -> None:
        self.engine, self.update = engine, update

    async def play(self, policy: Policy, prompt: Prompt) -> EpisodeResult:
        first = await policy.reply(prompt.messages, TOOLS)
        if self.update is not None:
            await self.engine.pause()
            await self.engine.load(weights(self.update), 1)
            await self.engine.resume()
        result: Message = {"role": "tool", "content": "2"}
        await policy.reply([*prompt.messages, first.message, result], TOOLS)
        return EpisodeResult(1.0)

    async def close(self) -> None: ...


def played(tokenizer: PreTrainedTokenizerFast, folder: Path, update: Path | None) -> Trajectory:
    own = copy.deepcopy(tokenizer)
    own.chat_template = TOOL_TEMPLATE
    chat = ChatFormat(own, use_template=True)
    prompt = Prompt(0, [{"role": "user", "content": "1+1="}])

    async def use(engine: HFEngine) -> Trajectory:
        limits = EpisodeLimits(250, turns=2, turn_tokens=6)
        episodes = Episodes(EnginePool([LocalActor("engine", engine)]), chat, limits)
        params = SamplingParams(1.0, 12, tuple(chat.stop_ids))
        return await episodes.run(TwoTurns(engine, update), prompt, RolloutKey(0, 0, 3), params)

    return used(folder, use)


def test_two_turns_with_a_tool_between_them(mixture: Path, moved: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The second call tells of the result and of the first reply's last token, and changes nothing else."""
    trajectory = played(tokenizer, mixture, None)
    tokens = trajectory.tokens.tolist()
    assert not trajectory.branches and len(np.flatnonzero(np.diff(trajectory.mask.astype(int)) == 1)) == 2
    np.testing.assert_array_equal(trajectory.experts[:-1], choice(mixture, tokens)[:-1])
    assert known(trajectory.experts).tolist() == [True] * (len(tokens) - 1) + [False]
    (sample,) = to_samples(trajectory)
    np.testing.assert_array_equal(sample.experts.numpy(), trajectory.experts)

    updated = played(tokenizer, mixture, moved)
    tokens, first = updated.tokens.tolist(), int(np.flatnonzero(updated.versions == 0)[-1])
    np.testing.assert_array_equal(updated.experts[:first], choice(mixture, tokens)[:first])
    np.testing.assert_array_equal(updated.experts[first:-1], choice(moved, tokens)[first:-1])


def test_what_an_engine_tells_is_checked() -> None:
    """It has those of all tokens but the last, and a kernel that does not record any leaves zeros."""
    told = np.stack([np.full((4, 3), 2), np.full((4, 3), 129)], axis=-1).astype(np.uint8)  # [4, layers, top_k]
    found = check_experts(told, 5)
    assert found.dtype == np.int16 and found.shape == (5, 3, 2)
    assert found[:4].tolist() == told.tolist() and (found[4] == UNKNOWN_EXPERT).all()
    with pytest.raises(RuntimeError, match=r"experts of 4 tokens instead of 5: set training\.replay_routing"):
        check_experts(told, 6)
    with pytest.raises(RuntimeError, match="experts of 0 tokens instead of 4"):
        check_experts(None, 5)
    with pytest.raises(RuntimeError, match="its kernel for this model does not record them"):
        check_experts(np.zeros_like(told), 5)


def test_experts_of_other_tokens_than_those_recorded_are_refused() -> None:
    trajectory = Trajectory(Prompt(0, []), 0)
    trajectory.add_observation(PROMPT)
    told = np.zeros((4, LAYERS, TOP_K), np.int8)
    with pytest.raises(ValueError, match="experts of 4 tokens, but the sequence has 6"):
        trajectory.add_action(Completion.of([1, 2], [-1.0, -1.0], 0, "stop", experts=told))


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_an_asynchronous_run_follows_the_engine(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In scoring and in updates, with weights that have moved on; a critic beside the policy chooses by itself."""
    make_tiny_mixture(tmp_path / "model", "qwen3_moe")
    passes: list[tuple[bool, float, bool]] = []  # gradients, share of slots that a router would choose otherwise, right
    route = Replay._route

    def watched(self: Replay, router: Any, module: Any, given: Any, found: Any) -> Any:
        answer = route(self, router, module, given, found)
        if self.experts is not None:
            told = self.experts[:, router.layer].long()
            right = torch.equal(torch.where(told == UNKNOWN_EXPERT, found[2], told), answer[2])
            away = (told != UNKNOWN_EXPERT) & ~(found[2][:, :, None] == told[:, None, :]).any(1)
            passes.append((module.training, away.float().mean().item(), right))
        return answer

    monkeypatch.setattr(Replay, "_route", watched)
    words = ["rollout.max_staleness=1", "minibatches=2", "training.learning_rate=3e-3", "training.replay_routing=true"]
    assert run_letters(tmp_path, preset, "steps=3", *words) == 0
    assert all(right for _, _, right in passes)
    scored, updated = ([away for training, away, _ in passes if training is wanted] for wanted in (False, True))
    assert len(scored) >= 3 * LAYERS and len(updated) >= 3 * 2 * LAYERS
    assert max(scored) > 0 and max(updated) > 0  # where it would have gone elsewhere
    rows = rows_of(tmp_path)[1:]
    assert len(rows) == 3 and all(0.5 < row["mismatch/routing_agreement"] <= 1 for row in rows)
    assert rows[0]["mismatch/logprob_gap_max"] < 1e-4


def test_a_run_that_only_measures_follows_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And evaluation, which nobody trains on, is told nothing."""
    make_tiny_mixture(tmp_path / "model", "mixtral")
    asked: list[tuple[bool, int]] = []
    sample = HFEngine._sample

    def watched(self: HFEngine, requests: Any) -> Any:
        found = sample(self, requests)
        asked.extend(
            (bool(one.params.temperature), len(done.experts)) for one, done in zip(requests, found, strict=True)
        )
        return found

    monkeypatch.setattr(HFEngine, "_sample", watched)
    held_out = [f"evaluation.data={tmp_path}/prompts.jsonl", "evaluation.limit=4", "evaluation.every=1"]
    words = ["steps=2", "minibatches=2", *held_out, "training.replay_routing=measure"]
    assert run_letters(tmp_path, "grpo", *words) == 0
    assert {(sampled, length > 0) for sampled, length in asked} == {(True, True), (False, False)}
    assert 0.9 < rows_of(tmp_path)[1]["mismatch/routing_agreement"] <= 1
