"""One suite for every rollout engine: what a sampler must do, whoever does it.

Covers `trueline.environments.tools.vllm_calls`.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny import make_tiny_model
from trueline.algorithms.importance_sampling import draw_metrics
from trueline.config.rl import RolloutConfig
from trueline.data.types import INTERRUPTED, Completion
from trueline.environments.base import Structure
from trueline.rollout.engine import EngineSpec, RolloutEngine, SamplingParams
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.pool import EnginePool, RolloutKey, SequencePlace
from trueline.runtime.actors import Actor, ActorFailure, Placement, RayActor, Target
from trueline.runtime.cluster import machine_at_hand, ray_cluster
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.placement import process_environment

TIMEOUT = 300.0
PROMPT = [10, 20, 30, 40, 50]
TARGETS: dict[str, Target[RolloutEngine]] = {
    "hf": ROLLOUT_ENGINES["hf"].target(RolloutConfig()),
    "vllm": replace(ROLLOUT_ENGINES["vllm"], path="tests.support.small_cache:SmallCacheEngine").target(RolloutConfig()),
}
ROOT = Path(__file__).resolve().parents[2]
Run = Callable[[Awaitable[Any]], Any]


class WithKey(Protocol):
    """What small_cache.py adds to the engine; it imports vLLM."""

    async def code_key(self, folder: str, remote: bool) -> str: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), tied=True))


@pytest.fixture(scope="module")
def plain(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = EventLoop(TIMEOUT)
    yield lambda work: loop.run(work, "a test's request")  # type: ignore[arg-type]
    loop.stop()


@pytest.fixture(scope="module")
def engines(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RayActor[RolloutEngine]]]:
    spec = EngineSpec(
        model=model,
        dtype="float32",
        context=128,
        tensor_parallel=1,
        max_sequences=16,
        seed=0,
        gpu_memory_utilization=0.3,
        cuda_graphs=False,
        sleeps=False,
        trust_remote_code=False,
        structured=True,
    )
    logs = tmp_path_factory.mktemp("logs")
    machine, more = machine_at_hand(), {"PYTHONPATH": str(ROOT), "VLLM_CACHE_ROOT": str(logs / "cache")}
    spots = {
        name: Placement(environment=process_environment(target, machine) | more) for name, target in TARGETS.items()
    }
    with ray_cluster(machine):
        yield {name: RayActor(name, TARGETS[name], [spec], spots[name], logs / f"{name}.log") for name in TARGETS}


@pytest.fixture(params=list(TARGETS))
def engine(request: pytest.FixtureRequest, engines: dict[str, RayActor[RolloutEngine]]) -> Actor[RolloutEngine]:
    return engines[request.param]


def params(temperature: float, tokens: int = 16, stop: tuple[int, ...] = (), seed: int | None = 1) -> SamplingParams:
    return SamplingParams(temperature, tokens, stop, seed)


def ask(
    run: Run, engine: Actor[RolloutEngine], request: str, settings: SamplingParams, prompt: list[int] = PROMPT
) -> Completion:
    return run(engine.call(RolloutEngine.generate, prompt, settings, request))


def true_logprobs(plain: Any, tokens: list[int], temperature: float) -> torch.Tensor:
    """[T - 1] of tokens[1:], by a full forward pass."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        scores = torch.log_softmax(plain(ids).logits[0, :-1] / temperature, -1)
    return scores.gather(-1, ids[0, 1:, None])[:, 0]


def test_the_parts_of_a_start_are_known(engines: dict[str, RayActor[RolloutEngine]], run: Run) -> None:
    """Ray starts no processes besides, and vLLM none to inspect the model's class, which leaves its result behind."""
    more = {"hf": [], "vllm": ["set-up", "weights"]}
    for name, engine in engines.items():
        run(engine.call(RolloutEngine.processes))
        parts, ends = zip(*engine.milestones().result(TIMEOUT), strict=True)
        assert list(parts) == ["process", "imports", *more[name], "rest"]
        assert [engine.begun, *ends] == sorted([engine.begun, *ends])
    commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert any("raylet" in command for command in commands) and not any("ray::IDLE" in one for one in commands)
    assert not (engines["vllm"].log.parent / "cache" / "modelinfos").exists()


def test_models_of_one_shape_share_compiled_code(
    engines: dict[str, RayActor[Any]], model: str, run: Run, tmp_path: Path
) -> None:
    """Those with code of their own do not."""

    def key(folder: str | Path, remote: bool = False) -> str:
        return run(engines["vllm"].call(WithKey.code_key, str(folder), remote))

    alike = make_tiny_model(tmp_path / "alike", tied=True, seed=1)
    other = make_tiny_model(tmp_path / "other", tied=True, biases=True)
    assert key(alike) == key(model) != key(other)
    assert key(alike, remote=True) != key(model, remote=True)


