"""Reward models on this machine, for whole completions or for their steps."""

import asyncio
import json
import math
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from trueline.config.base import ConfigError
from trueline.config.reward import RewardPartConfig
from trueline.data.chat import ChatFormat, Encoded
from trueline.data.encoding import encode_completion, encode_labelled, to_tensors
from trueline.data.formats import StepRated
from trueline.data.messages import Message, Tool
from trueline.data.pictures import Pictures, image_parts, pictures_of
from trueline.data.types import Sample
from trueline.rewards.base import IMAGES, BatchedReward, Call, RewardFailure, Score

ScoreSamples = Callable[[list[Sample]], list[Tensor]]
HEADS = {"ForSequenceClassification": ("reward", 1), "ForTokenClassification": ("steps", 2)}  # and how many labels
Combine = Callable[[list[float]], float]  # the probabilities of all steps -> the reward
STEPS: dict[str, Combine] = {"min": min, "mean": fmean, "product": math.prod, "last": itemgetter(-1)}


def reward_model_head(path: str) -> str:
    """Return `reward` or `steps`, or refuse a folder of any other model."""
    settings = read_settings(path)
    architecture = (settings.get("architectures") or ["unknown"])[0]
    for ending, (head, labels) in HEADS.items():
        if architecture.endswith(ending):
            found = len(settings.get("id2label") or range(2))  # transformers omits its default of two
            if found != labels:
                raise ConfigError(f"{path}: a {architecture} with {found} labels; a reward model has {labels}")
            return head
    raise ConfigError(f"{path}: {architecture} in its config.json is no reward model: train one with rm or prm")


def read_settings(path: str) -> dict[str, Any]:
    folder = Path(path).expanduser()
    if (folder / "adapter_config.json").is_file():
        command = "`trueline export RUN FOLDER --merge`"
        raise ConfigError(f"{path} holds a LoRA without its model: merge them with {command} and name that folder")
    try:
        settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        hint = f"; did you mean {folder / 'model'}?" if (folder / "model").is_dir() else ""
        raise ConfigError(f"{path}: no model folder, for its config.json cannot be read ({error}){hint}") from None
    return settings


def scale_of(part: RewardPartConfig) -> tuple[float, float]:
    """Return the mean and deviation for normalising, or refuse a model that has none."""
    if not part.normalize:
        return 0.0, 1.0
    settings = read_settings(part.function)
    mean: Any = settings.get("reward_mean")
    deviation: Any = settings.get("reward_std")
    finite = all(isinstance(value, int | float) and math.isfinite(value) for value in (mean, deviation))
    if not finite or deviation <= 0:
        raise ConfigError(
            f"normalize=true: {part.function} has reward_mean={mean} and reward_std={deviation} in its config.json: "
            "train it with held-out rows (rm with evaluation.share or --eval-data), write the two there, or set "
            "normalize=false"
        )
    return float(mean), float(deviation)


def check_reward_model(part: RewardPartConfig) -> None:
    if reward_model_head(part.function) == "steps" and not part.step_separator:
        raise ConfigError("step_separator is empty: name the text that ends a step")
    scale_of(part)


class ModelReward(BatchedReward):
    """Scores waiting completions together in a thread: `score` blocks, and gives [T, K] numbers for each sample."""

    def __init__(
        self, score: ScoreSamples, chat: ChatFormat, part: RewardPartConfig, *, max_tokens: int, batch: int
    ) -> None:
        check_reward_model(part)
        self.score_samples, self.chat, self.part, self.max_tokens = score, chat, part, max_tokens
        self.head = reward_model_head(part.function)
        self.mean, self.deviation = scale_of(part)
        self.separator = part.step_separator.replace("\\n", "\n")
        super().__init__(lambda calls: asyncio.to_thread(self._score_all, calls), batch, lanes=1)

    def _score_all(self, calls: list[Call]) -> list[Score]:
        encoded = [self._encode(call) for call in calls]
        samples = [one for one in encoded if isinstance(one, Sample)]
        scores = iter(self.score_samples(samples) if samples else [])
        return [self._score_of(one, next(scores)) if isinstance(one, Sample) else one for one in encoded]

    def _encode(self, call: Call) -> Sample | RewardFailure:
        tools: list[Tool] = list(call.get("tools") or [])
        try:
            json.dumps([call["reply"], call["messages"], tools], ensure_ascii=False, default=str).encode()
            encode = self._encode_reply if self.head == "reward" else self._encode_steps
            sample = encode(call["reply"], call["messages"], tools, self._pictures(call))
        except ConfigError as error:  # such as a chat template that refuses a conversation
            return RewardFailure(f"{self.part.function}: {error}")
        except UnicodeEncodeError as error:  # half a character, which no tokenizer takes
            return RewardFailure(f"{self.part.function}: prompt or reply is no valid text: {error}")
        if sample.length() > self.max_tokens:
            return RewardFailure(
                f"{self.part.function}: prompt and reply have {sample.length()} of its tokens, more than its "
                f"limit of {self.max_tokens}: shorten the completions, or take a model with a longer context"
            )
        return sample

    def _pictures(self, call: Call) -> Pictures:
        """Return the pictures that the messages show, or refuse those that are missing or not read."""
        if not (shown := sum(1 for _ in image_parts(call["messages"]))):
            return ()
        pictures = pictures_of(call.get(IMAGES))
        if self.chat.vision is None or len(pictures) != shown:
            reads = "no pictures" if self.chat.vision is None else f"{len(pictures)}, as many as are in images"
            raise ConfigError(f"the messages show {shown} pictures, but it reads {reads}: give it what it reads")
        return pictures

    def _encode_reply(self, reply: str, messages: list[Message], tools: list[Tool], pictures: Pictures) -> Sample:
        """Encode a call as `rm` trains on it; an empty reply, which it never saw, is the end token alone."""
        if not reply.strip():
            tokens = [*self.chat.begin(messages, tools, pictures).tokens, *self.chat.completion_tokens("")]
            return to_tensors(Encoded(tokens, [False] * len(tokens), pictures))
        turn = [{"role": "assistant", "content": reply}]
        return to_tensors(encode_completion(self.chat, messages, turn, "the reply", tools, pictures))

    def _encode_steps(self, reply: str, messages: list[Message], tools: list[Tool], pictures: Pictures) -> Sample:
        """Encode a call as `prm` trains on it; a reply without text is one empty step."""
        steps = [step for step in reply.split(self.separator) if step.strip()] or [""]
        record = StepRated(messages, steps, [0.0] * len(steps), "the reply", tools, pictures)
        return to_tensors(encode_labelled(record, self.chat, self.separator)[0])

    def _score_of(self, sample: Sample, scores: Tensor) -> Score:
        """Read the score where `rm` and `prm` learn: at the last token, or that of each step, where label 1 is good."""
        if self.head == "reward":
            value = float(scores[-1, 0])
        else:
            value = STEPS[self.part.steps](scores.float().softmax(-1)[sample.mask, 1].tolist())
        value = (value - self.mean) / self.deviation
        return value if math.isfinite(value) else RewardFailure(f"{self.part.function}: its score is {value}")
