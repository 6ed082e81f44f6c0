"""Check the rewards of a run: what they take, and what they return for a few replies before the start."""

import asyncio
import difflib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trueline.config.base import ConfigError
from trueline.config.data import PromptDataConfig
from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.data.messages import content_of
from trueline.data.prompts import sample_of
from trueline.data.readers import LABEL_COLUMNS
from trueline.data.types import Prompt
from trueline.environments.single_turn import reward_call
from trueline.monitoring.findings import Finding
from trueline.rewards.base import Call, PolicyError, RewardFailure, RewardTimeout, short_cause
from trueline.rewards.combined import REWARD_KINDS, kind_of
from trueline.rewards.function_reward import FunctionReward, LoadedFunction, given_names
from trueline.rewards.functions import REWARDS
from trueline.rewards.scoring import TRL, signature_of
from trueline.usercode.loading import Parameters

MADE_UP = "I do not know."
REPLIES = (MADE_UP, "<think>One and one.</think>\n<answer>two</answer>", "", "word " * 400)
FORMS = ("<answer>{}</answer>", "\\boxed{{{}}}", "#### {}")  # in which rewards may want a final answer
TESTED = ("code",)  # rewards whose labels are no replies
LABEL_NAMES = ("label", "labels", "ground_truth")  # of parameters, in any project
MOST_COLUMNS, MOST_ROWS = 4, 2  # columns of a row that are tried as replies; and rows
DIGITS = "12 + 30 = 42"
PATIENCE_SECONDS = 5.0  # a function that takes longer for one call is not called again
TRIAL_SECONDS = 10.0  # for all calls of a function together
NEAR = 0.75  # similarity of two names of which one may be misspelt


@dataclass(frozen=True, slots=True)
class ScoredReply:
    prompt: Prompt
    reply: str
    reward: float


@dataclass(slots=True)
class Trial:
    """Calls of one reward function before the start, in the process that its check has loaded."""

    compares: bool = False  # with labels; else all replies are made up
    reads_turns: bool = False  # of an episode, which a made-up reply has not
    calls: list[ScoredReply] = field(default_factory=list)
    others: list[ScoredReply] = field(default_factory=list)  # more replies, if the first calls show nothing
    failures: list[str] = field(default_factory=list)
    asked: int = 0
    slow: float = 0.0  # seconds of a call that ended them

    def rewards(self) -> list[float]:
        return [call.reward for call in (*self.calls, *self.others)]

    def pairs(self) -> list[tuple[float, float]]:
        """Return for each row the reward of the made-up reply and that of the label."""
        values = [call.reward for call in self.calls]
        return list(zip(values[::2], values[1::2], strict=False))

    def describe_failures(self) -> str:
        """Return how many calls failed and the first cause; empty if none failed."""
        count = "any" if len(self.failures) == self.asked else str(len(self.failures))
        text = f"gave no reward in {count} of {self.asked} calls before the start"
        return f"{text}: {short_cause(self.failures[0])}" if self.failures else ""

    def is_hopeless(self) -> bool:
        return len(self.failures) == self.asked > 0 and not self.slow


@dataclass(slots=True)
class RewardCheck:
    """What a plan has to report of its rewards, and the processes of functions, which a run takes over."""

    lines: list[str] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    trials: dict[str, Trial] = field(default_factory=dict)  # of functions, by the names of the rewards
    functions: dict[str, LoadedFunction] = field(default_factory=dict)

    def close(self) -> None:
        """End the processes that no run has taken over."""
        for function in self.functions.values():
            function.close()
        self.functions.clear()


def check_rewards(
    config: RewardConfig,
    sources: Sequence[Sequence[Prompt]],
    data: PromptDataConfig,
    *,
    required: bool = True,
    probe: bool = True,
    played: bool = False,
) -> RewardCheck:
    """Check whatever can be known of the rewards before anything starts.

    A function that fails at every call is refused, but not where episodes are `played`, which no made-up reply is.
    The result has to be passed to `open_rewards`, or closed.
    """
    parts, found = config.named_parts(), RewardCheck()
    if required and not parts:
        raise ConfigError(
            "reward.function is empty: give --reward math, exact, regex or another built-in, file.py:function, "
            "package.module:function, the folder of a reward model, or the http:// address of a scorer"
        )
    examples = {source[0].source: reward_call(source[0], "") for source in sources}
    try:
        compared = [check_part(found, name, config, sources, examples, probe=probe, played=played) for name in parts]
    except ConfigError:
        found.close()
        raise
    if any(compared) and data.label_column is None:
        add_label_remarks(found, sources)
    return found


