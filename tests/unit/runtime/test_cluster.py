import json
import os
import subprocess
import sys
from typing import Any

import pytest

from trueline.runtime.host import use_interface

SHOW = """
import json, os
from trueline.config.model import RanksConfig
from trueline.config.rl import RolloutConfig
from trueline.rollout.engines import ROLLOUT_ENGINES
from trueline.runtime.cluster import Machine
from trueline.runtime.placement import process_environment
from trueline.training.engines import TRAIN_ENGINES
from trueline.training.worker import worker_target
machines = [Machine(cpus=2, memory_bytes=2**34, gpus=gpus, gpu_bytes=2**34) for gpus in (0, 2)]
ranks = [worker_target(RanksConfig(engine=name)) for name in TRAIN_ENGINES]
engines = {name: row.target(RolloutConfig()) for name, row in ROLLOUT_ENGINES.items()}
started = [process_environment(target, machine, 2) for target in ranks for machine in machines]
started += [process_environment(target, machine) for target in engines.values() for machine in machines]
print(json.dumps([dict(os.environ), *started]))
"""
LISTENING = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


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
