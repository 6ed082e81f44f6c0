"""What `deterministic=true` refuses, settles and warns of, on CPUs and on GPUs."""

from dataclasses import replace
from typing import Any

import pytest

from trueline.config.base import ConfigError
from trueline.config.rl import ResolvedRollout
from trueline.config.run import RunConfig
from trueline.models.loading import ModelFacts
from trueline.plan import findings
from trueline.plan.findings import bits_lines, check_settled, doubts, reproducible
from trueline.plan.memory import EngineRoom, Forecast, MemoryPool, ModelFootprint, settle
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.runtime.actors import Target
from trueline.runtime.cluster import Machine, Node
from trueline.runtime.placement import REPEATED, Layout, Processes
from trueline.verbs import VERBS

CPU = Machine(cpus=8, memory_bytes=2**36, gpus=0, gpu_bytes=0)
GPU = replace(CPU, gpus=1, gpu_bytes=2**36)
HF = "rollout.engine=hf"


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "machine_at_hand", lambda: CPU)


def load(verb: str, *overrides: str) -> RunConfig:
    return VERBS[verb].kind.load([], ["deterministic=true", *overrides], VERBS[verb].defaults)


@pytest.mark.parametrize(
    ("verb", "words", "key", "remedy"),
    [
        ("grpo", [], "rollout.engine=vllm", "set rollout.engine=hf"),
        ("generate", [], "rollout.engine=vllm", "set rollout.engine=hf"),
        ("eval", [], "rollout.engine=vllm", "set rollout.engine=hf"),
        ("grpo", [HF, "rollout.max_staleness=2"], "rollout.max_staleness=2", "set 0"),
        ("grpo", [HF, "training.stream=true"], "training.stream=true", "set it to false"),
        ("grpo", [HF, "rollout.speculative=ngram"], "rollout.speculative=ngram", "set none"),
        ("grpo", [HF, "rollout.seeded=false"], "rollout.seeded=false", "leave it out"),
        ("grpo", [HF, "environment.agent=agent.py:main"], "environment.agent=agent.py:main", "environment.function"),
        ("generate", [HF, "environment.tools=mcp:http://host/mcp"], "environment.tools=mcp:http://host", "file.py:"),
        ("sft", ["training.compile=true"], "training.compile=true", "set it to false"),
        ("ppo", [HF, "critic.compile=true"], "critic.compile=true", "set it to false"),
        ("raft", [HF, "training.compile=true"], "training.compile=true", "set it to false"),
    ],
)
def test_what_cannot_hold_is_refused_by_name(verb: str, words: list[str], key: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=r"^deterministic=true: ") as refused:
        reproducible(load(verb, *words))
    assert key in str(refused.value) and remedy in str(refused.value)
    config = load(verb, *words, "deterministic=false")
    assert reproducible(config) is config


def test_a_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = (Node("10.0.0.1", "a", 8, 2**36), Node("10.0.0.2", "b", 8, 2**36))
    monkeypatch.setattr(findings, "machine_at_hand", lambda: replace(CPU, nodes=nodes))
    with pytest.raises(ConfigError, match=r"cluster\.address=auto places processes .* run on one machine"):
        reproducible(load("sft", "cluster.address=auto"))


def test_keys_that_decide_bits_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: Any = reproducible(load("grpo", HF, "reward.batch=8"))
    assert (settled.rollout.max_sequences, settled.rollout.seeded, settled.reward.batch) == (1, True, 1)
    assert (settled.training.stream, settled.training.compile) == (False, False)
    assert (
        "one completion at a time" in bits_lines(settled, CPU)[0] and "not measured" not in bits_lines(settled, CPU)[0]
    )
    monkeypatch.setattr(findings, "machine_at_hand", lambda: GPU)
    settled = reproducible(load("grpo"))
    assert (settled.rollout.max_sequences, settled.rollout.seeded) == (256, True)
    assert bits_lines(settled, GPU)[0].endswith("not measured on GPUs")
    assert bits_lines(load("grpo", "deterministic=false"), GPU) == []
    told = {verb: bits_lines(load(verb), CPU)[0].partition(" in every run")[0] for verb in ("raft", "eval", "sft")}
    assert told == {
        "raft": "bits       the same weights and sampled tokens",
        "eval": "bits       the same sampled tokens",
        "sft": "bits       the same weights",
    }


def test_every_process_gets_the_environment_that_repeats_bits(tmp_path: Any) -> None:
    target: Target[Any] = ROLLOUT_ENGINES["hf"].target(ResolvedRollout.model_construct())
    for asked in (False, True):
        processes = Processes(CPU, Layout(2, 2, deterministic=asked), tmp_path, local=False)
        given = processes._environment(target, [0, 0], 0, 1)
        assert (REPEATED.items() <= given.items()) is asked
        assert given["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["reward.function=https://host/score"], ["https://host/score"]),
        (["reward.function=judge", "reward.judge.url=http://host/v1"], ["judge"]),
        (["reward.function=math"], []),
        (["environment.function=game.py:Game"], ["environment.function"]),
        (["environment.tools=python"], ["environment.tools"]),
    ],
)
def test_code_and_servers_that_may_answer_differently_are_named(words: list[str], named: list[str]) -> None:
    assert [one.what.partition(": deterministic")[0] for one in doubts(load("generate", *words))] == named
    assert doubts(load("generate", *words, "deterministic=false")) == []


def forecast(config: Any, gib: float) -> Forecast:
    facts = ModelFacts(10**9, 4096, 8, 4, 64, vocabulary=1000, hidden_size=2048, layers=16, intermediate_size=8192)
    tenant = ModelFootprint("policy", "training", facts, config.model, config.training, 1, 1e5)
    return settle([MemoryPool(gib * 2**30, "cpu", [(tenant, 1)], 0, EngineRoom(0, 0, 0))], 100, "lengths")


def test_free_memory_decides_no_bits() -> None:
    config = load("grpo", HF, "model.dtype=float32")
    check_settled(config, forecast(config, 200))
    scarce = forecast(config, 20)
    with pytest.raises(ConfigError, match=r"memory is short.*: set (.*)$") as refused:
        check_settled(config, scarce)
    keys = str(refused.value).rpartition("set ")[2].split(" and ")
    again = load("grpo", HF, "model.dtype=float32", *keys)
    check_settled(again, forecast(again, 20))  # what it proposes is accepted, and does not follow memory
    assert forecast(again, 200).choice.is_as_quick(scarce.choice, 0)
    check_settled(config.with_keys({"deterministic": False}), scarce)


@pytest.mark.parametrize(("sampled", "words"), [(True, []), (False, ["environment.function=game.py:Game"])])
def test_lengths_that_follow_from_memory_or_other_runs_are_asked_for(sampled: bool, words: list[str]) -> None:
    config = load("grpo", HF, *words)
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens=null with .*: set it"):
        check_settled(config, forecast(config, 200), sampled=sampled)
    given = load("grpo", HF, *words, "rollout.max_prompt_tokens=64")
    check_settled(given, forecast(given, 200), sampled=sampled)
