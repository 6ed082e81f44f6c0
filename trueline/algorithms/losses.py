"""The table of every loss that a worker can be asked for, and what each asks of the loop and of the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trueline.algorithms.policy_losses import label_good_completions, policy_loss
from trueline.algorithms.preference_losses import Score, kto, mismatch_kl, preference, reward_model, reward_scale
from trueline.algorithms.supervised_losses import distill, process_reward, sft
from trueline.algorithms.value_loss import value
from trueline.data.types import Batch, LossOutput, ModelOutput, Sample

Numbers = Callable[[list[Sample], Any, Score], dict[str, float]]  # Any: the section of the configuration


def none(samples: list[Sample], section: Any, score: Score) -> dict[str, float]:
    return {}


@dataclass(frozen=True, slots=True)
class Loss:
    compute: Callable[[ModelOutput, Batch, Any], LossOutput]
    prepare: Numbers = none  # before it is computed: statistics of the whole minibatch
    facts: Numbers = none  # after an evaluation: what is saved with the model
    entropy: bool = False  # whether it reads the entropy, which costs another pass over the logits


LOSSES: dict[str, Loss] = {
    "policy": Loss(policy_loss, prepare=label_good_completions, entropy=True),
    "value": Loss(value),
    "sft": Loss(sft),
    "preference": Loss(preference),
    "kto": Loss(kto, prepare=mismatch_kl),
    "reward_model": Loss(reward_model, facts=reward_scale),
    "process_reward": Loss(process_reward),
    "distill": Loss(distill),
}
