import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from trueline.data.types import Completion
from trueline.monitoring.heartbeat import WORK
from trueline.rollout.engine import EngineSpec, SamplingParams
from trueline.rollout.hf_engine import HFEngine, shape_logits

PROMPT = [5, 80, 33, 7]
OTHER = [9, 41, 200, 17]
LONGER = [9, 41, 200, 17, 60, 61]


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


def spec(folder: Path, max_sequences: int = 8) -> EngineSpec:
    return EngineSpec(
        model=str(folder),
        dtype="float32",
        context=64,
        tensor_parallel=1,
        max_sequences=max_sequences,
        seed=0,
        gpu_memory_utilization=0.4,
        cuda_graphs=False,
        sleeps=False,
        trust_remote_code=False,
    )


def test_every_token_tells_that_the_run_moves(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[None] = []
    monkeypatch.setattr(WORK, "move", lambda: moves.append(None))
    params = SamplingParams(1.0, 5, ())
    completion = with_engine(model_folder, lambda engine: engine.generate(PROMPT, params, "one"))
    assert len(moves) == len(completion.tokens) == 5


def with_engine(folder: Path, use: Callable[[HFEngine], Awaitable[Any]], **settings: int) -> Any:
    async def run() -> Any:
        return await use(HFEngine(spec(folder, **settings)))

    return asyncio.run(run())


def generate(folder: Path, *requests: tuple[list[int], SamplingParams], **settings: int) -> list[Completion]:
    """All requests at once, as a group's answers are asked for."""

    async def use(engine: HFEngine) -> list[Completion]:
        calls = [engine.generate(tokens, params, str(number)) for number, (tokens, params) in enumerate(requests)]
        return list(await asyncio.gather(*calls))

    return with_engine(folder, use, **settings)


def full_logprobs(model: Any, prompt: list[int], answer: list[int], temperature: float) -> Tensor:
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        scores = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0]


def greedy_loop(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_is_the_argmax_of_the_model(model_folder: Path, reference: Any) -> None:
    params = SamplingParams(0.0, 12, ())
    answers = generate(model_folder, (PROMPT, params), (OTHER, params), (LONGER, params))
    for prompt, answer in zip((PROMPT, OTHER, LONGER), answers, strict=True):
        assert answer.tokens.tolist() == greedy_loop(reference, prompt, 12)
        assert answer.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_log_probs_are_those_of_the_distribution_sampled_from(
    model_folder: Path, reference: Any, temperature: float
) -> None:
    params = [SamplingParams(temperature, 10, (), seed) for seed in range(4)]
    answers = generate(model_folder, *((PROMPT, one) for one in params))
    for answer in answers:
        expected = full_logprobs(reference, PROMPT, answer.tokens.tolist(), temperature)
        torch.testing.assert_close(torch.tensor(answer.logprobs.tolist()), expected, rtol=1e-4, atol=1e-4)
    assert len({tuple(answer.tokens.tolist()) for answer in answers}) == 4


def test_samples_follow_the_models_distribution(model_folder: Path, reference: Any) -> None:
    """First tokens of many answers against the exact probabilities, by the chi-squared statistic."""
    draws = 600
    params = [SamplingParams(0.3, 1, (), seed) for seed in range(draws)]
    answers = generate(model_folder, *((PROMPT, one) for one in params), max_sequences=draws)
    with torch.no_grad():
        exact = (reference(input_ids=torch.tensor([PROMPT])).logits[0, -1] / 0.3).softmax(-1)
    counts = torch.bincount(torch.tensor([answer.tokens[0] for answer in answers]), minlength=len(exact))
    frequent = exact * draws >= 5
    expected = torch.cat([exact[frequent], exact[~frequent].sum()[None]]) * draws
    found = torch.cat([counts[frequent], counts[~frequent].sum()[None]])
    freedom = len(expected) - 1
    statistic = ((found - expected).square() / expected.clamp(min=1)).sum().item()
    assert freedom >= 3
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def shaped(logits: Tensor, **controls: Any) -> Tensor:
    return shape_logits(logits, SamplingParams(1.0, 1, (), **controls), before=[0, 3]).softmax(-1)


def test_controls_narrow_the_distribution() -> None:
    """By hand: probabilities 1/2, 1/4, 1/8, 1/16 and 1/16 of tokens that stand in no order."""
    exact = torch.tensor([1 / 8, 1 / 2, 1 / 16, 1 / 4, 1 / 16])
    logits = exact.log() + 3.0
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [0, 1, 3]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.49}, [1]),
        ({"top_p": 0.51}, [1, 3]),  # the token that passes the bound stays
        ({"top_p": 0.8}, [0, 1, 3]),
        ({"min_p": 0.2}, [0, 1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.2, "top_p": 0.84}, [1, 3]),  # of what min_p leaves, 6/7 is theirs
        ({"top_k": 2, "top_p": 0.6}, [1]),  # of what top_k leaves, 2/3 is its own
    ]
    for controls, kept in cases:
        expected = torch.zeros(5)
        expected[kept] = exact[kept] / exact[kept].sum()
        torch.testing.assert_close(shaped(logits, **controls), expected, msg=lambda text, c=controls: f"{c}: {text}")


def test_a_repetition_penalty_pulls_known_tokens_down_on_either_side_of_zero() -> None:
    logits = torch.tensor([2.0, 1.0, -1.0, -2.0])
    expected = torch.tensor([1.0, 1.0, -1.0, -4.0])  # tokens 0 and 3 came before
    torch.testing.assert_close(shaped(logits, repetition_penalty=2.0), expected.softmax(-1))
    greedy = SamplingParams(0.0, 1, (), repetition_penalty=2.0, top_k=1)
    torch.testing.assert_close(shape_logits(logits, greedy, [0, 3, 3]), expected)


