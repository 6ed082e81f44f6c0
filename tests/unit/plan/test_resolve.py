"""Engines are rows: what a run asks of them before it starts, and what a new one takes."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trueline.cli import main
from trueline.config.base import Config, ConfigError
from trueline.config.model import RanksConfig, TrainingConfig
from trueline.config.rl import ResolvedRollout, RLConfig, RolloutConfig
from trueline.config.run import EnginesConfig
from trueline.config.sampling import GenerateConfig, RaftConfig, ServingConfig
from trueline.config.supervised import SftConfig
from trueline.jobs.rounds import plan_rounds
from trueline.jobs.serve_reward import plan_serving
from trueline.models.loading import ModelFacts
from trueline.plan.memory import ModelFootprint, model_bytes
from trueline.plan.offline import plan_supervised
from trueline.plan.resolve import check_engines, check_rollout, resolve_dtype
from trueline.plan.rl import memory_bytes, plan_rl
from trueline.plan.sampling import plan_generate
from trueline.rollout.engine import EngineSpec
from trueline.rollout.engines import ROLLOUT_ENGINES, RolloutRow
from trueline.rollout.hf_engine import HFEngine
from trueline.runs.processes import engine_specs
from trueline.runtime import placement
from trueline.runtime.actors import Done, Placement
from trueline.runtime.cluster import Machine
from trueline.runtime.host import Location
from trueline.runtime.placement import Layout, Processes, RoleRanks
from trueline.training.engines.division import Division
from trueline.training.engines.table import TRAIN_ENGINES, TrainRow
from trueline.training.engines.torch_engine import TorchEngine
from trueline.training.worker import WorkerSpec, worker_target

ROOT = Path(__file__).resolve().parents[3]
FACTS = ModelFacts(
    10**6, context=64, heads=8, key_heads=4, head_size=8, vocabulary=10, hidden_size=64, layers=1, intermediate_size=64
)
TORCH = "training.engine=torch"
KINDS: dict[str, type[EnginesConfig]] = {
    "grpo": RLConfig,
    "sft": SftConfig,
    "generate": GenerateConfig,
    "raft": RaftConfig,
    "serve": ServingConfig,
}
PLANS: dict[str, Any] = {
    "grpo": plan_rl,
    "sft": plan_supervised,
    "generate": lambda config: plan_generate(config),
    "raft": lambda config: plan_rounds(config, Path("nowhere")),
    "serve": plan_serving,
}


def machine(gpus: int) -> Machine:
    return Machine(cpus=8, memory_bytes=2**34, gpus=gpus, gpu_bytes=2**34)


def refused(config: Config, *used: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_engines(config, *used)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("verb", "key", "rows"),
    [
        ("grpo", "rollout.engine", ROLLOUT_ENGINES),
        ("grpo", "training.engine", TRAIN_ENGINES),
        ("grpo", "teacher.engine", TRAIN_ENGINES),
        ("grpo", "critic.engine", TRAIN_ENGINES),
        ("sft", "training.engine", TRAIN_ENGINES),
        ("generate", "rollout.engine", ROLLOUT_ENGINES),
        ("raft", "training.engine", TRAIN_ENGINES),
        ("serve", "ranks.engine", TRAIN_ENGINES),
    ],
)
def test_an_unknown_name_is_told_with_those_that_are_known(
    verb: str, key: str, rows: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    """Before anything is read from the disk that could be wrong as well: by the plan of every kind of run."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1", "completion": "2"}) + "\n")
    source = [] if verb == "serve" else [f"data.path={tmp_path}/rows.jsonl"]
    judged = ["reward.function=exact"] if verb in ("grpo", "raft") else []
    config = KINDS[verb].load([], [f"model.path={model_folder}", *source, *judged, f"{key}=sglang"])
    with pytest.raises(ConfigError, match=re.escape(f"{key}=sglang: not known; choose from {', '.join(rows)}")):
        PLANS[verb](config)


@pytest.mark.parametrize(
    ("kind", "key", "engine", "instead"),
    [
        (RLConfig, "rollout.engine", "vllm", "hf"),
        (RLConfig, "training.engine", "deepspeed", "torch"),
        (RLConfig, "reference.engine", "deepspeed", "torch"),
        (SftConfig, "training.engine", "deepspeed", "torch"),
        (GenerateConfig, "rollout.engine", "vllm", "hf"),
        (RaftConfig, "training.engine", "deepspeed", "torch"),
        (ServingConfig, "ranks.engine", "deepspeed", "torch"),
    ],
)
def test_runtime_local_refuses_engines_with_processes(
    kind: type[EnginesConfig], key: str, engine: str, instead: str
) -> None:
    said = refused(kind.load([], ["runtime=local", f"{key}={engine}"]))
    assert said == (f"runtime=local keeps everything in one process: set {key}={instead} (got {engine}) or runtime=ray")
    check_engines(kind.load([], ["runtime=local"]))