def test_greedy_is_the_most_likely_token(engine: Actor[RolloutEngine], plain: Any, run: Run) -> None:
    answer = ask(run, engine, "greedy", params(0.0))
    tokens = list(PROMPT)
    for token in answer.tokens.tolist():
        with torch.no_grad():
            assert token == int(plain(torch.tensor([tokens])).logits[0, -1].argmax())
        tokens.append(token)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampled_distribution(
    engine: Actor[RolloutEngine], plain: Any, run: Run, temperature: float
) -> None:
    answer = ask(run, engine, f"logprobs-{temperature}", params(temperature))
    expected = true_logprobs(plain, PROMPT + answer.tokens.tolist(), temperature)[len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.tensor(answer.logprobs.tolist()), expected, atol=1e-4, rtol=0)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SHAPES = [Structure(json.dumps(SCHEMA)), Structure(json.dumps({"const": "x"}), "<tool_call>", "</tool_call>")]


def test_a_structure_is_kept_or_refused(
    engines: dict[str, RayActor[RolloutEngine]], model: str, plain: Any, run: Run
) -> None:
    """Log-probs are those of the tokens that the structure allows: what it forces is certain."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    stop = (tokenizer.eos_token_id,)
    settings = [replace(params(1.0, 60, stop), structure=shape) for shape in SHAPES]
    answers = [ask(run, engines["vllm"], f"structure-{at}", one) for at, one in enumerate(settings)]
    texts = [tokenizer.decode(answer.tokens[:-1].tolist()) for answer in answers]
    found = json.loads(texts[0])
    assert set(found) == {"a", "b"} and 0 <= found["a"] <= 99 and found["b"] in ("x", "yy")
    assert texts[1].replace(" ", "") == '<tool_call>"x"</tool_call>' and answers[1].finish_reason == "stop"
    free = true_logprobs(plain, PROMPT + answers[0].tokens.tolist(), 1.0)[len(PROMPT) - 1 :]
    held = torch.tensor(answers[0].logprobs.tolist())
    assert held[0] == 0 and (held >= free - 1e-4).all() and (held[1:] < 0).any()
    with pytest.raises(ActorFailure, match="=hf cannot enforce a structure"):
        ask(run, engines["hf"], "structure", settings[0])


def draws_of(run: Run, engine: Actor[RolloutEngine], plain: Any, name: str, **controls: float) -> tuple[float, float]:
    """Return z and effect of 32 answers by the plain model's own distributions; the engine's log-probs play no part."""
    settings = [replace(params(0.7, tokens=40, seed=seed), **controls) for seed in range(32)]  # type: ignore[arg-type]

    async def answers() -> list[Completion]:
        calls = [engine.call(RolloutEngine.generate, PROMPT, one, f"{name}-{one.seed}") for one in settings]
        return list(await asyncio.gather(*calls))

    excess = variance = 0.0
    for answer in run(answers()):
        with torch.no_grad():
            logits = plain(torch.tensor([PROMPT + answer.tokens.tolist()])).logits[0, len(PROMPT) - 1 : -1]
        scores = torch.log_softmax(logits / 0.7, -1).double()
        entropy = -(scores.exp() * scores).sum(-1)
        excess += (scores[range(len(scores)), answer.tokens] + entropy).sum().item()
        variance += (scores.exp() * (scores + entropy[:, None]).square()).sum().item()
    found = draw_metrics(excess, variance)
    return found["mismatch/sampler_z"], found["mismatch/sampler_effect"]


def test_tokens_are_drawn_from_the_model(engine: Actor[RolloutEngine], plain: Any, run: Run) -> None:
    """And the test that says so is not blind: with top_p it says no."""
    z, _ = draws_of(run, engine, plain, "draws")
    assert abs(z) < 4
    z, effect = draws_of(run, engine, plain, "narrow-draws", top_p=0.8)
    assert z > 6 and effect > 0.1


def test_score_is_that_of_the_plain_model(engine: Actor[RolloutEngine], plain: Any, run: Run) -> None:
    scores = run(engine.call(RolloutEngine.score, PROMPT))
    torch.testing.assert_close(torch.tensor(scores), true_logprobs(plain, PROMPT, 1.0), atol=1e-4, rtol=0)


def test_all_but_one_token_of_a_context_can_be_scored(engine: Actor[RolloutEngine], run: Run) -> None:
    assert len(run(engine.call(RolloutEngine.score, [3 + at % 250 for at in range(127)]))) == 126


def test_controls_shape_the_distribution_alike(engine: Actor[RolloutEngine], plain: Any, run: Run) -> None:
    """Tokens and log-probs are those that PyTorch alone computes from all logits; a greedy one only has the penalty."""
    cases: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 0.0, "repetition_penalty": 1.5, "top_k": 2},
    ]

    async def answers() -> list[Completion]:
        settings = [replace(params(0.5), **controls) for controls in cases]
        calls = [engine.call(RolloutEngine.generate, PROMPT, one, f"control-{at}") for at, one in enumerate(settings)]
        return list(await asyncio.gather(*calls))

    for controls, answer in zip(cases, run(answers()), strict=True):
        tokens = list(PROMPT)
        for token, logprob in zip(answer.tokens.tolist(), answer.logprobs.tolist(), strict=True):
            with torch.no_grad():
                expected = shaped_logprobs(plain(torch.tensor([tokens])).logits[0, -1], tokens, **controls)
            assert expected[token] > -torch.inf, controls
            assert abs(float(expected[token]) - logprob) < 1e-3, controls
            if "temperature" in controls:
                assert token == int(expected.argmax())
            tokens.append(token)


def shaped_logprobs(
    logits: torch.Tensor,
    before: list[int],
    temperature: float = 0.5,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> torch.Tensor:
    """[V] token by token: penalty, temperature, then the likeliest tokens as long as all bounds allow them."""
    scores = logits.tolist()
    for token in set(before):
        scores[token] *= repetition_penalty if scores[token] < 0 else 1 / repetition_penalty
    if temperature == 0:
        return torch.tensor(scores).log_softmax(-1)
    shares = (torch.tensor(scores, dtype=torch.float64) / temperature).softmax(-1)
    order = [int(token) for token in shares.argsort(descending=True) if shares[token] >= min_p * shares.max()]
    order = order[: top_k or None]
    total, passed, kept = float(shares[order].sum()), 0.0, []
    for token in order:
        if passed < top_p * total:
            kept.append(token)
        passed += float(shares[token])
    chosen = torch.full_like(shares, -torch.inf)
    chosen[kept] = (shares[kept] / shares[kept].sum()).log()
    return chosen.float()


def test_a_seed_repeats_an_answer(engine: Actor[RolloutEngine], run: Run) -> None:
    first, again = (ask(run, engine, f"seed-{number}", params(1.0, seed=5)) for number in range(2))
    other = ask(run, engine, "seed-other", params(1.0, seed=6))
    assert first.tokens.tolist() == again.tokens.tolist()
    assert first.tokens.tolist() != other.tokens.tolist()


def test_an_answer_ends_at_a_stop_token_or_at_its_limit(engine: Actor[RolloutEngine], run: Run) -> None:
    free = ask(run, engine, "free", params(1.0, seed=9))
    assert free.finish_reason == "length" and len(free.tokens) == 16
    stop = free.tokens.tolist()[4]
    stopped = ask(run, engine, "stopped", params(1.0, stop=(stop,), seed=9))
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == free.tokens.tolist()[: free.tokens.tolist().index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.tokens)


def test_requests_of_many_lengths_are_served_together(engine: Actor[RolloutEngine], plain: Any, run: Run) -> None:
    """More tokens than the engine reads in one go, so prompts queue; seeds must survive that."""
    prompts = [[3 + (number + at) % 250 for at in range(20 + 2 * number)] for number in range(40)]

    async def all_answers() -> list[Completion]:
        calls = [
            engine.call(RolloutEngine.generate, prompt, params(1.0, tokens=4, seed=number), f"many-{number}")
            for number, prompt in enumerate(prompts)
        ]
        return list(await asyncio.gather(*calls))

    for prompt, answer in zip(prompts, run(all_answers()), strict=True):
        expected = true_logprobs(plain, prompt + answer.tokens.tolist(), 1.0)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(answer.logprobs.tolist()), expected, atol=1e-4, rtol=0)


def test_a_paused_engine_answers_after_it_resumes(engine: Actor[RolloutEngine], run: Run) -> None:
    async def pause_then_ask() -> tuple[bool, Completion]:
        await engine.call(RolloutEngine.pause)
        request = asyncio.ensure_future(engine.call(RolloutEngine.generate, PROMPT, params(1.0), "paused"))
        await asyncio.sleep(0.5)
        waited = not request.done()
        await engine.call(RolloutEngine.resume)
        return waited, await request

    waited, answer = run(pause_then_ask())
    assert waited
    assert len(answer.tokens) == 16


@pytest.mark.parametrize("mode", ["interrupt", "keep"])
def test_answers_that_are_cut_off_go_on(engine: Actor[RolloutEngine], plain: Any, run: Run, mode: str) -> None:
    """By whoever asked, or by the engine itself; a token's log-prob is that of all tokens before it, either way."""
    pool = EnginePool([engine])

    async def cut(attempt: int) -> tuple[list[Completion], list[Completion]]:
        """Return what came of all requests, and of one that was asked without a pool."""
        keys = [RolloutKey(one, attempt, purpose=mode) for one in range(6)]
        calls = [pool.generate(PROMPT, params(1.0, 100, seed=key.group), key) for key in keys]
        alone = engine.call(RolloutEngine.generate, PROMPT, params(1.0, 100), f"{mode}-{attempt}-alone")
        requests = [asyncio.ensure_future(call) for call in (*calls, alone)]
        await asyncio.sleep(0.05 * attempt)
        await engine.call(RolloutEngine.pause, mode)
        await asyncio.sleep(0.2)
        assert not all(request.done() for request in requests[:-1]) or attempt > 3
        await engine.call(RolloutEngine.resume)
        *answers, single = await asyncio.gather(*requests)
        return answers, [single]

    for attempt in range(1, 8):  # until the pause comes in the midst of them
        answers, (single,) = run(cut(attempt))
        if 0 < len(single.tokens) < 100 or mode == "keep":
            break
    assert (single.finish_reason == INTERRUPTED) is (mode == "interrupt")
    for answer in [*answers, single]:
        assert answer.finish_reason in ("length", "stop") or answer is single
        assert len(answer.tokens) == len(answer.logprobs) == len(answer.versions)
        expected = true_logprobs(plain, PROMPT + answer.tokens.tolist(), 1.0)[len(PROMPT) - 1 :]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=0)
    assert all(len(answer.tokens) == 100 for answer in answers if answer.finish_reason == "length")


