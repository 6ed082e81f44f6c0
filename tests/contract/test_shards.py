"""What ranks hold of weights and training state, with every engine and cut: together it is everything, once."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.architectures import make_model
from tests.support.engines import ENGINES, EXPERTS, FSDP2, ZERO
from tests.support.ranks import run_ranks, started
from tests.support.tiny import make_samples, make_tiny_model
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.model import ModelConfig, TrainingConfig
from trueline.data.batching import Budget, pack_samples, plan_micro_batches
from trueline.models.loading import DTYPES
from trueline.runtime.fingerprints import add_bits, total_sums, wrap_int64
from trueline.runtime.transport import WIRE_DTYPES
from trueline.training.engines.engine import AVERAGE
from trueline.training.engines.shards import Shard
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

RANKS = 2


@dataclass(frozen=True)
class Case:
    engine: str
    tensor: int = 1
    model: str = "tied"
    dtype: str = "float32"
    lora: str = ""  # how adapters are sent

    def worker(self, rank: int, models: dict[str, str]) -> Worker:
        model = {"path": models[self.model], "dtype": self.dtype, "tensor_parallel": self.tensor}
        if self.lora:
            model["lora"] = {"rank": 2, "sync": self.lora}
        training = ENGINES[self.engine] | {"learning_rate": 1e-2, "ema_decay": 0.5}
        spec = WorkerSpec(ModelConfig.parse(model), TrainingConfig.parse(training), rank, RANKS, 10, seed=0)
        return started(Worker(spec))


SHARDED = ("zero3", "fsdp2")
WHOLE = [
    *(Case(engine) for engine in (*ZERO, *FSDP2)),
    *(Case(engine, model="mixture") for engine in (*SHARDED, *EXPERTS)),
    *(Case(engine, dtype="bfloat16") for engine in ("zero2", "fsdp2")),
    Case("zero2-experts", dtype="bfloat16", model="mixture"),
    *(Case(engine, model="untied", lora=lora) for engine in SHARDED for lora in ("merged", "adapter")),
]
CUT = [Case(engine, tensor=2, model="untied") for engine in (*ZERO, "fsdp2")]


def update(worker: Worker) -> None:
    samples, mesh = make_samples(4), worker.spec.mesh()
    set_weights(samples, "token_mean", 0)
    plan = plan_micro_batches([sample.length() for sample in samples], mesh.data, Budget(512))
    worker.update(pack_samples(samples), plan[mesh.data_place(worker.spec.rank)], "sft", LossSettings())


@contextmanager
def alone() -> Iterator[None]:
    """Fail at every call to other ranks, by PyTorch or by DeepSpeed, which keeps functions of its own."""
    from deepspeed.comm import comm

    def refuse(*args: Any, **named: Any) -> None:
        raise AssertionError("a rank spoke to others")

    with pytest.MonkeyPatch.context() as patch:
        for place in (dist, comm.cdb):
            for name in dir(place):
                if name.startswith(("all_", "allgather", "broadcast", "reduce", "gather", "barrier")):
                    patch.setattr(place, name, refuse)
        yield


def joined(shards: list[Shard], *, written: bool) -> dict[str, torch.Tensor]:
    """Whole tensors of the shards of all ranks, as ranks write them or as they speak for them; each element once."""
    mine = [(one, one.own() if written else (0, one.region.size() * one.counts())) for one in shards]
    held = [(one.name, one.region.part(*own), one.values[slice(*own)].float()) for one, own in mine]
    ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(ranks, held)
    found: dict[str, torch.Tensor] = {}
    for name, region, values in (entry for rank in ranks for entry in rank):
        whole = found.setdefault(name, torch.full(region.shape, torch.nan))
        before = torch.full_like(whole, torch.nan)
        region.lay(values, before.view(-1))
        assert (whole.isnan() | before.isnan()).all(), f"{name} has elements twice"
        region.lay(values, whole.view(-1))
    return found


def look(rank: int, world: int, models: dict[str, str], cases: list[Case]) -> dict[Case, list[str]]:
    """What differs between shards and whole tensors, and between their sums."""
    wrong: dict[Case, list[str]] = {}
    for case in cases:
        worker = case.worker(rank, models)
        update(worker)
        with alone():
            weights, state = list(worker.engine.weight_shards()), list(worker.engine.state_shards())
        gathered = {tensor.dtype for _, tensor in worker.engine.weights()}  # as layers compute, not as they are stepped
        assert {one.values.dtype for one in weights} == gathered == {DTYPES[case.dtype]}
        masters = {name: tensor.clone() for name, tensor in worker.engine.masters()}
        expected = {name: tensor.float().clone() for name, tensor in worker.engine.weights()}
        expected |= {f"{name}/weight": tensor for name, tensor in masters.items()}
        wrong[case] = []
        for written in (True, False):
            found = joined(weights, written=written) | joined(state, written=written)
            parts = {"weight", "exp_avg", "exp_avg_sq", AVERAGE}
            assert {key.rpartition("/")[2] for key in found if "/" in key} == parts
            assert len(found) == len(weights) + len(masters) * len(parts)
            assert not [key for key, tensor in found.items() if tensor.isnan().any()]
            wrong[case] += [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)]
        wrong[case] += wrong_sums(worker)
    return wrong


def wrong_sums(worker: Worker) -> list[str]:
    """Which sums of what ranks hold are not those of what is gathered and sent, in the types of engines."""
    wrong = []
    for name, dtype in WIRE_DTYPES.items():
        with nullcontext() if worker.spec.model.lora.sync == "merged" else alone():
            mine = worker.weight_bits(name)
        with alone():
            again = worker.weight_bits(name, base=False)
        ranks: list[Any] = [None] * RANKS
        dist.all_gather_object(ranks, (mine, again))
        (plain, adapters, fixed), trained = (total_sums(parts) for parts in zip(*ranks, strict=True))
        whole = {one: add_bits([(one, tensor)], dtype) for one, tensor in worker.outgoing.plain_weights()}
        kept = sum(whole.pop(one) for one in worker.names.fixed)
        wrong += [] if (plain, fixed) == (wrap_int64(sum(whole.values())), wrap_int64(kept)) else ["plain"]
        masters = add_bits(worker.engine.masters(), torch.float32) if worker.adapter else 0
        sent = add_bits(worker.outgoing.sent_weights(), dtype) if worker.outgoing.adapter_only else masters
        wrong += [] if adapters == sent else ["adapters"]
        wrong += [] if trained == (0, adapters, 0) else ["again"]
    return wrong


@pytest.mark.parametrize("cases", [WHOLE, pytest.param(CUT, marks=pytest.mark.slow)], ids=["whole", "cut"])
def test_shards_are_the_whole_and_need_no_other_rank(
    cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines announce AMX and lack it
    models = {name: str(make_tiny_model(tmp_path / name, tied=name == "tied")) for name in ("tied", "untied")}
    models["mixture"] = str(make_model(tmp_path / "mixture", "glm4_moe"))  # its routers have a bias that stays
    for wrong in run_ranks(look, RANKS, tmp_path / "ranks", models, cases):
        assert wrong == {case: [] for case in cases}
