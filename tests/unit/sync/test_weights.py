"""Weight sync between a real worker and real engines over gloo, in threads of one process; some engines lie.

Covers `trueline.training.worker`.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic

import pytest
import torch

from tests.support.faulty_worker import FaultyWorker
from tests.support.tiny import make_samples, make_tiny_model
from trueline.algorithms.loss_aggregation import set_weights
from trueline.cli import main
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import LoraConfig, ModelConfig, TrainingConfig
from trueline.config.rl import SyncConfig
from trueline.data.pictures import Shown
from trueline.models.lora import is_adapter
from trueline.models.weight_names import Named
from trueline.monitoring.findings import WATCH, Finding
from trueline.rollout.engine import PROOFS, EngineSpec
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.hf_engine import HFEngine
from trueline.rollout.pool import EnginePool
from trueline.runtime.actors import Pending, Result
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.fingerprints import ADAPTERS, Holding, LiveSums, add_bits, bit_sum, fingerprint, plain_parameters
from trueline.runtime.transport import Bucket, Link
from trueline.sync.proof import SyncFailure
from trueline.sync.weights import STRANGE, Canary, SyncPlan, WeightSync
from trueline.training.group import ModelGroup
from trueline.training.report import LossSettings
from trueline.training.worker import Worker, WorkerSpec

SECONDS = 120.0
TOKENS = list(range(5, 37))
Weights = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Running(Generic[Result]):
    who: str
    work: Future[Result]

    def result(self, timeout_seconds: float) -> Result:
        return self.work.result(timeout_seconds)

    async def async_result(self) -> Result:
        return await asyncio.wrap_future(self.work)


class InThread:
    """An actor with a thread for its ordinary methods, so that both ends of a broadcast can wait for each other."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target, self.thread = name, target, ThreadPoolExecutor(1)

    def submit(self, method: Callable[..., Any], *args: Any, **named: Any) -> Pending[Any]:
        return Running(self.name, self.thread.submit(getattr(self.target, method.__name__), *args, **named))

    async def call(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return await getattr(self.target, method.__name__)(*args, **named)

    def stop(self) -> None:
        pass


class OtherBytes(HFEngine):
    async def receive(self, buckets: list[Bucket], version: int) -> list[list[int]]:
        (prints,) = await super().receive(buckets, version)
        return [[*prints[:-1], prints[-1] + 1]]


class Deaf(HFEngine):
    """Takes the bytes, and computes with its old weights."""

    def _copy(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        pass


class Packing(HFEngine):
    """Keeps no plain weights that could be read back."""

    async def holdings(self) -> list[dict[str, Holding]]:
        return [dict.fromkeys((await super().holdings())[0], (0, 0))]

    async def bit_sums(self, dtype: str) -> list[dict[str, int]]:
        return [dict.fromkeys((await super().bit_sums(dtype))[0], 0)]

    async def scramble(self) -> None:
        pass


class DeafPacking(Packing, Deaf):
    pass


class NoNumbers(HFEngine):
    async def score(self, tokens: list[int], shown: Shown | None = None) -> list[float]:
        return [float("nan")] * (len(tokens) - 1)


class Confused(HFEngine):
    """Computes something else from the same checkpoint, from the start."""

    async def score(self, tokens: list[int], shown: Shown | None = None) -> list[float]:
        return [score - 0.05 for score in await super().score(tokens)]


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    event_loop = EventLoop(SECONDS)
    yield event_loop
    event_loop.stop()


class Cut(HFEngine):
    """Told of as the halves of two processes, of which both hold the norms whole."""

    def halves(self) -> list[dict[str, torch.Tensor]]:
        named = dict(plain_parameters(self.model))
        parts = {name: [weight, weight] if "norm" in name else weight.chunk(2) for name, weight in named.items()}
        return [{name: both[process] for name, both in parts.items()} for process in (0, 1)]

    async def holdings(self) -> list[dict[str, Holding]]:
        return [{name: (int(fingerprint(part)), part.numel()) for name, part in half.items()} for half in self.halves()]

    async def bit_sums(self, dtype: str) -> list[dict[str, int]]:
        return [{name: int(bit_sum(part)) for name, part in half.items()} for half in self.halves()]


def make_policy(
    model: Path, worker: type[Worker] = Worker, seconds: float = SECONDS, rank: int = 0, sync: str = "auto"
) -> ModelGroup:
    ranks = TrainingConfig(engine="torch", learning_rate=1e-2)
    config = ModelConfig(path=str(model), dtype="float32", lora=LoraConfig.parse({"rank": rank, "sync": sync}))
    spec = WorkerSpec(config, ranks, 0, 1, 10, 0)
    policy = ModelGroup("policy", [InThread("policy-0", worker(spec))], ranks, seconds)
    policy.start()
    return policy


def make_pool(model: Path, *kinds: type[HFEngine]) -> EnginePool:
    spec = EngineSpec(str(model), "float32", 64, 1, 8, 0, 0.3, False, False, False)
    return EnginePool([InThread(f"engine-{number}", kind(spec)) for number, kind in enumerate(kinds)])


def make_sync(policy: ModelGroup, pool: EnginePool, loop: EventLoop, **settings: Any) -> WeightSync:
    canary = Canary(TOKENS, 1e-3, settings.pop("tolerance", None), STRANGE)
    transport, or_gloo = settings.pop("transport", "gloo"), settings.pop("or_gloo", False)
    proofs, alone = settings.pop("proofs", PROOFS), settings.pop("adapter_only", False)
    plan = SyncPlan("float32", transport, settings.pop("differs", ""), alone, or_gloo=or_gloo, proofs=proofs)
    return WeightSync(policy, pool, loop, SyncConfig(bucket_mib=1, **settings), canary, plan)


def update(policy: ModelGroup) -> None:
    samples = make_samples(4)
    set_weights(samples, "sequence_mean", 24)
    policy.update(samples, "policy", LossSettings(1.0, AlgorithmConfig.parse({"preset": "dr_grpo"})))


def test_both_engines_follow_and_both_gaps_are_reported(model_folder: Path, loop: EventLoop) -> None:
    policy, pool = make_policy(model_folder), make_pool(model_folder, HFEngine, HFEngine)
    sync = make_sync(policy, pool, loop)
    assert sync.verify_initial_sync().startswith("verified; largest log-prob gap ")
    update(policy)
    with pytest.raises(SyncFailure, match="does not compute with the weights"):
        sync.verify()
    sync.publish(1)
    found = sync.verify()
    assert found["sync/canary_gap"] < 1e-5
    assert found["sync/canary_floor"] == sync.floor < 1e-5


class Showless(HFEngine):
    """Takes weights, and shows nothing of them."""

    async def holdings(self) -> list[dict[str, Holding]]:
        raise AssertionError("not declared")

    async def bit_sums(self, dtype: str) -> list[dict[str, int]]:
        raise AssertionError("not declared")

    async def cached_tokens(self, tokens: list[int]) -> int:
        raise AssertionError("not declared")

    async def score(self, tokens: list[int], shown: Shown | None = None) -> list[float]:
        raise AssertionError("not declared")


def test_proofs_that_an_engine_does_not_declare_are_left_out_and_named(model_folder: Path, loop: EventLoop) -> None:
    policy, pool = make_policy(model_folder), make_pool(model_folder, Showless)
    sync = make_sync(policy, pool, loop, proofs=())
    found = sync.verify_initial_sync()
    assert found.startswith("verified; not that it holds the checkpoint's bits at the start, which the engine cannot")
    assert found.count("which the engine cannot show") == 4
    update(policy)
    sync.publish(1)
    assert sync.verify() == {}
    engine: Any = pool.actors[0]
    assert engine.target.version == 1


def test_an_engine_that_only_scores_is_compared_by_its_log_probs(model_folder: Path, loop: EventLoop) -> None:
    class Scoring(Showless):
        async def score(self, tokens: list[int], shown: Shown | None = None) -> list[float]:
            return await HFEngine.score(self, tokens)

    policy, pool = make_policy(model_folder), make_pool(model_folder, Scoring)
    sync = make_sync(policy, pool, loop, proofs=("score",))
    assert "largest log-prob gap" in sync.verify_initial_sync()
    update(policy)
    with pytest.raises(SyncFailure, match="does not compute with the weights"):
        sync.verify()


def test_weights_of_zeros_that_processes_divide_are_counted_in_each(tmp_path: Path, loop: EventLoop) -> None:
    """Halves of zeros are alike in both processes until the first update moves them."""
    model = make_tiny_model(tmp_path, tied=True, biases=True)
    policy, pool = make_policy(model), make_pool(model, Cut)
    sync = make_sync(policy, pool, loop)
    sync.verify_initial_sync()
    assert sync.proof is not None and sync.proof.summed
    for version in (1, 2):
        update(policy)
        sync.publish(version)
        sync.verify()
    pool.actors[0].target.model.get_input_embeddings().weight.data[0, 0] += 1  # type: ignore[attr-defined]
    with pytest.raises(SyncFailure, match="engine 0 holds other weights than the trainer"):
        sync.proof.check_sum(*sync._bits())


class Remarking(HFEngine):
    remark = "it goes another way"


def test_the_remark_of_engines_is_reported_once(model_folder: Path, loop: EventLoop) -> None:
    policy, pool = make_policy(model_folder), make_pool(model_folder, HFEngine, Remarking, Remarking)
    found: list[Finding] = []
    policy.report = found.append
    sync = make_sync(policy, pool, loop)
    for version in range(2):
        sync.publish(version)
        sync.verify()
    assert [(one.level, one.code, one.what) for one in found] == [(WATCH, "plain_logprobs", Remarking.remark)]


def test_where_nccl_forms_no_group_weights_go_by_gloo_and_the_run_says_so(model_folder: Path, loop: EventLoop) -> None:
    """No process here has a GPU: all of them are told so by one another, and meet again over gloo."""
    policy, pool = make_policy(model_folder), make_pool(model_folder, HFEngine, HFEngine)
    sync = make_sync(policy, pool, loop, transport="nccl", or_gloo=True)
    said = "weights are sent over gloo, because process 0 of 3 has no GPU that NCCL can use"
    assert sync.verify_initial_sync().endswith(said) and sync.transport == "gloo"
    assert said in make_sync(policy, pool, loop, transport="nccl", or_gloo=True, check=False).verify_initial_sync()
    update(policy)
    sync.publish(1)
    assert sync.verify()["sync/canary_gap"] < 1e-5
    asked = r"sync\.transport=nccl: process 0 of 3 has no GPU .*; set sync\.transport=auto or gloo"
    with pytest.raises(SyncFailure, match=asked):
        make_sync(policy, pool, loop, transport="nccl")


def test_other_bytes_stop_the_run(model_folder: Path, loop: EventLoop) -> None:
    sync = make_sync(make_policy(model_folder), make_pool(model_folder, HFEngine, OtherBytes), loop)
    with pytest.raises(SyncFailure, match="process 0 of engine 1 received other weights than the trainer's"):
        sync.publish(1)


@pytest.mark.parametrize("kinds", [(DeafPacking, Packing), (Packing, DeafPacking)])
def test_one_stale_engine_of_two_stops_the_run(
    kinds: tuple[type[HFEngine], ...], model_folder: Path, loop: EventLoop
) -> None:
    policy = make_policy(model_folder)
    sync = make_sync(policy, make_pool(model_folder, *kinds), loop)
    sync.verify_initial_sync()
    update(policy)
    sync.publish(1)
    with pytest.raises(SyncFailure, match="does not compute with the weights"):
        sync.verify()


@pytest.mark.parametrize("kinds", [(NoNumbers, HFEngine), (HFEngine, NoNumbers)])
def test_an_engine_that_scores_nan_stops_the_run(
    kinds: tuple[type[HFEngine], ...], model_folder: Path, loop: EventLoop
) -> None:
    sync = make_sync(make_policy(model_folder), make_pool(model_folder, *kinds), loop)
    with pytest.raises(SyncFailure, match="differ from the trainer's by nan"):
        sync.verify()
    with pytest.raises(SyncFailure, match="loaded the same checkpoint"):
        sync.verify_initial_sync()


def test_later_gaps_are_judged_by_the_gap_at_the_start(model_folder: Path, loop: EventLoop) -> None:
    """Where rounding alone makes 0.009 nats, a fixed limit of 1e-3 would be a false alarm."""

    class Rounded(Confused):
        async def score(self, tokens: list[int], shown: Shown | None = None) -> list[float]:
            return [score + 0.041 for score in await super().score(tokens)]

    policy = make_policy(model_folder)
    sync = make_sync(policy, make_pool(model_folder, Rounded), loop)
    sync.verify_initial_sync()
    assert sync.floor == pytest.approx(0.009, abs=1e-4)
    assert sync.limit() == pytest.approx(0.036, abs=1e-3)
    update(policy)
    sync.publish(1)
    assert sync.verify()["sync/canary_gap"] == pytest.approx(0.009, abs=1e-3)
    update(policy)
    with pytest.raises(SyncFailure, match=r"more than 0\.036 \(0\.009 at the start"):
        sync.verify()


def test_a_gap_at_the_start_that_is_no_rounding_is_refused(model_folder: Path, loop: EventLoop) -> None:
    policy, pool = make_policy(model_folder), make_pool(model_folder, Confused)
    with pytest.raises(SyncFailure, match=r"differ by 0\.05 on average, more than 0\.01"):
        make_sync(policy, pool, loop).verify_initial_sync()
    asked = make_sync(policy, pool, loop, tolerance=0.06)  # the user's own limit holds at the start and later
    asked.verify_initial_sync()
    assert asked.limit() == 0.06
    assert "sync.check=false" in make_sync(policy, pool, loop, check=False).verify_initial_sync()


def skipped(weights: Weights) -> Weights:
    return [(name, tensor) for name, tensor in weights if not name.endswith("1.mlp.down_proj.weight")]


def swapped(weights: Weights) -> Weights:
    """Two matrices of one shape in each other's place: the sum of all bits stays the same."""
    named = dict(weights)
    for name in [name for name in named if "k_proj" in name and name.replace("k_proj", "v_proj") in named]:
        other = name.replace("k_proj", "v_proj")
        named[name], named[other] = named[other], named[name]
    return list(named.items())


def flipped(weights: Weights) -> Weights:
    name, tensor = weights[-1]
    bits = tensor.clone().view(torch.int32)
    bits.view(-1)[7] ^= 1
    return [*weights[:-1], (name, bits.view(torch.float32).view(tensor.shape))]


def narrowed(weights: Weights) -> Weights:
    return [(name, tensor.half()) for name, tensor in weights]


def headless(weights: Weights) -> Weights:
    """The tied embedding, which is the head, too, stays as it was."""
    return [(name, tensor) for name, tensor in weights if "embed_tokens" not in name]


FAULTS = {"skipped": skipped, "swapped": swapped, "flipped": flipped, "narrowed": narrowed, "headless": headless}


class Faulty(HFEngine):
    """Loads something else than it was given, once told to."""

    fault = ""

    def _copy(self, weights: Weights) -> None:
        super()._copy(FAULTS[self.fault](weights) if self.fault else weights)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_an_engine_loads_wrongly_is_noticed_at_once(fault: str, model_folder: Path, loop: EventLoop) -> None:
    policy, pool = make_policy(model_folder), make_pool(model_folder, HFEngine, Faulty)
    broken = pool.actors[1].target  # type: ignore[attr-defined]
    broken.fault = fault
    with pytest.raises(SyncFailure, match="engine 1 loaded the checkpoint itself, and holds other weights"):
        make_sync(policy, pool, loop).verify_initial_sync()
    broken.fault = ""
    make_sync(policy, pool, loop).publish(0)
    sync = make_sync(policy, pool, loop)
    sync.verify_initial_sync()
    for version in (1, 2):
        update(policy)
        sync.publish(version)
        sync.verify()
    update(policy)
    broken.fault = fault
    said = "does not compute" if fault == "swapped" else "engine 1 holds other weights than the trainer"
    with pytest.raises(SyncFailure, match=said):
        sync.publish(3)
        sync.verify()


def test_an_old_version_is_noticed(model_folder: Path, loop: EventLoop) -> None:
    policy = make_policy(model_folder, FaultyWorker)
    sync = make_sync(policy, make_pool(model_folder, HFEngine), loop)
    sync.verify_initial_sync()
    policy.call(FaultyWorker.break_with, "late")
    sync.publish(0)
    update(policy)
    with pytest.raises(SyncFailure, match="engine 0 holds other weights than the trainer"):
        sync.publish(1)


def test_adapters_that_are_not_merged_are_noticed(model_folder: Path, loop: EventLoop) -> None:
    policy = make_policy(model_folder, FaultyWorker, rank=4)
    sync = make_sync(policy, make_pool(model_folder, HFEngine), loop)
    sync.verify_initial_sync()
    for version in (1, 2):
        update(policy)
        sync.publish(version)
        assert sync.verify()["sync/canary_gap"] < 1e-4
    policy.call(FaultyWorker.break_with, "unmerged")
    with pytest.raises(SyncFailure, match="they were not merged"):
        sync.publish(3)


class Adapted(HFEngine):
    """Keeps adapters beside its weights; it computes without them."""

    adapters: Weights

    def _copy(self, weights: Weights) -> None:
        self.adapters = [(name, tensor.clone()) for name, tensor in weights]

    async def bit_sums(self, dtype: str) -> list[dict[str, int]]:
        (sums,) = await super().bit_sums(dtype)
        return [sums | {ADAPTERS: add_bits(self.adapters, torch.float32)}]


class Asked(FaultyWorker):
    """Notes whether it is asked to add up all weights, and sends nothing but adapters."""

    bases: ClassVar[list[bool]] = []

    def weight_bits(self, dtype: str, base: bool = True) -> LiveSums:
        self.bases.append(base)
        return super().weight_bits(dtype, base)

    def send_weights(self, buckets: list[Bucket]) -> list[int]:
        weights = self.engine.weights
        self.engine.weights = lambda chosen=None: adapters_alone(weights(chosen))  # type: ignore[method-assign]
        try:
            return super().send_weights(buckets)
        finally:
            self.engine.weights = weights  # type: ignore[method-assign]


def adapters_alone(weights: Named) -> Named:
    for name, tensor in weights:
        assert is_adapter(name)
        yield name, tensor


def test_frozen_weights_are_added_up_once_and_never_gathered(model_folder: Path, loop: EventLoop) -> None:
    """Of engines they are added up every time; so an engine that loses one is noticed, like old adapters."""
    policy, pool = make_policy(model_folder, Asked, rank=4, sync="adapter"), make_pool(model_folder, Adapted)
    sync = make_sync(policy, pool, loop, adapter_only=True)
    sync.verify_initial_sync()
    for version in (1, 2):
        update(policy)
        sync.publish(version)
    assert Asked.bases == [True, False, False]
    policy.call(FaultyWorker.break_with, "late")
    update(policy)
    with pytest.raises(SyncFailure, match="engine 0 holds other adapters than the trainer"):
        sync.publish(3)
    policy.call(FaultyWorker.break_with, "")
    pool.actors[0].target.model.get_input_embeddings().weight.data[0, 0] += 1  # type: ignore[attr-defined]
    with pytest.raises(SyncFailure, match="engine 0 holds other weights than the trainer"):
        sync.publish(4)


class Altered(Worker):
    """One byte changes between the weight and the wire."""

    def connect(self, link: Link) -> str:
        reason = super().connect(link)
        channel: Any = self.channel
        send = channel.send

        def altered(buffer: torch.Tensor) -> None:
            buffer[4] ^= 1
            send(buffer)

        channel.send = altered
        return reason


def test_a_byte_that_changes_on_its_way_is_noticed(model_folder: Path, loop: EventLoop) -> None:
    sync = make_sync(make_policy(model_folder, Altered), make_pool(model_folder, HFEngine), loop)
    with pytest.raises(SyncFailure, match=r"received other weights than the trainer's \(among model\.embed_tokens"):
        sync.publish(0)


class Remembering(HFEngine):
    async def cached_tokens(self, tokens: list[int]) -> int:
        return 16


def test_a_prefix_cache_that_was_not_emptied_is_noticed(model_folder: Path, loop: EventLoop) -> None:
    sync = make_sync(make_policy(model_folder), make_pool(model_folder, HFEngine, Remembering), loop)
    with pytest.raises(SyncFailure, match="engine 1 takes 16 tokens of a prompt from its prefix cache"):
        sync.verify_initial_sync()
    sync.publish(1)
    with pytest.raises(SyncFailure, match="engine 1 takes 16 tokens of a prompt from its prefix cache"):
        sync.verify()


class Busy(HFEngine):
    """Has answers under way that share a prefix with the canary: whenever it goes on, they fill the cache again."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.filled = False
        self.heard: list[str] = []

    async def pause(self, mode: str = "wait") -> None:
        self.heard.append("pause")
        await super().pause(mode)

    async def receive(self, buckets: list[Bucket], version: int) -> list[list[int]]:
        self.heard.append("receive")
        self.filled = False
        return await super().receive(buckets, version)

    async def cached_tokens(self, tokens: list[int]) -> int:
        self.heard.append("cached")
        found, self.filled = self.filled, True
        return 16 if found else 0

    async def resume(self) -> None:
        self.heard.append("resume")
        self.filled = True
        await super().resume()


def test_answers_under_way_that_fill_the_prefix_cache_again_are_no_alarm(model_folder: Path, loop: EventLoop) -> None:
    pool = make_pool(model_folder, Busy, Busy)
    sync = make_sync(make_policy(model_folder), pool, loop)
    sync.verify_initial_sync()
    for version in (1, 2):
        sync.publish(version)
        assert sync.verify()["sync/canary_gap"] < 1e-5
    for actor in pool.actors:
        assert actor.target.heard == ["pause", "cached", "receive", "cached", "resume"] * 3  # type: ignore[attr-defined]


def test_engines_that_are_not_compared_go_on_all_the_same(model_folder: Path, loop: EventLoop) -> None:
    pool = make_pool(model_folder, Busy)
    sync = make_sync(make_policy(model_folder), pool, loop, check=False)
    sync.publish(1)
    assert sync.verify() == {}
    assert pool.actors[0].target.heard == ["pause", "receive", "resume"]  # type: ignore[attr-defined]


class Clock:
    """Time that passes only where an engine says so."""

    now = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now


class Draining(HFEngine):
    """Needs long until its answers have ended, then two seconds for the weights."""

    async def pause(self, mode: str = "wait") -> None:
        await super().pause(mode)
        Clock.now += 1000

    async def receive(self, buckets: list[Bucket], version: int) -> list[list[int]]:
        prints = await super().receive(buckets, version)
        Clock.now += 2
        return prints


def test_the_speed_of_sending_is_that_of_sending_alone(
    model_folder: Path, loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trueline.sync.weights.time", Clock)
    monkeypatch.setattr("trueline.rollout.engine.time", Clock)
    sync = make_sync(make_policy(model_folder), make_pool(model_folder, Draining), loop)
    found = sync.publish(1)
    assert found["sync/gb_per_second"] == pytest.approx(sync.bytes / 1e9 / 2)
    assert found["sync/seconds"] == 1002


def test_only_bytes_that_go_from_node_to_node_are_counted(model_folder: Path, loop: EventLoop) -> None:
    policy, pool = make_policy(model_folder), make_pool(model_folder, HFEngine, HFEngine)
    sync = make_sync(policy, pool, loop)
    for nodes, crossings in (((0, 0, 0), 0), ((0, 1, 1), 1), ((0, 1, 2), 2), ((1, 0, 1), 1), ((), 0)):
        for transport in ("local", "ipc", "gloo", "nccl"):
            sync.plan = SyncPlan("float32", transport, nodes=nodes)
            assert sync.plan.crossings() == (crossings if transport in ("gloo", "nccl") else 0)
    sync.plan = SyncPlan("float32", "gloo", nodes=(0, 1, 1))
    assert sync.publish(1)["sync/wire_gb"] == pytest.approx(sync.bytes / 1e9)
    sync.plan = SyncPlan("float32", "local", nodes=(0, 1, 1))
    assert sync.publish(2)["sync/wire_gb"] == 0


def test_a_gap_is_that_of_the_counted_tokens(model_folder: Path, loop: EventLoop) -> None:
    class Wrong(HFEngine):
        """On every token of `TOKENS[1:]` by another amount."""

        async def score(self, tokens: list[int], shown: Shown | None = None) -> list[float]:
            return [score + at for at, score in enumerate(await super().score(tokens), 1)]

    sync = make_sync(make_policy(model_folder), make_pool(model_folder, HFEngine, Wrong), loop)
    counted = [at in (0, 4, 6) for at in range(len(TOKENS))]
    assert sync.gap(TOKENS, counted) == pytest.approx(5, abs=1e-4)  # the first token has no log-prob
    assert sync.gap(TOKENS) == pytest.approx(16, abs=1e-4)


def test_the_run_says_what_is_proven(model_folder: Path, loop: EventLoop) -> None:
    policy, words = make_policy(model_folder), {}
    for kind in (HFEngine, Packing):
        words[kind] = make_sync(policy, make_pool(model_folder, kind), loop).verify_initial_sync()
    assert words[HFEngine].startswith("verified; largest log-prob gap ") and words[HFEngine].endswith(" (limit 0.001)")
    assert "21 weights are packed by the engine: only their transfer is checked" in words[Packing]
    other = make_sync(policy, make_pool(model_folder, HFEngine), loop, differs="the trainer holds them in 4 bits")
    assert "not compared with the checkpoint, because the trainer holds them in 4 bits" in other.verify_initial_sync()


class Mute(Worker):
    def send_weights(self, buckets: list[Bucket]) -> list[int]:
        raise ValueError("no memory for a bucket")


class Unconnected(Worker):
    def connect(self, link: Link) -> str:
        raise ValueError("no route to the engines")


@pytest.mark.parametrize(
    ("kind", "seconds", "message"), [(Mute, 15.0, "no memory for a bucket"), (Unconnected, 2.0, "no route")]
)
def test_an_error_of_the_sender_is_raised_while_receivers_wait(
    kind: type[Worker], seconds: float, message: str, model_folder: Path, loop: EventLoop
) -> None:
    """The engines go on waiting for bytes, or for the trainer, until their own deadline, which is another error."""
    policy = make_policy(model_folder, kind, seconds)
    with pytest.raises(ValueError, match=message):
        make_sync(policy, make_pool(model_folder, HFEngine), loop).publish(1)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("Deaf", "loaded the checkpoint itself, and holds other weights after the trainer sent the same"),
        ("DeafPacking", "does not compute with the weights that were sent"),
        ("NoNumbers", "log-probs differ by nan"),
    ],
)
def test_a_whole_run_stops_by_name(
    engine: str,
    message: str,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(ROLLOUT_ENGINES, "hf", replace(ROLLOUT_ENGINES["hf"], path=f"{__name__}:{engine}"))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    (tmp_path / "reward.py").write_text("def reward(reply): return float(len(reply))")
    words = ["--model", str(model_folder), "--data", f"{tmp_path}/prompts.jsonl", f"folder={tmp_path}", "name=run"]
    small = ["prompts_per_step=2", "rollout.max_new_tokens=4", "training.learning_rate=1e-2", "runtime=local"]
    assert main(["grpo", *words, "--reward", f"{tmp_path}/reward.py:reward", *small, "steps=3"]) == 1
    assert message in capsys.readouterr().out


class Noting(Worker):
    patience: ClassVar[list[float]] = []

    def connect(self, link: Link) -> str:
        self.patience.append(link.timeout_seconds)
        return super().connect(link)


@pytest.mark.parametrize(("seconds", "patience"), [(1200.0, 120.0), (120.0, 30.0), (20.0, 20.0)])
def test_a_broadcast_waits_a_tenth_of_the_runs_patience(
    seconds: float, patience: float, model_folder: Path, loop: EventLoop
) -> None:
    """But 30 seconds at least, and never longer than the run itself."""
    make_sync(make_policy(model_folder, Noting, seconds), make_pool(model_folder, HFEngine), loop)
    assert Noting.patience.pop() == patience
