"""The rewards of a run: checked before the start, opened with the models they need, and files about failed ones."""

import asyncio
import difflib
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline.config.base import ConfigError
from trueline.config.data import PromptDataConfig
from trueline.config.reward import RewardConfig, RewardPartConfig
from trueline.data.messages import content_of
from trueline.data.readers import LABEL_COLUMNS
from trueline.data.types import Outcome, Prompt, Trajectory
from trueline.environments.single_turn import reward_call
from trueline.models.loading import load_chat
from trueline.rewards.base import Call, PolicyError, Reward, RewardFailure, RewardTimeout, last_words
from trueline.rewards.combined import REWARD_KINDS, CombinedReward, kind_of
from trueline.rewards.functions import REWARDS
from trueline.rewards.model import ModelReward
from trueline.rewards.pool import FunctionReward, given_names
from trueline.rewards.process import SIGNATURES, Takes
from trueline.rewards.replay import write_failure
from trueline.rollout.failures import Report
from trueline.runs.roles import RoleModel, reward_model_name

if TYPE_CHECKING:  # it brings all that trains; a plan checks rewards without
    from trueline.training.group import ModelGroup

MADE_UP = "I do not know."
REPLIES = (MADE_UP, "<think>One and one.</think>\n<answer>two</answer>", "", "word " * 400)
FORMS = ("<answer>{}</answer>", "\\boxed{{{}}}", "#### {}")  # that rewards ask of an answer
TESTED = ("code",)  # rewards whose labels are no replies
LABEL_NAMES = ("label", "labels", "ground_truth")  # of parameters, in any project
MOST_COLUMNS, MOST_ROWS = 4, 2  # of a row that are tried as a reply; and rows
DIGITS = "12 + 30 = 42"
PATIENCE_SECONDS = 5.0  # a function that takes longer for one call is not asked again
TRIAL_SECONDS = 10.0  # for all calls of a function together
NEAR = 0.75  # similarity of two names of which one may be misspelt


class TooSlow(Exception):
    """A call took so long that no more are made before the start."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Scored:
    """What a reward returned for a reply."""

    prompt: Prompt
    reply: str
    reward: float


@dataclass(slots=True)
class Trial:
    """Some calls of one reward function, made before the start in the process that its check has loaded."""

    compares: bool = False  # a label; else all replies are made up
    calls: list[Scored] = field(default_factory=list)
    others: list[Scored] = field(default_factory=list)  # more replies, where those show nothing
    failures: list[str] = field(default_factory=list)
    asked: int = 0
    slow: float = 0.0  # seconds of a call that ended them

    def rewards(self) -> list[float]:
        return [call.reward for call in (*self.calls, *self.others)]

    def pairs(self) -> list[tuple[float, float]]:
        """Return for each row the reward of the made-up reply and that of the label."""
        values = [call.reward for call in self.calls]
        return list(zip(values[::2], values[1::2], strict=False))

    def failed(self) -> str:
        """Return how many calls failed and the first cause, in words; nothing where none failed."""
        count = "any" if len(self.failures) == self.asked else str(len(self.failures))
        said = f"gave no reward in {count} of {self.asked} calls before the start"
        return f"{said}: {last_words(self.failures[0])}" if self.failures else ""

    def hopeless(self) -> bool:
        return len(self.failures) == self.asked > 0 and not self.slow


@dataclass(slots=True)
class RewardCheck:
    """What a plan has to report of its rewards."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    trials: dict[str, Trial] = field(default_factory=dict)  # of functions, by the names of the rewards


def check_rewards(
    config: RewardConfig,
    sources: list[list[Prompt]],
    data: PromptDataConfig,
    *,
    required: bool = True,
    probe: bool = True,
    played: bool = False,
) -> RewardCheck:
    """Check whatever can be known of the rewards before anything starts.

    A function that fails at every call is refused, but not where episodes are `played`, which no made-up reply is.
    """
    parts, found, compared = config.named_parts(), RewardCheck(), False
    if required and not parts:
        raise ConfigError(
            "reward.function is empty: give --reward math, exact, regex or another built-in, file.py:function, "
            "package.module:function, the folder of a reward model, or the http:// address of a scorer"
        )
    examples = {source[0].source: reward_call(source[0], "") for source in sources}
    for name, part in parts.items():
        trial = Trial()
        asked = partial(make_trial, trial, sources) if probe and config.probe else None
        try:
            check_name(name, config)
            takes = REWARD_KINDS[kind_of(part)].check(part, config, examples, asked)
            if trial.hopeless() and not played:
                raise ConfigError(f"reward.function={part.function} {trial.failed()}{way_out(takes)}")
        except ConfigError as error:
            raise ConfigError(f"reward.parts.{name}: {error}" if config.parts else str(error)) from error
        if takes is not None:
            found.trials[name] = trial
            add_remarks(found, part, takes, sources, examples)
        compared |= takes is None or takes["any"] or bool(takes["signature"]) or "label" in takes["all"]
    if compared and data.label_column is None:
        add_label_remarks(found, sources)
    return found


