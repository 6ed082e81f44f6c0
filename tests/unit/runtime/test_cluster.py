import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trueline.runtime import cluster
from trueline.runtime.host import use_interface

SHOW = """
import json, os
from trueline.config.model import RanksConfig
from trueline.config.rl import RolloutConfig
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.runtime.cluster import Machine
from trueline.runtime.placement import process_environment
from trueline.training.engines.table import TRAIN_ENGINES
from trueline.training.worker import worker_target
machines = [Machine(cpus=2, memory_bytes=2**34, gpus=gpus, gpu_bytes=2**34) for gpus in (0, 2)]
ranks = [worker_target(RanksConfig(engine=name)) for name in TRAIN_ENGINES]
engines = {name: row.target(RolloutConfig()) for name, row in ROLLOUT_ENGINES.items()}
started = [process_environment(target, machine, 2) for target in ranks for machine in machines]
started += [process_environment(target, machine) for target in engines.values() for machine in machines]
print(json.dumps([dict(os.environ), *started]))
"""
LISTENING = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.slow
@pytest.mark.parametrize(("given", "loopback"), [({}, True), ({"RAY_ADDRESS": "10.0.0.1:6379"}, False)])
def test_processes_meet_on_the_loopback_unless_there_is_a_cluster(given: dict[str, str], loopback: bool) -> None:
    """The driver's own environment, and those of ranks and engines, on CPUs and on GPUs."""
    own = {name: value for name, value in os.environ.items() if name not in (*LISTENING, "RAY_ADDRESS")}
    shown = subprocess.run([sys.executable, "-c", SHOW], env=own | given, capture_output=True, text=True, check=True)
    for environment in json.loads(shown.stdout):
        assert {name: environment.get(name) for name in LISTENING} == (
            LISTENING if loopback else dict.fromkeys(LISTENING)
        )
        assert environment.get("RAY_ADDRESS") == given.get("RAY_ADDRESS")


@pytest.mark.parametrize("given", [{}, {"NCCL_SOCKET_IFNAME": "ib0"}])
def test_a_process_meets_others_at_the_address_of_its_node(given: dict[str, str], monkeypatch: Any) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    use_interface("10.99.0.1")  # of no interface here
    assert {name: os.environ[name] for name in names if name in os.environ} == given
    use_interface("127.0.0.1")
    expected = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"} | given
    assert {name: os.environ[name] for name in names} == expected


GROUPS = {
    "version 1": ("4:memory:/job", {"memory/job/memory.stat": "hierarchical_memory_limit 5000\ntotal_rss 2000\n"}),
    "version 2": ("0::/job", {"job/memory.stat": "anon 1500\nfile 900\n", "job/memory.max": "4500\n"}),
    "no limit": ("0::/job", {"job/memory.stat": "anon 1500\n", "job/memory.max": "max\n"}),
    "not seen from here": ("4:memory:/elsewhere", {}),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_control_group_bounds_free_memory(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, files = GROUPS[case]
    (tmp_path / "cgroup").write_text(f"1:cpu:/\n{line}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cluster, "PROCESS_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cluster, "CONTROLLERS", tmp_path)
    assert (cluster.free_memory() == 3000) == case.startswith("version")
    assert cluster.free_memory() > 0
