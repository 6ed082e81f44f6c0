"""Suggestions for keys and verbs of other trainers (TRL, OpenRLHF, verl), and for keys that were renamed."""

from dataclasses import dataclass
from importlib.resources import files
from string import Formatter
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What to use instead of an unknown key: one key, or a sentence that names several."""

    keys: tuple[str, ...]
    sentence: str = ""

    def text(self) -> str:
        return self.sentence or f"did you mean {self.keys[0]!r}?"


def read_suggestion(entry: str | dict[str, Any]) -> Suggestion:
    if isinstance(entry, str):
        return Suggestion((entry,))
    parts = list(Formatter().parse(entry["say"]))
    keys = tuple(key for _, key, _, _ in parts if key)
    return Suggestion(keys, "".join(text + (key or "") for text, key, _, _ in parts))


# Names in one string, separated by spaces, and their suggestions
ROWS: dict[str, list[Suggestion]] = {
    names: [read_suggestion(entry) for entry in entries]
    for names, entries in yaml.safe_load(files("trueline.config").joinpath("foreign_names.yaml").read_text()).items()
}
FOREIGN_NAMES: dict[str, list[Suggestion]] = {name: found for names, found in ROWS.items() for name in names.split()}

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
    **{
        f"{section}.zero_stage": f"{section}.deepspeed.zero_stage"
        for section in ("training", "critic", "reference", "teacher", "reward_model")
    },
}

FOREIGN_VERBS: dict[str, tuple[str, ...]] = {
    "train": ("sft", "dpo", "grpo"),
    **dict.fromkeys(("rl", "rlhf", "rlvr"), ("grpo", "ppo")),
    **dict.fromkeys(("finetune", "pretrain"), ("sft",)),
    **dict.fromkeys(("rewardtrainer", "reward_model", "reward_modeling"), ("rm",)),
    **dict.fromkeys(("sample", "inference"), ("generate",)),
    "serve": ("serve-reward",),
    **dict.fromkeys(("merge", "convert"), ("export",)),
    "preview": ("data",),
    "keys": ("config",),
}
