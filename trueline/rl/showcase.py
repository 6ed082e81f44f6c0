"""Some groups of a step for transcripts.jsonl, each with all its completions; a rollout worker writes their texts."""

from dataclasses import dataclass

from trueline.config.rl import RLConfig
from trueline.monitoring.trackers import Tracker
from trueline.rl.lessons import Lessons
from trueline.rl.step import write_transcripts
from trueline.rl.transcripts import chosen_episodes, group_count
from trueline.rollout.summary import SampledGroup
from trueline.runs.rollout_workers import RolloutWorkers
from trueline.runtime.event_loop import EventLoop
from trueline.training.samples import StoredSamples


@dataclass(frozen=True, slots=True)
class Showcase:
    config: RLConfig
    loop: EventLoop
    workers: RolloutWorkers
    tracker: Tracker

    def show(self, step: int, groups: list[SampledGroup], samples: StoredSamples, lessons: Lessons | None) -> None:
        """Show the chosen groups of a step; `lessons` are what its teachers have read."""
        config = self.config
        wanted, size = config.monitoring.transcripts_per_step, config.algorithm.group_size
        if not (count := group_count(wanted, size, step, config.steps)):
            return
        places = [(group.parcels.transcripts, at) for group in groups for at in range(len(group))]
        shown = chosen_episodes([one for group in groups for one in group], count, [config.seed, step])
        given = (samples, [(one, *places[one]) for one in shown], config.monitoring.tokens, lessons)
        rows, files = self.loop.run(self.workers.run(write_transcripts, *given), "writing transcripts")
        self.tracker.show(step, rows, files)
