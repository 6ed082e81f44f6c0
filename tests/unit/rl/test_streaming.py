"""Steps whose groups are trained while others are sampled have the gradients of whole ones; whole runs in this process.

Covers `trueline.rl.streaming`, `trueline.algorithms.shortcuts`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.architectures import make_model
from tests.support.letters import rows_of, run_letters
from trueline.algorithms.loss_aggregation import AGGREGATIONS, set_weights
from trueline.algorithms.shortcuts import stream_obstacle
from trueline.config.rl import RLConfig
from trueline.data.types import Sample
from trueline.rl import step
from trueline.rl.streaming import Stream
from trueline.rollout.rollouts import Rollouts
from trueline.training.engines.table import kept_gradients
from trueline.training.group import ModelGroup
from trueline.training.report import LossSettings
from trueline.training.samples import Fields, SampleNumbers, StoredSamples
from trueline.training.worker import Worker

ALIKE = ("loss", "grad_norm", "policy/entropy", "policy/clip_fraction", "mismatch/logprob_gap_mean", "reward/mean")
SLOW = pytest.mark.slow
SMALL = ("steps=3", "algorithm.group_size=3", "prompts_per_step=6", "rollout.max_new_tokens=24")


@pytest.fixture(autouse=True)
def one_group_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group of a streamed step but the last one is trained apart, in the reverse of the data's order."""

    def stream(self: Rollouts, count: int, train: Any, least: int) -> list[Any]:
        groups, goes_on = self.take(count), True
        for group in reversed(groups[1:]):
            goes_on = goes_on and train([group])
        return groups

    monkeypatch.setattr(Rollouts, "stream", stream)


def run(folder: Path, preset: str, *words: str) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    assert run_letters(folder, preset, *SMALL, *words) == 0
    return rows_of(folder)[1:]


def findings(folder: Path) -> list[str]:
    return [json.loads(line)["code"] for line in (folder / "run" / "findings.jsonl").read_text().splitlines()]


