"""The bookkeeping of a DeepSpeed step, with what DeepSpeed does written down; tests/contract/ has it on real ranks."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trueline.config.model import TrainingConfig
from trueline.training.engines import deepspeed_engine
from trueline.training.engines.deepspeed_engine import Cuts, DeepSpeedEngine
from trueline.training.engines.optimizer import learning_rate_at

COURSE = TrainingConfig.parse({"learning_rate": 1.0, "schedule": "linear"})
STEPS = 10


class Recorded:
    """What is asked of DeepSpeed and of the moving average, in order."""

    def __init__(self, norm: float, *, plain: bool, average: bool = True) -> None:
        self.calls: list[str] = []
        self.norm = norm
        self.groups: list[dict[str, float]] = [{"lr": 0.0}, {"lr": 0.0}]
        kept: Any = {"left over": torch.ones(1)}
        self.optimizer: Any = SimpleNamespace(
            param_groups=self.groups, overflow=not math.isfinite(norm), averaged_gradients=kept
        )
        engine: Any = object.__new__(DeepSpeedEngine)
        engine.config, engine.total_steps, engine.steps, engine.plain = COURSE, STEPS, 4, plain
        engine.optimizer, engine.module = self.optimizer, self
        engine.trained = {"weight": SimpleNamespace(grad=torch.tensor([norm]))}
        engine.cuts = Cuts()
        engine.average = SimpleNamespace(update=lambda: self.calls.append("average")) if average else None
        self.made: DeepSpeedEngine = engine

    def step(self) -> None:
        assert {group["lr"] for group in self.groups} == {learning_rate_at(4, COURSE, STEPS)}
        self.calls.append("step")

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")

    def get_global_grad_norm(self) -> float:
        return self.norm


@pytest.mark.parametrize("plain", [True, False])
def test_a_finite_step_is_counted_and_averaged_once(plain: bool) -> None:
    seen = Recorded(0.5, plain=plain)
    rate = learning_rate_at(4, COURSE, STEPS)
    assert seen.made.step() == {"grad_norm": 0.5, "learning_rate": rate, "skipped": 0.0}
    assert (seen.calls, seen.made.steps) == (["step", "average"], 5)
    assert seen.optimizer.averaged_gradients
    without = Recorded(0.5, plain=plain, average=False)
    assert without.made.step()["skipped"] == 0.0 and without.calls == ["step"]


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("plain", [True, False])
def test_a_step_that_is_not_finite_counts_nowhere(plain: bool, norm: float) -> None:
    """Without ZeRO, DeepSpeed would step; with it, it has not, and keeps gradients that must not stay."""
    seen = Recorded(norm, plain=plain)
    found = seen.made.step()
    assert found["skipped"] == 1.0 and not math.isfinite(found["grad_norm"])
    assert found["learning_rate"] == learning_rate_at(4, COURSE, STEPS) and seen.made.steps == 4
    assert seen.calls == (["zero_grad"] if plain else ["step"])
    assert plain or not seen.optimizer.averaged_gradients


def reading_rank(rank: int, cuts: Cuts, elements: int, patch: pytest.MonkeyPatch) -> Any:
    """One of four ranks at stage 3, which has so many elements of a tensor of ten."""
    engine: Any = object.__new__(DeepSpeedEngine)
    engine.named = engine.trained = {
        "w": SimpleNamespace(ds_shape=(5, 2), shape=(), ds_tensor=SimpleNamespace(ds_numel=elements))
    }
    engine.cuts, engine.stage, engine.plain = cuts, 3, False
    patch.setattr(deepspeed_engine.dist, "get_rank", lambda: rank)
    patch.setattr(deepspeed_engine.dist, "get_world_size", lambda: 4)
    return engine


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 3)), (1, (3, 6)), (2, (6, 9)), (3, (9, 10))])
def test_a_rank_of_stage_three_reads_its_own_part_of_a_tensor(
    rank: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten elements for four ranks: the last has one alone. Rank 0 reads all of the weight, which it hands to others."""
    engine = reading_rank(rank, Cuts(), 3, monkeypatch)
    assert engine.needed_slice("w", "exp_avg") == slice(*expected)
    assert engine.needed_slice("w", "weight") == (slice(0, 10) if rank == 0 else slice(*expected))


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 5)), (1, (10, 15)), (2, (5, 10)), (3, (15, 20))])
def test_a_rank_of_stage_three_reads_its_own_part_of_its_experts(
    rank: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 2 share the first ten of twenty elements, 1 and 3 the others; 0 and 1 read all of theirs."""
    cuts = Cuts(2, {"w": 0}, rank=rank % 2, alike=False)
    engine = reading_rank(rank, cuts, 5, monkeypatch)
    assert engine.needed_slice("w", "exp_avg") == slice(*expected)
    assert engine.needed_slice("w", "weight") == (slice(10 * rank, 10 * rank + 10) if rank < 2 else slice(*expected))
