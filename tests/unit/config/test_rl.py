from pathlib import Path

import pytest

from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig
from trueline.config.sampling import EvalConfig, GenerateConfig, IterativeDPOConfig, RaftConfig


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        RLConfig.load([], list(overrides))
    return str(caught.value)


def test_the_dump_loads_back_equal(tmp_path: Path) -> None:
    config = RLConfig.load(
        [],
        [
            "algorithm.preset=dr_grpo",
            "training.learning_rate=3e-7",
            "training.betas=[0.8, 0.99]",
            "rollout.max_new_tokens=17",
            "data.system_prompt=größe",
            "name=123",
            "evaluation.temperature=0.25",
        ],
    )
    file = tmp_path / "config.yaml"
    file.write_text(config.dump())
    assert RLConfig.load([file], []) == config
    assert RLConfig.load([file], ["training.learning_rate=1e-6"]) != config


def test_the_dump_names_every_key() -> None:
    dumped = RLConfig().dump()
    assert [key.path for key in RLConfig().leaves() if f"{key.path.rpartition('.')[2]}:" not in dumped] == []


def test_runtime_local_fills_the_engines_that_run_in_one_process() -> None:
    local, ray = RLConfig.load([], ["runtime=local"]), RLConfig()
    assert (local.rollout.engine, local.training.engine, local.reference.engine) == ("hf", "torch", "torch")
    assert (ray.rollout.engine, ray.training.engine, ray.reference.engine) == ("vllm", "deepspeed", "deepspeed")
    config = RLConfig.load([], ["runtime=local", "rollout.temperature=0.5", "training.learning_rate=1e-3"])
    assert (config.rollout.temperature, config.training.learning_rate) == (0.5, 1e-3)


def test_minibatches_must_divide_the_answers() -> None:
    message = refused("prompts_per_step=3", "algorithm.group_size=2", "minibatches=4")
    for part in ("minibatches=4", "prompts_per_step=3", "algorithm.group_size=2"):
        assert part in message
    assert RLConfig.load([], ["prompts_per_step=3", "algorithm.group_size=2", "minibatches=6"]).minibatches == 6


CONTROLS = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}


def test_training_samples_from_the_distribution_whose_log_probs_it_computes() -> None:
    message = refused("rollout.repetition_penalty=1.1")
    assert message.startswith("rollout.repetition_penalty=1.1 would make training ratios wrong")
    assert "set evaluation.repetition_penalty for evaluation" in message
    held_out = RLConfig.parse({"evaluation": CONTROLS, "rollout": {"stop": ["END"]}})
    assert (held_out.evaluation.reshaping_keys(), held_out.rollout.stop) == (CONTROLS, ["END"])
    for kind in (GenerateConfig, RaftConfig, IterativeDPOConfig):
        assert kind.parse({"rollout": CONTROLS}).rollout.reshaping_keys() == CONTROLS
    assert EvalConfig.parse({"evaluation": CONTROLS}).evaluation.reshaping_keys() == CONTROLS


@pytest.mark.parametrize("section", ["rollout", "evaluation"])
def test_an_empty_stop_string_and_controls_out_of_range_are_refused(section: str) -> None:
    assert refused(f"{section}.stop=[a, '']").startswith(f"{section}.stop: an empty string would end every completion")
    for control in ("top_p=0", "top_p=1.1", "top_k=-1", "min_p=1.5", "repetition_penalty=0", "repetition_penalty=.inf"):
        assert refused(f"{section}.{control}").startswith(f"{section}.{control.partition('=')[0]}: ")


def test_one_stop_string_needs_no_brackets() -> None:
    assert RLConfig.load([], ["rollout.stop=END"]).rollout.stop == ["END"]
    assert RLConfig.load([], ["rollout.stop=[a, b]"]).rollout.stop == ["a", "b"]


