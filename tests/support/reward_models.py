"""Small reward models on disk, and the rank that scores with one."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from tests.support.tiny import small_config
from trueline.config.model import FrozenConfig, ModelConfig
from trueline.demo.material import make_tokenizer
from trueline.runtime.actors import LocalActor
from trueline.training.group import ModelGroup
from trueline.training.worker import Worker, WorkerSpec

CLASSES = {
    "reward": (LlamaForSequenceClassification, AutoModelForSequenceClassification, 1),
    "steps": (LlamaForTokenClassification, AutoModelForTokenClassification, 2),
}
CONTEXT = 64


def make_reward_model(folder: Path, head: str, template: str | None = None) -> Path:
    """A random Llama of two layers with the demo's byte tokenizer and a scoring head, as transformers saves it."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    kind, _, labels = CLASSES[head]
    kind(small_config(tokenizer, max_position_embeddings=CONTEXT, num_labels=labels)).save_pretrained(folder)
    return folder


def plain_logits(folder: Path, head: str, tokens: list[int]) -> Tensor:
    """What transformers itself says: [1] of the sequence, or [T, 2] of its tokens."""
    model = CLASSES[head][1].from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def local_group(folder: Path, head: str) -> ModelGroup:
    """The model in this process, as a run with runtime=local has it."""
    ranks = FrozenConfig(engine="torch")
    spec = WorkerSpec(ModelConfig(path=str(folder), dtype="float32"), ranks, 0, 1, 0, 0, head=head)
    group = ModelGroup("reward_model", [LocalActor("reward_model", Worker(spec))], ranks, 60)
    group.start()
    return group
