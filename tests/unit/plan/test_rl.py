"""What is decided before anything starts, for machines that this one is not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.tool_calls import TOOL_TALK, TOOL_TEMPLATE, TOOLS, calling
from tests.unit.data.test_chat import CHATML
from tests.unit.rollout.test_session import Table
from trueline.algorithms.advantages import has_teacher
from trueline.config.algorithm import PRESETS
from trueline.config.base import ConfigError
from trueline.config.rl import ResolvedRollout, RLConfig
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.environments.base import EpisodeResult, Policy
from trueline.environments.opening import EnvironmentCheck
from trueline.models.loading import ModelFacts
from trueline.plan import inputs, resolve
from trueline.plan.describe import describe, recipe_lines
from trueline.plan.findings import idle_keys
from trueline.plan.hardware import CORE_FLOPS
from trueline.plan.resolve import check_rollout, resolve_dtype, resolve_rollout
from trueline.plan.rl import RLPlan, check_algorithm, check_lengths, memory_bytes, plan_rl, share_devices
from trueline.plan.time import forward_flops, phase_seconds
from trueline.rl.build import sync_plan
from trueline.rollout.summary import transcript
from trueline.runs.processes import engine_specs, episode_budget
from trueline.runtime.cluster import OBJECT_STORE_BYTES, Machine
from trueline.sync.weights import SyncPlan

GIB = 2**30
FACTS = ModelFacts(
    10**9,
    context=4096,
    heads=8,
    key_heads=4,
    head_size=64,
    vocabulary=1000,
    hidden_size=512,
    layers=4,
    intermediate_size=2048,
)


def machine(gpus: int) -> Machine:
    return Machine(cpus=8, memory_bytes=64 * GIB, gpus=gpus, gpu_bytes=80 * GIB)


def resolved(gpus: int, *overrides: str, lengths: list[int] | None = None) -> RLConfig:
    """What machine and policy decide; the models beside it are looked at in whole plans."""
    config = RLConfig.load([], list(overrides))
    ranks, engines, colocated = share_devices(config, machine(gpus), 0)
    dtype = resolve_dtype(config.model.dtype, config.training, machine(gpus))
    return config.with_keys(
        {
            "placement": "colocated" if colocated else "separate",
            "model": {"dtype": dtype},
            "training": {"ranks": ranks},
            "rollout": resolve_rollout(config.rollout, FACTS, lengths or [5], engines, dtype, gpus).model_dump(),
        }
    )


def shares(config: RLConfig) -> tuple[int | None, int | None, str]:
    return config.training.ranks, config.rollout.engines, config.placement


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (0, [], (1, 1, "separate")),
        (0, ["training.ranks=2", "rollout.engines=3"], (2, 3, "separate")),
        (1, [], (1, 1, "colocated")),
        (8, [], (8, 8, "colocated")),
        (8, ["rollout.tensor_parallel=2"], (8, 4, "colocated")),
        (8, ["training.ranks=6"], (6, 6, "colocated")),
        (8, ["training.ranks=6", "rollout.engines=2"], (6, 2, "separate")),
        (8, ["placement=separate"], (4, 4, "separate")),
        (8, ["rollout.max_staleness=1"], (4, 4, "separate")),
        (8, ["rollout.max_staleness=1", "training.ranks=6"], (6, 2, "separate")),
        (8, ["rollout.max_staleness=1", "rollout.engines=2"], (6, 2, "separate")),
        (8, ["rollout.max_staleness=1", "rollout.tensor_parallel=2"], (4, 2, "separate")),
        (8, ["placement=colocated"], (8, 8, "colocated")),
        (8, ["placement=colocated", "rollout.tensor_parallel=4"], (8, 2, "colocated")),
        (4, ["training.ranks=4"], (4, 4, "colocated")),
        (4, ["training.ranks=1", "placement=colocated"], (1, 1, "colocated")),
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
    assert (config.training.ranks, config.rollout.engines) == (1, 1)


def test_the_prompts_limit_follows_the_data() -> None:
    """Rounded up to a multiple of 64, up to what the context of 4096 leaves; a longer prompt counts for nothing."""
    config = resolved(0, lengths=[7, 253])
    assert (config.rollout.max_new_tokens, config.rollout.max_prompt_tokens) == (1024, 256)
    assert resolved(0, lengths=[257, 3073]).rollout.max_prompt_tokens == 320
    assert resolved(0, lengths=[3073]).rollout.max_prompt_tokens == 3072
    assert resolved(0, "rollout.max_new_tokens=97", lengths=[3999]).rollout.max_prompt_tokens == 3999
    assert resolved(0, "rollout.max_prompt_tokens=500", lengths=[253]).rollout.max_prompt_tokens == 500


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["rollout.max_prompt_tokens=4000", "rollout.max_new_tokens=97"],
            ["rollout.max_prompt_tokens=4000", "rollout.max_new_tokens=97", "4096"],
        ),
        (
            ["rollout.max_prompt_tokens=3072", "training.micro_batch_tokens=4095"],
            ["training.micro_batch_tokens=4095", "rollout.max_new_tokens"],
        ),
        (["rollout.tensor_parallel=3"], ["rollout.tensor_parallel=3", "8 heads"]),
    ],
)
def test_shapes_that_cannot_work_are_refused_by_key(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config = resolved(0, *overrides)
        check_lengths(
            config,
            [],
            check_rollout(ResolvedRollout.parse(config.rollout.model_dump()), config.model, FACTS, machine(0)),
        )
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "lfm2"}, "vllm on a CPU gives lfm2 other log-probs"),
        ({"head_size": 16}, "heads have size 16; vllm on a"),
    ],
)
def test_what_an_engine_cannot_do_on_a_cpu_it_may_do_on_a_gpu(changes: dict[str, Any], message: str) -> None:
    config, facts = resolved(0), replace(FACTS, **changes)
    rollout, model = ResolvedRollout.parse(config.rollout.model_dump()), config.model
    with pytest.raises(ConfigError, match=message):
        check_rollout(rollout, model, facts, machine(0))
    assert check_rollout(rollout, model, facts, machine(1)) == rollout.longest()


def test_names_are_looked_up_before_the_start() -> None:
    check_algorithm(RLConfig())
    for override in ("algorithm.advantage=nonsense", "algorithm.loss=nonsense"):
        with pytest.raises(ConfigError, match=override):
            check_algorithm(RLConfig.load([], [override]))


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["algorithm.preset=vapo", "steps=10"], "algorithm.critic_warmup_steps=10 of steps=10"),
        (
            ["algorithm.preset=ppo", "algorithm.critic_warmup_variance=0.5"],
            "algorithm.critic_warmup_limit=100 of steps=100",
        ),
        (["algorithm.preset=ppo", "critic.engine=torch", "critic.ranks=2"], "critic.engine=torch"),
        (["algorithm.preset=ppo", "critic.offload=all"], "critic.offload=all needs critic.deepspeed.zero_stage=3"),
        (["algorithm.preset=remax", "algorithm.shaping.overlong_factor=1"], "greedy"),
        (["algorithm.group_size=1"], "algorithm.group_size to 2 or more"),
    ],
)
def test_what_the_algorithm_cannot_work_with_is_refused_before_any_row_is_read(overrides: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_rl(RLConfig.load([], ["data.path=nowhere.jsonl", *overrides]))
    assert part in str(caught.value)
    check_algorithm(
        RLConfig.load([], ["critic.offload=all", "algorithm.critic_warmup_steps=500"])
    )  # grpo has no critic


@pytest.fixture
def local_run(model_folder: Path, tmp_path: Path) -> Any:
    def make(rows: list[dict[str, Any]], *overrides: str) -> RLConfig:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = [f"model.path={model_folder}", f"data.path={file}", "reward.function=exact", "runtime=local"]
        return RLConfig.load([], [*given, *overrides])

    return make


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "10+1=", "answer": "11"}]


def test_a_whole_plan(local_run: Any) -> None:
    plan = plan_rl(local_run(ROWS))
    assert plan.longest_prompt == 5
    assert [prompt.label for prompt in plan.prompts] == ["2", "11"]
    assert (plan.config.rollout.max_new_tokens, plan.config.rollout.max_prompt_tokens) == (32, 32)


def test_what_the_check_of_rewards_finds_is_a_finding_of_the_plan(local_run: Any, tmp_path: Path) -> None:
    (tmp_path / "misspelt.py").write_text("def score(reply, lable=''):\n    return float(len(reply))\n")
    plan = plan_rl(local_run(ROWS, f"reward.function={tmp_path}/misspelt.py:score"))
    (found,) = (one for one in plan.findings if one.code == "reward_parameter")
    assert "did you mean 'label'?" in found.what and f"warning: {found.text()}" in describe(plan).splitlines()
    plan.rewards.close()


def loaded(plan: RLPlan) -> dict[str, tuple[str, int]]:
    return {role.name: (role.head, role.world) for role in plan.roles}


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("ppo", {"reference", "critic"}),
        ("reinforce++", {"reference"}),
        ("grpo", {"reference"}),
        ("dr_grpo", set()),
        ("rloo", {"reference"}),
        ("remax", {"reference"}),
        ("dapo", set()),
        ("gspo", set()),
        ("cispo", set()),
        ("vapo", {"critic"}),
    ],
)
def test_a_model_that_the_algorithm_does_not_need_is_not_loaded(
    local_run: Any, preset: str, expected: set[str]
) -> None:
    assert set(loaded(plan_rl(local_run(ROWS, f"algorithm.preset={preset}")))) == expected


def test_no_kl_no_reference_and_adapters_are_their_own(local_run: Any) -> None:
    assert loaded(plan_rl(local_run(ROWS, "algorithm.kl.coefficient=0"))) == {}
    assert loaded(plan_rl(local_run(ROWS, "model.lora.rank=2"))) == {}


def test_a_critic_starts_from_the_policy_or_from_what_it_is_told(local_run: Any, model_folder: Path) -> None:
    plan = plan_rl(local_run(ROWS, "algorithm.preset=ppo"))
    critic = next(role for role in plan.roles if role.name == "critic")
    assert (critic.model.path, critic.head, critic.world) == (str(model_folder), "value", 1)
    with pytest.raises(ConfigError, match=r"critic: .*nowhere"):
        plan_rl(local_run(ROWS, "algorithm.preset=ppo", "critic.path=./nowhere"))


def test_a_critic_is_held_against_its_section_again_once_its_ranks_are_known(local_run: Any) -> None:
    words = ["algorithm.preset=ppo", "runtime=ray", "training.ranks=2", "critic.engine=torch", "model.dtype=float32"]
    with pytest.raises(ConfigError, match=r"critic\.engine=torch runs in one process: set critic\.ranks=1 \(got 2\)"):
        plan_rl(local_run(ROWS, *words))


def test_a_teacher_must_be_named(local_run: Any, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"teacher\.path is empty"):
        plan_rl(local_run(ROWS, "algorithm.preset=on_policy_distill"))
    plan = plan_rl(local_run(ROWS, "algorithm.preset=on_policy_distill", f"teacher.path={model_folder}"))
    assert loaded(plan) == {"teacher": ("language", 1)}


OWN = """
from trueline.algorithms.entries import entry


