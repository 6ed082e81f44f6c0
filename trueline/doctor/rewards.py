"""Checks of reward functions by a few real calls, in the processes that a run asks too."""

import asyncio
import tempfile
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.data.messages import content_of
from trueline.data.readers import LABEL_COLUMNS
from trueline.data.types import Prompt
from trueline.doctor.case import Case
from trueline.doctor.findings import Finding
from trueline.environments.single_turn import reward_call
from trueline.jobs.try_reward import said
from trueline.rewards.base import PolicyError, RewardFailure
from trueline.rewards.combined import kind_of
from trueline.rewards.functions import REWARDS
from trueline.rewards.pool import FunctionReward
from trueline.runs.rewards import label_remark

MADE_UP = "I do not know."
REPLIES = (MADE_UP, "<think>One and one.</think>\n<answer>two</answer>", "", "word " * 400)
FORMS = ("<answer>{}</answer>", "\\boxed{{{}}}", "#### {}")  # that rewards ask of an answer
TESTED = ("code",)  # rewards whose labels are no replies
MOST_COLUMNS = 4  # of a row that are tried as a reply
DIGITS = "12 + 30 = 42"
PATIENCE_SECONDS = 5.0  # a reward that takes longer for one call is not asked again


class TooSlow(Exception):
    """A call took so long that a check should make no more."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


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
    others: list[Scored]  # more replies, where those say nothing: a label in other forms, or what the data says
    failure: RewardFailure | None = None
    slow: float = 0.0  # seconds of a call that ended them

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
    limits = config.replaced({"processes": 1})
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
    built_in, trial = reward.part.function in REWARDS, Trial(compared, [], [])
    try:
        for row, reply in replies:
            known = (
                compared and built_in and reply == MADE_UP != str(row.label)
            )  # and a call may take seconds to import
            trial.calls.append(Scored(row, reply, 0.0) if known else await score(reward, row, reply))
        for row, reply in more_replies(trial, rows, built_in):
            trial.others.append(await score(reward, row, reply))
    except RewardFailure as failure:
        return replace(trial, failure=failure)
    except TooSlow as slow:
        return replace(trial, slow=slow.seconds)
    return trial


def more_replies(trial: Trial, rows: list[Prompt], built_in: bool) -> list[tuple[Prompt, str]]:
    """Choose replies that may get another reward: a label in other forms, or digits and the data's own words."""
    if trial.compares:
        unpraised = trial.calls[1].reward <= trial.calls[0].reward
        return [(rows[0], form.format(rows[0].label)) for form in FORMS] if unpraised else []
    if built_in or len(set(trial.rewards())) > 1:
        return []
    own = [str(value) for value in (rows[0].label, *rows[0].columns.values()) if value is not None]
    said = content_of(rows[0].messages[-1])
    return [(rows[0], reply) for reply in (DIGITS, *(form.format(DIGITS) for form in FORMS), *own[:MOST_COLUMNS], said)]


async def score(reward: FunctionReward, row: Prompt, reply: str) -> Scored:
    """Ask a reward as a run does, with the same limit, and ask no more of one that takes long."""
    began = time.monotonic()
    try:
        value = await reward.score(reward_call(row, reply))
    except PolicyError:
        value = reward.config.policy_error
    if (seconds := time.monotonic() - began) > PATIENCE_SECONDS:
        raise TooSlow(seconds)
    return Scored(row, reply, value)


def judged(trial: Trial, part: RewardPartConfig, config: RewardConfig, key: str) -> Iterator[Finding]:
    """Say what is wrong with a reward, the plainest reason alone."""
    values = ", ".join(f"{value:g}" for value in trial.rewards())
    if trial.slow:
        what = f"{part.function} took {trial.slow:.0f} s for a call, and was not asked again"
        yield Finding("fine", what, f"a run waits {config.timeout_seconds:g} s (reward.timeout_seconds)", key)
    elif trial.failure is not None:
        what = f"{part.function} gave no reward: {said(trial.failure).removeprefix('none: ')}"
        why = "calls that fail leave their group; above reward.max_failure_share the run stops"
        yield Finding("bad", what, why, key)
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
