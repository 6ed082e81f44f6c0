"""What advantages and losses ask of a run, and runs that do not give it."""

from pathlib import Path

import pytest

from trueline.algorithms.advantages import check_needs, needs, policy_learns, policy_waits, reads_reward
from trueline.algorithms.shortcuts import check_truncation
from trueline.config.algorithm import PRESETS, AlgorithmConfig
from trueline.config.base import ConfigError
from trueline.config.rl import RLConfig

TAUGHT = ("on_policy_distill", "sdft", "sdpo", "opsd")
OWN = """
from trueline.algorithms.entries import entry


@entry(needs=("greedy", "groups"))
def asking(samples, config):
    pass


@entry(needs=("teacher", "reward"))
def both(samples, config):
    pass


@entry(needs=("recompute",))
def exact(logprobs, batch, config):
    pass


def plain(samples, config):
    pass
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_needs.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_needs(preset: str) -> None:
    config = AlgorithmConfig(preset=preset)
    check_needs(config)
    assert ("critic" in needs(config)) == (preset in ("ppo", "vapo"))
    assert ("teacher" in needs(config)) == (not reads_reward(config)) == (preset in TAUGHT)
    assert ("greedy" in needs(config)) == (preset == "remax")
    assert ("groups" in needs(config)) == (config.group_size > 1 and preset not in ("vapo", "sdpo"))


@pytest.mark.parametrize(("preset", "steps"), [("vapo", 10), ("ppo", 3), ("grpo", 0)])
def test_the_policy_waits_for_a_critic_only(preset: str, steps: int) -> None:
    config = AlgorithmConfig.parse({"preset": preset} | ({} if preset == "vapo" else {"critic_warmup_steps": 3}))
    assert policy_waits(config) == steps


def test_the_policy_waits_for_the_critics_variance_within_its_bounds() -> None:
    keys = {"critic_warmup_steps": 2, "critic_warmup_variance": 0.5, "critic_warmup_limit": 5}
    config = AlgorithmConfig.parse({"preset": "ppo"} | keys)
    assert [policy_learns(config, step, critic_ready=False) for step in range(7)] == [False] * 5 + [True] * 2
    assert [policy_learns(config, step, critic_ready=True) for step in range(4)] == [False] * 2 + [True] * 2
    assert policy_learns(AlgorithmConfig.parse({"preset": "grpo"} | keys), 0, critic_ready=False)


@pytest.mark.parametrize(
    "advantage", ["group_norm", "gdpo", "group_mean", "maxrl", "otb", "leave_one_out", "own_needs:asking"]
)
def test_a_group_estimator_needs_two_answers(advantage: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_needs(AlgorithmConfig.load([], [f"advantage={advantage}", "group_size=1"]))
    assert f"algorithm.advantage={advantage}" in str(caught.value)
    assert "algorithm.group_size to 2 or more (got 1)" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["preset=remax", "shaping.overlong_factor=1"], "another advantage than greedy_baseline"),
        (["advantage=own_needs:asking", "shaping.truncated=set"], "another advantage than own_needs:asking"),
        (["preset=on_policy_distill", "group_size=2", "dynamic_sampling.enabled=true"], "advantage=teacher uses no"),
        (["preset=on_policy_distill", "shaping.overlong_factor=1"], "advantage=teacher uses no reward"),
        (["preset=remax", "shaping.cosine_correct=[2,1]"], "cosine_correct=null, or another advantage than greedy"),
        (["preset=on_policy_distill", "shaping.cosine_correct=[2,1]"], "advantage=teacher uses no reward"),
        (["preset=maxrl", "shaping.overlong_factor=1"], "advantage=maxrl needs rewards from 0 on: set kl.place=loss"),
        (["preset=maxrl", "kl.place=reward", "kl.coefficient=0.1"], "loss and shaping.overlong_factor=0"),
        (["preset=on_policy_distill", "kl.place=reward"], "set kl.place=loss"),
        (
            ["preset=otb", "old_logprobs=rollout", "importance_sampling.mode=none"],
            "advantage=otb needs the trainer's distributions",
        ),
        (
            ["preset=gspo", "old_logprobs=rollout", "importance_sampling.mode=none"],
            "clip range of loss=gspo: set old_logprobs=recompute",
        ),
        (
            ["loss=own_needs:exact", "old_logprobs=rollout", "importance_sampling.mode=none"],
            "loss=own_needs:exact: set old_logprobs=recompute",
        ),
        (["advantage=nonsense"], "algorithm.advantage=nonsense"),
        (["loss=nonsense"], "algorithm.loss=nonsense"),
    ],
)
def test_what_a_function_would_not_read_as_it_sounds_is_refused(words: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_needs(AlgorithmConfig.load([], words))
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["advantage=own_needs:plain", "group_size=1", "kl.place=reward"],
        ["advantage=own_needs:both", "kl.place=reward", "shaping.overlong_factor=1"],
        ["advantage=own_needs:asking"],
        ["preset=maxrl", "kl.coefficient=0.1"],
        ["preset=maxrl", "kl.place=reward", "shaping.truncated=multiply"],
        ["loss=own_needs:exact"],
    ],
)
def test_a_function_of_the_users_own_gets_what_it_asks_for_and_no_more(words: list[str]) -> None:
    config = AlgorithmConfig.load([], words)
    check_needs(config)
    assert reads_reward(config)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["rollout.max_staleness=1"], "older weights have kept others (rollout.max_staleness=1)"),
        (["minibatches=2"], "later updates keep others (minibatches x epochs = 2)"),
        (["epochs=3"], "later updates keep others (minibatches x epochs = 3)"),
        (["algorithm.preset=grpo"], "the reference keeps others (algorithm.kl.coefficient=0.001)"),
        (["algorithm.preset=on_policy_distill"], "the teacher keeps others: choose another advantage than teacher"),
        (["algorithm.observation_loss=0.1", "environment.tools=python"], "observation_loss=0.1 learns tokens that"),
        (["model.lora.rank=4", "model.lora.dropout=0.1"], "adapters have dropout"),
        (["algorithm.preset=vapo"], "train only the critic"),
        (["algorithm.preset=otb"], "algorithm.advantage=otb, or top_entropy_share, reads what is computed before"),
        (["algorithm.top_entropy_share=0.2"], "or top_entropy_share, reads"),
    ],
)
def test_narrowed_sampling_is_refused_where_the_update_cannot_find_what_was_kept(words: list[str], part: str) -> None:
    config = RLConfig.load([], ["algorithm.preset=dr_grpo", "rollout.top_p=0.9", *words])
    with pytest.raises(ConfigError) as caught:
        check_truncation(config)
    assert str(caught.value).startswith("rollout.top_p=0.9 keeps the likeliest tokens alone") and part in str(
        caught.value
    )
    check_truncation(RLConfig.load([], ["algorithm.preset=dr_grpo", *words]))


@pytest.mark.parametrize("word", ["rollout.top_p=0.9", "rollout.top_k=5", "rollout.min_p=0.1"])
@pytest.mark.parametrize("more", [[], ["algorithm.preset=dapo"], ["algorithm.preset=dppo"], ["training.stream=true"]])
def test_narrowed_sampling_is_free_elsewhere(word: str, more: list[str]) -> None:
    check_truncation(RLConfig.load([], ["algorithm.preset=dr_grpo", *more, word]))
