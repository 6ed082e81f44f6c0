"""What a plan's samplers are made of, with no process started."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.data import rows as rows_module
from trueline.data.batching import Budget
from trueline.models.ring_attention import Mesh
from trueline.monitoring.ledger import Ledger, Pools
from trueline.monitoring.run_folder import RunFolder
from trueline.plan.describe import describe
from trueline.plan.rl import RLPlan, plan_rl
from trueline.rl.build import (
    begin_models,
    make_evaluator,
    make_rollouts,
    make_stream,
    sync_plan,
    wait_for_models,
    warn_without_mps,
)
from trueline.rl.streaming import Stream
from trueline.rollout.pool import EnginePool
from trueline.runs.processes import Sampling, open_sampling
from trueline.runs.rollout_workers import RolloutWorkers, WorkerSampler
from trueline.runs.state import RLState
from trueline.runtime.actors import LocalActor
from trueline.runtime.event_loop import EventLoop
from trueline.training.worker import WorkerSpec

NOTHING: Any = None


@pytest.fixture
def planned(model_folder: Path, tmp_path: Path) -> Any:
    def make(*overrides: str) -> RLPlan:
        file = tmp_path / "rows.jsonl"
        file.write_text(made.rows)
        given = [f"model.path={model_folder}", f"data.path={file}", "reward.function=exact", "runtime=local"]
        held_out = [f"evaluation.data={file}", "evaluation.samples=3", "evaluation.temperature=0.25"]
        words = ["seed=5", "prompts_per_step=2", "rollout.max_new_tokens=7", "rollout.temperature=0.5"]
        return plan_rl(RLConfig.load([], [*given, *held_out, *words, *overrides]))

    made: Any = make
    made.rows = '{"prompt": "1+1=", "answer": "2"}\n'
    return made


@pytest.mark.parametrize(("preset", "greedy"), [("grpo", False), ("remax", True)])
@pytest.mark.parametrize("seeded", [True, False])
def test_samplers_follow_the_plan(planned: Any, tmp_path: Path, preset: str, greedy: bool, seeded: bool) -> None:
    ends = ["rollout.stop=[a]", "evaluation.stop=[b]", "evaluation.top_p=0.75"]
    plan = planned(f"algorithm.preset={preset}", "algorithm.group_size=4", f"rollout.seeded={seeded}", *ends)
    talk = Sampling(RolloutWorkers([], EnginePool([])), (2,), NOTHING)
    rollouts = make_rollouts(plan, talk, RLState(ledger=Ledger(drawn=6)), RunFolder(tmp_path))
    assert isinstance(rollouts.sampler, WorkerSampler)
    sampler = rollouts.sampler.spec
    assert (sampler.size, sampler.seed, sampler.greedy) == (4, 5 if seeded else None, greedy)
    assert (sampler.params.temperature, sampler.params.max_new_tokens, sampler.purpose) == (0.5, 7, "train")
    assert (sampler.params.stop, sampler.params.top_p) == (("a",), 1.0)
    assert (rollouts.plan.capacity(), rollouts.order.position) == (2, 6)
    held_out = make_evaluator(plan, talk)
    assert held_out is not None
    assert isinstance(held_out.sampler, WorkerSampler)
    sampler = held_out.sampler.spec
    assert (sampler.size, sampler.seed, sampler.greedy) == (3, 5, False)  # an evaluation can always be repeated
    assert (sampler.params.temperature, sampler.params.max_new_tokens, sampler.purpose) == (0.25, 7, "evaluate")
    assert (sampler.params.stop, sampler.params.top_p) == (("b",), 0.75)


def test_the_order_of_groups_and_the_rest_of_rows_follow_the_plan(planned: Any, tmp_path: Path) -> None:
    asynchronous = ["rollout.max_staleness=2", "rollout.oversample=1.5", "rollout.window=7", "rollout.too_old=drop"]
    plan = planned(*asynchronous, "data.difficulty.enabled=true", "data.difficulty.rest=3", "steps=1")
    talk = Sampling(RolloutWorkers([], EnginePool([])), (2,), NOTHING)
    found = make_rollouts(plan, talk, RLState(), RunFolder(tmp_path)).plan
    assert (found.capacity(), found.max_staleness, found.window, found.drop_old) == (5, 2, 7, True)
    assert found.difficulty == plan.config.data.difficulty and found.difficulty.rest == 3
    line = "resting    a prompt rests if at most 0% or at least 100% of its completions pass (reward from 1)"
    assert line in describe(plan) and "resting  " not in describe(planned("data.difficulty.rest=3"))


@pytest.mark.parametrize("large", [False, True])
def test_known_pass_rates_are_the_first_verdicts(
    planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Of a mixture, whose rows are numbered one after the other; a resumed run does not judge by them again."""
    if large:
        monkeypatch.setattr(rows_module, "LARGE", 2)
    for name, rates in {"a": [1, 0.5, None], "b": [0, 0.0, 1.0]}.items():
        rows = [{"prompt": "1+1=", "answer": "2", "known": rate} for rate in rates]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixture = f"data.mixture={{{tmp_path}/a.jsonl: 1, {tmp_path}/b.jsonl: 2}}"
    keys = ["data.path=", mixture, "data.difficulty.enabled=true", "data.difficulty.column=known"]
    plan, talk = planned(*keys), Sampling(RolloutWorkers([], EnginePool([])), (2,), NOTHING)
    for ledger, expected in (
        (Ledger(), Pools({0: 1, 5: 1}, {3: 1, 4: 1}, {0: 1, 3: 1, 4: 1, 5: 1})),
        (Ledger(4), Pools()),
    ):
        rollouts = make_rollouts(plan, talk, RLState(ledger=ledger), RunFolder(tmp_path))
        assert rollouts.ledger.pools == expected


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("none", "row 1 of .*rows.jsonl: column 'none' is missing"),
        ("answer", "row 1 of .*rows.jsonl: answer='2' is no pass rate: set a number from 0 to 1"),
        ("high", "row 1 of .*rows.jsonl: high=1.5 is no pass rate"),
    ],
)
def test_a_column_without_pass_rates_is_refused(planned: Any, tmp_path: Path, column: str, message: str) -> None:
    planned()
    planned.rows = '{"prompt": "1+1=", "answer": "2", "high": 1.5}\n'
    with pytest.raises(ConfigError, match=message):
        planned("data.difficulty.enabled=true", f"data.difficulty.column={column}")


