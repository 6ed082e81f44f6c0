"""Experts divided over ranks: one gradient, one norm, one step, and files that any other division opens.

Covers `trueline.training.engines.deepspeed_experts` and `trueline.training.engines.tensor_cuts`.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.support.architectures import ARCHITECTURES, make_model
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples, make_tiny_mixture
from tests.support.whole import whole_state
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.model import FrozenConfig, ModelConfig, RanksConfig, TrainingConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.models.loading import shape_of
from trueline.training.engines.deepspeed_config import MIXTURES
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

SAMPLES, TOLERANCE = 7, 1e-5
CROWDED = "crowded"
# With this epsilon a step is nearly as long as the gradient, so clipping shows; the norms here are above 0.1.
COURSE = {"learning_rate": 1e-2, "epsilon": 1.0, "max_grad_norm": 0.1, "weight_decay": 0.1, "ema_decay": 0.5}

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    stage: int = 2
    experts: int = 2  # ranks that divide them
    kind: str = "mixtral"
    ring: int = 1
    checkpointing: bool = False
    offload: str = "none"
    optimizer: str = "adamw"
    dtype: str = "float32"

    def name(self) -> str:
        return "-".join(f"{key}={value}" for key, value in asdict(self).items() if value != asdict(Case())[key]) or "-"

    def worker(self, rank: int, world: int, folder: Path, kind: type[RanksConfig] = TrainingConfig) -> Worker:
        shape = {"context_parallel": self.ring, "gradient_checkpointing": self.checkpointing, "dtype": self.dtype}
        deepspeed = {"zero_stage": self.stage, "expert_parallel": self.experts}
        learning = COURSE | {"optimizer": self.optimizer} if kind is TrainingConfig else {}
        ranks = kind.parse({"deepspeed": deepspeed, "offload": self.offload} | learning)
        model = ModelConfig.parse({"path": str(folder / self.kind), **shape})
        return started(Worker(WorkerSpec(model, ranks, rank, world, 10, seed=0)))


PAIR = [
    *(Case(stage) for stage in (0, 1, 2, 3)),
    *(Case(kind=kind) for kind in MIXTURES if kind != "mixtral"),
    *(Case(stage, kind="qwen3_moe") for stage in (0, 3)),
    *(Case(stage, checkpointing=True) for stage in (0, 3)),
    *(Case(stage, ring=2) for stage in (2, 3)),
    *(Case(2, offload=kind) for kind in ("moments", "optimizer")),
    Case(3, offload="all"),
    Case(0, optimizer="muon"),
    *(Case(stage, kind=CROWDED) for stage in (0, 1, 2, 3)),
]
FOUR = [Case(stage, kind=kind) for stage in (0, 1, 2, 3) for kind in ("mixtral", CROWDED)]  # two ranks have each expert


def alone(case: Case) -> Case:
    return Case(0, 1, case.kind, optimizer=case.optimizer)


def accumulate(worker: Worker, seed: int = 0) -> None:
    samples, mesh = make_samples(SAMPLES, seed=seed), worker.spec.mesh()
    set_weights(samples, "token_mean", 0)
    plan = plan_micro_batches([sample.length() for sample in samples], mesh.data, Budget(10_000, 2))
    worker.accumulate(pack_samples(samples), plan[mesh.data_place(worker.rank)], "sft", LossSettings())


def everything(worker: Worker) -> Tensors:
    """Weights as they compute, as they are stepped, moments and averages."""
    found = {f"{name}/copy": tensor.float().numpy().copy() for name, tensor in worker.engine.weights()}
    return found | {name: tensor.numpy() for name, tensor in whole_state(worker.engine).items()}


def learn(rank: int, world: int, folder: Path, cases: list[Case]) -> dict[Case, tuple[Tensors, float, Tensors]]:
    """Gradients of a minibatch, their norm, and what a step makes of them."""
    found = {}
    for case in cases:
        worker = case.worker(rank, world, folder)
        held = {name: shape_of(one) for name, one in worker.model.named_parameters() if ".mlp.experts." in name}
        assert held == {name: (4 // case.experts, *worker.shapes[name][1:]) for name in held} and held  # of 4 experts
        if case.kind == CROWDED:  # a loop over the experts that have tokens, without which there is no gradient
            worker.model.set_experts_implementation("eager")
        accumulate(worker)
        gradients = worker.gradients()
        found[case] = gradients, worker.engine.step()["grad_norm"], everything(worker)
    return found


def make_crowded(folder: Path) -> None:
    """A model whose routers send every token to the first two experts, so that a rank has nothing to compute."""
    make_model(folder, "glm4_moe")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.tensor([9.0, 9.0, 0.0, 0.0])
    save_file(tensors, file, {"format": "pt"})


class Learning:
    """What each case learns, in processes that all cases of a number of ranks share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for kind in MIXTURES:
            (make_model if kind in ARCHITECTURES else make_tiny_mixture)(folder / kind, kind)
        make_crowded(folder / CROWDED)

    def of(self, world: int, cases: list[Case]) -> list[dict[Case, tuple[Tensors, float, Tensors]]]:
        return run_ranks(learn, world, self.folder / f"ranks{world}", self.folder, cases)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learning]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines announce AMX and lack it
        yield Learning(tmp_path_factory.mktemp("experts"))


