"""What needs no vLLM: where log-probs are kept, how its runners are wrapped, and who is trusted."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trueline.environments.base import Structure
from trueline.rollout import vllm_logprobs
from trueline.rollout.engine import SamplingParams
from trueline.rollout.vllm_logprobs import PROOFS, LogprobStore, Trust, keep_logprobs, kind_of

CPU = torch.device("cpu")
PLAIN = SamplingParams(1.0, 8, ())


def record(store: LogprobStore, batch: dict[str, tuple[int, float]], vain: str = "") -> None:
    """Take a step in which each request samples at a place, with a log-prob."""
    places, values = (torch.tensor(one) for one in zip(*batch.values(), strict=True))
    store.record(list(batch), places.int(), torch.tensor([name in vain for name in batch]), values)


def test_requests_find_their_own_wherever_they_stand_in_the_batch() -> None:
    """`a` has 3 tokens of a prompt, `b` has 1; they change places, and `c` comes where `a` was."""
    store = LogprobStore(2, 8, CPU)
    record(store, {"a": (3, -0.5), "b": (1, -1.0)})
    record(store, {"b": (2, -1.5), "a": (4, -2.0)})
    assert store.take([("a", 3, 2)]) == [[-0.5, -2.0]]
    record(store, {"c": (2, -3.0), "b": (3, -2.5)})
    assert store.take([("b", 1, 3), ("unknown", 0, 0), ("c", 2, 1)]) == [[-1.0, -1.5, -2.5], [], [-3.0]]
    assert not store.slots and sorted(store.free) == [0, 1]


def test_a_list_that_vllm_changes_in_place_is_noticed() -> None:
    store, batch = LogprobStore(2, 8, CPU), ["a", "b"]
    nothing = torch.tensor([False, False])
    store.record(batch, torch.tensor([1, 1]), nothing, torch.tensor([-1.0, -2.0]))
    batch.reverse()
    store.record(batch, torch.tensor([2, 2]), nothing, torch.tensor([-3.0, -4.0]))
    assert store.take([("a", 1, 2), ("b", 1, 2)]) == [[-1.0, -4.0], [-2.0, -3.0]]


def test_what_is_sampled_in_vain_overwrites_nothing() -> None:
    """A preempted request is read again in parts, and each part but the last ends with a token for nothing."""
    store = LogprobStore(1, 8, CPU)
    record(store, {"a": (2, -0.5)})
    record(store, {"a": (3, -1.0)})
    record(store, {"a": (2, -9.0)}, vain="a")
    record(store, {"a": (4, -1.5)})
    assert store.take([("a", 2, 3)]) == [[-0.5, -1.0, -1.5]]


def test_preempted_requests_keep_their_rows_while_others_run() -> None:
    store = LogprobStore(2, 8, CPU)
    record(store, {"a": (1, -0.5), "b": (1, -1.0)})
    record(store, {"b": (2, -1.5)})
    record(store, {"b": (3, -2.0), "a": (2, -2.5)})
    assert store.take([("a", 1, 2), ("b", 1, 3)]) == [[-0.5, -2.5], [-1.0, -1.5, -2.0]]


def test_more_requests_than_expected_get_rows_too() -> None:
    store = LogprobStore(1, 4, CPU)
    for step in range(3):
        record(store, {f"request-{at}": (1 + step, -float(10 * at + step)) for at in range(7)})
    found = store.take([(f"request-{at}", 1, 3) for at in range(7)])
    assert found == [[-float(10 * at + step) for step in range(3)] for at in range(7)]


def test_a_token_behind_the_end_of_a_full_context_is_harmless() -> None:
    """With asynchronous scheduling a step is under way when the last token is known."""
    store = LogprobStore(2, 4, CPU)
    record(store, {"a": (4, -0.5), "b": (3, -1.0)})
    record(store, {"a": (9, -7.0), "b": (4, -1.5)})
    assert store.take([("a", 4, 1), ("b", 3, 2)]) == [[-0.5], [-1.0, -1.5]]


def test_values_are_returned_bit_for_bit() -> None:
    values = torch.randn(5, generator=torch.Generator().manual_seed(0))
    store = LogprobStore(1, 8, CPU)
    for place, value in enumerate(values):
        store.record(["a"], torch.tensor([place]), torch.tensor([False]), value[None])
    assert store.take([("a", 0, 5)]) == [values.tolist()]


@dataclass
class Output:
    logprobs_tensors: Any


def tensors(values: list[float]) -> Any:
    return SimpleNamespace(logprobs=torch.tensor(values)[:, None])


class FirstRunner:
    """As vLLM's V1 model runner: without being asked, its sampler computes no log-probs."""

    device = CPU

    def __init__(self, asked: int | None) -> None:
        settings = SimpleNamespace(max_num_logprobs=asked)
        self.input_batch = SimpleNamespace(req_ids=["a", "b"], num_reqs=2, sampling_metadata=settings)
        self.seq_lens = torch.tensor([3, 5, 0, 0])
        self.discard_request_mask = SimpleNamespace(gpu=torch.tensor([False, True, True, True]))

    def _sample(self, logits: Tensor | None, drafts: None) -> Output:
        asked = self.input_batch.sampling_metadata.max_num_logprobs
        return Output(None if asked is None else tensors([-1.0, -2.0]))

    def step(self) -> Output:
        return self._sample(None, None)