@entry("a value of mine at {0.gamma:g}", needs=("critic",), reads=("gamma",))
def with_critic(samples, config):
    pass


@entry(needs=("groups",))
def with_groups(samples, config):
    pass


@entry("the teacher's word", needs=("teacher",))
def with_teacher(samples, config):
    pass


def plain(samples, config):
    pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_plan.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own")
def test_an_advantage_of_the_users_own_says_which_models_it_needs(local_run: Any, model_folder: Path) -> None:
    alone = ["algorithm.kl.coefficient=0"]
    assert loaded(plan_rl(local_run(ROWS, *alone, "algorithm.advantage=own_plan:plain"))) == {}
    critic = plan_rl(local_run(ROWS, *alone, "algorithm.advantage=own_plan:with_critic"))
    assert loaded(critic) == {"critic": ("value", 1)}
    words = [*alone, "algorithm.advantage=own_plan:with_teacher", "reward.function="]  # in a reward's place
    with pytest.raises(ConfigError, match=r"teacher\.path is empty"):
        plan_rl(local_run(ROWS, *words))
    teacher = plan_rl(local_run(ROWS, *words, f"teacher.path={model_folder}"))
    assert loaded(teacher) == {"teacher": ("language", 1)}
    with pytest.raises(ConfigError, match=r"own_plan:with_groups compares completions of one prompt"):
        plan_rl(local_run(ROWS, *alone, "algorithm.advantage=own_plan:with_groups", "algorithm.group_size=1"))


