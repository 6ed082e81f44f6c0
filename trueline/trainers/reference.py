"""Log-probs of the model that training starts from: computed once, kept with the run."""

import hashlib
from pathlib import Path

import torch

from trueline.data.types import Sample
from trueline.monitoring.progress import Progress
from trueline.training.checkpoints import load_tensors, save_tensors
from trueline.training.group import ModelGroup

SAMPLES_AT_ONCE = 4096


def fill_reference(model: ModelGroup, samples: list[Sample], file: Path, progress: Progress) -> None:
    """Sets `ref_logprobs`. Called before a checkpoint is loaded, while the model still is the starting one."""
    key = fingerprint(samples)
    lengths = [sample.length() for sample in samples]
    flat = read_cached(file, key)
    if flat is None:
        progress.note(f"reference  scoring {len(samples)} sequences once")
        parts = [
            part
            for start in range(0, len(samples), SAMPLES_AT_ONCE)
            for part in model.score(samples[start : start + SAMPLES_AT_ONCE])
        ]
        flat = torch.cat(parts)
        aside = file.with_suffix(".unfinished")
        save_tensors(aside, {"logprobs": flat}, {"samples": key})
        aside.rename(file)
    for sample, logprobs in zip(samples, flat.split(lengths), strict=True):
        sample.ref_logprobs = logprobs


def read_cached(file: Path, key: str) -> torch.Tensor | None:
    if not file.exists():
        return None
    with load_tensors(file) as saved:
        return saved.read("logprobs") if saved.metadata["samples"] == key else None


def fingerprint(samples: list[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.tokens.numpy().tobytes())
        digest.update(sample.mask.numpy().tobytes())
    return digest.hexdigest()
