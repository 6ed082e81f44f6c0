"""Six steps are three steps, a checkpoint and three more: on the same ranks bit for bit, on others within rounding."""

import math
import re
import runpy
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import ENGINES, FSDP2, ZERO
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples, make_tiny_model
from tests.support.whole import whole_state
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.training.report import LossSettings
from trueline.training.saving import SavedState
from trueline.training.worker import Worker, WorkerSpec

pytestmark = pytest.mark.slow
PAGE = Path(__file__).resolve().parents[2] / "docs" / "run_folder.md"
FIRST, REST = range(3), range(3, 6)
# Relative L2 distance of each weight after a change of ranks or engine; Muon's iterations are in bfloat16, and without
# its moments weights would be 1e-3 and more apart.
TOLERANCE = {"adamw": 1e-5, "muon": 1e-4}
COURSE = {"learning_rate": 1e-3, "schedule": "linear", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5}

State = dict[str, np.ndarray]  # `tensor/weight`, the moments, and `tensor/average`


@dataclass(frozen=True)
class Case:
    """How a model is trained and over how many ranks it is spread."""

    engine: str = "zero2"
    ranks: int = 2
    ring: int = 1
    tensor: int = 1
    lora: int = 0
    ema: float = 0.0
    offload: str = "none"
    dtype: str = "float32"
    optimizer: str = "adamw"

    def name(self) -> str:
        changed = [f"{key}={value}" for key, value in asdict(self).items() if value != asdict(Case())[key]]
        return "-".join(changed) or "default"

    def launch(self) -> tuple[int, int]:
        """Processes, and the tensor parallelism that they keep. Plain PyTorch runs on rank 0 of any launch."""
        return (2, 1) if self.engine == "torch" else (self.ranks, self.tensor)

    def worker(self, rank: int, model: str) -> Worker:
        lora = {"rank": self.lora, "dropout": 0.1 if self.lora else 0.0}  # draws random numbers at every step
        shape = {
            "path": model,
            "dtype": self.dtype,
            "context_parallel": self.ring,
            "tensor_parallel": self.tensor,
            "lora": lora,
        }
        settings = {"ema_decay": self.ema, "offload": self.offload, "optimizer": self.optimizer}
        training = TrainingConfig.parse(COURSE | ENGINES[self.engine] | settings)
        worker = Worker(WorkerSpec(ModelConfig.parse(shape), training, rank, self.ranks, REST.stop, seed=0))
        if self.engine != "torch":
            return started(worker)
        worker.start(("", 0))  # plain PyTorch meets nobody
        return worker


Change = tuple[Case, Case]  # what saves, what resumes

