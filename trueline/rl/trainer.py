"""The reinforcement-learning loop: it reads like the algorithm."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from trueline.algorithms.advantages import needs, policy_learns
from trueline.algorithms.importance_sampling import EXCESS, VARIANCE, draw_metrics
from trueline.algorithms.loss_aggregation import set_weights
from trueline.algorithms.reward_shaping import adapt_coefficient
from trueline.algorithms.shortcuts import fresh_old_logprobs, untested_draws
from trueline.config.rl import ResolvedRollout, RLConfig
from trueline.models.truncation import Truncation
from trueline.monitoring.progress import Progress
from trueline.monitoring.timing import Timer
from trueline.monitoring.trackers import Tracker
from trueline.rl.keeping import SampleKeeper
from trueline.rl.lessons import Tutor
from trueline.rl.metrics import AIMS, describe_pools, describe_step, over_updates
from trueline.rl.models import DeviceSharing, Models
from trueline.rl.showcase import Showcase
from trueline.rl.step import add_assessment, assess, describe_tokens, freely_drawn, places_by_episode, stored_samples
from trueline.rl.streaming import SAMPLED, Stream
from trueline.rl.transcripts import held_out_count, name_pictures
from trueline.rollout.evaluation import Evaluator
from trueline.rollout.failures import EngineCrashLoop, EngineLost, NothingToLearn, UnusableData
from trueline.rollout.rollouts import Rollouts
from trueline.rollout.summary import SampledGroup, transcript
from trueline.runs.guard import UpdateMonitor
from trueline.runs.interrupts import Interrupts
from trueline.runs.rescue import HealthAction, MemoryWatch, SaveOnFailure
from trueline.runs.rollout_workers import RolloutWorkers
from trueline.runs.state import RLState
from trueline.runtime.actors import ActorFailure
from trueline.runtime.event_loop import Interrupted
from trueline.sync.weights import WeightSync
from trueline.training.checkpoints import Checkpoints
from trueline.training.group import GradientsLost
from trueline.training.report import LossSettings, Then
from trueline.training.samples import StoredSamples, has_pictures


@dataclass(slots=True)
class RLTrainer:
    config: RLConfig  # resolved
    rollout: ResolvedRollout
    models: Models
    rollouts: Rollouts
    sync: WeightSync
    sharing: DeviceSharing
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    tracker: Tracker
    progress: Progress
    state: RLState
    timer: Timer
    guard: UpdateMonitor
    critic_guard: UpdateMonitor | None
    watch: MemoryWatch
    care: HealthAction
    workers: RolloutWorkers
    tutor: Tutor  # writes what teachers read
    showcase: Showcase
    keeper: SampleKeeper
    stream: Stream | None = None  # trains groups while others are sampled
    example: tuple[list[int], list[bool]] | None = None  # of a completion, in runs whose completions may be stale

    def fit(self) -> RLState:
        state, config = self.state, self.config
        for guard in self.guards():
            guard.watch()
        rescue = SaveOnFailure(state, self.guards(), lambda: self.save({}), self.checkpoints, self.watch, self.progress)
        loop, stops = self.rollouts.loop, self.progress.stops
        interrupts = Interrupts(self.progress.note, config.checkpoint.save, loop.interrupt, stops)
        with self.progress, interrupts, rescue:
            self.care.begin(lambda: self.save({}))
            self.publish()
            self.catch_up()
            if state.step < config.steps:
                self.rollouts.start(state.version)
            with suppress(Interrupted):  # while sampling: the ledger keeps the prompts for a resumed run
                while state.step < config.steps and not interrupts.has_request():
                    self.step(interrupts)
            self.save({})
            self.checkpoints.settle(wait=True)
            for line in (*self.rollouts.budget.total(), f"ledger     {state.ledger.balance()}"):
                self.progress.note(line)
        return state

    def step(self, interrupts: Interrupts) -> None:
        """Sample, score, assign advantages, update and sync; count, save, evaluate and report in between."""
        groups, learns = self.sample(), self.policy_learns()
        with self.sharing.training():
            samples, metrics = self.train(groups)
            describe, at_once = self.describe(samples), interrupts.has_request()
            if early := at_once or self.save_due(self.state.step + 1) or self.acts_on_tokens():
                metrics |= describe()
            metrics |= self.count_step(groups, samples, learns, metrics)
            self.save_if_due(metrics, at_once=at_once)
        if learns or self.sharing.shared:  # engines that sleep forget their weights
            metrics |= self.publish()
        if self.evaluation_due():
            metrics |= self.evaluate()
            self.checkpoints.add_metrics(self.state.step, metrics)
        if self.state.step < self.config.steps:
            self.rollouts.release(self.state.version)
        metrics |= {} if early else describe()  # engines have not waited for it
        self.report(metrics, groups, samples)
        self.care.act(self.state, lambda: self.save({}), interrupts)

    # The algorithm

    def sample(self) -> list[SampledGroup]:
        """Sample the groups of a step; meanwhile, the last checkpoint may have been written."""
        try:
            while True:
                try:
                    with self.timer.phase("rollout"):
                        groups = self.take(self.config.prompts_per_step)
                except EngineLost:
                    self.publish()
                else:
                    break
        except (NothingToLearn, UnusableData):  # the ledger has the prompts that were dropped, for a resumed run
            self.save({})
            self.checkpoints.settle(wait=True)
            raise
        if self.checkpoints.pending is not None:
            with self.timer.phase("save"):
                self.checkpoints.settle()
        return groups

    def take(self, count: int) -> list[SampledGroup]:
        """Wait for the groups of a step; a stream trains those that are complete meanwhile."""
        if self.stream is None or self.stream.failed:
            return self.rollouts.take(count)
        return self.rollouts.stream(count, self.train_part, self.stream.least)

    def train_part(self, groups: list[SampledGroup]) -> bool:
        """Accumulate the gradients of some groups of a step; return whether more may follow."""
        assert self.stream is not None
        with self.timer.phase("stream"):
            part = stored_samples(groups, self.state.averages)
            self.models.score(part, logprobs_from_update=self.logprobs_from_update())
            self.assign_advantages(part)
            self.stream.add(part)
            try:
                self.models.policy.update(part, "policy", self.settings("policy", freely_drawn(groups), then="more"))
            except GradientsLost:
                self.stream.lost = True
        return not self.stream.lost

    def train(self, groups: list[SampledGroup]) -> tuple[StoredSamples, dict[str, float]]:
        """Score groups, assign advantages and update; return their samples and the metrics of the update."""
        stream = self.stream
        rest = groups if stream is None else stream.rest(groups)
        samples = stored_samples(rest, self.state.averages)
        if rest:
            self.score(samples, rest)
            self.assign_advantages(samples)
        if stream is None or not stream.parts:
            return samples, self.update_models(samples, freely_drawn=freely_drawn(groups))
        streamed = len(groups) - len(rest)
        with self.timer.phase("train"):
            samples, metrics = self.end_stream(stream, samples, freely_drawn(groups))
        return samples, self.test_draws(over_updates([metrics])) | {"rollout/streamed_share": streamed / len(groups)}

    def end_stream(self, stream: Stream, rest: StoredSamples, first: bool) -> tuple[StoredSamples, dict[str, float]]:
        """Make the optimizer step of a step whose other parts are trained.

        In a run's first one, the gradient is compared with that of the whole batch, which is then stepped.
        """
        if len(rest):
            stream.add(rest)
        last, scale, model = rest if len(rest) else stream.nothing(), stream.scale(), self.models.policy
        steps, wanted = stream.proven and scale > 0, 0 if stream.proven else SAMPLED
        settings = self.settings("policy", first, scale=scale, then="step" if steps else "discard", gradients=wanted)
        lost, found = stream.lost, dict[str, float]()
        if not lost:
            try:
                found = (self.guard if steps else model).update(last, "policy", settings)
            except GradientsLost:
                lost = True
        samples = stream.end()
        if steps and not lost:
            return samples, found
        streamed = model.gradient
        metrics = self.update(samples, first=first, gradients=wanted)
        if metrics and not lost and not stream.proven:
            self.progress.report(stream.compare(streamed, model.gradient, self.config.model.dtype))
        return samples, metrics

    def score(self, samples: StoredSamples, groups: list[SampledGroup]) -> None:
        with self.timer.phase("score"):
            lessons = self.tutor.write(samples, groups)
            self.models.score(samples, lessons, logprobs_from_update=self.logprobs_from_update())

    def assign_advantages(self, samples: StoredSamples) -> None:
        """Let a rollout worker shape the rewards and assign the advantages that the losses read."""
        given = (samples, self.config, self.rollout, self.kl_coefficient())
        found, arrays = self.rollouts.loop.run(self.workers.run_kept(assess, *given), "assigning advantages")
        plain = self.rollout.max_staleness and not has_pictures(samples)  # an excerpt would cut them
        self.example = found.example if plain else None
        add_assessment(samples, found, arrays, critic="critic" in needs(self.config.algorithm))

    def update_models(self, samples: StoredSamples, *, freely_drawn: bool = True) -> dict[str, float]:
        """Make one optimizer step of each trained model per minibatch; return the metrics of all of them together."""
        config, episodes = self.config, list(places_by_episode(samples).values())
        updates: list[dict[str, float]] = []
        with self.timer.phase("train"):
            for epoch in range(config.epochs):
                order = np.random.default_rng([config.seed, self.state.step, epoch]).permutation(len(episodes))
                for part in np.array_split(order, config.minibatches):
                    first = freely_drawn and not any(updates)
                    places = [place for at in part for place in episodes[at]]
                    updates.append(self.update(samples.subset(places), first=first))
        return self.test_draws(over_updates(updates))

    def update(self, minibatch: StoredSamples, *, first: bool = True, gradients: int = 0) -> dict[str, float]:
        """Make an optimizer step of each model; draws are tested in the `first`, which has the weights that sampled.

        So many numbers of each `gradient` can be compared afterwards.
        """
        config = self.config
        set_weights(minibatch.rows, config.algorithm.loss_aggregation, self.rollout.max_new_tokens)
        if not any(row.weight for row in minibatch.rows):
            return {}  # too few groups were left to fill this minibatch, or all its completions are filtered
        learners = {"value": self.critic_guard} if self.critic_guard is not None else {}
        if self.policy_learns():
            learners["policy"] = self.guard
        # At once where each has devices of its own.
        with ThreadPoolExecutor(len(learners) if config.critic.placement == "separate" else 1) as threads:
            made = {
                loss: threads.submit(self.make_step, guard, minibatch, loss, self.settings(loss, first, gradients))
                for loss, guard in learners.items()
            }
        metrics = made["policy"].result() if "policy" in made else {}
        found = made["value"].result() if "value" in made else {}
        return metrics | {f"critic/{name.removeprefix('critic/')}": value for name, value in found.items()}

    def settings(
        self, loss: str, first: bool, gradients: int = 0, then: Then = "step", scale: float = 1.0
    ) -> LossSettings:
        is_policy, kept = loss == "policy", Truncation.of(self.rollout)
        return LossSettings(
            self.rollout.temperature,
            self.config.algorithm,
            statistics={"kl_coefficient": self.kl_coefficient()},
            kept=None if kept.keeps_all() or not is_policy else kept,
            logprobs_from_update=is_policy and self.logprobs_from_update(),
            entropies=is_policy and self.config.monitoring.tokens,
            draws=is_policy and first and not untested_draws(self.config),
            then=then,
            scale=scale,
            gradients=gradients,
        )

    def make_step(
        self, guard: UpdateMonitor, minibatch: StoredSamples, loss: str, settings: LossSettings
    ) -> dict[str, float]:
        return guard.update(minibatch, loss, guard.model.prepare_settings(minibatch, loss, settings))

    def publish(self) -> dict[str, float]:
        """Make the newest weights live in the engines, and prove it; start those that are lost again."""
        with self.timer.phase("sync"):
            while True:
                try:
                    with self.sharing.syncing(self.revive):
                        metrics = self.sync.publish(self.state.version)
                    metrics |= self.sync.verify() | self.numerics()
                except EngineCrashLoop:
                    raise
                except ActorFailure:
                    if not self.sync.has_lost_engines():
                        raise
                else:
                    self.sync.readmit_engines()
                    return metrics | self.sharing.metrics()

    def revive(self) -> None:
        """Start lost engines again, as often as they die before they are ready."""
        while missing := self.sync.pool.missing():
            for cause in missing.values():
                self.progress.note(f"warning: {cause}; the engine is restarted, and its completions continue")
            self.sync.restart_engines()

    # What surrounds it

    def describe(self, samples: StoredSamples) -> Callable[[], dict[str, float]]:
        """Let a rollout worker describe a step's tokens, and return a function that waits for the metrics."""
        waiting = self.rollouts.loop.begin(self.workers.run(describe_tokens, samples, self.config), "computing metrics")

        def wait() -> dict[str, float]:
            metrics, kl = waiting()
            return metrics | self.adapt_kl(kl, len(samples))

        return wait

    def acts_on_tokens(self) -> bool:
        """Tell whether the run follows a metric of a step's tokens: it needs that before the step is counted."""
        return self.config.algorithm.kl.target is not None or self.config.algorithm.critic_warmup_variance is not None

    def count_step(
        self, groups: list[SampledGroup], samples: StoredSamples, learns: bool, known: dict[str, float]
    ) -> dict[str, float]:
        """Describe a step that is trained, and count it: what the checkpoint after it holds."""
        state, config = self.state, self.config
        metrics = describe_step(groups, samples.rows, self.rollouts.dropped, state.version)
        metrics |= self.rollouts.loop.run(self.workers.load_metrics(), "counting requests")
        self.rollouts.judge(groups)
        metrics |= describe_pools(self.rollouts)
        state.advance([group[0].group for group in groups], learns)
        state.follow(samples.rows, config.algorithm.baseline_decay)
        self.tracker.account(state.step, state.ledger.row())  # before the checkpoint that counts it
        wanted, found = config.algorithm.critic_warmup_variance, known.get("critic/explained_variance", 0.0)
        if wanted is not None and found >= wanted and not state.critic_ready:
            state.critic_ready = True
            self.progress.note(f"critic     explains {found:.2f} of its returns' variance in step {state.step}")
        state.skipped_steps = self.guard.skipped
        state.critic_skipped_steps = self.critic_guard.skipped if self.critic_guard is not None else 0
        for guard in self.guards():
            guard.whole = True
        return metrics

    def catch_up(self) -> None:
        """Write the row of the step that a run starts from, where it is not written yet."""
        if self.tracker.last_step >= self.state.step:
            return
        known = self.checkpoints.newest_metrics()  # where a kill came between a step's checkpoint and its report
        if self.state.step == 0 or (self.evaluation_due() and not any(key.startswith("evaluation/") for key in known)):
            known |= self.evaluate() | self.timer.flush()
        self.tracker.log(self.state.step, known)

    def guards(self) -> list[UpdateMonitor]:
        return [guard for guard in (self.guard, self.critic_guard) if guard is not None]

    def numerics(self) -> dict[str, float]:
        """Score a completion of the last step by engines and trainer under the same weights, where it may be stale."""
        if self.example is None or not self.sync.has_proof("score"):
            return {}
        return {"mismatch/numerics": self.sync.gap(*self.example)}

    def kl_coefficient(self) -> float:
        """Return the KL coefficient, fixed or as it has adapted so far."""
        adapted = self.state.kl_coefficient
        return self.config.algorithm.kl.coefficient if adapted is None else adapted

    def test_draws(self, metrics: dict[str, float]) -> dict[str, float]:
        """Put the test of a step's draws, and of all so far, in place of the sums that its first update has found."""
        excess, variance = metrics.pop(EXCESS, 0.0), metrics.pop(VARIANCE, 0.0)
        if not (math.isfinite(excess) and 0 < variance < math.inf):
            return metrics
        state = self.state
        state.drawn_excess, state.drawn_variance = state.drawn_excess + excess, state.drawn_variance + variance
        whole = draw_metrics(state.drawn_excess, state.drawn_variance)
        return metrics | draw_metrics(excess, variance) | {f"{name}_run": value for name, value in whole.items()}

    def logprobs_from_update(self) -> bool:
        return self.policy_learns() and fresh_old_logprobs(self.config)

    def policy_learns(self) -> bool:
        return policy_learns(self.config.algorithm, self.state.step, self.state.critic_ready)

    def adapt_kl(self, found: float | None, samples: int) -> dict[str, float]:
        """Let an adaptive KL coefficient follow its target after a step; return it with the mean KL of a sequence."""
        kl = self.config.algorithm.kl
        if found is None:
            return {}
        if kl.target is not None and self.policy_learns():
            self.state.kl_coefficient = adapt_coefficient(self.kl_coefficient(), found, samples, kl)
        return {"policy/sequence_kl": found, "policy/kl_coefficient": self.kl_coefficient()}

    def evaluate(self) -> dict[str, float]:
        if self.evaluator is None:
            return {}
        try:
            with self.timer.phase("evaluate"):
                metrics, trajectories = self.evaluator.run(self.rollouts.budget.count)
        except EngineLost:
            self.publish()
            return self.evaluate()
        shown, files = trajectories[: held_out_count(self.config.evaluation.samples)], dict[str, bytes]()
        rows = [name_pictures(transcript(one, "evaluate"), one.prompt.pictures, files) for one in shown]
        self.tracker.show(self.state.step, rows, files)
        if "evaluation/reward" in metrics:
            self.progress.note(f"held-out reward after step {self.state.step}: {metrics['evaluation/reward']:.3f}")
        return metrics

    def report(self, metrics: dict[str, float], groups: list[SampledGroup], samples: StoredSamples) -> None:
        times = self.timer.flush()
        metrics |= times | {"speed/tokens_per_second": metrics["speed/tokens"] / times["time/step"]}
        if "mismatch/numerics" in metrics:
            rest = metrics["mismatch/logprob_gap_mean"] - metrics["mismatch/numerics"]
            metrics["mismatch/staleness"] = max(rest, 0.0)
        if not self.config.has_reward():
            metrics = {name: value for name, value in metrics.items() if not name.startswith("reward/")}
        metrics |= self.care.monitor.check(self.state.step, metrics)
        self.tracker.log(self.state.step, metrics)
        self.watch.see(metrics)
        self.showcase.show(self.state.step, groups, samples, self.tutor.lessons)
        self.keeper.keep(self.state.step, groups, samples, streamed="rollout/streamed_share" in metrics)
        self.progress.step(self.state.step, metrics)
        if metrics["rollout/groups"] < self.config.prompts_per_step:
            self.progress.note(
                f"warning: dynamic sampling found {metrics['rollout/groups']:.0f} of {self.config.prompts_per_step} "
                f"groups with different rewards in {self.config.algorithm.dynamic_sampling.max_batches} batches"
            )
        aim = next(name for name in AIMS if name in metrics)
        self.guard.follow(aim, metrics[aim])
        for line in self.rollouts.budget.news():
            self.progress.note(line)

    def evaluation_due(self) -> bool:
        every, step = self.config.evaluation.every, self.state.step
        return step == self.config.steps or (every > 0 and step % every == 0)

    def save_if_due(self, metrics: dict[str, float], *, at_once: bool) -> None:
        """Save if due; the last step is saved before its evaluation, so that nothing trained can be lost to it.

        So is one after which the run is to end, and then all of it is on the disk: a scheduler may not wait for more.
        """
        if at_once or self.save_due(self.state.step):
            with self.timer.phase("save"):
                self.save(metrics)
                if at_once:
                    self.checkpoints.settle(wait=True)

    def save_due(self, step: int) -> bool:
        return self.checkpoints.due(step) or step == self.config.steps

    def save(self, metrics: dict[str, float]) -> None:
        self.state.ledger.balance()
        write = partial(self.models.write, whole=self.config.checkpoint.holds_model(self.state.step, self.config.steps))
        self.checkpoints.save(self.state.step, self.state.snapshot(), write, metrics)
