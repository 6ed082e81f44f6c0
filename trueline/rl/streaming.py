"""Train a step's groups while others are still sampled: gradients are accumulated, and the optimizer steps once.

It is on-policy and exact: the weights of parts are relative to a number that is known before, and the gradient is
scaled once the step is complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trueline.algorithms.loss_aggregation import set_weights, weight_total
from trueline.monitoring.findings import FINE, WATCH, Finding
from trueline.rollout.summary import SampledGroup
from trueline.training.samples import Fields, SampleBlock, StoredSamples

SAMPLED = 64  # numbers of each tensor's gradient that a run's first step compares
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}  # of that gradient, relative: other micro-batches round otherwise
KEY = "training.stream"


@dataclass(slots=True)
class Stream:
    aggregation: str
    budget: int  # rollout.max_new_tokens
    expected: float  # total that the weights of parts are relative to
    least: int  # sampled tokens of a part
    proven: bool = False  # the first step's gradient was that of the whole batch
    failed: bool = False  # it was not, or gradients cannot be kept: the run goes on without
    parts: list[StoredSamples] = field(default_factory=list)  # of this step that are trained, but for the step
    groups: set[int] = field(default_factory=set)  # of these
    total: float = 0.0  # of their weights
    lost: bool = False  # their gradients are discarded

    def add(self, part: StoredSamples) -> None:
        """Weigh the samples of another part of the step."""
        set_weights(part.rows, self.aggregation, self.budget)
        total = weight_total(part.rows, self.aggregation)
        for row in part.rows:
            row.weight *= total / self.expected
        self.parts.append(part)
        self.groups |= {row.group for row in part.rows}
        self.total += total

    def rest(self, groups: Sequence[SampledGroup]) -> list[SampledGroup]:
        return [group for group in groups if group[0].group not in self.groups]

    def nothing(self) -> StoredSamples:
        """Return a sample without a weight, for the last pass of a step whose groups are all trained."""
        one = self.parts[0].subset([0])
        return replace(one, rows=[replace(one.rows[0], weight=0.0)])

    def scale(self) -> float:
        """Return by what to multiply the gradient of all parts."""
        return self.expected / self.total if self.total else 0.0

    def end(self) -> StoredSamples:
        """Return all samples of the step, weighed as a whole, and be ready for the next one."""
        whole = join(self.parts)
        set_weights(whole.rows, self.aggregation, self.budget)
        self.parts, self.groups, self.total, self.lost = [], set(), 0.0, False
        return whole

    def compare(self, streamed: np.ndarray, plain: np.ndarray, dtype: str) -> Finding:
        """Compare the gradients of a run's first step."""
        size = float(np.linalg.norm(plain))
        gap = float(np.linalg.norm(streamed - plain)) / size if size else float(np.linalg.norm(streamed))
        self.proven = gap <= TOLERANCES[dtype]  # not so if it is not a number
        self.failed = not self.proven
        what = f"the gradient of the streamed first step differs from that of the whole batch by {gap:.1e} of its norm"
        if self.proven:
            return Finding(FINE, "stream_proven", what)
        return Finding(WATCH, "stream_differs", f"{what}: steps are not streamed", f"set {KEY}=false", KEY)


def join(parts: Sequence[StoredSamples]) -> StoredSamples:
    """Return the samples of several parts as those of one step, in the order of groups."""
    rows = [row for part in parts for row in part.rows]
    firsts = np.cumsum([0, *map(len, parts)]).tolist()
    same = {name: other for part in parts for name, other in part.fields.same.items()}
    known = set.intersection(*(part.fields.names() for part in parts)) - same.keys()  # a failed update leaves gaps
    blocks = [
        SampleBlock(tuple(names), tuple(number + first for number in block.samples), block.arrays)
        for part, first in zip(parts, firsts, strict=False)
        for block in part.fields.blocks
        if (names := [name for name in block.names if name in known])
    ]
    fields = Fields([row.length for row in rows], blocks, same)
    places = [(row.group, at, row.episode) for at, row in enumerate(rows)]
    ordered = sorted(range(len(rows)), key=lambda at: (places[at][0], at))
    episodes: dict[tuple[int, int], int] = {}
    for at in ordered:
        group, _, episode = places[at]
        rows[at].episode = episodes.setdefault((group, episode), len(episodes))
    return StoredSamples(ordered, [rows[at] for at in ordered], fields)
