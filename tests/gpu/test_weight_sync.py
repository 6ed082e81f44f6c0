"""On one GPU that trainer and vLLM share: weights arrive by CUDA IPC, and whatever goes wrong is noticed at once."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from tests.support.faults import FAULTS, Breakable
from tests.support.faulty_worker import FaultyWorker
from tests.support.tiny import make_samples
from trueline.algorithms.loss_aggregation import set_weights
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import LoraConfig, ModelConfig, TrainingConfig
from trueline.config.rl import RolloutConfig, SyncConfig
from trueline.rollout.engine import EngineSpec, RolloutEngine
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.rollout.pool import EnginePool
from trueline.runtime.cluster import machine_at_hand, ray_cluster
from trueline.runtime.event_loop import EventLoop
from trueline.runtime.placement import Layout, Processes, RoleRanks
from trueline.sync.proof import SyncFailure
from trueline.sync.weights import Canary, SyncPlan, WeightSync
from trueline.training.group import ModelGroup
from trueline.training.report import LossSettings
from trueline.training.worker import WorkerSpec, worker_target

pytestmark = pytest.mark.gpu
SECONDS = 300.0
TOKENS = [*range(1000, 1040)]
SHARE = 0.3
GIB = 2**30


@dataclass
class Stage:
    """Trainers of all weights, with adapters, and with adapters that travel alone; an engine for each."""

    whole: ModelGroup
    adapted: ModelGroup
    adapter_only: ModelGroup
    pool: EnginePool
    holder: EnginePool  # of adapters
    loop: EventLoop

    def sync(self, policy: ModelGroup) -> WeightSync:
        adapter_only = policy is self.adapter_only
        plan, pool = SyncPlan("bfloat16", "ipc", adapter_only=adapter_only), self.holder if adapter_only else self.pool
        return WeightSync(policy, pool, self.loop, SyncConfig(), Canary(TOKENS, 0.1), plan)

    def break_engine(self, fault: str, adapter_only: bool = False) -> None:
        pool = self.holder if adapter_only else self.pool
        self.loop.run(pool.actors[0].call(Breakable.break_with, fault), "breaking the engine")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    model, logs = os.environ["SMOLLM2"], tmp_path_factory.mktemp("logs")
    machine, loop = machine_at_hand(), EventLoop(SECONDS)
    training = TrainingConfig(learning_rate=1e-4)
    engine = replace(ROLLOUT_ENGINES["vllm"], path="tests.support.faulty_receiver:FaultyEngine")
    target = replace(worker_target(training), path="tests.support.faulty_worker:FaultyWorker")
    spec = EngineSpec(model, "bfloat16", 512, 1, 64, 0, SHARE, cuda_graphs=True, sleeps=True, trust_remote_code=False)
    with ray_cluster(machine):
        roles = (RoleRanks("adapted", 1, shared=True), RoleRanks("apart", 1, shared=True))
        processes = Processes(machine, Layout(1, 1, 1, colocated=True, roles=roles), logs, local=False)
        groups = []
        specs = [
            WorkerSpec(ModelConfig(path=model, dtype="bfloat16", lora=lora), training, 0, 1, 100, 0)
            for lora in (LoraConfig(), LoraConfig(rank=8), LoraConfig(rank=8, alpha=12, sync="adapter"))
        ]
        actors = [
            processes.policy(target, specs[:1]),
            processes.role(roles[0], target, specs[1:2]),
            processes.role(roles[1], target, specs[2:]),
        ]
        for name, ranks in zip(("whole", "adapted", "apart"), actors, strict=True):
            groups.append(ModelGroup(name, ranks, training, SECONDS))
            groups[-1].start()
        pools = []
        for rank in (0, 8):
            pools.append(
                EnginePool(processes.engines(engine.target(RolloutConfig()), [replace(spec, adapter_rank=rank)]))
            )
            loop.run(pools[-1].call(RolloutEngine.processes), "start of an engine")
        yield Stage(*groups, *pools, loop)
        for pool in pools:
            pool.stop()
    loop.stop()


def update(policy: ModelGroup) -> None:
    samples = make_samples(4)
    set_weights(samples, "sequence_mean", 24)
    policy.update(samples, "policy", LossSettings(1.0, AlgorithmConfig.parse({"preset": "dr_grpo"})))


def test_every_fault_is_noticed_at_the_sync_in_which_it_happens(stage: Stage) -> None:
    sync = stage.sync(stage.whole)
    said = sync.verify_initial_sync()
    assert said.startswith("verified; ")
    assert "packed" not in said
    assert stage.loop.run(stage.pool.actors[0].call(Breakable.loads_in_place), "asking")
    update(stage.whole)
    sync.publish(1)
    assert sync.verify()["sync/canary_gap"] < 1
    for fault in FAULTS:
        update(stage.whole)
        stage.break_engine(fault)
        words = "does not compute with" if fault == "swapped" else "engine 0 holds other weights than the trainer"
        with pytest.raises(SyncFailure, match=words):
            sync.publish(2)
            sync.verify()
        stage.break_engine("")
        sync.publish(3)
        sync.verify()
    stage.break_engine("cached")
    with pytest.raises(SyncFailure, match="from its prefix cache"):
        sync.publish(4)
        sync.verify()
    stage.break_engine("")
    sync.publish(5)
    sync.verify()
    stage.whole.call(FaultyWorker.break_with, "late")
    update(stage.whole)
    with pytest.raises(SyncFailure, match="engine 0 holds other weights than the trainer"):
        sync.publish(6)
    stage.whole.call(FaultyWorker.break_with, "")


def test_a_fault_from_the_start_is_noticed_before_the_first_step(stage: Stage) -> None:
    sync = stage.sync(stage.whole)
    sync.publish(0)
    for fault in FAULTS:
        stage.break_engine(fault)
        with pytest.raises(SyncFailure, match="loaded the checkpoint itself, and holds other weights"):
            sync.verify_initial_sync()
        stage.break_engine("")
        sync.proof = None
        sync.publish(0)


def test_adapters_arrive_merged_and_unmerged_ones_are_noticed(stage: Stage) -> None:
    sync = stage.sync(stage.adapted)
    sync.publish(0)
    sync.verify_initial_sync()
    update(stage.adapted)
    sync.publish(1)
    sync.verify()
    stage.adapted.call(FaultyWorker.break_with, "unmerged")
    with pytest.raises(SyncFailure, match="they were not merged"):
        sync.publish(2)


def test_adapters_travel_alone_and_wrong_ones_are_noticed(stage: Stage) -> None:
    sync = stage.sync(stage.adapter_only)
    said = sync.verify_initial_sync()
    assert "only adapters are sent" in said
    assert "packed" not in said
    for version in (1, 2):
        update(stage.adapter_only)
        sync.publish(version)
        sync.verify()
        stage.loop.run(stage.holder.call(RolloutEngine.sleep), "sleep")
        stage.loop.run(stage.holder.call(RolloutEngine.wake, "weights"), "wake")
        stage.loop.run(stage.holder.call(RolloutEngine.wake, "kv_cache"), "wake")
    for fault in ("skipped", "flipped", "narrowed"):
        stage.break_engine(fault, adapter_only=True)
        with pytest.raises(SyncFailure, match="engine 0 holds other adapters than the trainer"):
            sync.publish(3)
    stage.break_engine("", adapter_only=True)


def test_an_engine_that_sleeps_gives_its_memory_back(stage: Stage) -> None:
    sync = stage.sync(stage.whole)
    sync.publish(0)

    def used() -> float:
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB

    def turn(method: object, *args: str) -> float:
        stage.loop.run(stage.pool.call(method, *args), "sleep or wake")  # type: ignore[arg-type]
        return used()

    before = used()
    for _ in range(3):
        asleep = turn(RolloutEngine.sleep)
        assert before - asleep > SHARE * torch.cuda.mem_get_info()[1] / GIB - 4
        turn(RolloutEngine.wake, "weights")
        sync.publish(1)
        awake = turn(RolloutEngine.wake, "kv_cache")
        sync.verify()
        assert abs(awake - before) < 1
