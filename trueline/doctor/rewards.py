"""Checks of reward functions by the few calls that a plan has made of them."""

from collections.abc import Iterator

from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.doctor.case import Case
from trueline.doctor.findings import Finding
from trueline.rewards.combined import kind_of
from trueline.rewards.functions import REWARDS
from trueline.runs.rewards import MADE_UP, Trial, label_remark


def tried_rewards(case: Case) -> Iterator[Finding]:
    """Look at what every reward that is a function returned for two rows."""
    config = case.rewards
    if not config.named_parts():
        yield Finding("fine", "there is no reward function to ask")
    for name, part in config.named_parts().items() if case.prompts else ():
        key = f"reward.parts.{name}.function" if config.parts else "reward.function"
        if kind_of(part) != "function":
            yield Finding("fine", f"{part.function} was not asked", "it is no function, and may cost money", key)
        elif (trial := case.trials.get(name)) is not None and trial.asked:
            yield from judged(trial, part, config, key)


def judged(trial: Trial, part: RewardPartConfig, config: RewardConfig, key: str) -> Iterator[Finding]:
    """Say what is wrong with a reward, the plainest reason alone."""
    values = ", ".join(f"{value:g}" for value in trial.rewards())
    if trial.failures:
        what = f"{part.function} {trial.failed()}"
        why = "calls that fail leave their group; above reward.max_failure_share the run stops"
        yield Finding("bad", what, why, key)
    elif trial.slow:
        what = f"{part.function} took {trial.slow:.0f} s for a call, and was not asked again"
        yield Finding("fine", what, f"a run waits {config.timeout_seconds:g} s (reward.timeout_seconds)", key)
    elif not trial.compares and len(set(trial.rewards())) == 1 and part.function not in REWARDS:
        what = f"{part.function} gave {values} to made-up replies, digits and what the data says: the same to all"
        yield Finding("watch", what, "rewards that are constant teach nothing", key)
    elif trial.compares:
        yield from judged_labels(trial, part, values, key)


def judged_labels(trial: Trial, part: RewardPartConfig, values: str, key: str) -> Iterator[Finding]:
    below = [own <= made_up for made_up, own in trial.pairs()]
    shaped = [call for call in trial.others if call.reward > trial.calls[0].reward]
    remark = label_remark(trial.calls[0].prompt.label) if part.function not in REWARDS else ""
    where = f"({values} to {MADE_UP!r} and to the label, in turns)"
    if not any(below):
        praised = f"{part.function} praises its own label, though {remark.partition(' and ')[0]}"
        yield from [Finding("fine", praised, "", key)] * bool(remark)
    elif shaped:
        what = f"{part.function} praises a label only in a form: {shaped[0].reply!r:.60}"
        yield Finding("watch", what, "a prompt that does not ask for that form gets no reward", key)
    elif remark:
        yield Finding("bad", f"{part.function}: {remark}", f"its own label got no reward {where}", "data.label_column")
    elif len(set(trial.rewards())) == 1:
        what = f"{part.function} gave the same whatever the reply {where}"
        yield Finding("bad", what, "rewards that are constant teach nothing", key)
    else:
        level = "bad" if all(below) else "watch"
        what = f"{part.function} gives a row's own label no more than a made-up reply {where}"
        yield Finding(level, what, "what is right would not be praised", key)


CHECKS = (tried_rewards,)