class SecondRunner:
    """As vLLM's V2 model runner."""

    device = CPU

    def __init__(self, asked: int | None) -> None:
        count = -1 if asked is None else asked
        states = SimpleNamespace(max_num_logprobs=lambda rows: count)
        self.sampler = SimpleNamespace(sampling_states=states)
        self.seq_lens, self.sampled = torch.tensor([3, 5, 0, 0]), torch.tensor([1, 0])

    def sample(self, hidden: Tensor, batch: Any, grammar: None) -> tuple[Output, Tensor, Tensor]:
        asked = self.sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        return Output(None if asked < 0 else tensors([-1.0, -2.0])), self.sampled, 1 - self.sampled

    def step(self) -> Output:
        rows = np.array([0, 1])
        batch = SimpleNamespace(req_ids=["a", "b"], num_reqs=2, seq_lens=self.seq_lens, idx_mapping_np=rows)
        return self.sample(torch.zeros(0), batch, None)[0]


def settings(rows: int = 2, length: int = 8, draft: object = None) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        model_config=SimpleNamespace(max_model_len=length),
        speculative_config=draft,
    )


@pytest.mark.parametrize("kind", [FirstRunner, SecondRunner])
@pytest.mark.parametrize("asked", [None, 0])
def test_a_runner_computes_all_and_passes_on_what_was_asked_for(kind: type[Any], asked: int | None) -> None:
    runner = kind(asked)
    store = keep_logprobs(runner, settings())
    assert isinstance(store, LogprobStore)
    outputs = [runner.step() for _ in range(2)]
    assert [one.logprobs_tensors is None for one in outputs] == [asked is None] * 2
    assert store.take([("a", 3, 1), ("b", 5, 1)]) == [[-1.0], [0.0]]  # the second was sampled in vain


@pytest.mark.parametrize(
    ("runner", "config", "reason"),
    [
        (FirstRunner(None), settings(draft=object()), "speculative decoding"),
        (FirstRunner(None), settings(1024, 2**17), "1024 sequences of 131072 tokens would take 0.5 GiB"),
        (SimpleNamespace(_sample=None), settings(), r"samples in another way \(types\)"),
        (SimpleNamespace(sample=None, sampler=SimpleNamespace()), settings(), "samples in another way"),
        (object(), settings(), r"samples in another way \(builtins\)"),
    ],
)
def test_what_stands_in_the_way_is_named(runner: Any, config: Any, reason: str) -> None:
    before = dict(vars(runner)) if "__dict__" in dir(runner) else {}
    found = keep_logprobs(runner, config)
    assert isinstance(found, str)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)
    assert not before or before == vars(runner)


def test_kinds_are_what_a_sampler_treats_differently() -> None:
    assert kind_of(PLAIN) == kind_of(replace(PLAIN, max_new_tokens=9, stop=("x",), experts=False)) == frozenset()
    changes: list[dict[str, Any]] = [
        {"temperature": 0.5},
        {"temperature": 0.0},
        {"seed": 0},
        {"top_p": 0.5},
        {"top_k": 2},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"stop_tokens": (1,)},
        {"structure": Structure("{}")},
        {"seed": 0, "top_p": 0.5},
    ]
    kinds = [kind_of(replace(PLAIN, **change)) for change in changes]
    assert len({frozenset(), *kinds}) == len(changes) + 1
    assert kind_of(replace(PLAIN, seed=1)) == kind_of(replace(PLAIN, seed=2))


def test_a_kind_is_trusted_after_enough_proofs() -> None:
    trust = Trust()
    for _ in range(PROOFS):
        assert not trust.covers(PLAIN)
        trust.compare(PLAIN, [], [])  # it was interrupted before its first token, and proves nothing
        trust.compare(PLAIN, [-1.0, -torch.inf], [-1.0, -torch.inf])
    assert trust.covers(PLAIN) and not trust.covers(replace(PLAIN, top_p=0.5))


@pytest.mark.parametrize(
    ("kept", "place"), [([-1.0, -2.0000002], 1), ([-1.0], 1), ([], 0), ([-1.5, -2.0], 0), ([-1.0, float("nan")], 1)]
)
def test_one_difference_ends_all_trust(kept: list[float], place: int) -> None:
    trust = Trust()
    trust.proven[kind_of(PLAIN)] = PROOFS
    trust.compare(replace(PLAIN, top_p=0.5, seed=1), [-1.0, -2.0], kept)
    assert trust.doubt == f"those kept on the device differ from token {place} of 2 on (seed, top_p)"
    assert not trust.covers(PLAIN)


def test_nothing_is_trusted_where_something_stands_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_logprobs, "PROOFS", 0)
    assert Trust().covers(PLAIN) and not Trust("an obstacle").covers(PLAIN)
