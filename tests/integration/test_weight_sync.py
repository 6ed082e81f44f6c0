"""Real Ray, vLLM and DeepSpeed: after every update the engines compute what the trainer computes."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.faults import FAULTS, Breakable
from tests.support.restartable import RestartableWorker
from tests.support.tiny import make_tiny_model
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import LoraConfig, ModelConfig, TrainingConfig
from trueline.config.rl import RolloutConfig, SyncConfig
from trueline.data.types import Completion, Sample
from trueline.rollout.engine import EngineSpec, RolloutEngine, SamplingParams
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.pool import EnginePool, RolloutKey
from trueline.runtime.actors import Placement, RayActor
from trueline.runtime.cluster import machine_at_hand, ray_cluster
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.placement import process_environment
from trueline.runtime.transport import TensorSpec, plan_buckets
from trueline.sync.proof import SyncFailure, shared_weights
from trueline.sync.weights import Canary, SyncPlan, WeightSync
from trueline.training.group import ModelGroup
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec, worker_target

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 400.0
TOLERANCE = 1e-4
UPDATES = 5
PROMPTS = [[10, 20, 30, 40], [50, 60, 70], [80, 90, 100, 110, 120], [33, 44]]
CANARY = list(range(5, 37))
BLOCK = 128  # tokens of a cache block of vLLM on a CPU


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(machine_at_hand()):
        yield


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    event_loop = EventLoop(TIMEOUT)
    yield event_loop
    event_loop.stop()


@pytest.fixture(scope="module")
def trainer(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelGroup]:
    """Two processes that serve every ZeRO stage and model in turn."""
    logs = tmp_path_factory.mktemp("trainer")
    target = replace(worker_target(TrainingConfig()), path="tests.support.restartable:RestartableWorker")
    spot = Placement(environment=process_environment(target, machine_at_hand(), 2) | {"PYTHONPATH": str(ROOT)})
    actors = [RayActor(f"policy-{rank}", target, [], spot, logs / f"{rank}.log") for rank in range(2)]
    group = ModelGroup("policy", actors, TrainingConfig(micro_batch_samples=3), TIMEOUT)
    yield group
    group.stop()


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.soak)])
def engines(
    request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, EnginePool]]:
    """One engine on one device and one on two, for one model."""
    folder = tmp_path_factory.mktemp(request.param)
    model = str(make_tiny_model(folder / "model", tied=request.param == "tied"))
    spot = Placement(environment=process_environment(ENGINE, machine_at_hand()) | {"PYTHONPATH": str(ROOT)})
    actors = [
        RayActor(f"engine-tp{width}", ENGINE, [engine_spec(model, width)], spot, folder / f"tp{width}.log")
        for width in (1, 2)
    ]
    pool = EnginePool(actors)
    yield model, pool
    pool.stop()


ENGINE = replace(ROLLOUT_ENGINES["vllm"], path="tests.support.faulty_receiver:FaultyEngine").target(RolloutConfig())


def engine_spec(model: str, tensor_parallel: int) -> EngineSpec:
    return EngineSpec(
        model=model,
        dtype="float32",
        context=BLOCK + 72,
        tensor_parallel=tensor_parallel,
        max_sequences=32,
        seed=0,
        gpu_memory_utilization=0.3,
        cuda_graphs=False,
        sleeps=False,
        trust_remote_code=False,
    )


def restart(trainer: ModelGroup, model: str, stage: int, lora: LoraConfig | None = None) -> None:
    config = TrainingConfig.parse({"deepspeed": {"zero_stage": stage}, "learning_rate": 1e-2})
    model_config = ModelConfig(path=model, dtype="float32", lora=lora or LoraConfig())
    specs = [WorkerSpec(model_config, config, rank, 2, 100, 0) for rank in range(2)]
    calls = [actor.submit(RestartableWorker.restart, spec) for actor, spec in zip(trainer.actors, specs, strict=True)]
    for call in calls:
        call.result(TIMEOUT)
    trainer.start()


def sample_all(pool: EnginePool, loop: EventLoop, temperature: float, round_: int) -> list[Sample]:
    """Each engine answers each prompt."""
    params = SamplingParams(temperature, max_new_tokens=24, stop_tokens=(2,), seed=round_)

    async def ask() -> list[Completion]:
        calls = [
            pool.generate(prompt, params, RolloutKey(engine, number, purpose=f"{round_}-{temperature}"))
            for number, prompt in enumerate(PROMPTS)
            for engine in range(len(pool.actors))
        ]
        return list(await asyncio.gather(*calls))

    prompts = [prompt for prompt in PROMPTS for _ in pool.actors]
    answers = loop.run(ask(), "sampling")
    return [as_sample(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def as_sample(prompt: list[int], completion: Completion) -> Sample:
    tokens = torch.tensor(prompt + completion.tokens.tolist())
    sample = Sample(tokens, torch.arange(len(tokens)) >= len(prompt), version=int(completion.versions[0]))
    sample.rollout_logprobs = torch.tensor([0.0] * len(prompt) + completion.logprobs.tolist())
    return sample


def largest_gap(trainer: ModelGroup, samples: list[Sample], temperature: float) -> float:
    scores = trainer.score(samples, temperature)
    gaps = [(score - one.rollout_logprobs)[one.mask].abs().max() for score, one in zip(scores, samples, strict=True)]
    return float(torch.stack(gaps).max())


def train_once(trainer: ModelGroup, samples: list[Sample], seed: int) -> dict[str, float]:
    """One update whose `old_logprobs` log-probs are the engine's own, so the ratio compares engine and trainer."""
    generator = torch.Generator().manual_seed(seed)
    for sample in samples:
        sample.old_logprobs = sample.rollout_logprobs
        sample.advantages = torch.randn(1, generator=generator) * sample.mask
    set_weights(samples, "sequence_mean", 24)
    algorithm = AlgorithmConfig.parse({"preset": "dr_grpo"})
    return trainer.update(samples, "policy", LossSettings(1.0, algorithm))


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.soak), 3])
def test_engines_follow_the_trainer(
    stage: int, trainer: ModelGroup, engines: tuple[str, EnginePool], loop: EventLoop
) -> None:
    model, pool = engines
    restart(trainer, model, stage)
    canary = Canary(CANARY, 1e-3)
    loop.run(pool.actors[0].call(RolloutEngine.scramble), "noise")  # left by an earlier stage: all is sent anew
    WeightSync(trainer, pool, loop, SyncConfig(bucket_mib=1), canary, SyncPlan("float32", "gloo")).publish(0)
    sync = WeightSync(trainer, pool, loop, SyncConfig(bucket_mib=1), canary, SyncPlan("float32", "gloo"))
    assert "packed by the engine" in sync.verify_initial_sync()
    assert sync.floor < TOLERANCE
    first_weights = dict(trainer.actors[0].submit(Worker.copy_weights).result(TIMEOUT)) if stage < 3 else {}
    for version in range(1, UPDATES + 1):
        samples = sample_all(pool, loop, 1.0, version)
        assert all(sample.version == version - 1 for sample in samples)
        metrics = train_once(trainer, samples, version)
        assert metrics["policy/ratio_deviation_max"] < TOLERANCE
        assert largest_gap(trainer, samples, 1.0) > 100 * TOLERANCE  # the update moved the policy visibly
        sync.publish(version)
        assert sync.verify()["sync/canary_gap"] < TOLERANCE
        assert largest_gap(trainer, sample_all(pool, loop, 1.0, 100 + version), 1.0) < TOLERANCE
        assert largest_gap(trainer, sample_all(pool, loop, 0.7, 200 + version), 0.7) < TOLERANCE
    if first_weights:
        now = dict(trainer.actors[0].submit(Worker.copy_weights).result(TIMEOUT))
        assert all(not torch.equal(first_weights[name], now[name]) for name in now)