def check_learning(models: Learning, world: int, cases: list[Case]) -> None:
    """1e-5 on every number of a gradient, and on what a clipped step makes of it, on every rank."""
    (expected,) = models.of(1, list(dict.fromkeys(map(alone, cases))))
    for found in models.of(world, cases):
        for case in cases:
            gradients, norm, after = expected[alone(case)]
            worked_out = math.sqrt(sum(float(np.square(array).sum()) for array in gradients.values()))
            idle = [array[2:] for name, array in gradients.items() if ".mlp.experts." in name]
            assert case.kind != CROWDED or not any(array.any() for array in idle)
            assert norm == pytest.approx(worked_out, rel=TOLERANCE) and norm > 2 * COURSE["max_grad_norm"]
            assert found[case][1] == pytest.approx(norm, rel=TOLERANCE), case
            check_equal(found[case][0], gradients, str(case))
            # Muon iterates in bfloat16, and moves numbers by 1e-3 and more.
            check_equal(found[case][2], after, str(case), TOLERANCE if case.optimizer == "adamw" else 2e-4)


def check_equal(found: Tensors, expected: Tensors, words: str, tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=tolerance, err_msg=f"{words} {name}")


@pytest.mark.slow
def test_two_ranks_with_half_of_the_experts_learn_what_one_rank_learns(models: Learning) -> None:
    check_learning(models, 2, PAIR)


@pytest.mark.soak
def test_four_ranks_of_which_two_have_each_expert_learn_what_one_rank_learns(models: Learning) -> None:
    check_learning(models, 4, FOUR)


def stumble(rank: int, world: int, folder: Path, cases: list[Case]) -> list[tuple[Case, str]]:
    """What a gradient of one expert, on the last rank alone, that is not finite changes on this rank."""
    wrong = []
    for case in cases:
        worker = case.worker(rank, world, folder)
        accumulate(worker)
        assert worker.engine.step()["skipped"] == 0.0
        before, spoilt = everything(worker), [rank == world - 1]
        expert = dict(worker.model.named_parameters())["model.layers.1.mlp.experts.down_proj"]
        expert.register_hook(lambda gradient, spoilt=spoilt: gradient * math.inf if spoilt[0] else gradient)
        accumulate(worker, 1)
        wrong += [(case, "stepped")] * (worker.engine.step()["skipped"] != 1.0)
        after, spoilt[0] = everything(worker), False
        wrong += [(case, name) for name in before if before[name].tobytes() != after[name].tobytes()]
        accumulate(worker, 2)
        wrong += [(case, "stopped")] * (worker.engine.step()["skipped"] != 0.0)
        wrong += [(case, "not finite")] * any(not np.isfinite(array).all() for array in everything(worker).values())
    return wrong