@pytest.mark.parametrize("name", ["../outside", "a/b", "", ".hidden", "a b"])
def test_a_name_is_one_folder_and_no_path(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        RLConfig.parse({"name": name})


@pytest.mark.parametrize(
    "override", ["training.deepspeed.zero_stage=4", "reference.deepspeed.zero_stage=2", "rollout.temperature=0"]
)
def test_values_out_of_range_are_refused_by_key(override: str) -> None:
    assert refused(override).startswith(override.partition("=")[0])


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.context_parallel=2", "training.ranks=2", "reference.ranks=1"],
        ["model.context_parallel=2", "training.ranks=2", "reference.packing=false"],
    ],
)
def test_the_references_ranks_must_fit_the_mesh_too(overrides: list[str]) -> None:
    assert overrides[2].partition("=")[0] in refused(*overrides)


def test_several_rewards_exclude_a_single_one() -> None:
    parts = {"right": {"function": "math"}, "short": {"function": "length", "weight": 0.5}}
    config = RLConfig.parse({"reward": {"parts": parts}})
    assert [part.weight for part in config.reward.named_parts().values()] == [1.0, 0.5]
    with pytest.raises(ConfigError, match="exclude each other"):
        RLConfig.parse({"reward": {"function": "math", "parts": parts}})


def test_several_greedy_answers_are_refused() -> None:
    assert "evaluation.temperature" in refused("evaluation.samples=4")


def test_a_role_may_be_cut_otherwise_than_the_policy() -> None:
    config = RLConfig.load(
        [], ["model.context_parallel=2", "training.ranks=2", "critic.context_parallel=1", "critic.ranks=1"]
    )
    assert config.critic.model_like(config.model, "elsewhere").context_parallel == 1
    seeing = config.model.with_keys({"train_vision": "all", "lora": {"rank": 2}})
    assert {role.model_like(seeing, "").train_vision for role in (config.critic, config.reference)} == {"none"}
    own = config.critic.with_keys({"train_vision": "projector"}).model_like(seeing, "")
    assert (own.train_vision, own.lora.rank) == ("projector", 0)
    assert "critic.ranks" in refused("critic.tensor_parallel=2", "critic.ranks=3")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["algorithm.preset=on_policy_distill", "evaluation.data=x.jsonl"], "evaluation needs a reward"),
        (["algorithm.preset=dapo", "algorithm.kl.target=6"], "kl.coefficient"),
        (
            ["algorithm.importance_sampling.low=3", "algorithm.importance_sampling.high=2"],
            "algorithm.importance_sampling.low=3",
        ),
    ],
)
def test_combinations_that_would_not_do_what_they_say_are_refused(overrides: list[str], part: str) -> None:
    assert part in refused(*overrides)


BEST = ["checkpoint.keep_best=1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (BEST, "no held-out data: set evaluation.data"),
        ([*BEST, "evaluation.data=x", "reward.function=math"], r"got 50 and 0"),
        (
            [*BEST, "evaluation.data=x", "reward.function=math", "evaluation.every=5", "checkpoint.every=0"],
            "got 0 and 5",
        ),
    ],
)
def test_the_best_is_not_looked_for_where_nothing_tells_it(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RLConfig.load([], words)


def test_the_best_of_rl_has_the_highest_reward() -> None:
    assert RLConfig.load([], ["checkpoint.keep_best=1", "checkpoint.metric=loss"]).checkpoint.metric == "loss"
    words = [*BEST, "evaluation.data=x", "reward.function=math", "evaluation.every=5"]
    assert RLConfig.load([], words).checkpoint.metric == "-evaluation/reward"


def test_what_environments_answer_can_be_learnt_only_where_they_do() -> None:
    weight = {"algorithm": {"preset": "grpo", "observation_loss": 0.1}}
    with pytest.raises(
        ConfigError, match=r"algorithm\.observation_loss=0\.1 learns .* set it to 0, or set environment"
    ):
        RLConfig.parse(weight)
    for played in ({"function": "game.py:Game"}, {"tools": ["python"]}, {"agent": "agent.py:main"}):
        RLConfig.parse(weight | {"environment": played})
