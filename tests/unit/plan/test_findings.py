"""Keys that change nothing are named; keys that change something are not."""

from pathlib import Path

import pytest
import yaml

from trueline.config.run import RunConfig
from trueline.plan.findings import idle_keys
from trueline.verbs import VERBS


def load(verb: str, *overrides: str) -> RunConfig:
    command = VERBS[verb]
    return command.kind.load([], list(overrides), command.defaults)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("raft", "iterative_dpo")])
@pytest.mark.parametrize("runtime", ["ray", "local"])
def test_what_a_verb_sets_itself_is_never_named(verb: str, runtime: str) -> None:
    assert idle_keys(load(verb, f"runtime={runtime}")) == []


IDLE = [
    ("grpo", "environment.max_turns=3", "episodes have one turn"),
    ("grpo", "algorithm.credit=turn", "episodes have one turn"),
    ("generate", "environment.max_turns=3", "episodes have one turn"),
    ("eval", "environment.processes=3", "episodes have one turn"),
    ("grpo", "critic.learning_rate=0.001", "has no critic"),
    ("grpo", "critic.path=somewhere", "has no critic"),
    ("grpo", "critic.betas=[0.5, 0.9]", "has no critic"),
    ("grpo", "algorithm.gae_lambda=0.5", "algorithm.advantage=group_norm"),
    ("vapo", "algorithm.gae_lambda=0.5", "length_adaptive"),
    ("grpo", "algorithm.value_clip=0.1", "algorithm.advantage=group_norm has no critic"),
    ("grpo", "algorithm.critic_warmup_steps=1", "algorithm.advantage=group_norm has no critic"),
    ("reinforce++", "algorithm.length_adaptive=0.5", "algorithm.advantage=reinforce does not read it"),
    ("gspo", "algorithm.ratio_cap=3.0", "algorithm.loss=gspo does not read it"),
    (
        "grpo",
        "algorithm.importance_sampling.low=0.25",
        "algorithm.importance_sampling.mode=token_truncate does not read it",
    ),
    ("grpo", "algorithm.gamma=0.5", "algorithm.advantage=group_norm"),
    ("dr_grpo", "reference.ranks=2", "algorithm.kl.coefficient=0"),
    ("dr_grpo", "algorithm.kl.place=reward", "algorithm.kl.coefficient=0"),
    ("ppo", "algorithm.kl.estimator=k2", "algorithm.kl.place=reward"),
    ("grpo", "algorithm.kl.horizon=5", "algorithm.kl.target=null"),
    ("grpo", "teacher.path=somewhere", "has no teacher"),
    ("grpo", "reward_model.ranks=2", "no reward is a model"),
    ("cispo", "algorithm.clip_high=0.5", "algorithm.loss=cispo"),
    ("grpo", "algorithm.divergence=kl", "algorithm.loss=ppo_clip"),
    ("gspo", "algorithm.dual_clip=3.0", "algorithm.loss=gspo"),
    ("grpo", "algorithm.ratio_cap=3.0", "algorithm.loss=ppo_clip"),
    ("grpo", "algorithm.importance_sampling.high=3.0", "algorithm.importance_sampling.mode=token_truncate"),
    ("grpo", "algorithm.importance_sampling.sequence_low=0.5", "algorithm.importance_sampling.mode=token_truncate"),
    ("grpo", "algorithm.dynamic_sampling.max_batches=3", "enabled=false"),
    ("grpo", "algorithm.shaping.overlong_share=0.5", "overlong_factor=0"),
    ("grpo", "algorithm.shaping.truncated_value=0.5", "truncated=keep"),
    ("grpo", "algorithm.shaping.cosine_wrong=[-1.0, 0.0]", "cosine_correct=null"),
    ("grpo", "evaluation.every=5", "evaluation.data"),
    ("grpo", "model.lora.alpha=5.0", "model.lora.rank=0"),
    ("grpo", "model.attention=eager", "training.packing=true"),
    ("sft", "model.attention=eager", "training.packing=true"),
    ("generate", "model.attention=eager", "engines have an attention of their own"),
    ("grpo", "training.decay_share=0.5", "training.schedule=wsd"),
    ("sft", "training.decay_share=0.5", "training.schedule=wsd"),
    ("sft", "evaluation.every=5", "held out"),
    ("sft", "monitoring.transcripts_per_step=1", "nothing is sampled"),
    ("sft", "monitoring.tokens=False", "nothing is sampled"),
    ("sft", "health.rate_factor=0.5", "health.action=log"),
    ("generate", "health.action=stop", "nothing is trained"),
    ("dpo", "preference.gamma=0.5", "preference.loss=simpo"),
    ("generate", "checkpoint.every=5", "nothing is trained"),
    ("generate", "reward_model.ranks=2", "no reward is a model"),
    ("eval", "evaluation.every=5", "nothing is trained"),
    ("eval", "evaluation.top_p=0.5", "evaluation.temperature=0"),
    ("eval", "evaluation.top_k=5", "evaluation.temperature=0"),
    ("eval", "evaluation.min_p=0.5", "evaluation.temperature=0"),
    ("eval", "rollout.top_p=0.5", "evaluation"),
    ("eval", "rollout.temperature=0.5", "evaluation"),
]


