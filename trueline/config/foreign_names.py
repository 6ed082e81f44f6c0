"""What the names of other trainers (TRL, OpenRLHF, verl) are called here."""

from importlib.resources import files

import yaml

# Names, several in one, and what to say of them; foreign_names.yaml says how.
ROWS: dict[str, list[str]] = yaml.safe_load(files("trueline.config").joinpath("foreign_names.yaml").read_text())

# Endings of keys that had another name here, and the name that they have.
RENAMED: dict[str, str] = {
    "groups_per_step": "prompts_per_step",
    "algorithm.weighting": "algorithm.loss_aggregation",
    "algorithm.old": "algorithm.old_logprobs",
    "algorithm.critic_only_steps": "algorithm.critic_warmup_steps",
    "algorithm.correction.kind": "algorithm.importance_sampling.mode",
    **{
        f"algorithm.correction.{name}": f"algorithm.importance_sampling.{name}"
        for name in ("cap", "low", "high", "sequence_low", "sequence_high")
    },
    "rollout.gpu_memory_share": "rollout.gpu_memory_utilization",
    **{
        f"{section}ring": f"{section}context_parallel"
        for section in ("model.", "critic.", "reference.", "teacher.", "reward_model.")
    },
}

FOREIGN_NAMES: dict[str, list[str]] = {name: answers for names, answers in ROWS.items() for name in names.split()}

FOREIGN_VERBS: dict[str, tuple[str, ...]] = {
    "train": ("sft", "dpo", "grpo"),
    "rl": ("grpo", "ppo"),
    "rlhf": ("grpo", "ppo"),
    "rlvr": ("grpo", "ppo"),
    "finetune": ("sft",),
    "pretrain": ("sft",),
    "rewardtrainer": ("rm",),
    "reward_model": ("rm",),
    "reward_modeling": ("rm",),
    "sample": ("generate",),
    "inference": ("generate",),
    "serve": ("serve-reward",),
    "merge": ("export",),
    "convert": ("export",),
    "preview": ("data",),
    "keys": ("config",),
}