@pytest.mark.usefixtures("own")
def test_a_critic_of_the_users_own_advantage_has_gpus_and_keys_that_count(elsewhere: Any) -> None:
    words = ["algorithm.advantage=own_plan:with_critic", "critic.placement=separate", "critic.ranks=2"]
    assert shares(elsewhere(80, *words, gpus=8).config) == (6, 6, "colocated")
    assert idle_keys(RLConfig.load([], [*words, "algorithm.value_clip=0.1", "critic.learning_rate=1e-3"])) == []
    with pytest.raises(ConfigError, match="critic_warmup_steps=100 of steps=100"):
        check_algorithm(RLConfig.load([], [*words, "algorithm.critic_warmup_steps=100"]))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("with_critic", "baseline is a value of mine at 0.5; gamma 0.5"),
        ("with_teacher", "baseline is the teacher's word"),
        ("with_groups", "baseline is your own"),
        ("plain", "baseline is your own"),
    ],
)
def test_an_advantage_of_the_users_own_brings_its_words(name: str, said: str) -> None:
    config = RLConfig.parse({"algorithm": {"advantage": f"own_plan:{name}", "gamma": 0.5}})
    assert recipe_lines(config)[0] == f"advantage  own_plan:{name}: {said}"


def test_a_prompt_above_the_limit_is_named_or_left_out(local_run: Any) -> None:
    rows = [{"prompt": "1", "answer": "2"}, {"prompt": "1" * 9, "answer": "2"}]
    with pytest.raises(ConfigError, match=r"row 2 of .*rows\.jsonl has 9 tokens.*rollout\.max_prompt_tokens=8"):
        plan_rl(local_run(rows, "rollout.max_prompt_tokens=8"))
    plan = plan_rl(local_run(rows, "rollout.max_prompt_tokens=8", "data.too_long=drop"))
    assert (len(plan.prompts), plan.sources[0].dropped) == (1, 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_recipe_has_five_lines_and_one_of_its_teacher(preset: str) -> None:
    lines = recipe_lines(config := RLConfig.parse({"algorithm": {"preset": preset}}))
    taught = ["teacher"] * has_teacher(config.algorithm)
    assert [line.split()[0] for line in lines] == ["advantage", "loss", "averaging", "KL", *taught, "importance"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "draws tested"),
        ({"rollout": {"max_staleness": 1}}, "draws not tested: completions may come from older weights"),
        ({"algorithm": {"preset": "dapo"}}, "draws not tested: dynamic sampling selects completions by their rewards"),
        ({"model": {"lora": {"rank": 4, "dropout": 0.1}}}, "draws not tested: adapters have dropout in updates"),
    ],
)
def test_the_recipe_tells_why_draws_are_not_tested(changed: dict[str, Any], said: str) -> None:
    assert recipe_lines(RLConfig.parse({"algorithm": {"preset": "grpo"}} | changed))[-1].endswith(f"; {said}")


def test_the_recipe_tells_what_was_changed() -> None:
    said = "".join(
        recipe_lines(RLConfig.parse({"algorithm": {"preset": "ppo", "clip_low": 0.125, "gae_lambda": 0.95}}))
    )
    for part in ("gae", "lambda 0.95", "whitened", "1 - 0.125", "token_mean", "k1", "0.01", "truncate"):
        assert part in said