def assert_alike(streamed: list[dict[str, Any]], whole: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    for one, other in zip(streamed, whole, strict=True):
        names = [name for name in ALIKE if name in other]
        expected = {name: pytest.approx(other[name], rel=tolerance, abs=1e-6) for name in names}
        assert {name: one[name] for name in names} == expected


QUICK = ("grpo", "dapo")
PRESETS = {
    "grpo": [],
    "dr_grpo": [],
    "rloo": [],
    "remax": ["algorithm.group_size=1"],
    "dapo": ["algorithm.dynamic_sampling.max_batches=3"],
    "gspo": [],
    "cispo": [],
    "reinforce++_baseline": ["algorithm.whiten=false"],
}


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far the gradients of first steps were from those of the whole batch, relative."""
    found: list[float] = []
    compare = Stream.compare

    def spy(self: Stream, streamed: np.ndarray, plain: np.ndarray, dtype: str) -> Any:
        found.append(float(np.linalg.norm(streamed - plain) / np.linalg.norm(plain)))
        return compare(self, streamed, plain, dtype)

    monkeypatch.setattr(Stream, "compare", spy)
    return found


@pytest.mark.parametrize(
    "preset", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in PRESETS]
)
def test_a_streamed_run_has_the_numbers_of_a_whole_one(preset: str, tmp_path: Path, gaps: list[float]) -> None:
    words = [*PRESETS[preset], "model.lora.rank=0"]
    whole = run(tmp_path / "whole", preset, *words, "training.stream=false")
    streamed = run(tmp_path / "streamed", preset, *words, "training.stream=true")
    assert_alike(streamed, whole)
    assert [row["rollout/streamed_share"] > 0.5 for row in streamed] == [True] * 3
    assert not any("rollout/streamed_share" in row for row in whole)
    assert "stream_proven" in findings(tmp_path / "streamed")
    gap, tokens = (torch.tensor([row[name] for row in streamed]) for name in ("mismatch/logprob_gap_mean", "loss"))
    assert gap.isfinite().all() and tokens.isfinite().all()
    assert len(gaps) == 1 and gaps[0] < 1e-6


@pytest.mark.parametrize(  # windows, experts, padded linear attention
    "kind", [pytest.param("gemma3_text", marks=SLOW), "mixtral", pytest.param("qwen3_5_text", marks=SLOW)]
)
def test_other_families_are_streamed_too(kind: str, tmp_path: Path, gaps: list[float]) -> None:
    words = ["training.packing=false", "algorithm.kl.coefficient=0"] if kind == "qwen3_5_text" else []
    for name in ("whole", "streamed"):
        make_model(tmp_path / name / "model", kind)
    whole = run(tmp_path / "whole", "grpo", *words, "training.stream=false")
    streamed = run(tmp_path / "streamed", "grpo", *words, "training.stream=true")
    assert_alike(streamed, whole)
    assert gaps[0] < 1e-6


def test_transcripts_and_ledger_of_a_streamed_run_are_in_the_order_of_the_data(tmp_path: Path) -> None:
    for name in ("true", "false"):
        run(tmp_path / name, "grpo", f"training.stream={name}")
    for file in ("ledger.jsonl", "transcripts.jsonl"):
        first, second = (
            [json.loads(line) for line in (tmp_path / name / "run" / file).read_text().splitlines()]
            for name in ("true", "false")
        )
        for row in (*first, *second):
            row.pop("source", None)  # has the folder's name
            row.pop("tokens", None)  # their log-probs are rounded otherwise
        assert first == second, file


def test_a_stream_whose_gradient_differs_is_given_up_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is that of the whole batch, so nothing wrong was trained."""
    monkeypatch.setattr(Stream, "scale", lambda self: 2 * self.expected / self.total)
    streamed = run(tmp_path / "streamed", "grpo", "training.stream=true")
    whole = run(tmp_path / "whole", "grpo", "training.stream=false")
    assert_alike(streamed, whole, 1e-9)
    assert "stream_differs" in findings(tmp_path / "streamed")
    assert ["rollout/streamed_share" in row for row in streamed] == [True, False, False]


@pytest.mark.parametrize("fails_at", [1, 2, 6])  # a part of the first step, its last part, a part of the second step
def test_when_memory_runs_out_the_step_is_trained_whole(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    accumulate = Worker.accumulate

    def scarce(self: Worker, packed: Any, passes: Any, loss: str, settings: LossSettings) -> Any:
        seen.append(settings.then)
        if len(seen) == fails_at:
            raise torch.OutOfMemoryError("no memory")
        return accumulate(self, packed, passes, loss, settings)

    monkeypatch.setattr(Worker, "accumulate", scarce)
    words = ["prompts_per_step=3", "training.micro_batch_tokens=256"]
    streamed = run(tmp_path / "streamed", "grpo", *words, "training.stream=true")
    monkeypatch.undo()
    whole = run(tmp_path / "whole", "grpo", *words, "training.stream=false")
    assert_alike(streamed, whole)
    assert seen.count("discard") <= 2 and seen.count("step") >= 3


def test_a_step_without_a_rest_still_makes_one_optimizer_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(self: Rollouts, count: int, train: Any, least: int) -> list[Any]:
        groups = self.take(count)
        assert all(train([group]) for group in groups)
        return groups

    monkeypatch.setattr(Rollouts, "stream", stream)
    streamed = run(tmp_path / "streamed", "dapo", "training.stream=true")
    whole = run(tmp_path / "whole", "dapo", "training.stream=false")
    assert_alike(streamed, whole)
    assert all(row["rollout/streamed_share"] == 1 for row in streamed)


def test_a_step_of_filtered_completions_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    update, shape = ModelGroup.update, step.shape_rewards

    def spy(self: ModelGroup, samples: Any, loss: str, settings: LossSettings, **named: Any) -> Any:
        steps.append(settings.then)
        return update(self, samples, loss, settings, **named)

    def filter_all(samples: list[Sample], *given: Any) -> None:
        shape(samples, *given)
        for sample in samples:
            sample.filtered = True

    monkeypatch.setattr(ModelGroup, "update", spy)
    monkeypatch.setattr(step, "shape_rewards", filter_all)
    run_letters(tmp_path, "grpo", *SMALL, "training.stream=true")
    assert steps[:6] == ["more"] * 5 + ["discard"] and "step" not in steps


# The arithmetic


def rows(*groups: int) -> list[SampleNumbers]:
    """Episodes of two sequences; those with an even number are filtered."""
    made = []
    for at, group in enumerate(groups):
        row = SampleNumbers(10 + at, 3 + at, group, at // 2, 0, 1.0, 0.0, False)
        row.filtered = (at // 2) % 2 == 1
        made.append(row)
    return made


def stored(some: list[SampleNumbers]) -> StoredSamples:
    return StoredSamples(list(range(len(some))), some, Fields([row.length for row in some], []))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_of_parts_times_the_scale_are_those_of_the_whole(aggregation: str) -> None:
    whole = rows(0, 0, 0, 0, 1, 1, 1, 1)
    set_weights(whole, aggregation, 7)
    expected = [row.weight for row in whole]
    again = rows(0, 0, 0, 0, 1, 1, 1, 1)
    stream = Stream(aggregation, 7, expected=100.0, least=1)
    stream.add(stored(again[4:]))
    stream.add(stored(again[:4]))
    assert [row.weight * stream.scale() for row in again] == pytest.approx(expected)
    joined = stream.end()
    assert [row.weight for row in joined.rows] == pytest.approx(expected)
    assert [row.group for row in joined.rows] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [row.episode for row in joined.rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not stream.parts and not stream.groups and not stream.total


@pytest.mark.parametrize(("gap", "proven"), [(0.0, True), (5e-5, True), (2e-4, False), (float("nan"), False)])
def test_a_gradient_is_proven_within_its_precision(gap: float, proven: bool) -> None:
    stream, plain = Stream("token_mean", 1, 1.0, 1), np.array([3.0, 4.0], np.float32)
    finding = stream.compare(plain + np.array([5 * gap, 0.0], np.float32), plain, "float32")
    assert stream.proven is proven and stream.failed is not proven
    assert finding.code == ("stream_proven" if proven else "stream_differs")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({}, ""),
        ({"algorithm": {"whiten": True}}, "algorithm.whiten=true needs the whole batch"),
        ({"algorithm": {"advantage": "batch_mean"}}, "algorithm.advantage=batch_mean needs the whole batch"),
        ({"algorithm": {"advantage": "gae"}}, "algorithm.advantage=gae needs the whole batch"),
        ({"algorithm": {"advantage": "statistics:fmean"}}, "algorithm.advantage=statistics:fmean needs the whole"),
        ({"algorithm": {"positive_nll": 0.1}}, "algorithm.positive_nll=0.1 needs the whole batch"),
        (
            {"algorithm": {"observation_loss": 0.1}, "environment": {"function": "game.py:Game"}},
            "algorithm.observation_loss=0.1 needs the whole batch",
        ),
        ({"algorithm": {"advantage": "otb"}}, ""),
        ({"algorithm": {"top_entropy_share": 0.2}}, "algorithm.top_entropy_share=0.2 needs the whole batch"),
        ({"minibatches": 2}, "a step makes 2 updates"),
        ({"epochs": 3}, "a step makes 3 updates"),
        ({"training": {"router_aux_loss_coef": 0.1}}, "training.router_aux_loss_coef needs the whole batch"),
        ({"rollout": {"max_staleness": 1}}, "rollout.max_staleness=1 already samples while it trains"),
        ({"training": {"deepspeed": {"zero_stage": 3}}}, "training.deepspeed.zero_stage=3 cannot discard gradients"),
        ({"training": {"offload": "optimizer"}}, "training.offload=optimizer cannot discard gradients"),
        ({"training": {"engine": "fsdp2", "offload": "all"}}, ""),
    ],
)
def test_what_cannot_be_streamed_says_why(words: dict[str, Any], reason: str) -> None:
    config = RLConfig.model_validate({"algorithm": {"preset": "grpo"}}).with_keys(words)
    found = stream_obstacle(config, kept_gradients(config.training))
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_what_was_asked_for_and_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_letters(tmp_path, "ppo", "training.stream=true") == 2
    assert "training.stream=true, but algorithm.whiten=true needs the whole batch" in capsys.readouterr().err