TORCH = Case("torch", ranks=1)
SAME = [
    TORCH,
    *(Case(engine) for engine in ZERO),
    *(Case(engine, tensor=2) for engine in ("zero1", "zero3")),
    Case("zero2", ring=2),
    Case("zero2", lora=4),
    Case("zero3", ema=0.8),
    Case("zero2", offload="optimizer"),
    Case("zero2", offload="moments"),
    Case("zero3", offload="all"),
    Case("zero0", optimizer="muon"),
    *(Case(engine) for engine in FSDP2),
    Case("fsdp2", tensor=2),
    Case("fsdp2", lora=4),
    Case("fsdp2", ema=0.8, optimizer="muon"),
    *(Case("fsdp2", offload=kind, ema=0.8) for kind in ("moments", "all")),
]
SAME_RARE = [
    *(replace(TORCH, **change) for change in ({"ema": 0.8}, {"offload": "moments"})),
    *(Case(engine, tensor=2) for engine in ("zero0", "zero2")),
    Case("zero1", tensor=2, ema=0.8),
    Case("zero3", ring=2),
    *(Case(engine, ema=0.8) for engine in ("zero0", "zero1", "zero2")),
    *(Case(engine, offload="moments") for engine in ("zero0", "zero3")),
]
CHANGED: list[Change] = [
    (Case("zero3", ema=0.8), Case("zero1", ranks=1, ema=0.8)),
    (Case("zero1", tensor=2), Case("zero1", ranks=1)),
    (Case("zero3", tensor=2), Case("zero3")),
    (Case("zero2"), Case("zero2", tensor=2)),
    (Case("zero2", ring=2), Case("zero2", ranks=1)),
    (Case("zero2"), TORCH),
    (Case("zero0", optimizer="muon"), replace(TORCH, optimizer="muon")),
    (TORCH, Case("zero3")),
    (Case("zero2", offload="moments"), Case("zero2")),
    (Case("zero3", ema=0.8), Case("fsdp2", ema=0.8)),
    (Case("fsdp2", ema=0.8), Case("zero1", ranks=1, ema=0.8)),
    (Case("fsdp2-copies", optimizer="muon"), Case("fsdp2", ranks=1, optimizer="muon")),
    (Case("fsdp2", tensor=2), Case("zero2")),
    (Case("fsdp2", tensor=2, optimizer="muon"), Case("fsdp2", ranks=1, optimizer="muon")),
    (TORCH, Case("fsdp2", offload="all")),
    *((Case(f"zero{stage}"), Case(f"zero{3 - stage}")) for stage in (0, 1)),
]
CHANGED_RARE: list[Change] = [
    (Case("zero3"), Case("zero1", ranks=1)),
    (Case("zero0", tensor=2), Case("zero2")),
    (Case("zero1", tensor=2, ema=0.8), Case("zero3", ema=0.8)),
    (TORCH, Case("zero3", tensor=2)),
    (Case("zero2"), Case("zero2", ring=2)),
    (Case("zero2"), Case("zero3", offload="moments")),
    *((Case(f"zero{stage}"), Case(f"zero{3 - stage}")) for stage in (2, 3)),
]


def in_soak(rare: list[Any]) -> list[Any]:
    return [pytest.param(one, marks=pytest.mark.soak) for one in rare]


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[Change]:
    """What the selected tests of this file compare; nothing else is computed."""
    items = [item for item in request.session.items if item.path == request.path]
    given = [item.callspec.params for item in items if hasattr(item, "callspec")]
    changes = [one.get("change") or (one["case"], one["case"]) for one in given if one.keys() & {"change", "case"}]
    return list(dict.fromkeys(changes))


def train(worker: Worker, rounds: Iterable[int]) -> list[float]:
    """The loss at each step; the samples of a step depend on nothing but its number."""
    settings = LossSettings(0.8, AlgorithmConfig.parse({"preset": "grpo", "kl": {"coefficient": 0.1}}))
    mesh, losses = worker.spec.mesh(), []
    for number in rounds:
        samples = make_samples(6, seed=number)
        set_weights(samples, "sequence_mean", 24)
        plan = plan_micro_batches([sample.length() for sample in samples], mesh.data, Budget(10_000, 2))
        share = plan[mesh.data_place(worker.spec.rank)]
        losses.append(worker.update(pack_samples(samples), share, "policy", settings).sums["loss"])
    return losses


def save(worker: Worker, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    worker.save(str(folder))
    saved = worker.save_result(True)
    assert saved is not None and saved.problem is None


def state_of(worker: Worker) -> State:
    return {name: tensor.numpy() for name, tensor in whole_state(worker.engine).items()}


def train_whole(rank: int, world: int, model: str, folder: Path, cases: list[Case]) -> dict[Case, State]:
    """Uninterrupted, with a checkpoint in the middle."""
    ends = {}
    for case in cases:
        if rank < case.ranks:
            worker = case.worker(rank, model)
            train(worker, FIRST)
            save(worker, folder / case.name())
            train(worker, REST)
            ends[case] = state_of(worker)
    return ends


def train_rest(rank: int, world: int, model: str, folder: Path, changes: list[Change]) -> dict[Change, State]:
    ends = {}
    for saved, case in changes:
        if rank < case.ranks:
            worker = case.worker(rank, model)
            worker.load(str(folder / saved.name()))
            train(worker, REST)
            ends[saved, case] = state_of(worker)
    return ends


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), tied=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def whole(model: str, saved: Path, asked: list[Change]) -> list[dict[Case, State]]:
    """Of each rank: where the uninterrupted runs end. Leaves their checkpoints in `saved`."""
    found: list[dict[Case, State]] = [{}, {}]
    for launch in dict.fromkeys(case.launch() for case, _ in asked):
        cases = [case for case in dict.fromkeys(case for case, _ in asked) if case.launch() == launch]
        results = run_ranks(train_whole, launch[0], saved / f"whole-{launch}", model, saved, cases)
        for ends, result in zip(found, results, strict=True):
            ends.update(result)
    return found


