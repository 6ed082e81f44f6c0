"""The models of a reinforcement-learning run as the loop sees them, and the engines that share their GPUs."""

from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Literal

from trueline.algorithms.advantages import has_teacher, needs, policy_waits
from trueline.config.algorithm import WHOLE_VOCABULARY, AlgorithmConfig
from trueline.config.rl import RLConfig
from trueline.data.types import TARGETS
from trueline.rl.lessons import Lessons
from trueline.rollout.engine import RolloutEngine
from trueline.rollout.pool import EnginePool
from trueline.runtime.actors import Given
from trueline.runtime.event_loop import EventLoop
from trueline.training.checkpoints import PollSave
from trueline.training.group import ModelGroup, write_models
from trueline.training.report import Asked
from trueline.training.samples import SampleBlock, StoredSamples
from trueline.training.worker import Worker, WorkerSpec

CRITIC = "critic"  # folder inside a checkpoint
Held = Literal["live", "average", "reference"]
WEIGHTS: dict[str, Held] = {"policy": "live", "average": "average", "frozen": "reference"}  # of a policy that teaches


@dataclass(frozen=True, slots=True)
class Models:
    algorithm: AlgorithmConfig
    temperature: float
    policy: ModelGroup
    reference: ModelGroup | None  # None also where a policy with adapters is its own reference
    teachers: dict[str, ModelGroup]  # by the names that rows have for them; empty where it is the policy
    critic: ModelGroup | None

    def score(
        self, samples: StoredSamples, lessons: Lessons | None = None, *, logprobs_from_update: bool = False
    ) -> None:
        """Set the log-probs and values of samples before the update; models in processes of their own work at once.

        With `logprobs_from_update`, the update itself gives the old log-probs. Teachers read `lessons`, if any.
        """
        wanted: list[Callable[[], list[SampleBlock]]] = []
        heat, wants = self.temperature, {"entropy": self.algorithm.needs_entropy()}
        more = [name for name, wanted in (wants | {"squares": "squares" in needs(self.algorithm)}).items() if wanted]
        if self.algorithm.old_logprobs == "recompute" and not logprobs_from_update:
            wanted.append(lambda: self.policy.score_stored(samples, "old_logprobs", *more, temperature=heat))
        if self.algorithm.needs_reference():
            model, reference = self.reference or self.policy, self.reference is None
            wanted.append(lambda: model.score_stored(samples, "ref_logprobs", temperature=heat, reference=reference))
        if has_teacher(self.algorithm):
            teachers, read = self.teachers or {"": self.policy}, lessons or Lessons(samples)
            wanted += [partial(self._teach, teacher, read.of(name)) for name, teacher in teachers.items()]
        if self.critic is not None:
            critic = self.critic
            wanted.append(lambda: critic.score_stored(samples, "values"))
        samples.fields.same["old_logprobs"] = "rollout_logprobs"
        with ThreadPoolExecutor(max_workers=4) as threads:
            running = [threads.submit(call) for call in wanted]
        for block in (block for scored in running for block in scored.result()):
            samples.add(block)

    def _teach(self, teacher: ModelGroup, read: StoredSamples) -> list[SampleBlock]:
        """Let a teacher score what it reads; the fields are those of the samples, which end with the same tokens."""
        asked = self.algorithm.distillation
        top_k = (asked.top_k or WHOLE_VOCABULARY) if asked.coefficient else 0
        names = ("teacher_logprobs", *TARGETS) if top_k else ("teacher_logprobs",)
        weights: Held = "live" if self.teachers else WEIGHTS[asked.teacher]
        question = Asked(names, top_k, self.temperature, weights)
        found = teacher.score_targets(read, question) if len(read) else []
        return [replace(one, lengths=tuple(read.fields.lengths[at] for at in one.samples)) for one in found]

    def trained_models(self) -> dict[str, ModelGroup]:
        """Return the models that a checkpoint holds, by their folders inside it."""
        return {"": self.policy} | ({CRITIC: self.critic} if self.critic is not None else {})

    def write(self, folder: Path, whole: bool = True) -> PollSave:
        return write_models(self.trained_models(), folder, whole)

    def load(self, checkpoint: Path) -> None:
        for place, model in self.trained_models().items():
            model.call(Worker.load, str(checkpoint / place))


def policy_specs(config: RLConfig, ranks: int) -> list[WorkerSpec]:
    """Return what the policy's ranks are made from; their learning rates end with the steps of the run."""
    learns = max(config.steps - policy_waits(config.algorithm), 1) * config.minibatches * config.epochs
    first = WorkerSpec(config.model, config.training, 0, ranks, learns, config.seed, config.timeout_seconds)
    return [replace(first, rank=rank, deterministic=config.deterministic) for rank in range(ranks)]


class DeviceSharing:
    """Models and engines that share GPUs take turns; those that do not are always awake."""

    def __init__(
        self,
        pool: EnginePool,
        loop: EventLoop,
        shared: bool,
        models: Sequence[ModelGroup] = (),
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.pool, self.loop, self.shared, self.models, self.note = pool, loop, shared, models, note
        self.phase = "start"
        self.in_use: dict[str, float] = {}  # GiB of a GPU at the end of each phase, the last time

    def _engines(
        self,
        method: Callable[Concatenate[RolloutEngine, Given], Coroutine[Any, Any, None]],
        *args: Given.args,
        **named: Given.kwargs,
    ) -> None:
        if self.shared:
            self.loop.run(self.pool.call(method, *args, **named), f"{method.__name__} of the engines")

    def _release(self, following: str) -> None:
        """End a phase: remember what is in use, and let models give back what they do not need for the next one."""
        if not self.shared:
            return
        found = [pair for model in self.models for pair in model.call(Worker.release)]
        first = self.phase == "training" and self.phase not in self.in_use
        self.in_use[self.phase] = max((used for used, _ in found), default=0.0)
        self.phase = following
        if first:
            given = sum(freed for _, freed in found)
            self.note(f"memory     models give back {given:.1f} GiB before the engine wakes")

    def metrics(self) -> dict[str, float]:
        if not self.in_use:
            return {}
        phases = {f"memory/{phase}_gib": used for phase, used in self.in_use.items()}
        return phases | {"memory/device_gib": max(self.in_use.values())}

    @contextmanager
    def training(self) -> Iterator[None]:
        self._release("training")
        if self.shared:
            self.loop.run(self.pool.sleep(), "sleep of the engines")
        yield

    @contextmanager
    def syncing(self, revive: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Wake engines for new weights; `revive` starts lost ones again, in memory that models have given back."""
        self._release("rollout")
        revive()
        self._engines(RolloutEngine.wake, "weights")
        yield
        self._engines(RolloutEngine.wake, "kv_cache")
