"""The controller's view of all ranks of one model."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate

import numpy as np
import torch
from torch import Tensor

from trueline.algorithms.importance_sampling import EXCESS, VARIANCE
from trueline.algorithms.losses import LOSSES
from trueline.algorithms.policy_losses import OBSERVATION
from trueline.config.model import WORTHWHILE, RanksConfig, TrainingConfig, reads_experts, sharing_obstacle
from trueline.data.batching import FILLER, Budget, MicroBatch, Plan, SampleReader, pack_samples, plan_micro_batches
from trueline.data.types import Sample
from trueline.models.ring_attention import Mesh
from trueline.monitoring.findings import WATCH, Finding
from trueline.monitoring.heartbeat import WORK
from trueline.runtime.actors import (
    Actor,
    ActorFailure,
    Given,
    LocalActor,
    Method,
    Pending,
    Result,
    Stored,
    share,
    wait_all,
)
from trueline.training.checkpoints import PollSave, SaveResult
from trueline.training.report import AGREED, REPORTED, Asked, LossSettings, Metrics, Report
from trueline.training.samples import Arrays, SampleBlock, Samples, StoredSamples, families_of, has_pictures, lengths_of
from trueline.training.worker import Worker


class GradientsLost(RuntimeError):
    """Memory ran out, so the gradients of earlier parts of the step are discarded, too."""


TOTALS = (
    "loss",
    "router_loss",
    OBSERVATION,
    AGREED,
    REPORTED,
    EXCESS,
    VARIANCE,
)  # sums of a report that are no means of tokens
Actors = Sequence[Actor[Worker]]


class ModelGroup:
    def __init__(
        self, name: str, actors: Actors, config: RanksConfig, timeout_seconds: float, mesh: Mesh | None = None
    ) -> None:
        self.name, self.actors, self.timeout_seconds = name, actors, timeout_seconds
        self.submitting = threading.Lock()
        self.mesh = mesh or Mesh(len(actors))
        self.reads_experts = reads_experts(config)
        self.balanced = isinstance(config, TrainingConfig) and config.router_aux_loss_coef > 0
        self.budget = Budget(config.tokens_per_pass() * self.mesh.ring, config.micro_batch_samples, config.packing)
        self.halved = 0  # times that passes were halved because memory ran out
        self.sharing = not sharing_obstacle(config, self.mesh.ring) and config.share_prefixes
        self.proven, self.proving = False, threading.Lock()  # that sharing prefixes changes nothing
        self.plain = False  # layers are not compiled any more
        self.report: Callable[[Finding], None] = lambda finding: None
        self.earlier: list[Report] = []  # of parts of the next step
        self.counted: list[tuple[float, int]] = []  # tokens of those parts: not computed again, and all
        self.gradient = np.zeros(0, np.float32)  # some numbers of the last one, if they were wanted

    def start(self) -> None:
        start_groups([self])

    def call(self, method: Method[Worker, Given, Result], *args: Given.args, **named: Given.kwargs) -> list[Result]:
        """Make a call on every rank, and return the results in rank order."""
        return wait_all([actor.submit(method, *args, **named) for actor in self.actors], self.timeout_seconds)

    def wait_until_idle(self, seconds: float) -> None:
        """Return when every rank is idle, or raise ActorFailure."""
        wait_all([actor.submit(Worker.ready) for actor in self.actors], seconds)

    def score(self, samples: list[Sample], temperature: float = 1.0, *, reference: bool = False) -> list[Tensor]:
        """Return [T] log-probs of each sample's tokens under this model, or [T, K] scores of a scoring head."""
        plan = self.plan(samples)
        return split_by_sample(samples, plan, self._submit(Worker.score, samples, plan, temperature, reference))

    def score_stored(
        self, samples: StoredSamples, *names: str, temperature: float = 1.0, reference: bool = False
    ) -> list[SampleBlock]:
        """Score samples by reference, and return blocks of fields, which stay with the ranks' nodes."""
        plan = self.plan(samples)
        found = self._keep(Worker.score_kept, samples, plan, names, temperature, reference)
        return self._blocks(samples, plan, names, [arrays for _, arrays in found])

    def score_targets(self, samples: StoredSamples, asked: Asked) -> list[SampleBlock]:
        """Return what this model says of tokens and, with a top_k, the likeliest tokens in their places, as fields."""
        plan = self.plan(samples)
        found = self._keep(Worker.score_targets, samples, plan, asked)
        return self._blocks(samples, plan, asked.names, [arrays for _, arrays in found])

    def prepare_settings(self, samples: Samples, loss: str, settings: LossSettings) -> LossSettings:
        """Return the settings with the loss's own statistics of the whole minibatch."""
        rows: Any = samples.rows if isinstance(samples, StoredSamples) else samples
        found = LOSSES[loss].prepare(rows, settings.section, partial(self.score, temperature=settings.temperature))
        return replace(settings, statistics=settings.statistics | found)

    def update(self, samples: Samples, loss: str, settings: LossSettings, *, samples_per_row: int = 1) -> Metrics:
        """Make one optimizer step on the whole minibatch; once in a run, halve the passes if memory runs out.

        The log-probs and entropies that it computes of samples by reference become fields of theirs. Parts of the
        minibatch may be passed one by one: all but the last with `settings.then` = "more".
        """
        plan = self.plan(samples, samples_per_row)
        counted = self._with_expert_counts(samples, plan, settings)
        kept: list[Stored[Arrays]] = []
        if isinstance(samples, StoredSamples):
            both = self._keep(Worker.update_kept, samples, plan, loss, counted)
            reports, kept = [report for report, _ in both], [arrays for _, arrays in both]
        else:
            reports = self._submit(Worker.update, samples, plan, loss, counted)
        if error := reports[0].out_of_memory:
            whole, self.budget = self.budget, replace(self.budget, tokens=self.budget.tokens // 2)
            try:
                self.plan(samples, samples_per_row)
            except ValueError:  # half is too small for a sample
                self.budget = whole
            if self.halved or self.budget == whole:
                raise ActorFailure(f"{self.name}: out of memory in passes of up to {whole.tokens} tokens: {error}")
            self.halved += 1
            if self.earlier or settings.then == "more":
                self.earlier, self.counted = [], []
                raise GradientsLost
            return self.update(samples, loss, settings, samples_per_row=samples_per_row)
        self._tell(next((report.remark for report in reports if report.remark), ""))
        if isinstance(samples, StoredSamples) and (names := settings.kept_fields()):
            for block in self._blocks(samples, plan, names, kept):
                samples.add(block)
        self.counted.append((plan.saved * (tokens := sum(lengths_of(samples))), tokens))
        if settings.then == "more":
            self.earlier += reports
            return {}
        self.gradient, all_reports, self.earlier = reports[0].gradient, [*reports, *self.earlier], []
        (saved, whole), self.counted = np.sum(self.counted, axis=0), []
        if settings.then == "discard":
            return {}
        known = {"memory/halved": float(self.halved), "speed/shared_prefixes": float(saved / whole)}
        return reduce_reports(all_reports, settings.scale) | {name: value for name, value in known.items() if value}

    def _tell(self, doubt: str) -> None:
        """Report once why layers are not compiled."""
        if doubt and not self.plain:
            self.plain = True
            what = f"{self.name}: {doubt}, so this run uses plain layers"
            self.report(Finding(WATCH, "compiled_differs", what, "set compile=false", "compile"))

    def accumulate(self, samples: Samples, loss: str, settings: LossSettings) -> Metrics:
        """Accumulate the gradients of `update` without its step."""
        plan = self.plan(samples)
        counted = self._with_expert_counts(samples, plan, settings)
        return reduce_reports(self._submit(Worker.accumulate, samples, plan, loss, counted))

    def _with_expert_counts(self, samples: Samples, plan: Plan, settings: LossSettings) -> LossSettings:
        """Return the settings with the expert counts of the minibatch (one more pass), if experts are balanced."""
        if not self.balanced:
            return settings
        counts = self._submit(Worker.count_experts, samples, plan)
        return replace(settings, expert_counts=[sum(of_one) for of_one in zip(*counts, strict=True)])

    def evaluate(
        self, samples: list[Sample], loss: str, settings: LossSettings, *, samples_per_row: int = 1
    ) -> Metrics:
        """Return the loss and its metrics, without gradients."""
        plan = self.plan(samples, samples_per_row)
        return reduce_reports(self._submit(Worker.evaluate, samples, plan, loss, settings))

    def keep_facts(self, samples: list[Sample], loss: str, settings: LossSettings) -> None:
        """Keep the loss's numbers after an evaluation, to save them with the model."""
        if facts := LOSSES[loss].facts(samples, settings.section, self.score):
            self.call(Worker.annotate, facts)

    def _submit(
        self,
        method: Callable[Concatenate[Worker, SampleReader, list[MicroBatch], Given], Result],
        samples: Samples,
        plan: Plan,
        *args: Given.args,
        **named: Given.kwargs,
    ) -> list[Result]:
        """Make a call on every rank, and return one result per data place: its ranks all return the same."""
        given = self._readers(samples, plan)
        return self._on_ranks(plan, lambda actor, at: actor.submit(method, given[at], plan[at], *args, **named))

    def _keep(
        self,
        method: Callable[Concatenate[Worker, SampleReader, list[MicroBatch], Given], tuple[Result, Arrays]],
        samples: StoredSamples,
        plan: Plan,
        *args: Given.args,
        **named: Given.kwargs,
    ) -> list[tuple[Result, Stored[Arrays]]]:
        """Do the same, and leave the arrays in the object store."""
        given = self._readers(samples, plan)
        return self._on_ranks(plan, lambda actor, at: actor.submit_kept(method, given[at], plan[at], *args, **named))

    def _readers(self, samples: Samples, plan: Plan) -> list[SampleReader]:
        """Return what is sent to each data place: references to its own samples, or all samples packed."""
        if isinstance(samples, StoredSamples):
            # A pass of fillers takes the types of its fields from the first sample.
            places = [{max(at, 0) for micro_batch in passes for at in micro_batch} for passes in plan]
            given = {"experts": self.reads_experts, "shares": plan.saved > 0}
            readers = [samples.for_rank(some, **given) for some in places]
            if not isinstance(self.actors[0], LocalActor):
                for block in (block for one in readers for block in one.fields.blocks):
                    block.arrays.share()
            return [*readers]
        packed = pack_samples(list(samples), experts=self.reads_experts, shares=plan.saved > 0)
        return [packed if isinstance(self.actors[0], LocalActor) else share(packed)] * len(plan)

    def _on_ranks(self, plan: Plan, submit: Callable[[Actor[Worker], int], Pending[Result]]) -> list[Result]:
        """Submit a call to every rank with its data place, and return one result per data place."""
        with self.submitting:  # every rank must get the calls of several threads in the same order
            calls = [submit(actor, self.mesh.data_place(rank)) for rank, actor in enumerate(self.actors)]
        return wait_all(calls, self.timeout_seconds)[:: self.mesh.width]

    def _blocks(
        self, samples: StoredSamples, plan: Plan, names: tuple[str, ...], found: list[Stored[Arrays]]
    ) -> list[SampleBlock]:
        """Return what the ranks have computed of their samples, in the order of their passes."""
        pairs = zip(map(own_places, plan), found, strict=True)
        return [SampleBlock(names, tuple(samples.numbers[at] for at in places), arrays) for places, arrays in pairs]

    def plan(self, samples: Samples, samples_per_row: int = 1) -> Plan:
        """Divide samples into passes, with common prefixes computed once if that is worthwhile and exact."""
        make = partial(plan_micro_batches, lengths_of(samples), self.mesh.data, self.budget, samples_per_row)
        if self.sharing and not has_pictures(samples):  # equal tokens may stand for other pictures
            plan = make(families_of(samples))
            enough = WORTHWHILE if self.sharing == "auto" else 0.0
            if plan.saved and plan.saved >= enough and self._shares_exactly(samples, plan):
                return plan
        return make()

    def _shares_exactly(self, samples: Samples, plan: Plan) -> bool:
        """Let every rank compare some sequences with and without sharing, once; turn it off if they differ."""
        with self.proving:
            if not self.proven:
                found = self._submit(Worker.compare_sharing, samples, plan)
                gap, limit = next((one for one in found if not one[0] < one[1]), (0.0, 0.0))
                self.proven, self.sharing = True, not limit and self.sharing
                if limit:
                    what = (
                        f"{self.name}: sequences whose common prefix is computed once differ from those computed whole "
                        f"by {gap:.2g} on average (rounding: up to {limit:.2g}), so this run computes all of them whole"
                    )
                    self.report(Finding(WATCH, "prefixes_differ", what, "set share_prefixes=false", "share_prefixes"))
        return bool(self.sharing)

    def stop(self) -> None:
        for actor in self.actors:
            actor.stop()


def own_places(passes: list[MicroBatch]) -> list[int]:
    """Return the places of a rank's samples in the order of its passes, without fillers."""
    return [at for micro_batch in passes for at in micro_batch if at != FILLER]


def split_by_sample(samples: Sequence[Sample], plan: Plan, flats: list[np.ndarray]) -> list[Tensor]:
    """Split the ranks' values of tokens into samples, in the order of the samples."""
    found: dict[int, Tensor] = {}
    for passes, flat in zip(plan, flats, strict=True):
        places = own_places(passes)
        pieces = torch.tensor(flat).split([samples[at].length() for at in places])
        found.update(zip(places, pieces, strict=False))
    return [found[at] for at in range(len(samples))]


def write_models(models: dict[str, ModelGroup], folder: Path, whole: bool = True) -> PollSave:
    """Let all ranks copy and begin to write a checkpoint; without `whole`, weights are only in the training state."""
    for place, model in models.items():
        (folder / place).mkdir(exist_ok=True)
        model.call(Worker.save, str(folder / place), whole)

    def poll(wait: bool) -> SaveResult | None:
        found = [(Path(place), one) for place, model in models.items() for one in model.call(Worker.save_result, wait)]
        shares = [(place, one) for place, one in found if one is not None]
        if len(shares) < len(found):
            return None
        digests = {(place / name).as_posix(): value for place, one in shares for name, value in one.digests.items()}
        problem = next((one.problem for _, one in shares if one.problem), None)
        return SaveResult(digests, max(one.seconds for _, one in shares), problem)

    return poll


def prepare_saving(models: Sequence[ModelGroup]) -> None:
    """Let the ranks of all saved models allocate memory for checkpoints."""
    for model in models:
        model.call(Worker.prepare_saving, sum(len(model.actors) for model in models))


@WORK.doing("phase", "start")
def start_groups(groups: Sequence[ModelGroup]) -> None:
    """Start the ranks of several models at once; the ranks of a model meet at its rank 0."""
    seconds = groups[0].timeout_seconds
    addresses = wait_all([group.actors[0].submit(Worker.listen) for group in groups], seconds)
    pairs = zip(groups, addresses, strict=True)
    wait_all([actor.submit(Worker.start, address) for group, address in pairs for actor in group.actors], seconds)


def reduce_reports(reports: list[Report], scale: float = 1.0) -> Metrics:
    """Reduce the ranks' reports: means are weighted like the loss, and totals are summed; `scale` is the loss's."""
    names = dict.fromkeys(name for report in reports for name in report.sums)
    sums = {name: sum(report.sums.get(name, 0.0) for report in reports) for name in names}
    weight = sums.pop("weight")
    totals = {name: sums.pop(name) for name in list(sums) if name in TOTALS}
    totals["loss"] *= scale
    means = {name: value / weight for name, value in sums.items()}
    agreed, reported = totals.pop(AGREED, 0.0), totals.pop(REPORTED, 0.0)
    if reported:
        means["mismatch/routing_agreement"] = agreed / reported
    maxima = {name: max(report.maxima[name] for report in reports) for name in reports[0].maxima}
    return {**totals, **means, **maxima, **reports[0].step}
