"""What the keys of FSDP2 change: when weights are gathered or copied and gradients reduced, and never what is computed.

Covers `trueline.training.engines.fsdp2_engine`.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engines import ENGINES, FSDP2
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples, make_tiny_model
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.base import Tree
from trueline.config.model import FrozenConfig, ModelConfig, TrainingConfig
from trueline.data.batching import pack_samples
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

PASSES = 3  # of each rank
NAMES = ("zero2", *FSDP2)
FREED: dict[str, Tree] = {"fsdp2-freed": {"engine": "fsdp2", "fsdp2": {"reshard": True, "reduce_each_pass": True}}}


def watch(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often FSDP2 gathers a group of weights, or copies it on one rank, and reduces one of gradients."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    calls: Counter[str] = Counter()
    for name in ("foreach_all_gather", "foreach_reduce"):
        plain = getattr(groups, name)

        def counted(*given: Any, name: str = name, plain: Any = plain, **named: Any) -> Any:
            calls[name] += 1
            return plain(*given, **named)

        patch.setattr(groups, name, counted)
    show = groups.FSDPParamGroup._to_unsharded

    def shown(group: Any) -> None:
        calls["shown"] += 1
        show(group)

    patch.setattr(groups.FSDPParamGroup, "_to_unsharded", shown)
    return calls


def train(
    rank: int, world: int, model: str, names: tuple[str, ...] = NAMES
) -> dict[str, tuple[Counter[str], list[np.ndarray], int]]:
    """Score, update and score again; count what happens in the update."""
    found = {}
    samples = make_samples(world * PASSES, seed=5)
    set_weights(samples, "token_mean", 0)
    mine = [[number] for number in range(rank, len(samples), world)]
    for name in names:
        training = TrainingConfig.parse((ENGINES | FREED)[name] | {"learning_rate": 1e-2})
        worker = started(Worker(WorkerSpec(ModelConfig(path=model, dtype="float32"), training, rank, world, 9, 0)))
        packed = pack_samples(samples)
        scores = [worker.score(packed, mine, 1.0)]
        if name != "zero2":  # half a step that is given up, as when a streamed gradient is proven, leaves no trace
            worker.accumulate(packed, mine, "sft", replace(LossSettings(), then="more"))
            assert worker.engine.discard()
        with pytest.MonkeyPatch.context() as patch:
            calls = watch(patch)
            norm = worker.update(packed, mine, "sft", LossSettings()).step["grad_norm"]
        scores += [worker.score(packed, mine, 1.0), np.array(norm)]
        found[name] = calls, scores, len(worker.model.get_decoder().layers)
    return found


def score_in_bfloat16(rank: int, world: int, model: str) -> dict[str, tuple[set[str], np.ndarray]]:
    """Start a reference with each engine, which compares it with plain Transformers, and score."""
    found, packed = {}, pack_samples(make_samples(world, seed=5))
    for engine in ("deepspeed", "fsdp2"):
        spec = WorkerSpec(ModelConfig(path=model, dtype="bfloat16"), FrozenConfig(engine=engine), rank, world, 9, 0)
        worker = started(Worker(spec))
        kept = {str(one.dtype) for one in worker.model.parameters()}
        found[engine] = kept, worker.score(packed, [[rank]], 1.0)
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_model_that_only_scores_keeps_its_type(world: int, tmp_path: Path) -> None:
    """It has no master weights: in float32 it would need twice the memory and would not be the model that was read."""
    model = str(make_tiny_model(tmp_path / "model", tied=False))
    for found in run_ranks(score_in_bfloat16, world, tmp_path / "ranks", model):
        (_, expected), (kept, scores) = found["deepspeed"], found["fsdp2"]
        assert kept == {"torch.bfloat16"}
        np.testing.assert_array_equal(scores, expected)


@pytest.mark.slow
def test_keys_move_exchanges_and_change_no_number(tmp_path: Path) -> None:
    """Weights in use are those of the last step, though a model that is kept whole is not gathered again to score."""
    model = str(make_tiny_model(tmp_path / "model", tied=False))
    for found in run_ranks(train, 2, tmp_path / "ranks", model):
        _, (first, last, norm), layers = found["zero2"]
        assert np.abs(last - first).max() > 1e-2
        for name in FSDP2:
            for one, other in zip(found[name][1], (first, last, norm), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
        groups = layers + 1  # and what no layer has
        exchanges = {
            name: tuple(found[name][0][key] for key in ("foreach_all_gather", "foreach_reduce")) for name in FSDP2
        }
        assert exchanges == {
            "fsdp2": (PASSES * (groups + layers), PASSES * groups),
            "fsdp2-kept": (groups, PASSES * groups),
            "fsdp2-late": (PASSES * (groups + layers), groups),
            "fsdp2-copies": (0, groups),
        }
        assert found["fsdp2"][0]["shown"] == PASSES * (groups + layers)
        assert found["fsdp2-copies"][0]["shown"] == groups


def test_one_rank_copies_its_weights_and_reduces_gradients_once_a_step(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "model", tied=False))
    (found,) = run_ranks(train, 1, tmp_path / "ranks", model, ("zero2", "fsdp2", "fsdp2-freed"))
    for name in ("fsdp2", "fsdp2-freed"):
        for one, other in zip(found[name][1], found["zero2"][1], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, err_msg=name)
    (plain, _, layers), (freed, _, _) = found["fsdp2"], found["fsdp2-freed"]
    assert (plain["shown"], plain["foreach_reduce"]) == (layers + 1, layers + 1)
    assert (freed["shown"], freed["foreach_reduce"]) == (PASSES * (2 * layers + 1), PASSES * (layers + 1))
