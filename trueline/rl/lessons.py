"""What a teacher reads: the policy's completion behind another prompt, which shows more than the policy saw."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trueline.algorithms.advantages import has_teacher
from trueline.config.algorithm import DistillationConfig
from trueline.config.rl import RLConfig
from trueline.data.chat import ChatFormat
from trueline.data.messages import Message, Tool, content_of
from trueline.data.types import Prompt
from trueline.rollout.rollouts import Rollouts
from trueline.rollout.summary import SampledGroup, Transcript
from trueline.runs.rollout_workers import RolloutWorkers
from trueline.runtime.actors import Stored
from trueline.training.samples import Arrays, Fields, SampleBlock, SampleNumbers, StoredSamples

FIELD = re.compile(r"\{(prompt|demonstration|solution|feedback)\}")
Texts = dict[str, str]  # by the fields of a template


@dataclass(slots=True)
class Lessons:
    """What teachers score: one sequence for each sample of a step, which ends with the same tokens."""

    samples: StoredSamples
    teachers: list[str] = field(default_factory=list)  # of each sample; empty: all have one

    def of(self, teacher: str) -> StoredSamples:
        mine = [at for at, name in enumerate(self.teachers) if name == teacher]
        return self.samples.subset(mine) if self.teachers else self.samples

    def prompt(self, chat: ChatFormat, places: Sequence[int]) -> dict[str, str]:
        """Return the teacher's prompt of the first of these samples that has one, for a transcript."""
        for at in places:
            if (mask := self.samples.part("mask", at)).any():
                return {"teacher_prompt": chat.raw_text(self.samples.part("tokens", at)[: mask.argmax()].tolist())}
        return {}


@dataclass(frozen=True, slots=True)
class Opening:
    """What is known of a group besides its samples."""

    messages: list[Message]
    tools: list[Tool]
    text: str  # of the row's column, if the context is one
    rewards: list[float]  # of its episodes
    errors: list[str]  # what the environment said of a reply that failed
    transcripts: Stored[list[Transcript]]
    first: int  # the number of its first episode in the step

    def reads(self, episode: int, config: DistillationConfig) -> Texts:
        """Return what the teacher of an episode reads besides its prompt; a text may be empty."""
        if config.context != "feedback":
            return {config.context: self.text}
        at = episode - self.first
        best = best_sibling(self.rewards, at, config.rewarded)
        reply = "" if best is None else str(self.transcripts.fetch()[best]["reply"])
        return {"demonstration": reply, "feedback": self.errors[at]}


@dataclass(slots=True)
class Tutor:
    """Writes what the teachers of a run read."""

    config: RLConfig
    longest: int  # tokens of a teacher's prompt
    rollouts: Rollouts
    workers: RolloutWorkers
    lessons: Lessons | None = None  # of the last step, where they are no samples

    def write(self, samples: StoredSamples, groups: Sequence[SampledGroup]) -> Lessons | None:
        """Return what teachers read and whose lesson each is; None where one teacher reads the samples."""
        asked, section = self.config.algorithm.distillation, self.config.teacher
        if not has_teacher(self.config.algorithm) or not (asked.reads_more() or section.paths):
            return None
        numbers = [group[0].group for group in groups]
        rows = [self.rollouts.prompts[self.rollouts.ledger.under_way[number]] for number in numbers]
        prompts = dict(zip(numbers, rows, strict=True))
        teachers = [str(prompts[row.group].columns.get(section.column)) for row in samples.rows if section.paths]
        if not asked.reads_more():
            return Lessons(samples, teachers)
        openings, first = {}, 0
        for group, prompt in zip(groups, rows, strict=True):
            openings[group[0].group] = open_lesson(prompt, group, asked, first)
            first += len(group)
        work = self.workers.run_kept(write_lessons, samples, openings, asked, self.longest)
        lengths, arrays = self.rollouts.loop.run(work, "writing what the teacher reads")
        for row, length in zip(samples.rows, lengths, strict=True):
            row.taught = length > SHORTEST
        self.lessons = Lessons(as_samples(samples, lengths, arrays), teachers)
        return self.lessons


SHORTEST = 2  # tokens in place of a sequence that its teacher does not read, so that all ranks have some


def open_lesson(prompt: Prompt, group: SampledGroup, config: DistillationConfig, first: int) -> Opening:
    text = prompt.columns.get(config.column or config.context)
    return Opening(
        prompt.messages,
        prompt.tools,
        "" if text is None else str(text),
        [one.reward or 0.0 for one in group],
        [one.error for one in group],
        group.parcels.transcripts,
        first,
    )


def as_samples(samples: StoredSamples, lengths: list[int], arrays: Stored[Arrays]) -> StoredSamples:
    """Return the sequences of a teacher as samples with the numbers of the policy's."""
    rows = [
        SampleNumbers(length, row.sampled, row.group, row.episode, row.version, row.task_reward, 0.0, row.truncated)
        for row, length in zip(samples.rows, lengths, strict=True)
    ]
    by_number = dict(zip(samples.numbers, lengths, strict=True))
    block = SampleBlock(("tokens", "mask"), tuple(samples.numbers), arrays)
    return StoredSamples(samples.numbers, rows, Fields([by_number[at] for at in sorted(by_number)], [block]))


def write_lessons(
    chat: ChatFormat, stored: StoredSamples, openings: dict[int, Opening], config: DistillationConfig, longest: int
) -> tuple[list[int], Arrays]:
    """Put each completion behind its teacher's prompt; return the lengths, and tokens and masks.

    A sample has no teacher if nothing fills the template, its prompt is too long, or the completion does not follow
    the row's prompt but messages that an agent has rewritten.
    """
    tokens, masks = [], []
    for at, row in enumerate(stored.rows):
        own, mask = stored.part("tokens", at), stored.part("mask", at)
        opening, first = openings[row.group], int(mask.argmax())
        texts = opening.reads(row.episode, config)
        prompt = chat.begin(richer(opening.messages, config.template, texts), opening.tools).tokens
        follows = chat.begin(opening.messages, opening.tools).tokens == own[:first].tolist()
        if any(texts.values()) and len(prompt) <= longest and follows:
            tokens.append(np.concatenate([np.array(prompt, own.dtype), own[first:]]))
            masks.append(np.concatenate([np.zeros(len(prompt), np.bool_), mask[first:]]))
        else:
            tokens.append(own[:SHORTEST])
            masks.append(np.zeros(SHORTEST, np.bool_))
    return [len(one) for one in tokens], {"tokens": np.concatenate(tokens), "mask": np.concatenate(masks)}


def best_sibling(rewards: list[float], at: int, least: float) -> int | None:
    """Return the episode of a group, other than this one, with the highest reward, if that is enough.

    Of several, it is the next one behind this, so that episodes learn from different ones.
    """
    others = [(rewards[other], -((other - at) % len(rewards)), other) for other in range(len(rewards)) if other != at]
    return max((one for one in others if one[0] >= least), default=(0.0, 0, None))[2]


def richer(messages: list[Message], template: str, texts: Texts) -> list[Message]:
    """Return messages of which the user's last is the template."""
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    last = users[-1] if users else len(messages) - 1
    filled = fill(template, {**texts, "prompt": content_of(messages[last])})
    return [{**message, "content": filled} if at == last else message for at, message in enumerate(messages)]


def fill(template: str, texts: Texts) -> str:
    """Fill a template in, without the paragraphs that have a field for which there is no text."""
    kept = [part for part in template.split("\n\n") if all(texts.get(name) for name in FIELD.findall(part))]
    return "\n\n".join(FIELD.sub(lambda found: texts[found[1]], part) for part in kept)