def test_the_recipe_tells_what_is_masked() -> None:
    keys = {"importance_sampling": {"off_policy_mask": 0.5}}
    line = recipe_lines(RLConfig.parse({"algorithm": keys}))[-1]
    assert "(engine vs. trainer), negative advantages masked beyond 0.5 nats per token; old" in line


SMOLLM2 = ModelFacts(
    134_515_008,
    context=8192,
    heads=9,
    key_heads=3,
    head_size=64,
    vocabulary=49_152,
    hidden_size=576,
    layers=30,
    intermediate_size=1536,
)


@pytest.fixture
def elsewhere(local_run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plan for SmolLM2-135M on a machine with so much memory and so many GPUs."""

    def make(memory_gib: float, *overrides: str, gpus: int = 0, cpus: int = 2, mps: bool = False) -> RLPlan:
        size = int(memory_gib * GIB)
        there = Machine(cpus=cpus, memory_bytes=size, gpus=gpus, gpu_bytes=size, mps=mps)
        monkeypatch.setattr(inputs, "machine_at_hand", lambda: there)
        for module in (inputs, resolve):
            monkeypatch.setattr(module, "check_model", lambda config, head="language": SMOLLM2)
        return plan_rl(local_run([{"prompt": "1" * 253, "answer": "2"}], "runtime=ray", *overrides))

    return make


def test_three_flags_fit(elsewhere: Any) -> None:
    """Model, data and reward: lengths follow the prompts, and passes follow the memory."""
    plan = elsewhere(12)
    config = plan.config
    assert (config.rollout.max_prompt_tokens, config.rollout.max_new_tokens) == (256, 1024)
    assert (config.training.micro_batch_tokens, config.model.gradient_checkpointing) == (2048, False)
    assert [role.ranks.micro_batch_tokens for role in plan.roles] == [config.reference.micro_batch_tokens] == [2048]
    assert sum(memory_bytes(plan).values()) < 0.9 * 12 * GIB
    said = describe(plan)
    assert "policy     1 x deepspeed rank, ZeRO 2, micro-batches of up to 2048 tokens, about" in said
    assert "reference  1 x deepspeed rank, micro-batches of up to 2048 tokens, about" in said


def test_samples_that_no_object_store_here_holds_are_a_finding_and_count_as_memory(elsewhere: Any) -> None:
    few, many = elsewhere(64), elsewhere(64, "prompts_per_step=4096", "rollout.max_staleness=3")
    assert "object_store" not in {one.code for one in few.findings} and few.forecast.room.samples < GIB
    (found,) = (one for one in many.findings if one.code == "object_store")
    assert f"samples take up to {many.forecast.room.samples / GIB:.1f} GiB" in found.what
    assert many.forecast.room.samples > 3 * GIB and many.layout.store_bytes == OBJECT_STORE_BYTES
    needed = [plan.forecast.room.bytes_needed(plan.forecast.choice) for plan in (few, many)]
    assert needed[1] - needed[0] > 3 * GIB


def test_little_memory_computes_activations_again_in_every_trained_model(elsewhere: Any) -> None:
    plan = elsewhere(14, "algorithm.preset=ppo")
    assert plan.config.model.gradient_checkpointing
    assert {role.name: role.model.gradient_checkpointing for role in plan.roles} == {"reference": True, "critic": True}
    sizes = {role.section: role.ranks.micro_batch_tokens for role in plan.roles}
    assert sizes == dict.fromkeys(("reference", "critic"), plan.config.training.micro_batch_tokens)
    assert describe(plan).count("gradient checkpointing") == 2


def test_a_run_that_goes_on_keeps_what_memory_decided(elsewhere: Any) -> None:
    before = elsewhere(12).config
    again = elsewhere(200, *(f"{key}={value}" for key, value in resolved_keys(before).items())).config
    assert resolved_keys(again) == resolved_keys(before)
    assert resolved_keys(elsewhere(200).config) != resolved_keys(before)


def resolved_keys(config: RLConfig) -> dict[str, Any]:
    names = ("micro_batch_tokens", "gradient_checkpointing", "max_prompt_tokens")
    return {key.path: key.default for key in config.leaves() if key.path.endswith(names) and key.default is not None}


def test_held_out_prompts_count_too(elsewhere: Any, tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "1" * 300, "answer": "2"}))
    assert elsewhere(23, f"evaluation.data={tmp_path}/held_out.jsonl").config.rollout.max_prompt_tokens == 320


def test_every_rank_takes_memory(elsewhere: Any) -> None:
    one, three = elsewhere(23), elsewhere(23, "training.ranks=3")
    assert three.config.training.micro_batch_tokens < one.config.training.micro_batch_tokens


def test_a_refusal_names_the_model_at_fault(elsewhere: Any) -> None:
    words = ["algorithm.preset=ppo", "critic.micro_batch_tokens=300000", "prompts_per_step=1000"]
    with pytest.raises(ConfigError, match=r"needs about .*1 x critic .*: set critic\.micro_batch_tokens=\d+$"):
        elsewhere(30, *words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["algorithm.preset=ppo", "critic.placement=separate", "critic.ranks=2"], (6, 6, "colocated")),
        (
            ["placement=separate", "algorithm.preset=ppo", "critic.placement=separate", "critic.ranks=2"],
            (3, 3, "separate"),
        ),
        (["critic.placement=separate", "critic.ranks=2"], (8, 8, "colocated")),  # grpo has no critic
        (["reference.placement=separate", "reference.context_parallel=4"], (4, 4, "colocated")),
        (["reference.placement=separate", "reference.context_parallel=4", "model.lora.rank=2"], (8, 8, "colocated")),
    ],
)
def test_gpus_of_models_that_are_needed_and_share_with_no_one_are_taken_first(
    elsewhere: Any, words: list[str], expected: tuple[int, int, str]
) -> None:
    assert shares(elsewhere(80, *words, gpus=8).config) == expected


@pytest.mark.parametrize("gpus", [0, 8])
def test_a_plan_holds_what_its_configuration_says(elsewhere: Any, gpus: int) -> None:
    """Numbers that were left to machine, model and data are in the plan, and in the configuration that is written."""
    plan = elsewhere(80, "algorithm.preset=ppo", "critic.tensor_parallel=3", gpus=gpus)
    assert plan.rollout.model_dump() == plan.config.rollout.model_dump()
    assert plan.rollout.longest() == 256 + 1024
    assert (plan.layout.policy_ranks, plan.layout.engines) == (plan.config.training.ranks, plan.rollout.engines)
    sections = plan.config.roles()
    assert {role.name: role.world for role in plan.roles} == {"reference": 8 if gpus else 1, "critic": 6 if gpus else 3}
    assert all(role.world == sections[role.section].ranks == role.ranks.ranks for role in plan.roles)
    assert [one.ranks for one in plan.layout.roles] == [role.world for role in plan.roles]


def test_engines_and_models_on_the_same_gpu_take_turns(elsewhere: Any) -> None:
    """An engine alone takes most of its GPU; one beside models leaves them theirs, and is told what it gets."""
    alone, together = elsewhere(24, "placement=separate", gpus=2), elsewhere(24, gpus=1)
    assert (alone.config.placement, alone.rollout.gpu_memory_utilization) == ("separate", 0.9)
    assert list(alone.forecast.room.phases(alone.forecast.choice)) == ["training"]
    assert together.config.placement == "colocated"
    (spec,) = engine_specs(together.config.model, together.rollout, together.layout, 0, together.cache_bytes())
    share = together.forecast.choice.share
    assert 0 < spec.cache_bytes < share * 24 * GIB and alone.cache_bytes() == 0
    assert spec.gpu_memory_utilization == together.config.rollout.gpu_memory_utilization == share < 0.6
    phases = together.forecast.room.phases(together.forecast.choice)
    assert set(phases) == {"rollout", "training"} and max(phases.values()) <= 0.9 * 24 * GIB
    assert f"rollout {phases['rollout'] / GIB:.1f} GiB, training" in describe(together)
    assert elsewhere(24, "rollout.gpu_memory_utilization=0.7", gpus=1).rollout.gpu_memory_utilization == 0.7
    assert "GiB on each GPU" not in describe(elsewhere(24))


def test_engines_and_models_on_the_same_gpu_work_at_once_where_answers_may_be_stale(elsewhere: Any) -> None:
    """Nobody sleeps, so the memory must hold all of them."""
    together, turns = elsewhere(64, "rollout.max_staleness=1", gpus=1), elsewhere(64, gpus=1)
    assert together.config.placement == "colocated" and together.transport() == "ipc"
    assert (together.takes_turns(), turns.takes_turns()) == (False, True)
    for plan, sleeps in ((together, False), (turns, True)):
        (spec,) = engine_specs(plan.config.model, plan.rollout, plan.layout, 0, plan.cache_bytes())
        assert spec.sleeps is sleeps and spec.cache_bytes > 0
    phases = together.forecast.room.phases(together.forecast.choice)
    assert list(phases) == ["training"] and phases["training"] <= 0.9 * 64 * GIB
    adapter_only = turns.forecast.room.phases(together.forecast.choice)
    assert phases["training"] > max(adapter_only.values())
    assert "share GPUs and work at once" in describe(together)
    assert "share GPUs and take turns" in describe(turns)


def test_steps_are_streamed_on_gpus_where_memory_and_mps_allow(elsewhere: Any) -> None:
    """On a shared GPU with room for both, passes and engine are those of a run in turns."""
    turns, together = elsewhere(80, gpus=1), elsewhere(80, gpus=1, mps=True)
    assert turns.config.training.stream is False and together.config.training.stream is True
    assert turns.takes_turns() and not together.takes_turns()
    assert together.forecast.choice.keys() == turns.forecast.choice.keys()
    held = together.forecast.room.each(together.forecast.choice)
    rest = sum(count * size for name, (count, size) in held.items() if name != "policy")
    assert together.policy_share() == pytest.approx(1 - rest / (80 * GIB)) and 0.5 < together.policy_share() < 1
    assert turns.policy_share() == elsewhere(80).policy_share() == 1.0
    assert "models and engines share GPUs and work at once, by MPS" in describe(together)
    assert "stream     complete groups are trained while others are sampled" in describe(together)
    assert "stream     groups are trained when all are sampled: MPS cannot be started here" in describe(turns)
    small = elsewhere(12, gpus=1, mps=True)
    assert small.takes_turns() and small.config.training.stream is False
    assert "memory does not hold models and engines at once with the same passes" in describe(small)
    unwanted = elsewhere(80, "training.stream=false", gpus=1, mps=True)
    assert "stream     groups are trained when all are sampled: training.stream=false is set, or" in describe(unwanted)
    assert elsewhere(80, "training.stream=true", gpus=1).config.training.stream is True
    assert "work at once, without MPS" in describe(elsewhere(80, "training.stream=true", gpus=1))


def test_steps_are_streamed_where_models_and_engines_have_gpus_of_their_own(elsewhere: Any) -> None:
    apart = elsewhere(80, "placement=separate", gpus=2)
    assert apart.config.training.stream is True and not apart.takes_turns()
    off = elsewhere(80, "placement=separate", "training.stream=false", gpus=2)
    assert "stream     groups are trained when all are sampled: training.stream=false" in describe(off)
    several = elsewhere(80, "minibatches=2", gpus=1, mps=True)
    assert several.takes_turns() and "sampled: a step makes 2 updates" in describe(several)


def test_on_cpus_steps_are_streamed_only_if_asked_for(elsewhere: Any) -> None:
    assert elsewhere(24).config.training.stream is False and "stream  " not in describe(elsewhere(24))
    asked = elsewhere(24, "training.stream=true")
    assert asked.config.training.stream is True and not asked.layout.in_turns


def test_models_and_engines_take_turns_with_the_cores_unless_answers_may_lag(elsewhere: Any) -> None:
    assert elsewhere(24).layout.in_turns
    assert not elsewhere(24, "rollout.max_staleness=1").layout.in_turns


def test_weights_travel_through_what_models_and_engines_share(elsewhere: Any) -> None:
    """The way is told to the sync, with why the trainer's weights are not the checkpoint's, where they are not."""
    ways = {
        "ipc": elsewhere(24, gpus=1),
        "gloo": elsewhere(24, "placement=separate", "sync.transport=gloo", gpus=2),
        "nccl": elsewhere(24, "placement=separate", "sync.transport=nccl", gpus=2),
    }
    assert {name: sync_plan(plan) for name, plan in ways.items()} == {
        name: SyncPlan("bfloat16", name, nodes=(0, 0)) for name in ways
    }
    chosen = sync_plan(elsewhere(24, "placement=separate", gpus=2))  # from GPU to GPU, if NCCL can
    assert chosen == SyncPlan("bfloat16", "nccl", nodes=(0, 0), or_gloo=True)
    assert sync_plan(elsewhere(24)) == SyncPlan("float32", "gloo", nodes=(0, 0))
    assert sync_plan(elsewhere(24, "runtime=local")).transport == "local"
    wider = sync_plan(elsewhere(24, "rollout.dtype=float32", gpus=1))
    assert wider == SyncPlan(
        "float32", "ipc", "the trainer holds them in bfloat16, the engines in float32", nodes=(0, 0)
    )
    four_bits = sync_plan(elsewhere(24, "model.lora.rank=4", "model.lora.quantize=true", gpus=1))
    assert four_bits.differs == "the trainer holds them in 4 bits"
    for asked, gpus, said in (("ipc", 2, "the same GPUs"), ("ipc", 0, "the same GPUs"), ("nccl", 1, "of its own")):
        words = [f"sync.transport={asked}", f"placement={'separate' if gpus == 2 else 'auto'}"]
        with pytest.raises(ConfigError, match=rf"sync\.transport={asked} needs .*{said}.*: set sync\.transport=auto"):
            elsewhere(24, *words, gpus=gpus)


@pytest.mark.parametrize(
    ("gpus", "words", "lean"),
    [
        (0, [], False),
        (1, [], True),
        (1, ["rollout.lean_logprobs=false"], False),
        (3, ["rollout.tensor_parallel=3"], False),
        (0, ["rollout.lean_logprobs=true"], True),
        (1, ["rollout.lean_logprobs=true"], True),
        (1, ["rollout.lean_logprobs=true", "rollout.engine=hf"], False),
    ],
)
def test_log_probs_stay_on_the_device_on_request(elsewhere: Any, gpus: int, words: list[str], lean: bool) -> None:
    plan = elsewhere(24, *words, gpus=gpus)
    assert plan.rollout.lean_logprobs is plan.config.rollout.lean_logprobs is lean
    specs = engine_specs(plan.config.model, plan.rollout, plan.layout, 0)
    assert {spec.lean_logprobs for spec in specs} == {lean}


@pytest.mark.parametrize(
    ("gpus", "words", "compiled"),
    [
        (1, [], True),
        (0, [], False),
        (0, ["training.compile=true"], True),
        (1, ["training.engine=fsdp2"], False),
        (1, ["training.engine=fsdp2", "training.compile=true"], True),
        (1, ["training.compile=false"], False),
        (1, ["steps=99"], False),
        (1, ["training.deepspeed.zero_stage=3"], False),
        (3, ["model.tensor_parallel=3"], False),
        (1, ["model.lora.rank=4"], False),
    ],
)
def test_layers_are_compiled_where_that_works_and_pays(
    elsewhere: Any, gpus: int, words: list[str], compiled: bool
) -> None:
    plan = elsewhere(24, "steps=100", *words, gpus=gpus)
    assert plan.config.training.compile is compiled
    assert (
        any(line.startswith("policy") and "compiled layers" in line for line in describe(plan).splitlines()) is compiled
    )


def test_tokens_are_guessed_on_gpus_alone(elsewhere: Any) -> None:
    asked = "rollout.speculative=ngram"
    for words, guesses in (([], False), ([asked], True)):
        plan = elsewhere(24, *words, gpus=1)
        assert {spec.speculative for spec in engine_specs(plan.config.model, plan.rollout, plan.layout, 0)} == {guesses}
    for words, where in (([asked], "vllm on a cpu"), ([asked, "rollout.engine=hf"], "hf on a gpu")):
        with pytest.raises(ConfigError, match=rf"rollout\.speculative=ngram: {where} cannot guess.*speculative=none"):
            elsewhere(24, *words, gpus=int("hf" in where))


@pytest.mark.parametrize(
    ("gpus", "words", "seeded"),
    [(0, [], True), (1, [], False), (1, ["rollout.engine=hf"], True), (1, ["rollout.seeded=true"], True)],
)
def test_answers_have_seeds_where_those_cost_nothing(elsewhere: Any, gpus: int, words: list[str], seeded: bool) -> None:
    plan = elsewhere(24, *words, gpus=gpus)
    assert plan.rollout.seeded is plan.config.rollout.seeded is seeded
    assert ("without seeds of their own (rollout.seeded=false)" in describe(plan)) is not seeded


def test_moments_go_to_the_host_where_a_gpu_is_small(elsewhere: Any) -> None:
    for words, expected in (([], "moments"), (["training.offload=none"], "none")):
        plan = elsewhere(11, "algorithm.kl.coefficient=0", *words, gpus=1)
        assert plan.config.training.offload == expected
        assert ("optimizer moments on the host" in describe(plan)) == (expected == "moments")
    assert elsewhere(24, gpus=1).config.training.offload == "none"


def test_the_plan_warns_of_crowded_cores_rates_and_idle_keys(elsewhere: Any) -> None:
    words = ["rollout.engines=8", "rollout.cpu_cache_gib=0.5", "algorithm.preset=ppo", "critic.learning_rate=10"]
    words += ["training.learning_rate=1e-8"]
    plan = elsewhere(64, *words, "teacher.ranks=1")
    crowded, *others = (one for one in plan.findings if one.code != "no_chat_template")
    assert crowded.code == "crowded_cores" and crowded.what.startswith("rollout.engines=8 x")
    assert [(one.level, one.code, one.key) for one in others] == [
        ("watch", "learning_rate", "training.learning_rate"),
        ("bad", "learning_rate", "critic.learning_rate"),
        ("watch", "idle_key", "teacher.ranks"),
    ]
    assert describe(plan).splitlines()[-5:] == [f"warning: {one.text()}" for one in plan.findings]
    quiet = elsewhere(64, "rollout.engines=2", "algorithm.preset=ppo")
    assert [one.code for one in quiet.findings] == ["no_chat_template"]
    for rate in ("training.learning_rate=1e-05: default for reinf", "critic.learning_rate=0.0001: default for a c"):
        assert f"rate       {rate}" in describe(quiet)


def test_the_plan_tells_of_a_template_that_is_not_there_and_takes_one(local_run: Any, tmp_path: Path) -> None:
    """One that never shows a row's tools is refused; the tools of a prompt count among its tokens."""
    assert [one.code for one in plan_rl(local_run(ROWS)).findings] == ["no_chat_template"]
    file = tmp_path / "chat.jinja"
    file.write_text(TOOL_TEMPLATE)
    tools = [{**row, "tools": TOOLS} for row in ROWS]
    words = [f"data.chat_template={file}", "rollout.max_new_tokens=8"]
    plan = plan_rl(local_run(tools, *words))
    assert plan.findings == []
    assert plan.longest_prompt == len("<tools>add;\n<user>10+1=\n<assistant>") + 2  # each end is one token
    file.write_text(TOOL_TEMPLATE.replace("messages %}", "messages if message.role != 'tool' %}", 1))
    with pytest.raises(ConfigError, match=r"row 1 of .*: the chat template of .* leaves out the result of a tool"):
        plan_rl(local_run(tools, *words))
    file.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"row 1 of .*: the model would not see the tools add, .*rename the column"):
        plan_rl(local_run(tools, *words))
    played = [*words, "environment.tools=python"]
    with pytest.raises(ConfigError, match=r"would not see the tools python, .*data.system_prompt$"):
        plan_rl(local_run(ROWS, *played))
    assert plan_rl(local_run(ROWS, *played, "data.system_prompt='Use python.'")).prompts[0].tools