@pytest.mark.parametrize(("verb", "override", "why"), IDLE)
def test_a_key_without_effect_is_named_with_the_reason(verb: str, override: str, why: str) -> None:
    (found,) = idle_keys(load(verb, override))
    assert found.what == f"{override} has no effect" and why in found.why and override.startswith(f"{found.key}=")


@pytest.mark.parametrize(("verb", "override"), [(verb, override) for verb, override, _ in IDLE])
def test_a_run_that_goes_on_names_the_same(verb: str, override: str, tmp_path: Path) -> None:
    """Its config.yaml holds every key."""
    config = load(verb, override)
    again = type(config).parse(yaml.safe_load(config.dump()))
    assert idle_keys(again) == idle_keys(config) != []


@pytest.mark.parametrize(
    ("verb", "overrides"),
    [
        ("ppo", ["critic.learning_rate=0.001", "algorithm.gae_lambda=0.5", "algorithm.gamma=0.5"]),
        ("reinforce++", ["algorithm.gamma=0.5", "reference.ranks=2"]),
        ("grpo", ["algorithm.advantage=statistics:fmean", "algorithm.gamma=0.5", "algorithm.gae_lambda=0.5"]),
        ("grpo", ["algorithm.loss=statistics:fmean", "algorithm.clip_low=0.5", "algorithm.ratio_cap=2"]),
        ("grpo", ["evaluation.data=rows.jsonl", "evaluation.every=5", "reward.function=exact"]),
        ("eval", ["evaluation.repetition_penalty=1.5", "evaluation.stop=[a]"]),
        ("eval", ["evaluation.temperature=1", "evaluation.top_p=0.5", "evaluation.top_k=5", "evaluation.min_p=0.5"]),
        ("generate", ["rollout.top_p=0.5", "rollout.stop=[a]"]),
        ("on_policy_distill", ["teacher.path=somewhere", "teacher.ranks=2"]),
        ("simpo", ["preference.gamma=0.5"]),
        ("sft", ["model.attention=eager", "training.packing=false"]),
        ("grpo", ["model.attention=eager", "training.packing=false"]),
        ("grpo", ["model.attention=eager", "reference.packing=false"]),
        ("sft", ["evaluation.share=0.5", "evaluation.every=5", "training.deepspeed.zero_stage=3"]),
        (
            "grpo",
            ["training.engine=fsdp2", "training.replicas=2", "reference.replicas=1", "reference.fsdp2.reshard=false"],
        ),
    ],
)
def test_a_key_with_an_effect_is_not_named(verb: str, overrides: list[str]) -> None:
    assert idle_keys(load(verb, *overrides)) == []


def test_adapters_need_no_reference_and_plain_torch_shards_nothing() -> None:
    (found,) = idle_keys(load("grpo", "model.lora.rank=8", "reference.ranks=2"))
    assert "its own reference" in found.why
    (found,) = idle_keys(load("ppo", "runtime=local", "critic.deepspeed.zero_stage=3"))
    assert "critic.engine=torch" in found.why


def test_keys_of_another_engine_are_idle_and_the_engine_of_other_models_is_none() -> None:
    """The critic of a run without one follows the policy's engine, which is no mistake of the user's."""
    (found,) = idle_keys(load("grpo", "training.engine=fsdp2", "training.deepspeed.zero_stage=3"))
    assert found.text() == "training.deepspeed.zero_stage=3 has no effect; training.engine=fsdp2 does not read it"
    found, other = idle_keys(load("sft", "training.replicas=2", "training.fsdp2.reshard=false"))
    assert found.key == "training.fsdp2.reshard" and other.key == "training.replicas"
    assert found.why == other.why == "training.engine=deepspeed does not read it"


def test_a_run_that_saves_nothing_reads_no_key_of_checkpoints() -> None:
    for verb in ("grpo", "sft"):
        (found,) = idle_keys(load(verb, "checkpoint.save=false", "checkpoint.every=5"))
        assert found.text() == "checkpoint.every=5 has no effect; checkpoint.save=false writes no checkpoint"


def test_greedy_evaluation_of_a_training_run_narrows_nothing() -> None:
    held_out = ["evaluation.data=rows.jsonl", "reward.function=exact"]
    (found,) = idle_keys(load("grpo", *held_out, "evaluation.top_p=0.5", "evaluation.repetition_penalty=1.5"))
    assert found.text().startswith("evaluation.top_p=0.5 has no effect; evaluation.temperature=0")