def test_pools_in_less_than_an_epoch_are_pointed_out(planned: Any) -> None:
    planned.rows = '{"prompt": "1+1=", "answer": "2", "known": 0.5}\n' * 20
    for words, idle in ([], True), (["steps=11"], False), (["data.difficulty.column=known"], False):
        found = planned("data.difficulty.enabled=true", "steps=10", *words).findings
        assert any(one.key == "data.difficulty.enabled" and "20 of 20 prompts" in one.what for one in found) is idle


class Recorder:
    """Starts nothing, and remembers what is asked of processes."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout
        self.heard: list[str] = []
        self.shares: list[float] = []

    def policy(self, target: Any, specs: list[Any]) -> list[Any]:
        self.shares = [spec.memory_share for spec in specs if isinstance(spec, WorkerSpec)] or self.shares
        return [LocalActor("policy", self) for _ in specs]

    def engines(self, target: Any, specs: list[Any]) -> list[Any]:
        self.caches = [spec.cache_bytes for spec in specs]
        return self.policy(target, specs)

    def listen(self) -> tuple[str, int]:
        return "", 0

    def start(self, address: Any) -> None:
        self.heard.append("model starts")

    async def processes(self) -> int:
        self.heard.append("engine is there")
        return 1


@pytest.mark.parametrize("colocated", [True, False])
def test_an_engine_that_shares_the_models_gpu_is_told_its_cache(planned: Any, colocated: bool) -> None:
    """Models load at the same time: it would count what they take meanwhile as its own."""
    plan = planned("algorithm.kl.coefficient=0")  # no reference
    machine, layout = replace(plan.machine, gpus=2), replace(plan.layout, colocated=colocated)
    processes: Any = Recorder(layout)
    loop = EventLoop(timeout_seconds=60)
    said: Any = SimpleNamespace(note=processes.heard.append)
    groups, pool = begin_models(replace(plan, machine=machine, layout=layout), processes)
    wait_for_models(groups, pool, loop, said)
    loop.stop()
    assert [line.split()[0] for line in processes.heard] == ["model", "loaded", "engine", "engines"]
    assert [size > 0 for size in processes.caches] == [colocated] and processes.shares == [1.0]


def test_a_policy_leaves_engines_that_work_at_the_same_time_their_memory(planned: Any) -> None:
    """The allocator of a rank would otherwise keep whatever is free on the GPU."""
    plan = planned("algorithm.kl.coefficient=0")
    machine, layout = replace(plan.machine, gpus=1), replace(plan.layout, colocated=True, in_turns=False)
    processes: Any = Recorder(layout)
    at_once = replace(plan, machine=machine, layout=layout)
    begin_models(at_once, processes)
    assert processes.shares == [at_once.policy_share()]


@pytest.mark.parametrize(
    ("clients", "in_turns", "warned"), [({}, False, True), ({"a": "b"}, False, False), ({}, True, False)]
)
def test_without_mps_a_run_tells_what_that_costs(
    planned: Any, clients: dict[str, str], in_turns: bool, warned: bool, tmp_path: Path
) -> None:
    plan, said = planned(), []
    machine = replace(plan.machine, gpus=1, mps=True)
    layout = replace(plan.layout, colocated=True, in_turns=in_turns)
    processes: Any = SimpleNamespace(clients=clients, logs=tmp_path)
    progress: Any = SimpleNamespace(note=said.append)
    warn_without_mps(replace(plan, machine=machine, layout=layout), processes, progress)
    assert [line.startswith(f"warning: MPS did not start ({tmp_path}/mps)") for line in said] == [True] * warned


@pytest.mark.parametrize(
    ("tokens", "ranks", "least"),
    [(4096, 1, 7), (12, 1, 6), (12, 2, 7)],  # an eighth of 2 x 4 x 7 tokens, or half a pass of every rank
)
def test_a_part_of_a_streamed_step_fills_half_a_pass_or_is_an_eighth_of_it(
    planned: Any, tokens: int, ranks: int, least: int
) -> None:
    plan = planned("algorithm.group_size=4", "algorithm.loss_aggregation=token_mean")
    policy: Any = SimpleNamespace(budget=Budget(tokens), mesh=Mesh(ranks))
    assert make_stream(plan, policy) == Stream("token_mean", 7, expected=28.0, least=least)
    by_sequence = planned("algorithm.group_size=4", "algorithm.loss_aggregation=sequence_mean")
    assert make_stream(by_sequence, policy).expected == 8  # completions


def test_rollout_workers_begin_while_models_and_engines_do(planned: Any, tmp_path: Path) -> None:
    plan = planned()
    processes: Any = Recorder(plan.layout)
    processes.logs = tmp_path
    plan = replace(plan, rollout=plan.rollout.with_keys({"workers": 1}))
    loop = EventLoop(timeout_seconds=60)
    order = processes.heard.append
    processes.rollout_workers = lambda target, specs: [order(f"worker {one.number} begins") for one in specs][1:]
    with open_sampling(plan, EnginePool([]), processes, {}, loop, order, lambda: order("models are there")):
        assert processes.heard == ["worker 0 begins", "models are there"]
    loop.stop()


def test_what_becomes_of_old_groups_and_running_answers_is_passed_on(planned: Any, tmp_path: Path) -> None:
    for words, drops, mode in (((), False, "wait"), (("rollout.too_old=drop", "rollout.on_update=keep"), True, "keep")):
        plan = planned(*words)
        talk = Sampling(RolloutWorkers([], EnginePool([])), (2,), NOTHING)
        assert make_rollouts(plan, talk, RLState(), RunFolder(tmp_path)).plan.drop_old is drops
        assert sync_plan(plan).on_update == mode