@pytest.mark.parametrize("mode", ["interrupt", pytest.param("keep", marks=pytest.mark.slow)])
def test_tokens_of_an_answer_are_those_of_the_versions_it_crossed(
    mode: str, trainer: ModelGroup, engines: tuple[str, EnginePool], loop: EventLoop
) -> None:
    """Three updates in the midst of answers: each token's log-prob is that of its own version, scored anew."""
    model, pool = engines
    restart(trainer, model, 2)
    plan = SyncPlan("float32", "gloo", on_update=mode)
    sync = WeightSync(trainer, pool, loop, SyncConfig(bucket_mib=1), Canary(CANARY, 1e-3), plan)
    sync.publish(0)
    sync.verify()
    samples = sample_all(pool, loop, 1.0, 11)
    loop.run(pool.call(Breakable.be_slow, 0.1), "slowing down")  # type: ignore[arg-type]
    params = SamplingParams(1.0, 50, (), seed=5)
    shared = (CANARY * BLOCK)[: BLOCK + 10]  # answers that go on fill the canary's block again: no alarm
    prompts = [*PROMPTS, *[[*shared, number] for number in range(4)]]
    asked = [
        asyncio.run_coroutine_threadsafe(pool.generate(prompt, params, RolloutKey(number, 0, purpose=mode)), loop.loop)
        for number, prompt in enumerate(prompts)
    ]
    answers: list[Completion] = []
    scores: list[list[torch.Tensor]] = []  # by version, of each answer's tokens
    weights = [dict(trainer.actors[0].submit(Worker.copy_weights).result(TIMEOUT))]
    for version in range(1, 4):
        time.sleep(0.4)
        train_once(trainer, samples, version)
        sync.publish(version)
        sync.verify()
        weights.append(dict(trainer.actors[0].submit(Worker.copy_weights).result(TIMEOUT)))
    answers = [future.result(TIMEOUT) for future in asked]
    loop.run(pool.call(Breakable.be_slow, 0.0), "as fast as before")  # type: ignore[arg-type]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for state in weights:
        plain.load_state_dict(state, strict=False)
        scores.append([rescored(plain, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)])
    for number, answer in enumerate(answers):
        versions = torch.tensor(answer.versions)
        assert len(versions) == len(answer.tokens) and (versions.diff() >= 0).all()
        assert len(versions.unique()) > 1 or len(answer.tokens) < 12  # one that ended early crossed none
        found = torch.stack([one[number] for one in scores])
        own = found.gather(0, versions[None].long())[0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), own, atol=TOLERANCE, rtol=0)
    assert max(len(set(answer.versions.tolist())) for answer in answers) > 2


