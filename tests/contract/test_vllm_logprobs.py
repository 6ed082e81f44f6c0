"""The real vLLM keeps log-probs in its worker: they are its own, bit for bit, whatever happens to a request."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny import make_tiny_model
from trueline.data.types import INTERRUPTED, Completion
from trueline.environments.base import Structure
from trueline.rollout import vllm_logprobs
from trueline.rollout.engine import EngineSpec, SamplingParams
from trueline.rollout.vllm_logprobs import LogprobStore, Trust, kind_of
from trueline.runtime.event_loop import EventLoop

pytestmark = pytest.mark.slow
PROMPT = [10, 20, 30, 40, 50]
SEQUENCES, BLOCK_TOKENS, BLOCKS = 16, 32, 9  # a cache for two requests of 128 tokens, so that vLLM preempts others
SPEC = EngineSpec("", "float32", 128, 1, SEQUENCES, 0, 0.3, False, False, False, structured=True, lean_logprobs=True)
PLAIN = SamplingParams(1.0, 20, ())
ALWAYS, NEVER = 0, 10**9  # proofs before requests are trusted
Run = Callable[[Awaitable[Any]], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), tied=True))


@pytest.fixture(scope="module")
def started(model: str) -> Iterator[Any]:
    from tests.support import vllm_here
    from trueline.rollout import vllm_engine

    options = vllm_engine.on_cpu_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_here, "BLOCKS", BLOCKS)
        patch.setattr(vllm_engine, "on_cpu_options", lambda spec: options(spec) | {"block_size": BLOCK_TOKENS})
        yield vllm_here.EngineHere(replace(SPEC, model=model))
    vllm_here.release()


@pytest.fixture
def engine(started: Any) -> Any:
    """It trusts nothing yet, and holds nothing of requests before."""
    assert not store_of(started).slots and not started.names
    started.trust, started.remark = Trust(), ""
    return started


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = EventLoop(60.0)
    yield lambda work: loop.run(work, "a test's request")  # type: ignore[arg-type]
    loop.stop()


def store_of(engine: Any) -> LogprobStore:
    return engine.llm.model_executor.driver_worker.worker.logprob_store


def runner_of(engine: Any) -> Any:
    return engine.llm.model_executor.driver_worker.worker.model_runner


async def sample(engine: Any, *requests: SamplingParams) -> list[Completion]:
    calls = (engine.generate([*PROMPT, at + 3], one, f"request-{at}") for at, one in enumerate(requests))
    return list(await asyncio.gather(*calls))


def check_true(model: str, answers: list[Completion]) -> None:
    """Compare with PyTorch alone, at temperature 1."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for at, answer in enumerate(answers):
        ids = torch.tensor([[*PROMPT, at + 3, *answer.tokens.tolist()]])
        with torch.no_grad():
            scores = plain(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[len(PROMPT) :, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs.tolist()), scores, atol=1e-4, rtol=0)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Return the results of a method from now on."""
    method, found = getattr(owner, name), []

    def counted(*args: Any, **named: Any) -> Any:
        found.append(method(*args, **named))
        return found[-1]

    monkeypatch.setattr(owner, name, counted)
    return found


SHAPE = Structure(json.dumps({"enum": ["x", "yy", "zzz"]}))
CASES = {
    "plain": PLAIN,
    "one_token": replace(PLAIN, max_new_tokens=1),
    "long": replace(PLAIN, max_new_tokens=110),
    "temperature": replace(PLAIN, temperature=0.7),
    "greedy": replace(PLAIN, temperature=0.0),
    "top_p": replace(PLAIN, top_p=0.5),
    "top_k": replace(PLAIN, top_k=3),
    "min_p": replace(PLAIN, min_p=0.1),
    "penalty": replace(PLAIN, repetition_penalty=1.3),
    "seed": replace(PLAIN, seed=7),
    "stop": replace(PLAIN, max_new_tokens=100, stop_tokens=tuple(range(3, 60))),
    "all": replace(PLAIN, temperature=0.8, top_k=20, top_p=0.7, min_p=0.05, repetition_penalty=1.3, seed=3),
    "structure": replace(PLAIN, structure=SHAPE, max_new_tokens=40),
}


@pytest.mark.parametrize("case", [*CASES, "together"])
def test_they_are_vllms_own_bit_for_bit(engine: Any, run: Run, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """More requests of one kind than run at once, or of all kinds in one batch."""
    monkeypatch.setattr(vllm_logprobs, "PROOFS", NEVER)
    asked = [*CASES.values()] * 2 if case == "together" else [CASES[case]] * (SEQUENCES + 2)
    answers = run(sample(engine, *asked))
    assert engine.trust.doubt == "" and all(len(one.tokens) for one in answers)
    assert engine.trust.proven.total() == len(asked)
    assert set(engine.trust.proven) == {kind_of(one) for one in asked}


def test_what_was_proven_is_not_asked_of_vllm(engine: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, so that every computation is repeated; then vLLM copies tokens alone to the host."""
    settings = [replace(PLAIN, seed=seed) for seed in range(vllm_logprobs.PROOFS)]
    own = [run(sample(engine, one))[0] for one in settings]
    outputs = count_calls(monkeypatch, runner_of(engine), "_sample")
    calls = count_calls(monkeypatch, engine, "_take_logprobs")
    kept = [run(sample(engine, one))[0] for one in settings]
    for one, other in zip(own, kept, strict=True):
        assert (one.tokens.tolist(), one.logprobs.tolist()) == (other.tokens.tolist(), other.logprobs.tolist())
    assert engine.trust.proven.total() == len(settings) == len(calls)
    assert len(outputs) == sum(len(one.tokens) for one in kept)
    assert all(output.logprobs_tensors is None for output in outputs)