def check_part(
    found: RewardCheck,
    name: str,
    config: RewardConfig,
    sources: Sequence[Sequence[Prompt]],
    examples: dict[str, Call],
    *,
    probe: bool,
    played: bool,
) -> bool:
    """Check one of the rewards, and return whether it may compare completions with labels."""
    part, trial = config.named_parts()[name], Trial()
    asked = partial(make_trial, trial, sources) if probe and config.probe else None
    try:
        others = [other for other, one in config.parts.items() if one.function]
        if name in config.parts and name not in others:  # a misspelt name in an override makes such a part
            near = difflib.get_close_matches(name, others, 1)
            guess = f", or did you mean reward.parts.{near[0]}?" if near else ""
            raise ConfigError(f"it has no function: set reward.parts.{name}.function{guess}")
        loaded = REWARD_KINDS[kind_of(part)].check(part, config, examples, asked)
        if not isinstance(loaded, LoadedFunction):
            found.lines += loaded or []
            return True
        found.functions[name], found.trials[name] = loaded, trial
        if trial.is_hopeless() and not played:
            raise ConfigError(f"reward.function={part.function} {trial.describe_failures()}{remedy(loaded.parameters)}")
    except ConfigError as error:
        key = error.key or (f"reward.parts.{name}.function" if config.parts else "reward.function")
        raise ConfigError(f"reward.parts.{name}: {error}" if config.parts else str(error), key=key) from error
    add_remarks(found, part, loaded.parameters, sources, examples)
    return loaded.parameters.takes("label") or signature_of(loaded.parameters) is not None


def remedy(parameters: Parameters) -> str:
    signature = signature_of(parameters)
    form = f"; it is called as {signature.project} does" if signature else ""
    if signature is TRL:
        form += ", with messages where the prompts of the data are messages, else with texts"
    return f"{form}; fix it, and try it with `trueline reward try` (reward.probe=false starts all the same)"


def add_remarks(
    found: RewardCheck,
    part: RewardPartConfig,
    parameters: Parameters,
    sources: Sequence[Sequence[Prompt]],
    examples: dict[str, Call],
) -> None:
    """Add lines and warnings about a function whose parameters are all filled."""
    function = f"reward.function={part.function}"
    if signature := signature_of(parameters):
        names = ", ".join(parameters.required)
        found.lines.append(
            f"reward     {part.function} has {signature.project}'s parameters ({names}): each call has one completion"
            + ", in lists of one" * signature.takes_lists
        )
    if part.function not in REWARDS:
        given = set.intersection(*(given_names(part, parameters, call) for call in examples.values()))
        taken = parameters.names
        similar = partial(difflib.get_close_matches, possibilities=given.difference(taken), n=1, cutoff=NEAR)
        kept = {one: "".join(similar(one)) for one in taken if one not in given}
        unfilled = "{}: parameter {!r} keeps its default, because there is no such value: did you mean {!r}?"
        found.warnings += [
            Finding("watch", "reward_parameter", unfilled.format(function, one, near), key="reward.function")
            for one, near in kept.items()
            if near
        ]
        if unlike := [one for one, near in kept.items() if not near]:
            found.lines.append(f"reward     {part.function} keeps the default of {', '.join(unlike)}: no such column")
        remarks = [(source[0].source, label_remark(source[0].label)) for source in sources if "label" in taken]
        found.warnings += [
            Finding("watch", "label_type", f"{function} of {source}: {remark}", key="data.label_column")
            for source, remark in remarks
            if remark
        ]
    trial = next(reversed(found.trials.values()))
    if trial.failures:
        text = f"{function} {trial.describe_failures()}"
        found.warnings.append(Finding("watch", "reward_trial", text, key="reward.function"))


def add_label_remarks(found: RewardCheck, sources: Sequence[Sequence[Prompt]]) -> None:
    """Add which column is the label if several could be, and warn if they differ."""
    for prompts in sources:
        label, *others = [column for column in LABEL_COLUMNS if column in prompts[0].columns] or [""]
        if others:
            found.lines.append(
                f"label      column {label} of {prompts[0].source}; {', '.join(others)}: given under "
                f"{'its own name' if len(others) == 1 else 'their own names'} (data.label_column chooses)"
            )
        looked_at = sample_of(prompts)
        rows = "rows" if len(looked_at) == len(prompts) else "sampled rows"
        for other in others:
            unlike = [one for one in looked_at if str(one.label).strip() != str(one.columns.get(other)).strip()]
            for one in unlike[:1]:
                what = (
                    f"{one.place()}: column {label} is {one.label!r:.40}, {other} is {one.columns.get(other)!r:.40}; "
                    f"they differ in {len(unlike)} of {len(looked_at)} {rows}"
                )
                why = f"rewards get {label} as the label: set data.label_column={label} or {other}"
                found.warnings.append(Finding("watch", "labels_differ", what, why, "data.label_column"))