def test_requests_served_together_have_controls_of_their_own(model_folder: Path, reference: Any) -> None:
    """And log-probs are those of the narrowed distribution: of one token, 0."""
    one, free = SamplingParams(1.0, 8, (), 3, top_k=1), SamplingParams(1.0, 8, (), 3)
    shy = SamplingParams(1.0, 8, (), 3, repetition_penalty=3.0)
    narrow, wide, fresh = generate(model_folder, (PROMPT, one), (PROMPT, free), (PROMPT, shy))
    assert narrow.tokens.tolist() == greedy_loop(reference, PROMPT, 8) and narrow.logprobs.tolist() == [0.0] * 8
    torch.testing.assert_close(
        torch.tensor(wide.logprobs.tolist()),
        full_logprobs(reference, PROMPT, wide.tokens.tolist(), 1.0),
        rtol=1e-4,
        atol=1e-4,
    )
    tokens = list(PROMPT)
    for token, logprob in zip(fresh.tokens.tolist(), fresh.logprobs.tolist(), strict=True):
        with torch.no_grad():
            logits = shape_logits(reference(input_ids=torch.tensor([tokens])).logits[0, -1], shy, tokens)
        assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)
        tokens.append(token)  # what was just drawn is known from now on


def test_a_seed_repeats_an_answer_whatever_runs_beside_it(model_folder: Path) -> None:
    params = SamplingParams(1.0, 10, (), seed=7)
    alone = generate(model_folder, (PROMPT, params))[0]
    again = generate(model_folder, (PROMPT, params))[0]
    beside = generate(model_folder, (OTHER, SamplingParams(1.0, 10, (), seed=8)), (PROMPT, params))[1]
    single = generate(model_folder, (OTHER, params), (PROMPT, params), max_sequences=1)[1]
    assert (alone.tokens == again.tokens).all() and (alone.logprobs == again.logprobs).all()
    assert alone.tokens.tolist() == beside.tokens.tolist() == single.tokens.tolist()


def test_without_a_seed_answers_differ(model_folder: Path) -> None:
    params = SamplingParams(1.0, 10, ())
    first, second = generate(model_folder, (PROMPT, params), (PROMPT, params))
    assert first.tokens.tolist() != second.tokens.tolist()


def test_a_stop_token_ends_its_answer_and_is_part_of_it(model_folder: Path, reference: Any) -> None:
    free = greedy_loop(reference, PROMPT, 12)
    stop = free[3]
    end = free.index(stop) + 1
    stopped, other = generate(
        model_folder, (PROMPT, SamplingParams(0.0, 12, (stop, 255))), (PROMPT, SamplingParams(0.0, 12, ()))
    )
    assert stopped.tokens.tolist() == free[:end]
    assert len(stopped.logprobs) == end
    assert (stopped.finish_reason, other.finish_reason) == ("stop", "length")
    assert other.tokens.tolist() == free


def test_a_stop_token_in_the_last_place_is_a_stop(model_folder: Path, reference: Any) -> None:
    first = greedy_loop(reference, PROMPT, 1)
    assert generate(model_folder, (PROMPT, SamplingParams(0.0, 1, (first[0],))))[0].finish_reason == "stop"


def test_scores_are_log_probs_at_temperature_one(model_folder: Path, reference: Any) -> None:
    scores = with_engine(model_folder, lambda engine: engine.score(LONGER))
    expected = full_logprobs(reference, LONGER[:1], LONGER[1:], 1.0)
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=1e-4, atol=1e-4)


def test_loaded_weights_are_the_ones_sampled_from(model_folder: Path, reference: Any) -> None:
    torch.manual_seed(5)
    other = AutoModelForCausalLM.from_config(reference.config).eval()

    async def use(engine: HFEngine) -> tuple[Completion, Completion]:
        params = SamplingParams(0.0, 8, ())
        before = await engine.generate(PROMPT, params, "before")
        await engine.load([(name, tensor.detach()) for name, tensor in other.named_parameters()], version=3)
        return before, await engine.generate(PROMPT, params, "after")

    before, after = with_engine(model_folder, use)
    assert (set(before.versions.tolist()), set(after.versions.tolist())) == ({0}, {3})
    assert before.tokens.tolist() == greedy_loop(reference, PROMPT, 8)
    assert after.tokens.tolist() == greedy_loop(other, PROMPT, 8)
    assert before.tokens.tolist() != after.tokens.tolist()


def test_a_paused_engine_starts_nothing_until_it_goes_on(model_folder: Path) -> None:
    async def use(engine: HFEngine) -> tuple[bool, Completion]:
        await engine.pause()
        call = asyncio.create_task(engine.generate(PROMPT, SamplingParams(0.0, 2, ()), "waiting"))
        await asyncio.sleep(0.1)
        started = call.done()
        await engine.resume()
        return started, await asyncio.wait_for(call, 10)

    started, answer = with_engine(model_folder, use)
    assert not started
    assert len(answer.tokens) == 2


@pytest.mark.parametrize("tokens", [[5, 100_000], []], ids=["outside the vocabulary", "empty"])
def test_a_request_that_cannot_be_answered_raises_and_does_not_hang(model_folder: Path, tokens: list[int]) -> None:
    async def use(engine: HFEngine) -> Completion:
        return await asyncio.wait_for(engine.generate(tokens, SamplingParams(0.0, 2, ()), "bad"), 5)

    with pytest.raises((RuntimeError, IndexError, ValueError)):
        with_engine(model_folder, use)