def test_another_kind_is_proven_for_itself(engine: Any, run: Run) -> None:
    engine.trust.proven[kind_of(PLAIN)] = vllm_logprobs.PROOFS
    run(sample(engine, PLAIN, replace(PLAIN, top_k=3)))
    assert dict(engine.trust.proven) == {kind_of(PLAIN): vllm_logprobs.PROOFS, frozenset({"top_k"}): 1}


@pytest.mark.parametrize("proofs", [ALWAYS, NEVER])
def test_preempted_requests_keep_what_they_had(
    engine: Any, model: str, run: Run, monkeypatch: pytest.MonkeyPatch, proofs: int
) -> None:
    monkeypatch.setattr(vllm_logprobs, "PROOFS", proofs)
    scheduler = engine.llm.engine_core.engine_core.scheduler
    preempted = count_calls(monkeypatch, scheduler, "_preempt_request")
    answers = run(sample(engine, *[replace(PLAIN, max_new_tokens=100)] * 8))
    assert preempted and engine.trust.doubt == ""
    assert engine.trust.proven.total() == (0 if proofs == ALWAYS else 8)
    check_true(model, answers)


@pytest.mark.parametrize("proofs", [ALWAYS, NEVER])
@pytest.mark.parametrize("mode", ["interrupt", "keep"])
def test_interrupted_requests_have_those_of_their_tokens(
    engine: Any, model: str, run: Run, monkeypatch: pytest.MonkeyPatch, mode: str, proofs: int
) -> None:
    """In their midst, after so many steps; one that the engine continues has those of both parts."""
    monkeypatch.setattr(vllm_logprobs, "PROOFS", proofs)
    steps = count_calls(monkeypatch, engine.llm, "step")

    async def interrupt() -> list[Completion]:
        requests = asyncio.ensure_future(sample(engine, *[replace(PLAIN, max_new_tokens=100)] * 6))
        while len(steps) < 30:
            await asyncio.sleep(0.001)
        await engine.pause(mode)
        await engine.resume()
        return await requests

    answers = run(interrupt())
    reasons = {answer.finish_reason for answer in answers}
    assert (INTERRUPTED in reasons) is (mode == "interrupt")
    assert any(0 < len(answer.tokens) < 100 for answer in answers) or mode == "keep"
    assert engine.trust.doubt == "" and (engine.trust.proven.total() > 0) is (proofs == NEVER)
    check_true(model, answers)


def test_an_idle_engine_can_be_interrupted(engine: Any, run: Run) -> None:
    async def interrupt() -> None:
        await engine.pause("interrupt")
        await engine.resume()

    run(interrupt())
    assert len(run(sample(engine, PLAIN))) == 1


