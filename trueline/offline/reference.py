"""Log-probs of the model that training starts from: computed once, kept with the run."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trueline.data.types import Sample
from trueline.files import atomic_path
from trueline.monitoring.progress import Progress
from trueline.training.checkpoints import save_tensors
from trueline.training.group import ModelGroup

SAMPLES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class ReferenceCache:
    """Log-probs of some samples under the named model, kept in a file."""

    file: Path
    model: str

    def key(self, samples: list[Sample]) -> str:
        digest = hashlib.sha256(self.model.encode())
        for sample in samples:
            digest.update(sample.tokens.numpy().tobytes())
            digest.update(sample.mask.numpy().tobytes())
        return digest.hexdigest()

    def read(self, samples: list[Sample]) -> torch.Tensor | None:
        # What is not there, or not whole, is computed again.
        with suppress(OSError, SafetensorError), safe_open(self.file, framework="pt") as saved:
            known = saved.metadata()["key"] == self.key(samples)
            return saved.get_tensor("logprobs") if known else None
        return None

    def write(self, samples: list[Sample], logprobs: torch.Tensor) -> None:
        with atomic_path(self.file) as aside:
            save_tensors(aside, {"logprobs": logprobs}, {"key": self.key(samples)})


def fill_reference(model: ModelGroup, samples: list[Sample], cache: ReferenceCache, progress: Progress) -> None:
    """Set `ref_logprobs` before a checkpoint is loaded, while the model still is the one that training starts from."""
    flat = cache.read(samples)
    if flat is None:
        progress.note(f"reference  scoring {len(samples)} sequences once")
        parts = [
            part
            for start in range(0, len(samples), SAMPLES_AT_ONCE)
            for part in model.score(samples[start : start + SAMPLES_AT_ONCE])
        ]
        flat = torch.cat(parts)
        try:
            cache.write(samples, flat)
        except (OSError, SafetensorError) as error:
            progress.note(f"warning: {cache.file} cannot be written ({error}); --resume will score them again")
    for sample, logprobs in zip(samples, flat.split([sample.length() for sample in samples]), strict=True):
        sample.ref_logprobs = logprobs