@pytest.fixture(scope="module")
def resumed(model: str, saved: Path, asked: list[Change], whole: list[dict[Case, State]]) -> list[dict[Change, State]]:
    """Of each rank: where runs end that took up the checkpoints of `whole` in processes of their own."""
    found: list[dict[Change, State]] = [{}, {}]
    for launch in dict.fromkeys(change[1].launch() for change in asked):
        changes = [change for change in asked if change[1].launch() == launch]
        results = run_ranks(train_rest, launch[0], saved / f"rest-{launch}", model, saved, changes)
        for ends, result in zip(found, results, strict=False):
            ends.update(result)
    return found


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("case", [*SAME, *in_soak(SAME_RARE)], ids=Case.name)
def test_a_resumed_run_equals_the_uninterrupted_one(
    case: Case, whole: list[dict[Case, State]], resumed: list[dict[Change, State]]
) -> None:
    """Weights, moments and averages of every rank, bit for bit."""
    for rank in range(case.ranks):
        expected, found = whole[rank][case], resumed[rank][case, case]
        assert set(found) == set(expected)
        assert any(name.endswith("/average") for name in found) == bool(case.ema)
        wrong = {name: distance(found[name], expected[name]) for name in found if differs(found[name], expected[name])}
        assert not wrong, f"rank {rank}: {wrong}"


