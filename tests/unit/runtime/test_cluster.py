import json
import os
import subprocess
import sys

import pytest

SHOW = """
import json, os
from trueline.runtime.cluster import Machine, engine_environment, worker_environment
machines = [Machine(cpus=2, memory_bytes=2**34, gpus=gpus, gpu_bytes=2**34) for gpus in (0, 2)]
started = [what for machine in machines for what in (worker_environment(machine, 2), engine_environment(machine, 1.0))]
print(json.dumps([dict(os.environ), *started]))
"""
LISTENING = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


@pytest.mark.parametrize(("given", "loopback"), [({}, True), ({"RAY_ADDRESS": "10.0.0.1:6379"}, False)])
def test_processes_meet_on_the_loopback_unless_there_is_a_cluster(given: dict[str, str], loopback: bool) -> None:
    """The driver's own environment, and those of ranks and engines, on CPUs and on GPUs."""
    own = {name: value for name, value in os.environ.items() if name not in (*LISTENING, "RAY_ADDRESS")}
    shown = subprocess.run([sys.executable, "-c", SHOW], env=own | given, capture_output=True, text=True, check=True)
    for environment in json.loads(shown.stdout):
        assert {name: environment.get(name) for name in LISTENING} == (
            LISTENING if loopback else dict.fromkeys(LISTENING)
        )
