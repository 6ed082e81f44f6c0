"""A pass that runs out of memory half way leaves nothing behind: the step is made again as if it had not been."""

from typing import Any

import pytest
import torch

from tests.support.engines import ENGINES, ZERO
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples, make_tiny_model
from tests.support.whole import whole_state
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import pack_samples
from trueline.training.report import LossSettings, Report
from trueline.training.worker import Worker, WorkerSpec

CASES = [*((engine, "float32") for engine in (*ZERO, "fsdp2")), ("zero2", "bfloat16"), ("fsdp2", "bfloat16")]
PASSES = [[0, 1], [2, 3], [4, 5]]


def make_worker(engine: str, dtype: str, model: str) -> Worker:
    training = TrainingConfig.parse(ENGINES[engine] | {"learning_rate": 1e-3})
    return started(Worker(WorkerSpec(ModelConfig(path=model, dtype=dtype), training, 0, 1, 10, seed=0)))


def train(worker: Worker, seed: int) -> Report:
    samples = make_samples(6, seed=seed)
    set_weights(samples, "token_mean", 0)
    settings = LossSettings(1.0, AlgorithmConfig.parse({"preset": "dr_grpo"}))
    return worker.update(pack_samples(samples), PASSES, "policy", settings)


def run_out(worker: Worker) -> Any:
    """Memory runs out in the second pass, when half of its layers have their gradients and a bucket holds them."""
    layers: Any = worker.model.get_decoder().layers
    passes: list[int] = []

    def count(gradient: torch.Tensor) -> None:
        passes.append(1)
        if len(passes) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def watch(layer: Any, given: Any, output: torch.Tensor) -> None:
        output.register_hook(count)

    return layers[len(layers) // 2].register_forward_hook(watch)


def stumble(rank: int, world: int, model: str) -> dict[Any, tuple[str, bool]]:
    found = {}
    for engine, dtype in CASES:
        worker, plain = make_worker(engine, dtype, model), make_worker(engine, dtype, model)
        train(worker, 1)
        hook = run_out(worker)
        try:
            said = train(worker, 2).out_of_memory
        except torch.OutOfMemoryError:
            said = "raised"
        hook.remove()
        if said == "raised":
            found[engine, dtype] = said, True
            continue
        train(worker, 2)
        train(plain, 1)
        train(plain, 2)
        mine, theirs = whole_state(worker.engine), whole_state(plain.engine)
        same = mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        found[engine, dtype] = said, same
    return found


@pytest.mark.slow
def test_the_step_is_made_again_as_if_memory_had_not_run_out(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit at ZeRO 0 to 2 and with FSDP2; ZeRO 3 has parameters under way, and says so at once."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines announce AMX and lack it
    folder = tmp_path_factory.mktemp("memory")
    (found,) = run_ranks(stumble, 1, folder / "ranks", str(make_tiny_model(folder / "model", tied=True)))
    for case, (said, same) in found.items():
        assert (said, same) == ("raised" if case[0] == "zero3" else "CUDA out of memory", True), case
