"""What is decided before anything starts, for machines that this one is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.models.loading import ModelFacts, check_model
from trueline.runtime.cluster import Machine
from trueline.trainers.plan import check_names, check_prompt_lengths, check_shape, load_prompts, plan_rl, resolve

GIB = 2**30
FACTS = ModelFacts(10**9, context=4096, heads=8, key_heads=4, head_size=64, vocabulary=1000, hidden_size=512, layers=4)


def machine(gpus: int) -> Machine:
    return Machine(cpus=8, memory_bytes=64 * GIB, gpus=gpus, gpu_bytes=80 * GIB)


def resolved(gpus: int, *overrides: str) -> RLConfig:
    return resolve(RLConfig.load([], list(overrides)), FACTS, machine(gpus))


def shares(config: RLConfig) -> tuple[int | None, int | None, str]:
    return config.training.ranks, config.rollout.engines, config.placement


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (0, [], (1, 1, "separate")),
        (0, ["training.ranks=2", "rollout.engines=3"], (2, 3, "separate")),
        (1, [], (1, 1, "colocated")),
        (8, [], (4, 4, "separate")),
        (8, ["training.ranks=6"], (6, 2, "separate")),
        (8, ["rollout.engines=2"], (6, 2, "separate")),
        (8, ["rollout.tensor_parallel=2"], (4, 2, "separate")),
        (8, ["placement=colocated"], (8, 8, "colocated")),
        (8, ["placement=colocated", "rollout.tensor_parallel=4"], (8, 2, "colocated")),
        (4, ["training.ranks=4"], (4, 4, "colocated")),
    ],
)
def test_devices_are_shared_out(gpus: int, overrides: list[str], expected: tuple[int, int, str]) -> None:
    assert shares(resolved(gpus, *overrides)) == expected


def test_the_types_follow_the_machine() -> None:
    assert (resolved(0).model.dtype, resolved(8).model.dtype) == ("float32", "bfloat16")
    assert resolved(8).rollout.dtype == "bfloat16"
    assert resolved(8, "rollout.dtype=float32").rollout.dtype == "float32"
    assert resolved(1, "runtime=local").model.dtype == "float32"


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_a_local_run_has_one_rank_and_one_engine_on_any_machine(gpus: int) -> None:
    config = resolved(gpus, "runtime=local")
    assert (config.training.ranks, config.reference.ranks, config.rollout.engines) == (1, 1, 1)


def test_lengths_follow_the_context() -> None:
    config = resolved(0)
    assert (config.rollout.max_new_tokens, config.rollout.max_prompt_tokens) == (1024, 4096 - 1024)
    config = resolved(0, "rollout.max_new_tokens=96")
    assert config.rollout.max_prompt_tokens == 4000


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["rollout.max_prompt_tokens=4000", "rollout.max_new_tokens=97"],
            ["rollout.max_prompt_tokens=4000", "rollout.max_new_tokens=97", "4096"],
        ),
        (["training.micro_batch_tokens=4095"], ["training.micro_batch_tokens=4095", "rollout.max_new_tokens"]),
        (["reference.micro_batch_tokens=4095"], ["reference.micro_batch_tokens=4095", "rollout.max_new_tokens"]),
        (["rollout.tensor_parallel=3"], ["rollout.tensor_parallel=3", "8 heads"]),
    ],
)
def test_shapes_that_cannot_work_are_refused_by_key(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_shape(resolved(0, *overrides), FACTS, machine(0))
    for part in parts:
        assert part in str(caught.value)


def test_names_are_looked_up_before_the_start() -> None:
    check_names(RLConfig())
    for override in ("algorithm.advantage=nonsense", "algorithm.loss=nonsense"):
        with pytest.raises(ConfigError, match=override):
            check_names(RLConfig.load([], [override]))


@pytest.fixture
def local_run(model_folder: Path, tmp_path: Path) -> Any:
    def make(rows: list[dict[str, str]], *overrides: str) -> RLConfig:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = [f"model.path={model_folder}", f"data.path={file}", "reward.function=exact", "runtime=local"]
        return RLConfig.load([], [*given, *overrides])

    return make


def test_a_whole_plan(local_run: Any) -> None:
    plan = plan_rl(local_run([{"prompt": "1+1=", "answer": "2"}, {"prompt": "10+1=", "answer": "11"}]))
    assert plan.longest_prompt == 5
    assert [prompt.label for prompt in plan.prompts] == ["2", "11"]
    assert plan.layout.reference_ranks == 1  # grpo has a KL term
    assert (plan.config.rollout.max_new_tokens, plan.config.rollout.max_prompt_tokens) == (32, 32)


def test_a_plan_without_a_kl_term_has_no_reference(local_run: Any) -> None:
    config = local_run([{"prompt": "1+1=", "answer": "2"}], "algorithm.kl.coefficient=0")
    assert plan_rl(config).layout.reference_ranks == 0


def test_a_prompt_above_the_limit_is_named(local_run: Any) -> None:
    config = local_run(
        [{"prompt": "1", "answer": "2"}, {"prompt": "1" * 9, "answer": "2"}], "rollout.max_prompt_tokens=8"
    )
    config = resolve(config, check_model(config.model), machine(0))
    prompts = load_prompts(config.data, config.data.path, "data.path")
    with pytest.raises(ConfigError, match=r"prompt 1 of .*rows\.jsonl has 9 tokens.*rollout\.max_prompt_tokens=8"):
        check_prompt_lengths(config, prompts)
