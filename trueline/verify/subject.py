"""The model that is verified: its tokens, and what plain Transformers says of them."""

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.base import ConfigError
from trueline.config.model import LoraConfig, ModelConfig
from trueline.config.verify import VerifyConfig
from trueline.data.chat import ChatFormat
from trueline.data.messages import Message
from trueline.data.types import Sample
from trueline.models.loading import DTYPES, ModelFacts, check_model, load_chat, load_model
from trueline.models.scorer import plain_logprobs, rounding
from trueline.plan.resolve import check_engines, resolve_dtype
from trueline.runtime.cluster import Machine
from trueline.training.report import spread_sample
from trueline.verify.comparison import Bounds, Measurement, Rows

GPU_TOKENS, CPU_TOKENS = 1024, 128
SHARES = (1.0, 0.6, 0.35, 0.2, 0.1, 0.05)  # of the longest, of the samples' lengths
NUMBERS = 1000  # of each tensor's gradient
LOGS = "logs"  # folder of the processes' output
QUESTIONS = ("Which boats are in the harbour?", "List the trains.")
THINGS = ("boat", "train", "kite", "horse", "river", "lamp", "garden")
COLOURS = ("green", "dark blue", "red", "white and grey", "yellow")


@dataclass(frozen=True, slots=True)
class Subject:
    config: VerifyConfig  # resolved
    facts: ModelFacts
    machine: Machine
    chat: ChatFormat
    samples: list[Sample]
    folder: Path  # for checkpoints and logs
    adapter: LoraConfig  # that is checked; all other checks are without
    plain: Measurement = field(init=False)
    limits: Bounds = field(init=False)

    def __post_init__(self) -> None:
        plain, rounded = measure_plainly(self.config.model, self.samples)
        object.__setattr__(self, "plain", plain)
        object.__setattr__(self, "limits", Bounds.of(plain, rounded))

    def device(self) -> torch.device:
        return torch.device("cuda" if self.machine.gpus else "cpu")


def open_subject(config: VerifyConfig, machine: Machine, folder: Path) -> Subject:
    """Check the keys, and measure the model with Transformers alone."""
    check_engines(config)
    facts = check_model(config.model)
    dtype = resolve_dtype(config.model.dtype, config.training, machine)
    longest = min(config.tokens or (GPU_TOKENS if machine.gpus else CPU_TOKENS), facts.context)
    without = {"rank": 0, "quantize": False}  # where adapters are not what is verified
    config = config.with_keys({"tokens": longest, "model": {"dtype": dtype}})
    chat = load_chat(config.model, config.data.chat_template, config.data.chat_template_kwargs)
    plain = config.with_keys({"model": {"lora": without, "gradient_checkpointing": False}})
    return Subject(plain, facts, machine, chat, make_samples(chat, longest), folder, config.model.lora)


def make_samples(chat: ChatFormat, longest: int) -> list[Sample]:
    """Return sequences of many lengths, of which some begin with the same tokens; all have the weight of a loss."""
    found = []
    for number, share in enumerate(SHARES):
        question: Message = {"role": "user", "content": QUESTIONS[number % 2]}
        reply: Message = {"role": "assistant", "content": make_text(number, longest)}
        (encoded,) = chat.encode([question, reply], "all")
        length = max(int(share * longest), min(encoded.mask.index(True) + 4, longest))
        tokens, mask = torch.tensor(encoded.tokens[:length]), torch.tensor(encoded.mask[:length])
        if not mask.any():
            raise ConfigError(
                f"tokens={longest}: the chat template alone takes {length}; set it to {encoded.mask.index(True) + 16}"
            )
        found.append(Sample(tokens, mask))
    set_weights(found, "token_mean", 0)
    return found


def make_text(number: int, words: int) -> str:
    """Return a text of at least so many words, of its own for each number."""
    lines = []
    for at in range(words // 8 + 1):
        place = 7 * number + at
        thing, colour = THINGS[place % len(THINGS)], COLOURS[place * place % len(COLOURS)]
        lines.append(f"{at + 1}. The {colour} {thing} comes at {place % 24}:{place * 13 % 60:02d}.")
    return "\n".join(lines)


def open_plain(model: ModelConfig) -> Any:
    """Open the model as Transformers alone does, in the type that training computes in."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_model(model, DTYPES[model.dtype]).to(device)


def plain_rows(model: Any, samples: list[Sample]) -> Rows:
    """Return the log-probs of each sample's masked tokens."""
    with torch.no_grad():
        device = next(model.parameters()).device
        rows = [plain_logprobs(model, sample.tokens.to(device)).cpu() for sample in samples]
    return masked_rows(rows, samples)


def masked_rows(rows: list[Tensor], samples: list[Sample]) -> Rows:
    """Return the numbers of masked tokens; nothing else is computed of others."""
    return [row[sample.mask].float().numpy() for row, sample in zip(rows, samples, strict=True)]


def measure_plainly(config: ModelConfig, samples: list[Sample]) -> tuple[Measurement, Measurement]:
    """Measure one sequence at a time; and again, with every embedded number moved by its last bit."""
    model = open_plain(config)
    plain = measure_model(model, samples)
    with rounding(model.get_input_embeddings()):
        rounded = measure_model(model, samples)
    del model
    free_memory()
    return plain, rounded


def free_memory() -> None:
    """Leave the GPU to the next model, also of another process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_model(model: Any, samples: list[Sample]) -> Measurement:
    """Add gradients up in float32, as training does."""
    rows, sums, device = [], np.zeros(0), next(model.parameters()).device
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    for sample in samples:
        logprobs = plain_logprobs(model, sample.tokens.to(device))
        (-logprobs[sample.mask.to(device)].sum() * sample.weight).backward()
        rows.append(logprobs.detach().cpu())
        filled = ((name, torch.zeros_like(one) if one.grad is None else one.grad) for name, one in trained)
        part = spread_sample(filled, NUMBERS).astype(np.float64)
        sums = part if not len(sums) else sums + part
        model.zero_grad()
    return Measurement(masked_rows(rows, samples), sums)