def test_a_cancelled_request_leaves_nothing_behind(engine: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = count_calls(monkeypatch, engine.llm, "step")

    async def cancel() -> None:
        request = asyncio.ensure_future(sample(engine, replace(PLAIN, max_new_tokens=100)))
        while len(steps) < 10:
            await asyncio.sleep(0.001)
        assert store_of(engine).slots
        request.cancel()
        await asyncio.wait([request])

    run(cancel())
    assert not store_of(engine).slots and not engine.names
    assert len(store_of(engine).free) == len(store_of(engine).values) == SEQUENCES


def test_scores_and_probes_leave_nothing_behind(engine: Any, run: Run) -> None:
    assert len(run(engine.score(PROMPT))) == len(PROMPT) - 1
    run(engine.cached_tokens(PROMPT))
    assert not store_of(engine).slots and engine.trust.doubt == ""


def late(record: Callable[..., None], batch: list[str], places: Any, in_vain: Any, logprobs: Any) -> None:
    record(batch, places + 1, in_vain, logprobs)


def swapped(record: Callable[..., None], batch: list[str], places: Any, in_vain: Any, logprobs: Any) -> None:
    record(batch, places, in_vain, logprobs.flip(0))


def rounded(record: Callable[..., None], batch: list[str], places: Any, in_vain: Any, logprobs: Any) -> None:
    record(batch, places, in_vain, torch.nextafter(logprobs, torch.tensor(0.0)))


@pytest.mark.parametrize("fault", [late, swapped, rounded])
def test_where_they_differ_vllm_is_asked_again(
    engine: Any, model: str, run: Run, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    """Answers have vLLM's own, the engine says why, and no later request is trusted."""
    store = store_of(engine)
    record = store.record
    monkeypatch.setattr(store, "record", lambda *given: fault(record, *given))
    answers = run(sample(engine, *[PLAIN] * 4))
    check_true(model, answers)
    assert engine.remark.startswith("vLLM is asked for the log-prob of every token, because those kept on the device")
    assert engine.remark.endswith(" on (plain sampling)")
    monkeypatch.undo()
    engine.trust.proven[kind_of(PLAIN)] = vllm_logprobs.PROOFS
    before, told = engine.trust.proven.copy(), engine.remark
    check_true(model, run(sample(engine, *[PLAIN] * 4)))
    assert (engine.trust.proven, engine.remark) == (before, told)


def test_an_update_carries_the_remark(engine: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive(buckets: list[Any], version: int) -> list[list[int]]:
        return []

    monkeypatch.setattr(engine, "receive", receive)
    assert run(engine.take([], 1)).remark == ""
    engine.remark = "a remark"
    assert run(engine.take([], 1)).remark == "a remark"


class StandIn:
    """An LLMEngine whose worker gives a reason."""

    def __init__(self, reason: str = "") -> None:
        self.reason, self.calls = reason, list[str]()
        self.model_executor = SimpleNamespace(register_failure_callback=lambda callback: None)

    def collective_rpc(self, method: str) -> list[str]:
        self.calls.append(method)
        return [self.reason]


@pytest.mark.parametrize(
    ("spec", "reason", "calls", "remark"),
    [
        (replace(SPEC, lean_logprobs=False), "", [], ""),
        (SPEC, "", ["keep_logprobs"], ""),
        (SPEC, "it is tired", ["keep_logprobs"], "because it is tired"),
        (replace(SPEC, tensor_parallel=2), "", [], "because rollout.tensor_parallel=2 has several workers"),
    ],
)
def test_the_switch_and_obstacles(
    started: Any, monkeypatch: pytest.MonkeyPatch, spec: EngineSpec, reason: str, calls: list[str], remark: str
) -> None:
    from trueline.rollout import vllm_engine

    stand_in = StandIn(reason)
    monkeypatch.setattr(vllm_engine, "EngineArgs", dict)
    monkeypatch.setattr(vllm_engine, "import_model", lambda spec: None)
    monkeypatch.setattr(vllm_engine, "has_states", lambda spec: False)
    monkeypatch.setattr(vllm_engine.LLMEngine, "from_engine_args", lambda options: stand_in)
    engine = vllm_engine.VllmEngine(spec)
    engine.thread.stop()
    engine.trust.proven[kind_of(PLAIN)] = vllm_logprobs.PROOFS
    assert stand_in.calls == calls and engine.remark.endswith(remark) and bool(engine.remark) is bool(remark)
    assert engine.keeps_logprobs is engine.trust.covers(PLAIN) is (spec.lean_logprobs and not remark)