@pytest.mark.slow
def test_no_rank_steps_if_an_expert_of_another_has_a_gradient_that_is_not_finite(models: Learning) -> None:
    cases = [*(Case(stage) for stage in (0, 1, 2, 3)), Case(2, offload="optimizer"), Case(3, offload="all")]
    assert run_ranks(stumble, 2, models.folder / "stumble", models.folder, cases) == [[], []]


def keep(rank: int, world: int, folder: Path, cases: list[Case], saved: str) -> dict[Case, Tensors]:
    """Train, save, and train on."""
    found = {}
    for case in cases:
        worker = case.worker(rank, world, folder)
        accumulate(worker)
        worker.engine.step()
        target = folder / saved / case.name()
        target.mkdir(parents=True, exist_ok=True)
        worker.save(str(target))
        result = worker.save_result(wait=True)
        assert result is not None and result.problem is None
        found[case] = state = everything(worker)
        if world > 1:
            dist.barrier()
        files = {name: one for file in target.glob("model/*.safetensors") for name, one in load_file(file).items()}
        sent = {name: tensor.clone() for name, tensor in worker.outgoing.plain_weights()}
        assert files.keys() == sent.keys() and all(torch.equal(files[name], sent[name]) for name in sent)
        assert any(name.endswith("experts.gate_up_proj/exp_avg") for name in state)
    return found


def resume(
    rank: int, world: int, folder: Path, pairs: list[tuple[Case, Case]], saved: str
) -> dict[Case, tuple[Tensors, Tensors]]:
    """What another division opens, and what it makes of the next step."""
    found = {}
    for wrote, reads in pairs:
        worker = reads.worker(rank, world, folder)
        worker.load(str(folder / saved / wrote.name()))
        opened = everything(worker)
        accumulate(worker, 1)
        worker.engine.step()
        found[wrote] = opened, everything(worker)
    return found


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.soak)])
def test_what_several_ranks_save_one_rank_opens_and_the_other_way_round(ranks: int, models: Learning) -> None:
    """Bit for bit, with moments and averages; and the next step is that of ranks that went on."""
    divided, whole = [Case(stage) for stage in (0, 1, 2, 3)], [Case(0, 1), Case(3, 1)]
    half = Case(3, dtype="bfloat16")  # its weights are not its master weights
    folder, several = models.folder, f"saved{ranks}"
    written = run_ranks(keep, ranks, folder / f"divided{ranks}", folder, [*divided, half], several)[0]
    written |= run_ranks(keep, 1, folder / f"whole{ranks}", folder, whole, "saved1")[0]
    pairs = [(case, whole[number % 2]) for number, case in enumerate(divided)]
    opened = run_ranks(resume, 1, folder / f"open{ranks}", folder, pairs, several)
    others = list(zip(whole, divided[1::2], strict=True))
    opened += run_ranks(resume, ranks, folder / f"divide{ranks}", folder, others, "saved1")
    opened += run_ranks(
        resume, ranks, folder / f"again{ranks}", folder, [(case, case) for case in (*divided, half)], several
    )
    after = opened[-1][divided[0]][1]
    for found in opened:
        for case, (state, stepped) in found.items():
            assert state.keys() == written[case].keys()
            assert not [name for name in state if not np.array_equal(state[name], written[case][name])]
            if case != half:
                check_equal(stepped, after, str(case))


def score(rank: int, world: int, folder: Path, cases: list[Case]) -> list[np.ndarray]:
    """Log-probs of a model that only scores, of all samples on every rank."""
    passes, samples = [list(range(SAMPLES))], pack_samples(make_samples(SAMPLES))
    return [case.worker(rank, world, folder, FrozenConfig).score(samples, passes, 1.0) for case in cases]


@pytest.mark.slow
def test_a_model_that_only_scores_may_be_divided(models: Learning) -> None:
    (expected,) = run_ranks(score, 1, models.folder / "alone", models.folder, [Case(0, 1)])[0]
    for found in run_ranks(score, 2, models.folder / "scores", models.folder, [Case(0), Case(3)]):
        for logprobs in found:
            np.testing.assert_allclose(logprobs, expected, rtol=0, atol=TOLERANCE)