def test_a_pause_drains_preempted_requests_too(engines: dict[str, RayActor[RolloutEngine]], run: Run) -> None:
    """Eight requests of up to 105 tokens in room for two: vLLM preempts some, and its own pause forgets those."""
    engine = engines["vllm"]

    async def ask_then_pause() -> int:
        calls = [
            engine.call(RolloutEngine.generate, PROMPT, params(1.0, 100, seed=one), f"drain-{one}") for one in range(8)
        ]
        requests = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.3)  # some run, some are preempted; the pause comes in their midst
        await engine.call(RolloutEngine.pause)
        done, _ = await asyncio.wait(requests, timeout=120)  # for answers on their way; one that is frozen never comes
        await engine.call(RolloutEngine.resume)
        await asyncio.gather(*requests)
        return len(done)

    assert run(ask_then_pause()) == 8


def test_what_goes_wrong_inside_vllm_is_told() -> None:
    """A stand-in does what the real one does only by chance: it fails in a step, and keeps its prefix cache."""
    code = """
import asyncio, threading, time
from types import SimpleNamespace
import pytest
from vllm.logprobs import Logprob
from trueline.rollout import vllm_engine
from trueline.rollout.engine import EngineSpec, SamplingParams

class Output:
    finished, num_cached_tokens, prompt_logprobs = True, 0, [None, {1: Logprob(-0.5)}]
    prompt_token_ids = [1]
    def __init__(self, request):
        self.request_id = request

class State:
    def __init__(self, request):
        self.external_req_id = request
    def make_request_output(self, *args):
        return Output(self.external_req_id)

class StandIn(list):
    aborted, slept = [], []
    busy, go_on = threading.Event(), threading.Event()
    @property
    def output_processor(self):
        return SimpleNamespace(request_states={one: State(one) for one in self})
    def sleep(self, level):
        self.slept.append(list(self))
    @classmethod
    def from_engine_args(cls, options):
        return cls()
    def add_request(self, request, prompt, settings, lora_request):
        self.append(request)
    def has_unfinished_requests(self):
        return bool(self)
    def step(self):
        time.sleep(0.01)
        assert "bad" not in self, "a broken step"
        if "dying" in self:
            self.busy.set()
            self.go_on.wait()
            ended = [Output(one) for one in self]
            self.clear()
            return ended
        return []
    def abort_request(self, requests):
        self.aborted += requests
        self[:] = [one for one in self if one not in requests]
    def collective_rpc(self, method, args):
        return [[]]
    def reset_prefix_cache(self):
        return False

async def cancel_while_it_ends(engine):
    # A step ends two requests, of which one was cancelled meanwhile: the other has its answer.
    dying = asyncio.create_task(engine._run([1], None, "dying"))
    other = asyncio.create_task(engine._run([1], None, "other"))
    await asyncio.to_thread(StandIn.busy.wait)
    while "other" not in engine.waiting:
        await asyncio.sleep(0)
    engine.llm.append("other")  # its own call waits behind the step
    dying.cancel()
    await asyncio.sleep(0)
    StandIn.go_on.set()
    assert (await other).request_id == "other"
    await asyncio.wait([dying])
    engine.llm.clear()

async def cancel_while_it_is_cut_off(engine):
    # A pause cuts two requests off, of which one is cancelled in that moment: the other hands back what it has.
    both = [asyncio.create_task(engine._run([1], None, name)) for name in ("cancelled", "kept")]
    while len(engine.llm) < 2:
        await asyncio.sleep(0.01)
    cut_off = engine._interrupt
    def cancel_then_cut():
        engine.waiting["cancelled"].cancel()
        return cut_off()
    engine._interrupt = cancel_then_cut
    await engine.pause("keep")
    assert (await both[1]).request_id == "kept" and engine.idle.is_set()
    engine._interrupt = cut_off
    await engine.resume()

async def sleep_while_one_runs(engine):
    # What dynamic sampling has no use for may still run when the engine shall sleep.
    engine.sleeps = True
    running = asyncio.create_task(engine._run([1], None, "unneeded"))
    while not engine.llm:
        await asyncio.sleep(0.01)
    await engine.sleep()
    assert engine.llm.slept == [[]] and running.done() and not engine.open.is_set()
    await engine.resume()

async def main():
    engine = vllm_engine.VllmEngine(EngineSpec("", "float32", 64, 1, 8, 0, 0.3, False, False, False))
    endless = asyncio.create_task(engine.generate([1], SamplingParams(1.0, 8, ()), "endless"))
    await asyncio.sleep(0.1)
    endless.cancel()
    await asyncio.wait([endless])
    assert engine.llm.aborted == ["endless"] and engine.idle.is_set()
    await cancel_while_it_ends(engine)
    await cancel_while_it_is_cut_off(engine)
    await sleep_while_one_runs(engine)
    with pytest.raises(AssertionError, match="a broken step"):
        await engine.generate([1], SamplingParams(1.0, 8, ()), "bad")
    with pytest.raises(RuntimeError, match="prefix cache"):
        await engine.receive([], 1)
    assert engine.version == 0

vllm_engine.LLMEngine, vllm_engine.EngineArgs, vllm_engine.has_states = StandIn, dict, lambda spec: False
vllm_engine.import_model = lambda spec: None
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.slow
def test_head_sizes_are_those_of_vllm() -> None:
    """The plan refuses other head sizes before vLLM is imported, by a list of its own."""
    code = (
        "from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend\n"
        "from trueline.rollout.engines import ROLLOUT_ENGINES\n"
        "sizes = ROLLOUT_ENGINES['vllm'].cpu_head_sizes\n"
        "assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == sizes\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_group_and_turns_are_the_same_as_single_requests(engine: Actor[RolloutEngine], run: Run) -> None:
    """One call for several completions of a prompt, and later turns by their new tokens alone."""
    seeds = [3, 4, 5, 6]

    async def sample(pool: EnginePool, start: int) -> list[list[int]]:
        with pool.keep_group(start):
            keys = [RolloutKey(start, index) for index in range(4)]
            pairs = zip(seeds, keys, strict=True)
            group = await asyncio.gather(
                *(pool.generate(PROMPT, params(1.0, 3 * seed, seed=seed), key) for seed, key in pairs)
            )
            tokens, found = list(PROMPT), [one.tokens.tolist() for one in group]
            for turn in range(1, 4):
                place = SequencePlace(0, 0 if turn == 1 else len(tokens) - 1)
                completion = await pool.generate(list(tokens), params(1.0, 5, seed=turn), keys[0], turn, place)
                found.append(completion.tokens.tolist())
                tokens += [*found[-1], 60 + turn]
        return found

    single, grouped = run(sample(EnginePool([engine]), 1)), run(sample(EnginePool([engine], takes_groups=True), 2))
    assert single == grouped and [len(one) for one in grouped[:4]] == [9, 12, 15, 18]