def way_out(takes: Takes | None) -> str:
    form = f"; it is called as {takes['signature']} does" if takes and takes["signature"] else ""
    if form and SIGNATURES["TRL"].mark in (takes or {})["all"]:
        form += ", with messages where the prompts of the data are messages, else with texts"
    return f"{form}; mend it, and try it by `trueline reward try` (reward.probe=false starts all the same)"


def check_name(name: str, config: RewardConfig) -> None:
    """Refuse a part without a function, which is what a misspelt name in an override makes."""
    others = [other for other, part in config.parts.items() if part.function]
    if name in config.parts and name not in others:
        near = difflib.get_close_matches(name, others, 1)
        raise ConfigError(
            f"it has no function: set reward.parts.{name}.function"
            + (f", or did you mean reward.parts.{near[0]}?" if near else "")
        )


def add_remarks(
    found: RewardCheck, part: RewardPartConfig, takes: Takes, sources: list[list[Prompt]], examples: dict[str, Call]
) -> None:
    """Add what is to be known of a function whose parameters are all filled."""
    function = f"reward.function={part.function}"
    if takes["signature"]:
        names = ", ".join(takes["required"])
        found.lines.append(
            f"reward     {part.function} has {takes['signature']}'s parameters ({names}): each call has one completion"
            + ", in lists of one" * SIGNATURES[takes["signature"]].listed
        )
    if part.function not in REWARDS:
        given = set.intersection(*(given_names(part, takes, call) for call in examples.values()))
        kept = {one: closest(one, given.difference(takes["all"])) for one in takes["all"] if one not in given}
        found.warnings += [
            f"{function}: parameter {one!r} keeps its default, for no such value is given: did you mean {near!r}?"
            for one, near in kept.items()
            if near
        ]
        if unlike := [one for one, near in kept.items() if not near]:
            found.lines.append(f"reward     {part.function} keeps the default of {', '.join(unlike)}: no such column")
        remarks = [(source[0].source, label_remark(source[0].label)) for source in sources if "label" in takes["all"]]
        found.warnings += [f"{function} of {source}: {remark}" for source, remark in remarks if remark]
    trial = next(reversed(found.trials.values()))
    found.warnings += [f"{function} {trial.failed()}"] * bool(trial.failures)


def add_label_remarks(found: RewardCheck, sources: list[list[Prompt]]) -> None:
    """Add which column is the label where several might be, and warn where they differ."""
    for prompts in sources:
        label, *others = [column for column in LABEL_COLUMNS if column in prompts[0].columns] or [""]
        if others:
            found.lines.append(
                f"label      column {label} of {prompts[0].source}; {', '.join(others)}: given under "
                f"{'its own name' if len(others) == 1 else 'their own names'} (data.label_column chooses)"
            )
        for other in others:
            unlike = [one for one in prompts if str(one.label).strip() != str(one.columns.get(other)).strip()]
            found.warnings += [
                f"{one.place()}: column {label} is {one.label!r:.40}, {other} is {one.columns.get(other)!r:.40}; they "
                f"differ in {len(unlike)} of {len(prompts)} rows, and rewards are given {label} as the label: set "
                f"data.label_column={label} or {other}"
                for one in unlike[:1]
            ]


def closest(name: str, given: Collection[str]) -> str:
    return next(iter(difflib.get_close_matches(name, given, 1, cutoff=NEAR)), "")


async def make_trial(trial: Trial, sources: list[list[Prompt]], reward: FunctionReward, takes: Takes) -> None:
    """Ask a function about the first row and one with another label; where all fails, about more rows and replies."""
    rows, built_in = two_rows(sources[0]), reward.part.function in REWARDS
    trial.compares = compares(reward.part, takes, rows)
    try:
        async with asyncio.timeout(TRIAL_SECONDS):
            for row, reply in first_replies(trial, rows):
                known = trial.compares and built_in and reply == MADE_UP != str(row.label)  # a call may import much
                scored = Scored(row, reply, 0.0) if known else await score(trial, reward, row, reply)
                trial.calls += [scored] if scored else []
            for row, reply in more_replies(trial, rows, built_in) if not trial.failures else ():
                scored = await score(trial, reward, row, reply)
                trial.others += [scored] if scored else []
            for row, reply in last_replies(sources):
                if trial.hopeless():
                    await score(trial, reward, row, reply)
    except TooSlow as slow:
        trial.slow = slow.seconds
    except TimeoutError:
        trial.slow = TRIAL_SECONDS


