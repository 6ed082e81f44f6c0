"""Under ZeRO 3 and FSDP2 no rank ever holds more of a model than its part and a little: it starts, learns, resumes."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, core_model_loading

from tests.support.architectures import make_model as make_model_of_kind
from tests.support.engines import ENGINES
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples, make_tiny_model
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.model import LoraConfig, ModelConfig, RanksConfig, TrainingConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.demo.material import make_tokenizer
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

RANKS, STEPS = 4, 3
GIB = 2**30
STATE_BYTES = 16  # of a parameter in float32: weight, gradient and two moments
CONTROLLER = Path("/sys/fs/cgroup/memory")

Weights = dict[str, np.ndarray]
Found = tuple[list[float], dict[str, float]]  # losses, and GiB of private memory at most, by phase


def make_model(folder: Path) -> int:
    """A random Llama of 351 million parameters, most of them in its layers; returns their number."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=14,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


class Peaks:
    """What this process has of private memory at most, by phase."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.phase = "start"
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            lines = Path("/proc/self/status").read_text().splitlines()
            size = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 2**20
            self.found[self.phase] = max(size, self.found.get(self.phase, 0.0))
            time.sleep(0.01)


def make_worker(rank: int, world: int, model: str, engine: str) -> Worker:
    training = TrainingConfig.parse(ENGINES[engine] | {"learning_rate": 1e-4})
    return started(Worker(WorkerSpec(ModelConfig(path=model, dtype="float32"), training, rank, world, 2 * STEPS, 0)))


def train(worker: Worker, rounds: range) -> list[float]:
    losses = []
    for number in rounds:
        samples = make_samples(RANKS, seed=number)
        set_weights(samples, "token_mean", 0)
        plan = plan_micro_batches([sample.length() for sample in samples], RANKS, Budget(1000))
        share = plan[worker.spec.rank]
        losses.append(worker.update(pack_samples(samples), share, "sft", LossSettings()).sums["loss"])
    return losses


def train_and_save(rank: int, world: int, model: str, folder: Path, engine: str) -> Found:
    peaks = Peaks()
    worker = make_worker(rank, world, model, engine)
    worker.prepare_saving(world)
    peaks.phase = "train"
    losses = train(worker, range(STEPS))
    peaks.phase = "save"
    folder.mkdir(exist_ok=True)
    worker.save(str(folder))
    saved = worker.save_result(True)
    assert saved is not None and saved.problem is None
    return losses + train(worker, range(STEPS, STEPS + 1)), peaks.found


def resume(rank: int, world: int, model: str, folder: Path, engine: str) -> Found:
    peaks = Peaks()
    worker = make_worker(rank, world, model, engine)
    worker.prepare_saving(world)
    peaks.phase = "load"
    worker.load(str(folder))
    peaks.phase = "train"
    return train(worker, range(STEPS, STEPS + 1)), peaks.found


CASES = {  # what is loaded: model, kind of head, rank of adapters, type
    "tied": ("tied", "language", 0, "float32"),
    "adapters": ("untied", "language", 4, "bfloat16"),
    "critic": ("untied", "value", 0, "float32"),
    "reward model": ("tied", "reward", 0, "bfloat16"),
    "process reward model": ("tied", "steps", 2, "float32"),
    "mixture": ("mixture", "language", 0, "float32"),
}


def load_shared(rank: int, world: int, models: dict[str, str], trained: bool) -> dict[str, dict[str, Weights]]:
    """The weights of every case, whole again, as every rank reads them and as they are shared out."""
    found: dict[str, dict[str, Weights]] = {}
    read: list[Any] = []
    reading: Any = core_model_loading
    materialize = reading._materialize_copy
    reading._materialize_copy = lambda stored, *rest: read.append(stored.get_shape()) or materialize(stored, *rest)
    for name, (model, head, adapters, dtype) in CASES.items():
        config = ModelConfig(path=models[model], dtype=dtype, lora=LoraConfig(rank=adapters))
        for engine in ("zero2" if trained else "zero0", "zero3", "fsdp2"):
            rate = {"learning_rate": 1e-6} if trained else {"replicas": 1 if engine == "fsdp2" else None}
            read.clear()
            ranks = (TrainingConfig if trained else RanksConfig).parse(ENGINES[engine] | rate)
            worker = started(Worker(WorkerSpec(config, ranks, rank, world, 10, seed=3, head=head)))
            weights = {name: tensor.float().numpy().copy() for name, tensor in worker.engine.weights()}
            assert {name: array.shape for name, array in weights.items()} == worker.shapes
            buffers = {name: tensor.float().numpy().copy() for name, tensor in worker.names.buffers.items()}
            found.setdefault(name, {})[engine] = weights | buffers
            assert bool(read) == (engine in ("zero0", "zero2") or rank == 0), (
                name,
                engine,
                read,
            )  # each byte once, by rank 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False])
def test_what_is_shared_out_while_it_is_read_is_the_model(
    tmp_path: Path, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what every rank reads whole at other stages, new heads and adapters too."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines announce AMX and lack it
    models = {name: str(make_tiny_model(tmp_path / name, tied=name == "tied")) for name in ("tied", "untied")}
    models["mixture"] = str(make_model_of_kind(tmp_path / "mixture", "glm4_moe"))  # with a buffer in its files
    for found in run_ranks(load_shared, 2, tmp_path / "ranks", models, trained):
        for name, by_engine in found.items():
            expected, *others = by_engine.values()
            for shared in others:
                assert shared.keys() == expected.keys(), name
                wrong = [key for key in shared if shared[key].tobytes() != expected[key].tobytes()]
                assert not wrong, (name, wrong)
        for engine in ("zero3", "fsdp2"):
            assert not found["critic"][engine]["score.weight"].any()
            assert any(name.endswith("e_score_correction_bias") for name in found["mixture"][engine])


def score_cut(rank: int, world: int, model: str, engine: str) -> list[np.ndarray]:
    """Score by a model that was whole before it was cut, and by one that never was."""
    samples = make_samples(4)
    (passes,) = plan_micro_batches([sample.length() for sample in samples], 1, Budget(512))
    config = ModelConfig(path=model, dtype="float32", tensor_parallel=2)
    ranks = TrainingConfig.parse(ENGINES[engine] | {"learning_rate": 1e-6})
    found = []
    for fits in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trueline.training.worker.fits_whole", lambda *given, fits=fits: fits)
            worker = started(Worker(WorkerSpec(config, ranks, rank, world, 10, seed=3)))
        found.append(worker.score(pack_samples(samples), passes, 1.0))
    return found


@pytest.mark.parametrize("engine", ["zero2", "fsdp2"])
def test_a_model_that_no_device_holds_is_cut_where_it_was_read(engine: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", tied=False)
    for whole, never in run_ranks(score_cut, 2, tmp_path / "ranks", str(model), engine):
        np.testing.assert_array_equal(whole, never)


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    """Memory control groups, one for each rank."""
    made: list[Path] = []
    try:
        for rank in range(RANKS):
            group = CONTROLLER / f"trueline-test-{os.getpid()}-{rank}"
            group.mkdir()
            made.append(group)
        assert (made[0] / "memory.limit_in_bytes").exists()
    except (OSError, AssertionError) as error:
        pytest.skip(f"no memory control groups (version 1) can be made here: {error}")
    else:
        yield made
    finally:
        for group in made:
            with suppress(OSError):
                group.rmdir()


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_a_model_trains_where_a_rank_has_room_for_its_part_alone(
    engine: str, tmp_path: Path, groups: list[Path]
) -> None:
    parameters = make_model(tmp_path / "model")
    limit = int(0.6 * GIB + 1.3 * STATE_BYTES * parameters / RANKS)
    for group in groups:
        (group / "memory.limit_in_bytes").write_text(str(limit))
    given = (str(tmp_path / "model"), tmp_path / "saved", engine)
    whole = run_ranks(train_and_save, RANKS, tmp_path / "first", *given, groups=groups)
    again = run_ranks(resume, RANKS, tmp_path / "second", *given, groups=groups)
    for (losses, peaks), (resumed, more) in zip(whole, again, strict=True):
        assert resumed == losses[STEPS:]
        assert max(*peaks.values(), *more.values()) < limit / GIB
    print(f"{parameters} parameters, limit {limit / GIB:.2f} GiB: {whole[0][1]}, resumed {again[0][1]}")  # noqa: T201