def rescored(plain: Any, prompt: list[int], answer: Completion) -> torch.Tensor:
    tokens = torch.tensor([prompt + answer.tokens.tolist()])
    with torch.no_grad():
        logprobs = plain(tokens).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, tokens[0, 1:, None])[len(prompt) - 1 :, 0]


@pytest.mark.slow
def test_what_two_processes_divide_shows_in_noise(cluster: None, loop: EventLoop, tmp_path: Path) -> None:
    """Biases of zeros are alike in both processes at the start, though vLLM cuts those of queries, keys and values."""
    model = make_tiny_model(tmp_path / "model", tied=True, biases=True)
    spot = Placement(environment=process_environment(ENGINE, machine_at_hand()) | {"PYTHONPATH": str(ROOT)})
    engine = RayActor("engine-biases", ENGINE, [engine_spec(str(model), 2)], spot, tmp_path / "engine.log")
    named = AutoModelForCausalLM.from_pretrained(model).named_parameters()
    buckets = plan_buckets((TensorSpec(name, tuple(one.shape), "float32") for name, one in named), 2**20)
    before = loop.run(engine.call(RolloutEngine.holdings), "holdings")
    loop.run(engine.call(RolloutEngine.load_noise, buckets), "noise")
    noise = loop.run(engine.call(RolloutEngine.holdings), "holdings")
    engine.stop()
    plain = {name for name, (_, size) in before[0].items() if size}
    cut = {name for name in plain if name.endswith("qkv_proj.bias")}
    whole = {name for name in plain if name.endswith(("norm.weight", "o_proj.bias"))}
    assert len(cut) == 2 and len(whole) == 7
    assert cut | whole <= shared_weights(before) and shared_weights(noise) & (cut | whole) == whole
    assert all(before[0][name] != noise[0][name] for name in cut | whole)


def test_stale_engine_is_noticed(trainer: ModelGroup, engines: tuple[str, EnginePool], loop: EventLoop) -> None:
    """An update that is never published leaves engine and trainer apart, and the check says so."""
    model, pool = engines
    restart(trainer, model, 2)
    sync = WeightSync(trainer, pool, loop, SyncConfig(), Canary(CANARY, 1e-3), SyncPlan("float32", "gloo"))
    sync.publish(0)
    sync.verify()
    train_once(trainer, sample_all(pool, loop, 1.0, 7), 7)
    with pytest.raises(SyncFailure, match="does not compute with the weights that were sent"):
        sync.verify()


def test_a_prefix_cache_that_is_not_emptied_is_noticed_on_a_cpu_too(
    trainer: ModelGroup, engines: tuple[str, EnginePool], loop: EventLoop
) -> None:
    """Its blocks are longer than the canary."""
    model, pool = engines
    restart(trainer, model, 2)
    sync = WeightSync(trainer, pool, loop, SyncConfig(), Canary(CANARY, 1e-3), SyncPlan("float32", "gloo"))
    sync.publish(0)
    sync.verify()
    loop.run(pool.actors[1].call(Breakable.break_with, "cached"), "cached")
    sync.publish(1)
    with pytest.raises(SyncFailure, match=f"engine 1 takes {BLOCK} tokens of a prompt from its prefix cache"):
        sync.verify()
    loop.run(pool.actors[1].call(Breakable.break_with, ""), "healing")
    sync.publish(2)
    sync.verify()