def differs(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() != other.tobytes()


@pytest.mark.parametrize(
    "change", [*CHANGED, *in_soak(CHANGED_RARE)], ids=lambda change: f"{change[0].name()}-to-{change[1].name()}"
)
def test_a_run_resumes_on_other_ranks_and_engines(
    change: Change, whole: list[dict[Case, State]], resumed: list[dict[Change, State]]
) -> None:
    expected, found = whole[0][change[0]], resumed[0][change]
    assert set(found) == set(expected)
    far = {
        name: distance(tensor, expected[name])
        for name, tensor in found.items()
        if name.endswith(("/weight", "/average"))
    }
    assert max(far.values()) < TOLERANCE[change[1].optimizer], far


LOWER = [
    *(Case(engine, ranks=1, ema=0.8, dtype="bfloat16") for engine in (*ZERO, "fsdp2")),
    Case("fsdp2", ranks=1, optimizer="muon", dtype="bfloat16"),
    Case("zero1", ranks=1, offload="optimizer", dtype="bfloat16"),
    Case("zero2", ranks=1, offload="moments", dtype="bfloat16"),
    Case("zero3", ranks=1, offload="all", dtype="bfloat16"),
]
EXACT = {one.optimizer: one for one in (Case(ranks=1), Case("fsdp2", ranks=1, optimizer="muon"))}


def train_in_bfloat16(rank: int, world: int, model: str, folder: Path) -> dict[Case, list[float]]:
    """Losses of six steps with every engine, the last three from a checkpoint that goes on as if there were none."""
    losses = {}
    for case in LOWER:
        worker, again = case.worker(rank, model), case.worker(rank, model)
        losses[case] = train(worker, FIRST)
        save(worker, folder / case.name())
        train(worker, REST)
        again.load(str(folder / case.name()))
        losses[case] += train(again, REST)
        expected, found = state_of(worker), state_of(again)
        assert any(name.endswith("/average") for name in found) == bool(case.ema)
        assert not [name for name in expected if differs(found[name], expected[name])], case.name()
    return losses | {exact: train(exact.worker(rank, model), range(REST.stop)) for exact in EXACT.values()}


def test_bfloat16_follows_float32(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower precision, same course; master weights, moments and averages survive a checkpoint."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines announce AMX and lack it
    losses = run_ranks(train_in_bfloat16, 1, tmp_path / "ranks", model, tmp_path)[0]
    for case in LOWER:
        np.testing.assert_allclose(losses[case], losses[EXACT[case.optimizer]], atol=0.02, err_msg=case.name())


FOUR, TWO = Case("zero3", ranks=4, tensor=2), Case("fsdp2")
FEWER = {ranks: [Case(engine, ranks=ranks) for engine in ("zero1", "zero2", "zero3", "fsdp2")] for ranks in (1, 2, 3)}
OTHERS = {ranks: [Case("fsdp2", ranks=ranks)] for ranks in (1, 3)}


def save_and_go_on(rank: int, world: int, model: str, folder: Path, case: Case) -> float:
    """The loss of the step behind the checkpoint."""
    worker = case.worker(rank, model)
    train(worker, FIRST)
    save(worker, folder)
    return train(worker, [REST.start])[0]


def take_up(rank: int, world: int, model: str, folder: Path, cases: list[Case]) -> dict[Case, tuple[float, int]]:
    """The loss of the step behind the checkpoint, and how many elements of a moment this rank reads."""
    found = {}
    for case in cases:
        worker = case.worker(rank, model)
        worker.load(str(folder))
        sizes = {name: math.prod(shape) for name, shape in worker.shapes.items()}
        slices = [worker.engine.needed_slice(name, "moment").indices(size) for name, size in sizes.items()]
        read = sum(len(range(*one)) for one in slices)
        found[case] = train(worker, [REST.start])[0], read
    return found


@pytest.mark.parametrize("case", [Case("zero3"), TWO, replace(TORCH, ema=0.5)], ids=Case.name)
def test_torch_distributed_checkpoint_reads_the_training_state(case: Case, model: str, tmp_path: Path) -> None:
    """Flat, from any number of ranks, by the lines of the page about checkpoints."""
    count, saved = case.launch()[0] if case.engine != "torch" else 1, tmp_path / "saved"
    run_ranks(save_and_go_on, count, tmp_path / "ranks", model, saved, case)
    ours = SavedState(saved)
    (lines,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "lines.py").write_text(lines.replace("runs/first/checkpoints/step_000050", str(saved)))
    flat = runpy.run_path(str(tmp_path / "lines.py"))["state"]
    assert flat.keys() == ours.shapes.keys()
    for key, tensor in flat.items():
        assert torch.equal(tensor, ours.read(key).flatten()), key


@pytest.mark.parametrize(
    ("saver", "takers", "tolerance"),
    [pytest.param(FOUR, FEWER, 1e-5, marks=pytest.mark.soak), (TWO, OTHERS, 1e-6)],
    ids=["four ranks of ZeRO 3, two of them cut", "two ranks of FSDP2"],
)
def test_what_some_ranks_saved_goes_on_with_fewer_and_more(
    saver: Case, takers: dict[int, list[Case]], tolerance: float, model: str, tmp_path: Path
) -> None:
    saved, count = tmp_path / "saved", saver.ranks
    losses = run_ranks(save_and_go_on, count, tmp_path / "saver", model, saved, saver)
    expected = sum(losses[:: saver.tensor])  # of each data place
    files = [saved.rglob(f"*-0000{rank}-of-0000{count}.*") for rank in range(1, count + 1)]
    sizes = [sum(file.stat().st_size for file in own) for own in files]
    assert max(sizes) < 1.05 * sum(sizes) / count, sizes
    elements = sum(shape.numel() for key, shape in SavedState(saved).shapes.items() if key.endswith("/weight"))
    for ranks, cases in takers.items():
        results = run_ranks(take_up, ranks, tmp_path / str(ranks), model, saved, cases)
        for case in cases:
            assert abs(sum(result[case][0] for result in results) - expected) < tolerance, case.name()
            assert sum(result[case][1] for result in results) == elements, case.name()  # each of them once
