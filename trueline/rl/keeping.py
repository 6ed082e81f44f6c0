"""Keep what each step trained on, so that `trueline replay` can compute it again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trueline.config.run import RunConfig
from trueline.data.chat import ChatFormat
from trueline.monitoring.trackers import Sink
from trueline.rollout.summary import CALL, SampledGroup, Transcript
from trueline.runs.guard import UpdateMonitor
from trueline.runs.rollout_workers import RolloutWorkers
from trueline.runtime.actors import Stored
from trueline.runtime.event_loop import EventLoop
from trueline.training.checkpoints import Checkpoints, step_of
from trueline.training.kept_samples import TOO_LARGE, KeptStep, SampleFiles, Update
from trueline.training.samples import StoredSamples, has_pictures

KEY = "monitoring.keep_samples_mib"
Texts = list[tuple[Stored[list[Transcript]], int]]  # where the texts of each episode lie, and its place there


def pack_step(chat: ChatFormat, kept: KeptStep, texts: Texts) -> bytes:
    """Return the file of a step; a rollout worker makes it, on samples that it fetches."""
    calls = [stored.fetch()[at].get(CALL) for stored, at in texts]
    return KeptStep(kept.step, kept.config, kept.updates, kept.samples, calls).pack()


@dataclass(slots=True)
class SampleKeeper:
    config: RunConfig
    files: SampleFiles
    workers: RolloutWorkers
    loop: EventLoop
    checkpoints: Checkpoints
    monitors: Sequence[UpdateMonitor]
    note: Callable[[str], None]
    sink: Sink = field(init=False)
    told: bool = False  # why a step is not kept

    def __post_init__(self) -> None:
        self.sink = Sink(self.write, "samples", self.note)

    def keep(self, step: int, groups: Sequence[SampledGroup], samples: StoredSamples, *, streamed: bool) -> None:
        """Keep a step's samples and its updates; a streamed one is written as if it were whole."""
        updates = [update for monitor in self.monitors for update in monitor.take_updates()]
        most = round(self.config.monitoring.keep_samples_mib * 2**20)
        if not most:
            return
        if has_pictures(samples):
            self.tell("samples with pictures are not kept, so this run cannot be replayed")
            return
        if streamed:
            weights = [row.weight for row in samples.rows]
            updates = [Update(one.loss, list(samples.numbers), weights, one.settings, one.metrics) for one in updates]
        kept = KeptStep(step, self.config.model_dump(mode="json"), updates, samples, [])
        texts = [(group.parcels.transcripts, at) for group in groups for at in range(len(group))]
        content = self.loop.run(self.workers.run(pack_step, kept, texts), "keeping samples")
        newest = self.checkpoints.newest()
        self.sink.put(step, content, most, step_of(newest) if newest is not None else 0)

    def write(self, step: int, content: bytes, most: int, saved: int) -> None:
        if not self.files.keep(step, content, most, saved):
            self.tell(f"{KEY}={self.config.monitoring.keep_samples_mib:g}: {TOO_LARGE}")

    def tell(self, why: str) -> None:
        if not self.told:
            self.note(f"warning: {why}")
        self.told = True