TORCH_REFUSES: dict[str, tuple[list[str], list[str]]] = {
    "several ranks": (
        [TORCH, "training.ranks=2"],
        ["training.engine=torch", "training.ranks=1 (got 2)", "training.engine=deepspeed"],
    ),
    "layers that are divided": ([TORCH, "model.tensor_parallel=2"], ["model.tensor_parallel=1", "got 2 ranks wide"]),
    "sequences that are divided": ([TORCH, "model.context_parallel=2"], ["model.context_parallel=1"]),
    "lower precision": (
        [TORCH, "model.dtype=bfloat16"],
        ["training.engine=torch", "model.dtype=float32 (got bfloat16)", "or training.engine=deepspeed"],
    ),
    "offload": ([TORCH, "training.offload=optimizer"], ["training.offload=none or moments (got optimizer)"]),
}


@pytest.mark.parametrize("kind", [SftConfig, RLConfig, RaftConfig])
@pytest.mark.parametrize("case", sorted(TORCH_REFUSES))
def test_what_the_torch_engine_cannot_do_is_refused_by_key(kind: type[EnginesConfig], case: str) -> None:
    overrides, parts = TORCH_REFUSES[case]
    said = refused(kind.load([], overrides), "training")
    for part in parts:
        assert part in said


@pytest.mark.parametrize("kind", [SftConfig, RLConfig, RaftConfig])
def test_muon_is_refused_where_matrices_are_taken_apart(kind: type[EnginesConfig]) -> None:
    muon, whole = "training.optimizer=muon", "training.deepspeed.zero_stage=0"
    for words, got in (
        ([], "training.deepspeed.zero_stage=0 (got 2)"),
        ([whole, "model.dtype=bfloat16"], "model.dtype=float32 (got bfloat16)"),
        ([whole, "model.tensor_parallel=2"], "model.tensor_parallel=1 (got 2)"),
    ):
        said = refused(kind.load([], [muon, *words]), "training")
        assert "training.optimizer=muon steps whole matrices in float32" in said and got in said
        assert "or training.optimizer=adamw" in said
    for words in ([whole], [TORCH]):
        check_engines(kind.load([], [muon, *words]), "training")


DEEPSPEED_REFUSES = [  # overrides, and the parts of the message in their order
    (
        "training.offload=all training.deepspeed.zero_stage=2",
        ["training.offload=all", "training.deepspeed.zero_stage=3 (got 2)"],
    ),
    (
        "training.offload=optimizer training.deepspeed.zero_stage=0",
        ["offload=optimizer", "zero_stage=1 or more (got 0)"],
    ),
    (
        "model.lora.rank=4 model.lora.quantize=true training.deepspeed.zero_stage=3",
        ["model.lora.quantize=true", "training.deepspeed.zero_stage=2 (got 3)"],
    ),
    (
        "training.compile=true training.deepspeed.zero_stage=3",
        ["compile=true needs whole layers", "training.deepspeed.zero_stage=2 (got 3)"],
    ),
    (
        "training.compile=true model.tensor_parallel=2",
        ["compile=true needs whole layers", "model.tensor_parallel=1 (got 2)"],
    ),
]


@pytest.mark.parametrize("kind", [SftConfig, RLConfig])
@pytest.mark.parametrize(("overrides", "parts"), DEEPSPEED_REFUSES)
def test_what_deepspeed_cannot_do_is_refused_by_key(
    kind: type[EnginesConfig], overrides: str, parts: list[str]
) -> None:
    said = refused(kind.load([], overrides.split()), "training")
    assert re.search(".*".join(map(re.escape, parts)), said), said