def two_rows(prompts: list[Prompt]) -> list[Prompt]:
    """Choose the first row, and one with another label."""
    first = prompts[0]
    return [first, next((one for one in prompts if one.label != first.label), prompts[-1])]


def compares(part: RewardPartConfig, takes: Takes, rows: list[Prompt]) -> bool:
    """Tell whether a reward reads labels, and labels that can stand for a reply."""
    labelled = all(row.label is not None for row in rows)
    return labelled and part.function not in TESTED and not {*LABEL_NAMES, *LABEL_COLUMNS}.isdisjoint(takes["all"])


def first_replies(trial: Trial, rows: list[Prompt]) -> list[tuple[Prompt, str]]:
    if trial.compares:
        return [(row, text) for row in rows for text in (MADE_UP, str(row.label))]
    return list(zip((rows[0], rows[0], rows[1], rows[1]), REPLIES, strict=True))


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


def last_replies(sources: list[list[Prompt]]) -> Iterator[tuple[Prompt, str]]:
    """Yield a few replies to other rows, for a function that failed at all others."""
    for row in [row for source in sources for row in (source[len(source) // 2], source[-1])][:MOST_ROWS]:
        own = [value for value in (row.label, *row.columns.values()) if isinstance(value, str)]
        yield from ((row, reply) for reply in (DIGITS, *own[:1], ""))


async def score(trial: Trial, reward: FunctionReward, row: Prompt, reply: str) -> Scored | None:
    """Ask a reward as a run does; count a failure, and ask no more of one that takes long."""
    began = time.monotonic()
    trial.asked += 1
    try:
        value = await reward.score(reward_call(row, reply))
    except PolicyError:
        value = reward.config.policy_error
    except RewardFailure as failure:
        trial.failures.append(str(failure).removeprefix(f"reward.function={reward.part.function}: "))
        if isinstance(failure, RewardTimeout):
            raise TooSlow(time.monotonic() - began) from None
        return None
    if (seconds := time.monotonic() - began) > PATIENCE_SECONDS:
        raise TooSlow(seconds)
    return Scored(row, reply, value)


def label_remark(label: Any) -> str:
    """Say of a label that is no text what a comparison with a reply then gives; nothing of one that is."""
    if label is None or isinstance(label, str):
        return ""
    return (
        f"the label {label!r:.40} is of type {type(label).__name__} and replies are texts, so `reply == label` is "
        "never true: compare with str(label)"
    )


def open_rewards(
    config: RewardConfig, roles: list[RoleModel], groups: "dict[str, ModelGroup]", logs: Path
) -> CombinedReward:
    """Open the rewards of a run; `groups` are its models by the names of their roles."""
    models = {role.name: role for role in roles}

    def opened(name: str, part: RewardPartConfig) -> Reward:
        role, log = reward_model_name(name, config), logs / (f"reward-{name}.log" if config.parts else "reward.log")
        loaded = lambda: model_reward(part, config, models[role], groups[role])  # noqa: E731
        return REWARD_KINDS[kind_of(part)].open(part, config, log, loaded)

    parts = {name: (opened(name, part), part) for name, part in config.named_parts().items()}
    return CombinedReward(parts, config.policy_error, config.processes)


def model_reward(part: RewardPartConfig, config: RewardConfig, role: RoleModel, group: "ModelGroup") -> ModelReward:
    """Make the reward of a reward model, which reads messages through its own tokenizer and template."""
    chat = load_chat(role.model, part.chat_template)
    longest = min(role.facts.context, role.ranks.tokens_per_pass() * role.model.context_parallel)
    return ModelReward(group.score, chat, part, max_tokens=longest, batch=config.batch)


def failure_files(config: RewardConfig, folder: Path) -> Report:
    """Return what writes, below a run folder, the call of a failed completion, and returns how to look at it."""

    def write(number: int, trajectory: Trajectory) -> str:
        of_reward = trajectory.outcome is not Outcome.ENVIRONMENT_ERROR
        part = failed_part(config, trajectory.error) or RewardPartConfig() if of_reward else None
        file = folder / "failures" / f"{number}.json"
        try:
            write_failure(file, part, failed_call(trajectory), trajectory.error)
        except OSError:  # a full disk must not hide why the run stops
            return ""
        runs_again = part is not None and part.function and kind_of(part) == "function"
        return f"python -m trueline.rewards.replay {file}" if runs_again else str(file)

    return write


def failed_call(trajectory: Trajectory) -> Call:
    return reward_call(trajectory.prompt, trajectory.reply, trajectory.talk)


def failed_part(config: RewardConfig, error: str) -> RewardPartConfig | None:
    """Return the reward whose name begins the error; a single one has none."""
    named = config.named_parts().items()
    return next((part for name, part in named if not config.parts or error.startswith(f"{name}: ")), None)
