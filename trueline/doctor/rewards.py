"""Checks of reward functions by a few real calls, in the processes that a run asks too."""

import asyncio
import tempfile
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.data.readers import LABEL_COLUMNS
from trueline.data.types import Prompt
from trueline.doctor.case import Case
from trueline.doctor.findings import Finding
from trueline.environments.single_turn import reward_call
from trueline.jobs.try_reward import said
from trueline.rewards.base import PolicyError, RewardFailure, RewardTimeout
from trueline.rewards.combined import kind_of
from trueline.rewards.functions import REWARDS
from trueline.rewards.pool import FunctionReward
from trueline.runs.rewards import label_remark

MADE_UP = "I do not know."
REPLIES = (MADE_UP, "<think>One and one.</think>\n<answer>two</answer>", "", "word " * 400)
FORMS = ("<answer>{}</answer>", "\\boxed{{{}}}", "#### {}")  # that rewards ask of an answer
TESTED = ("code",)  # rewards whose labels are no replies
SECONDS = 5.0  # for one call; a check must not wait as long as a run does


@dataclass(frozen=True, slots=True)
class Scored:
    """What a reward said of a reply."""

    prompt: Prompt
    reply: str
    reward: float


@dataclass(frozen=True, slots=True)
class Trial:
    """Some calls of one reward, and the failure that ended them."""

    compares: bool  # a label; else all replies are made up
    calls: list[Scored]
    others: list[Scored]  # of a label that got no more than a made-up reply, in other forms
    failure: RewardFailure | None = None

    def rewards(self) -> list[float]:
        return [call.reward for call in (*self.calls, *self.others)]

    def pairs(self) -> list[tuple[float, float]]:
        """Return for each row the reward of the made-up reply and that of the label."""
        values = [call.reward for call in self.calls]
        return list(zip(values[::2], values[1::2], strict=False))


def tried_rewards(case: Case) -> Iterator[Finding]:
    """Ask every reward that is a function about two rows."""
    config = case.rewards
    if not config.named_parts():
        yield Finding("fine", "there is no reward function to ask")
    for name, part in config.named_parts().items() if case.prompts else ():
        key = f"reward.parts.{name}.function" if config.parts else "reward.function"
        if kind_of(part) != "function":
            yield Finding("fine", f"{part.function} was not asked", "it is no function, and may cost money", key)
        elif (trial := waited_for(tried(part, config, two_rows(case.prompts)))) is not None:
            yield from judged(trial, part, config, key)


def waited_for(trial: Coroutine[Any, Any, Trial | None]) -> Trial | None:
    with ThreadPoolExecutor(1) as thread:  # a notebook runs an event loop in this one
        return thread.submit(asyncio.run, trial).result()


def two_rows(prompts: list[Prompt]) -> list[Prompt]:
    """Choose the first row, and one with another label."""
    first = prompts[0]
    return [first, next((one for one in prompts if one.label != first.label), prompts[-1])]


async def tried(part: RewardPartConfig, config: RewardConfig, rows: list[Prompt]) -> Trial | None:
    """Make the calls; None: the function cannot be loaded, as its plan says."""
    limits = config.replaced({"processes": 1, "timeout_seconds": min(config.timeout_seconds, SECONDS)})
    with tempfile.TemporaryDirectory() as folder:
        reward = FunctionReward(part, limits, Path(folder, "reward.log"))
        try:
            await reward.children[0].start()
        except RewardFailure:
            return None
        try:
            return await called(reward, rows, compares(part, reward.children[0].takes["all"], rows))
        finally:
            await reward.stop()


def compares(part: RewardPartConfig, takes: list[str], rows: list[Prompt]) -> bool:
    """Tell whether a reward reads labels, and labels that can stand for a reply."""
    labelled = all(row.label is not None for row in rows)
    return labelled and part.function not in TESTED and not {"label", *LABEL_COLUMNS}.isdisjoint(takes)


async def called(reward: FunctionReward, rows: list[Prompt], compared: bool) -> Trial:
    replies = [(row, text) for row in rows for text in (MADE_UP, str(row.label))]
    if not compared:
        replies = list(zip((rows[0], rows[0], rows[1], rows[1]), REPLIES, strict=True))
    known = compared and reward.part.function in REWARDS  # what a made-up reply gets, which may take seconds to import
    calls, others = [], []
    try:
        for row, reply in replies:
            calls.append(
                Scored(row, reply, 0.0)
                if known and reply == MADE_UP != str(row.label)
                else await score(reward, row, reply)
            )
        if compared and calls[1].reward <= calls[0].reward:
            others = [await score(reward, rows[0], form.format(rows[0].label)) for form in FORMS]
    except RewardFailure as failure:
        return Trial(compared, calls, others, failure)
    return Trial(compared, calls, others)


async def score(reward: FunctionReward, row: Prompt, reply: str) -> Scored:
    try:
        return Scored(row, reply, await reward.score(reward_call(row, reply)))
    except PolicyError:
        return Scored(row, reply, reward.config.policy_error)


def judged(trial: Trial, part: RewardPartConfig, config: RewardConfig, key: str) -> Iterator[Finding]:
    """Say what is wrong with a reward, the plainest reason alone."""
    values = ", ".join(f"{value:g}" for value in trial.rewards())
    if trial.failure is not None:
        slow = isinstance(trial.failure, RewardTimeout) and config.timeout_seconds > SECONDS
        what = f"{part.function} gave no reward: {said(trial.failure).removeprefix('none: ')}"
        why = "calls that fail leave their group; above reward.max_failure_share the run stops"
        yield Finding("watch" if slow else "bad", what, why, key)
    elif not trial.compares and len(set(trial.rewards())) == 1 and part.function not in REWARDS:
        what = f"{part.function} gave {values} to made-up replies: the same whatever they say"
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