def test_a_prompt_that_cannot_be_shown_is_named(local_run: Any) -> None:
    rows = [{"messages": TOOL_TALK[:1], "answer": ""}, {"messages": TOOL_TALK[:3], "answer": ""}]
    with pytest.raises(ConfigError, match=r"row 2 of .*rows\.jsonl: a message calls add"):
        plan_rl(local_run(rows))


@pytest.mark.parametrize(("last", "shown"), [(TOOL_TALK[2], "2"), (calling(), ""), ({"role": "tool"}, "")])
def test_a_transcript_has_the_text_of_the_last_message_if_any(last: dict[str, Any], shown: str) -> None:
    trajectory = Trajectory(Prompt(0, [last], source="sums.jsonl"), 0, reward=1.0, outcome=Outcome.FINISHED)
    said = transcript(trajectory, "train")
    assert (said["prompt"], said["source"]) == (shown, "sums.jsonl")


def test_this_machine_is_timed_by_the_model_of_devices_on_paper(elsewhere: Any) -> None:
    """A critic scores and trains, a reference scores; cores are shared, GPUs add up."""
    words = ["prompts_per_step=4", "rollout.max_new_tokens=100", "epochs=2", "steps=3", "algorithm.group_size=8"]
    alone = "algorithm.kl.coefficient=0"
    plan = elsewhere(100, *words, alone)
    length = plan.longest_prompt + 100
    forward = forward_flops(SMOLLM2, 4 * 8 * length, length) / (2 * CORE_FLOPS)  # of old log-probs, for two updates
    policy, with_reference = phase_seconds(plan), phase_seconds(elsewhere(100, *words))
    assert (policy["score"], policy["train"]) == pytest.approx((forward, 2 * 3 * forward))
    assert (with_reference["score"], with_reference["train"]) == pytest.approx((2 * forward, 2 * 3 * forward))
    critic = phase_seconds(elsewhere(100, *words, alone, "algorithm.advantage=gae"))
    assert (critic["score"], critic["train"]) == pytest.approx((2 * forward, 2 * 2 * 3 * forward))
    one, two = (phase_seconds(elsewhere(100, *words, alone, gpus=gpus)) for gpus in (1, 2))
    assert two["train"] < one["train"] < policy["train"]
    said = describe(plan)
    assert "batch      4 prompts x 8 completions = 32 per step, 2 optimizer steps of 32" in said
    assert "length     3 steps = 12 epochs" in said  # of one prompt


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> str:
    """An agent that no process has to look at."""
    monkeypatch.setattr(inputs, "check_environment", lambda *given, **named: EnvironmentCheck())
    return "environment.agent=agent.py:main"