def test_muon_is_refused_for_the_type_that_a_gpu_gives(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1", "completion": "2"}) + "\n")
    monkeypatch.setattr("trueline.plan.offline.machine_at_hand", lambda: machine(1))
    words = [f"model.path={model_folder}", f"data.path={tmp_path}/rows.jsonl", "training.deepspeed.zero_stage=0"]
    with pytest.raises(ConfigError, match=r"model.dtype=float32 \(got bfloat16\)"):
        plan_supervised(SftConfig.load([], [*words, "training.optimizer=muon"]))


def test_a_critic_is_trained_too_and_cut_as_it_says_itself() -> None:
    small = ["algorithm.preset=ppo", "critic.engine=torch"]
    assert "critic.ranks=1 (got 2)" in refused(RLConfig.load([], [*small, "critic.ranks=2"]), "critic")
    wide = ["model.context_parallel=2", "training.ranks=2"]
    assert "got 2 ranks wide" in refused(RLConfig.load([], [*small, *wide]), "critic")
    check_engines(RLConfig.load([], [*small, *wide, "critic.context_parallel=1", "critic.ranks=1"]), "critic")
    muon = ["algorithm.preset=ppo", "critic.optimizer=muon"]
    assert "critic.deepspeed.zero_stage=0 (got 2)" in refused(RLConfig.load([], muon), "critic")


def test_ranks_that_the_machine_gives_are_compared_too(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight GPUs would give the policy eight ranks, and the plan says so where its engine has one."""
    monkeypatch.setattr("trueline.plan.inputs.machine_at_hand", lambda: machine(8))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    words = [f"model.path={model_folder}", f"data.path={tmp_path}/rows.jsonl", "reward.function=exact", TORCH]
    with pytest.raises(ConfigError, match=r"training.engine=torch runs in one process: set training.ranks=1 \(got 8\)"):
        plan_rl(RLConfig.load([], [*words, "rollout.engine=hf", "reference.engine=torch"]))


@pytest.mark.parametrize("keys", [{"ranks": {"ranks": 2}}, {"model": {"tensor_parallel": 2}}])
def test_a_served_model_has_one_rank_under_torch(keys: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"ranks\.engine=torch runs in one process: .* runtime=ray and ranks\.engine="
    ):
        plan_serving(ServingConfig.parse(keys))


# What a row says


def test_a_package_that_is_missing_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROLLOUT_ENGINES, "vllm", replace(ROLLOUT_ENGINES["vllm"], package="no_such_package"))
    said = refused(RLConfig(), "rollout")
    assert "rollout.engine=vllm: no_such_package is not installed here" in said
    assert "trueline[gpu]" in said and said.endswith("or set rollout.engine=hf")
    check_engines(RLConfig())  # no one samples


def test_what_brings_an_engine_is_an_extra_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows: list[TrainRow | RolloutRow] = [*TRAIN_ENGINES.values(), *ROLLOUT_ENGINES.values()]
    named = {extra for row in rows for extra in re.findall(r"trueline\[(\w+)\]", row.brought_by)}
    assert named == {"cpu", "gpu"} and named <= set(extras)
    assert all(bool(row.package) == bool(row.brought_by) for row in rows)


def test_samplers_refuse_what_they_cannot_do() -> None:
    model = RLConfig().model
    lengths = {"engines": 1, "max_new_tokens": 8, "max_prompt_tokens": 8}
    with pytest.raises(ConfigError, match=r"heads have size 8; vllm on a CPU runs 32, 64.*: set rollout\.engine=hf or"):
        check_rollout(ResolvedRollout(**lengths), model, FACTS, machine(0))
    check_rollout(ResolvedRollout(**lengths), model, FACTS, machine(1))
    check_rollout(ResolvedRollout(engine="hf", **lengths), model, FACTS, machine(0))
    with pytest.raises(ConfigError, match=r"rollout.tensor_parallel=1 \(got 2\) or rollout\.engine=vllm"):
        check_rollout(ResolvedRollout(engine="hf", tensor_parallel=2, **lengths), model, FACTS, machine(2))


def test_only_an_engine_that_can_is_told_to_sleep() -> None:
    layout = Layout(1, engines=1, colocated=True)
    for engine, sleeps in (("vllm", True), ("hf", False)):
        rollout = ResolvedRollout(engine=engine, engines=1, max_new_tokens=8, max_prompt_tokens=8)
        assert [spec.sleeps for spec in engine_specs(RLConfig().model, rollout, layout, 0)] == [sleeps]


# The environment of processes


class Recorder:
    """Stands where a Ray process would be started."""

    started: list[tuple[str, dict[str, str]]] = []

    def __init__(self, name: str, target: Any, args: Any, spot: Placement, log: Path) -> None:
        self.started.append((name, spot.environment))

    def location(self) -> Done[tuple[str, list[str]]]:
        return Done(Location("node", ["0"], 1))


def environments(
    gpus: int, engine: str, sampler: str, monkeypatch: pytest.MonkeyPatch, width: int = 1, in_turns: bool = True
) -> dict[str, dict[str, str]]:
    monkeypatch.setattr(placement, "RayActor", Recorder)
    monkeypatch.setattr(placement, "reserve", lambda bundles: None)
    monkeypatch.setattr(Recorder, "started", [])
    critic = RoleRanks("critic", 2, shared=True)
    processes = Processes(
        machine(gpus), Layout(2, 1, width, roles=(critic,), in_turns=in_turns), Path("logs"), local=False
    )
    ranks, rollout = RanksConfig(engine=engine), RolloutConfig(engine=sampler, cpu_cache_gib=3.2)
    processes.policy(worker_target(ranks), [None, None])
    processes.role(critic, worker_target(ranks), [None, None])
    processes.engines(ROLLOUT_ENGINES[sampler].target(rollout), [None])
    return dict(Recorder.started)


SILENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}


def of_libraries(environment: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key.startswith(("VLLM_", "DS_", "OMP_"))}


def test_processes_start_with_what_their_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = environments(0, "deepspeed", "vllm", monkeypatch)
    assert [of_libraries(cpu[name]) for name in ("policy-0", "policy-1", "critic-0")] == [
        {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"}
    ] * 3
    assert of_libraries(cpu["engine-0"]) == SILENT | {
        "OMP_NUM_THREADS": "8",
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "3",
    }
    assert environments(0, "deepspeed", "vllm", monkeypatch, 2)["engine-0"]["OMP_NUM_THREADS"] == "4"
    gpu = environments(4, "deepspeed", "vllm", monkeypatch)
    assert of_libraries(gpu["policy-0"]) == of_libraries(gpu["critic-1"]) == {}
    assert of_libraries(gpu["engine-0"]) == SILENT | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    plain = environments(0, "torch", "hf", monkeypatch)
    assert of_libraries(plain["policy-0"]) == {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"}
    assert of_libraries(plain["engine-0"]) == {"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "PASSIVE"}
    assert all(one["DO_NOT_TRACK"] == "1" for one in (cpu | gpu | plain).values())


def test_only_ranks_that_gather_weights_take_memory_in_pieces_of_their_own() -> None:
    for stage, gpus, pieces in ((2, 0, False), (3, 0, True), (3, 1, False)):
        target = worker_target(RanksConfig.parse({"engine": "deepspeed", "deepspeed": {"zero_stage": stage}}))
        assert ("MALLOC_MMAP_THRESHOLD_" in target.environment(gpus)) == pieces
    assert "MALLOC_MMAP_THRESHOLD_" not in worker_target(RanksConfig(engine="torch")).environment(0)


def test_processes_that_work_at_once_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for in_turns, expected in ((True, {"4"}), (False, {"2"})):
        found = environments(0, "torch", "hf", monkeypatch, 2, in_turns)
        assert {one["OMP_NUM_THREADS"] for one in found.values()} == expected


# Engines that the package has never heard of


class OwnTrainer(TorchEngine):
    made: list[WorkerSpec] = []

    def __init__(self, module: nn.Module, spec: WorkerSpec, device: torch.device) -> None:
        super().__init__(module, spec, device)
        self.made.append(spec)


class OwnSampler(HFEngine):
    made: list[EngineSpec] = []

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.made.append(spec)


@pytest.fixture
def own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TrainRow(
        f"{__name__}:OwnTrainer",
        local=True,
        several_ranks=False,
        masters=False,
        division=lambda ranks, dtype, alike: Division(optimizer=alike),
        environment=lambda ranks, gpus: {"OWN_TRAINER": str(gpus)},
    )
    sampler = RolloutRow(
        f"{__name__}:OwnSampler",
        local=True,
        memory=lambda rollout, facts, machine: 123.0,
        environment=lambda rollout, gpus: {"OWN_SAMPLER": rollout.dtype},
    )
    monkeypatch.setitem(TRAIN_ENGINES, "own", trainer)
    monkeypatch.setitem(ROLLOUT_ENGINES, "own", sampler)
    for kind in (OwnTrainer, OwnSampler):
        monkeypatch.setattr(kind, "made", [])


@pytest.mark.usefixtures("own_rows")
def test_a_row_is_all_that_a_run_needs_of_a_new_engine(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    words = ["--model", str(model_folder), "--data", f"{tmp_path}/prompts.jsonl", "--reward", "exact", "steps=1"]
    small = ["prompts_per_step=2", "rollout.max_new_tokens=4", f"folder={tmp_path}", "runtime=local"]
    own = ["training.engine=own", "rollout.engine=own"]
    assert main(["dr_grpo", *words, *small, *own, "name=run"]) == 0
    assert [spec.ranks.engine for spec in OwnTrainer.made] == ["own"] and len(OwnSampler.made) == 1


@pytest.mark.usefixtures("own_rows")
def test_memory_precision_and_environment_come_from_the_row(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    words = [f"model.path={model_folder}", f"data.path={tmp_path}/rows.jsonl", "reward.function=exact"]
    plan = plan_rl(RLConfig.load([], [*words, "runtime=local", "training.engine=own", "rollout.engine=own"]))
    assert memory_bytes(plan)["engine"] == 123.0
    config = TrainingConfig(engine="own")
    assert resolve_dtype("auto", config, machine(8)) == "float32"
    tenant = ModelFootprint("policy", "training", FACTS, plan.config.model, config, 4, 1.0)
    assert model_bytes(tenant) == FACTS.parameters * (4 + 4 + 8 / 4)
    found = environments(2, "own", "own", monkeypatch)
    assert found["policy-0"]["OWN_TRAINER"] == found["critic-0"]["OWN_TRAINER"] == "2"
    assert found["engine-0"]["OWN_SAMPLER"] == "auto"
