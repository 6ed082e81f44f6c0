"""Checks of reward functions, from the few calls that a plan made."""

from collections.abc import Iterator

from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.doctor.case import Case
from trueline.monitoring.findings import BAD, FINE, WATCH, Finding
from trueline.plan.rewards import MADE_UP, Trial, label_remark
from trueline.rewards.combined import kind_of
from trueline.rewards.functions import REWARDS


def check_trials(case: Case) -> Iterator[Finding]:
    """Check what each reward function returned for two rows."""
    config = case.rewards
    if not config.named_parts():
        yield Finding(FINE, "no_reward", "there is no reward function to check")
    for name, part in config.named_parts().items() if case.prompts else ():
        key = f"reward.parts.{name}.function" if config.parts else "reward.function"
        if kind_of(part) != "function":
            why = "it is not a function, and may cost money"
            yield Finding(FINE, "reward_not_called", f"{part.function} was not called", why, key)
        elif (trial := case.trials.get(name)) is not None and trial.asked:
            yield from reward_findings(trial, part, config, key)


def reward_findings(trial: Trial, part: RewardPartConfig, config: RewardConfig, key: str) -> Iterator[Finding]:
    """Report what is wrong with a reward, the plainest reason alone."""
    values = ", ".join(f"{value:g}" for value in trial.rewards())
    if trial.failures:
        why = "completions whose reward fails are dropped; above reward.max_failure_share the run stops"
        yield Finding(BAD, "reward_trial", f"{part.function} {trial.describe_failures()}", why, key)
    elif trial.slow:
        what = f"{part.function} took {trial.slow:.0f} s for a call, and was not called again"
        yield Finding(FINE, "slow_reward", what, f"reward.timeout_seconds={config.timeout_seconds:g}", key)
    elif not trial.compares and len(set(trial.rewards())) == 1 and part.function not in REWARDS:
        what = f"{part.function} scored made-up replies, digits and texts of the data all the same: {values}"
        yield Finding(WATCH, "constant_reward", what, "constant rewards teach nothing", key)
    elif trial.compares:
        yield from label_findings(trial, part, values, key)


def label_findings(trial: Trial, part: RewardPartConfig, values: str, key: str) -> Iterator[Finding]:
    below = [own <= made_up for made_up, own in trial.pairs()]
    shaped = [call for call in trial.others if call.reward > trial.calls[0].reward]
    remark = label_remark(trial.calls[0].prompt.label) if part.function not in REWARDS else ""
    where = f"({values} for {MADE_UP!r} and for the label, in turns)"
    if not any(below):
        if remark:
            yield Finding(FINE, "label_type", f"{part.function} accepts its own label, although {remark}", "", key)
    elif shaped:
        what = f"{part.function} accepts a label only in this form: {shaped[0].reply!r:.60}"
        yield Finding(WATCH, "reward_form", what, "a prompt that does not ask for that form gets no reward", key)
    elif remark:
        why = f"its own label got no reward {where}"
        yield Finding(BAD, "label_type", f"{part.function}: {remark}", why, "data.label_column")
    elif len(set(trial.rewards())) == 1:
        what = f"{part.function} scored every reply the same {where}"
        yield Finding(BAD, "constant_reward", what, "constant rewards teach nothing", key)
    else:
        what = f"{part.function} scores a row's own label no higher than a made-up reply {where}"
        yield Finding(BAD if all(below) else WATCH, "ignored_label", what, "right replies get no reward", key)


CHECKS = (check_trials,)