SMOLAGENTS_TOKENS = 2120  # of the system prompt of its CodeAgent, without a tool


def test_an_agents_own_system_prompt_fits_by_default(
    elsewhere: Any, agent: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The context is the model's, not that of the data's longest row, and the limit reaches engine and session."""
    plan = elsewhere(64, agent)
    assert plan.rollout.longest() == SMOLLM2.context == episode_budget(plan.config, plan.rollout).context
    assert all(
        spec.context == SMOLLM2.context for spec in engine_specs(plan.config.model, plan.rollout, plan.layout, 0)
    )
    assert (plan.rollout.max_new_tokens, plan.longest_prompt) == (1024, 253)
    assert f"turns      up to 8 in sequences of up to {SMOLLM2.context} tokens: environment.agent=" in describe(plan)

    async def briefed(policy: Policy, prompt: Prompt) -> EpisodeResult:
        system = {"role": "system", "content": "s" * SMOLAGENTS_TOKENS}
        return EpisodeResult(float((await policy.reply([system, *prompt.messages])).text == "2"))

    table = Table(tokenizer, CHATML, "2", context=episode_budget(plan.config, plan.rollout).context)
    assert table.run(briefed, longest=plan.rollout.max_new_tokens).reward == 1.0


def test_the_context_of_several_turns_is_bounded_by_memory_and_by_keys(elsewhere: Any, agent: str) -> None:
    small = elsewhere(8, agent).rollout.longest()
    assert small < SMOLLM2.context and SMOLLM2.context % small == 0
    with pytest.raises(ConfigError, match="GiB of memory"):  # twice as much is refused
        elsewhere(8, agent, f"rollout.max_prompt_tokens={2 * small - 1024}")
    cached = elsewhere(64, agent, "rollout.cpu_cache_gib=0.125").rollout.longest()  # vLLM refuses what it cannot hold
    token = 2 * SMOLLM2.layers * SMOLLM2.key_heads * SMOLLM2.head_size * 4
    assert cached == int(0.125 * GIB / token) < SMOLLM2.context
    assert elsewhere(64, agent, "training.micro_batch_tokens=3000").rollout.longest() == SMOLLM2.context // 4
    assert elsewhere(64, agent, "rollout.max_prompt_tokens=300").rollout.longest() == 300 + 1024
    assert elsewhere(64, agent, "rollout.max_new_tokens=300").rollout.max_prompt_tokens == SMOLLM2.context - 300
    assert elsewhere(80, agent, gpus=1).rollout.longest() == SMOLLM2.context
    assert elsewhere(64).rollout.longest() == 256 + 1024  # one turn needs no more than its prompt


def test_a_run_of_several_turns_that_goes_on_keeps_its_context(elsewhere: Any, agent: str) -> None:
    before = elsewhere(8, agent).config
    again = elsewhere(64, agent, *(f"{key}={value}" for key, value in resolved_keys(before).items())).config
    assert again.rollout.max_prompt_tokens == before.rollout.max_prompt_tokens


def test_vllm_on_a_cpu_reads_no_pictures_of_gemma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    config, facts = resolved(0), replace(FACTS, kind="gemma3_text", family="gemma3")
    rollout = ResolvedRollout.parse(config.rollout.model_dump())
    with pytest.raises(ConfigError, match="vllm on a CPU gives gemma3 other log-probs"):
        check_rollout(rollout, config.model, facts, machine(0))
    assert check_rollout(rollout, config.model, facts, machine(1)) == rollout.longest()


def test_a_plan_refuses_narrowed_sampling_that_the_trainer_cannot_follow() -> None:
    narrowed = {"algorithm": {"preset": "dr_grpo"}, "rollout": {"top_p": 0.9}}
    check_algorithm(RLConfig.parse(narrowed))
    with pytest.raises(ConfigError, match=r"rollout\.top_p=0\.9 keeps the likeliest tokens alone.*max_staleness=1"):
        check_algorithm(RLConfig.parse(narrowed | {"rollout": {"top_p": 0.9, "max_staleness": 1}}))
