"""The models of a reinforcement-learning run as the loop sees them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trueline.config.algorithm import AlgorithmConfig
from trueline.data.types import Sample
from trueline.training.checkpoints import PollSave
from trueline.training.group import ModelGroup, write_models
from trueline.training.worker import Worker

CRITIC = "critic"  # folder inside a checkpoint


@dataclass(frozen=True, slots=True)
class Models:
    algorithm: AlgorithmConfig
    temperature: float
    policy: ModelGroup
    reference: ModelGroup | None  # None also where a policy with adapters is its own reference
    teacher: ModelGroup | None
    critic: ModelGroup | None

    def score(self, samples: list[Sample], *, logprobs_from_update: bool = False) -> None:
        """Set the log-probs and values of samples before the update; models in processes of their own work at once.

        With `logprobs_from_update`, the update itself gives the old log-probs.
        """
        wanted: dict[str, Callable[[], list[Tensor]]] = {}
        if self.algorithm.old_logprobs == "recompute" and not logprobs_from_update:
            wanted["old_logprobs"] = lambda: self.policy.score(samples, self.temperature)
        if self.algorithm.needs_reference():
            wanted["ref_logprobs"] = lambda: self._reference(samples)
        if self.teacher is not None:
            teacher = self.teacher
            wanted["teacher_logprobs"] = lambda: teacher.score(samples, self.temperature)
        if self.critic is not None:
            critic = self.critic
            wanted["values"] = lambda: critic.score(samples)
        for sample in samples:
            sample.old_logprobs = sample.rollout_logprobs
        with ThreadPoolExecutor(max_workers=4) as threads:
            running = {name: threads.submit(call) for name, call in wanted.items()}
        for name, scored in running.items():
            for sample, values in zip(samples, scored.result(), strict=True):
                setattr(sample, name, values)

    def _reference(self, samples: list[Sample]) -> list[Tensor]:
        if self.reference is not None:
            return self.reference.score(samples, self.temperature)
        return self.policy.score(samples, self.temperature, reference=True)

    def trained_models(self) -> dict[str, ModelGroup]:
        """Return the models that a checkpoint holds, by their folders inside it."""
        return {"": self.policy} | ({CRITIC: self.critic} if self.critic is not None else {})

    def write(self, folder: Path, whole: bool = True) -> PollSave:
        return write_models(self.trained_models(), folder, whole)

    def load(self, checkpoint: Path) -> None:
        for place, model in self.trained_models().items():
            model.call(Worker.load, str(checkpoint / place))