async def make_trial(
    trial: Trial, sources: Sequence[Sequence[Prompt]], reward: FunctionReward, parameters: Parameters
) -> None:
    """Score replies to the first row and to one with another label; if all calls fail, more rows and replies."""
    first, is_built_in = sources[0][0], reward.part.function in REWARDS
    rows = [first, next((one for one in sample_of(sources[0]) if one.label != first.label), sources[0][-1])]
    reads_labels = not {*LABEL_NAMES, *LABEL_COLUMNS}.isdisjoint(parameters.names)
    trial.reads_turns = "turns" in parameters.names
    trial.compares = reads_labels and reward.part.function not in TESTED and all(row.label is not None for row in rows)
    if trial.compares:
        replies = [(row, text) for row in rows for text in (MADE_UP, str(row.label))]
    else:
        replies = list(zip((rows[0], rows[0], rows[1], rows[1]), REPLIES, strict=True))
    try:
        async with asyncio.timeout(TRIAL_SECONDS):
            for row, reply in replies:
                known = trial.compares and is_built_in and reply == MADE_UP != str(row.label)  # a call may import much
                scored = ScoredReply(row, reply, 0.0) if known else await score(trial, reward, row, reply)
                trial.calls += [scored] if scored else []
            for row, reply in more_replies(trial, rows, is_built_in) if not trial.failures else ():
                scored = await score(trial, reward, row, reply)
                trial.others += [scored] if scored else []
            for row, reply in last_replies(sources):
                if trial.is_hopeless():
                    await score(trial, reward, row, reply)
    except TimeoutError:
        trial.slow = trial.slow or TRIAL_SECONDS


def more_replies(trial: Trial, rows: list[Prompt], is_built_in: bool) -> list[tuple[Prompt, str]]:
    """Choose replies that may get another reward: a label in other forms, or digits and the data's own words."""
    if trial.compares:
        is_not_better = trial.calls[1].reward <= trial.calls[0].reward
        return [(rows[0], form.format(rows[0].label)) for form in FORMS] if is_not_better else []
    if is_built_in or len(set(trial.rewards())) > 1:
        return []
    own = [str(value) for value in (rows[0].label, *rows[0].columns.values()) if value is not None]
    texts = DIGITS, *(form.format(DIGITS) for form in FORMS), *own[:MOST_COLUMNS], content_of(rows[0].messages[-1])
    return [(rows[0], reply) for reply in texts]


def last_replies(sources: Sequence[Sequence[Prompt]]) -> Iterator[tuple[Prompt, str]]:
    """Yield a few replies to other rows, for a function that failed at every call."""
    for row in [row for source in sources for row in (source[len(source) // 2], source[-1])][:MOST_ROWS]:
        own = [value for value in (row.label, *row.columns.values()) if isinstance(value, str)]
        yield from ((row, reply) for reply in (DIGITS, *own[:1], ""))


async def score(trial: Trial, reward: FunctionReward, row: Prompt, reply: str) -> ScoredReply | None:
    """Call a reward as a run does; count a failure, and raise TimeoutError if it takes too long."""
    began = time.monotonic()
    trial.asked += 1
    value, is_late = 0.0, False
    try:
        value = await reward.score(reward_call(row, reply))
    except PolicyError:
        value = reward.config.policy_error
    except RewardFailure as failure:
        trial.failures.append(failure.reason)
        is_late = isinstance(failure, RewardTimeout)
        if not is_late:
            return None
    seconds = time.monotonic() - began
    if is_late or seconds > PATIENCE_SECONDS:
        trial.slow = seconds
        raise TimeoutError
    return ScoredReply(row, reply, value)


def label_remark(label: Any) -> str:
    """Return what is wrong with comparing a reply to a label that is no text; empty for a text."""
    if label is None or isinstance(label, str):
        return ""
    return (
        f"the label {label!r:.40} is of type {type(label).__name__} and replies are texts, so `reply == label` is "
        "never true: compare with str(label)"
    )