def test_what_vllm_loads_wrongly_is_noticed(
    trainer: ModelGroup, engines: tuple[str, EnginePool], loop: EventLoop
) -> None:
    """vLLM on a CPU packs its matrices away: what it loads wrongly shows in its log-probs, or in what is left plain."""
    model, pool = engines
    restart(trainer, model, 2)
    sync = WeightSync(trainer, pool, loop, SyncConfig(), Canary(CANARY, 1e-3), SyncPlan("float32", "gloo"))
    sync.publish(0)
    sync.verify()
    for number, fault in enumerate(FAULTS):
        train_once(trainer, sample_all(pool, loop, 1.0, 300 + number), number)
        loop.run(pool.actors[1].call(Breakable.break_with, fault), fault)
        with pytest.raises(SyncFailure, match="does not compute with the weights that were sent"):
            sync.publish(number)
            sync.verify()
        loop.run(pool.actors[1].call(Breakable.break_with, ""), "healing")
        sync.publish(number)
        assert sync.verify()["sync/canary_gap"] < TOLERANCE, fault


@pytest.mark.slow
def test_an_engine_whose_worker_is_killed_is_started_again(
    trainer: ModelGroup, engines: tuple[str, EnginePool], loop: EventLoop
) -> None:
    """One of the processes that compute for an engine of two devices: what it had to answer is answered elsewhere."""
    model, pool = engines
    restart(trainer, model, 2)
    sync = WeightSync(trainer, pool, loop, SyncConfig(), Canary(CANARY, 1e-3), SyncPlan("float32", "gloo"))
    sync.publish(1)
    sync.verify()
    wide = pool.actors[1]
    assert isinstance(wide, RayActor)
    family = psutil.Process(wide.location().result(TIMEOUT).pid).children(recursive=True)
    workers = [one for one in family if "Worker" in " ".join([one.name(), *one.cmdline()])]
    assert len(workers) == 2, [one.cmdline() for one in family]
    loop.run(wide.call(Breakable.be_slow, 0.1), "slowing down")
    params = SamplingParams(1.0, 40, (), seed=5)
    pool.group_engines |= dict.fromkeys(range(4), 1)  # all go to the wide one
    asked = [
        asyncio.run_coroutine_threadsafe(pool.generate([10, 20, number], params, RolloutKey(number, 0)), loop.loop)
        for number in range(4)
    ]
    while pool.loads[1].requests < 4:
        time.sleep(0.05)
    time.sleep(0.3)
    workers[1].kill()
    answers = [one.result(TIMEOUT) for one in asked]
    assert [len(answer.tokens) for answer in answers] == [40] * 4
    assert "a worker process of vLLM is gone" in pool.missing()[1] and 0 not in pool.lost
    sync.restart_engines()
    sync.publish(2)
    assert sync.verify()["sync/canary_gap"] < TOLERANCE
    sync.readmit_engines()
    assert not pool.lost
    assert largest_gap(trainer, sample_all(pool, loop, 1.0, 500), 1.0) < TOLERANCE
    assert all(load.served for load in pool.loads)


@pytest.mark.slow
def test_adapters_alone_reach_an_engine_that_holds_them(
    trainer: ModelGroup, cluster: None, loop: EventLoop, tmp_path: Path
) -> None:
    """The engine computes with its own weights and the adapters it is sent, and wrong adapters are noticed at once."""
    model = str(make_tiny_model(tmp_path / "model", tied=True))
    spot = Placement(environment=process_environment(ENGINE, machine_at_hand()) | {"PYTHONPATH": str(ROOT)})
    spec = replace(engine_spec(model, 1), adapter_rank=4)
    pool = EnginePool([RayActor("engine-adapters", ENGINE, [spec], spot, tmp_path / "engine.log")])
    restart(trainer, model, 2, LoraConfig(rank=4, alpha=12, sync="adapter"))
    canary = Canary(CANARY, 1e-3)
    sync = WeightSync(trainer, pool, loop, SyncConfig(), canary, SyncPlan("float32", "gloo", adapter_only=True))
    assert "only adapters are sent" in sync.verify_initial_sync()
    for version in range(1, 4):
        samples = sample_all(pool, loop, 1.0, version)
        train_once(trainer, samples, version)
        assert largest_gap(trainer, samples, 1.0) > 100 * TOLERANCE
        sync.publish(version)
        assert sync.verify()["sync/canary_gap"] < TOLERANCE
        assert largest_gap(trainer, sample_all(pool, loop, 1.0, 100 + version), 1.0) < TOLERANCE
    for fault in ("skipped", "flipped", "narrowed"):
        loop.run(pool.actors[0].call(Breakable.break_with, fault), fault)
        with pytest.raises(SyncFailure, match="engine 0 holds other adapters than the trainer"):
            sync.publish(4)
    pool.stop()
