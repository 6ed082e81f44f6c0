"""NVIDIA's multi-process service (MPS): kernels of several processes run on one GPU at the same time."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
SECONDS = 20  # to start or end it, and for a client to connect
# A client that uses the GPU, without PyTorch: the service may start and then refuse clients, e.g. of another user.
CLIENT = """
import ctypes, sys
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
sys.exit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
"""
# Ends the service when its standard input closes: with the run, also with one that is killed.
GUARD = f'exec > /dev/null 2>&1; cat; echo "quit -t 1" | {CONTROL}; rm -rf "${PIPES}"'


def is_installed() -> bool:
    return shutil.which(CONTROL) is not None


@contextmanager
def service(logs: Path) -> Iterator[dict[str, str]]:
    """Start a service that ends with this run; yield the environment of its clients, or none if it fails."""
    pipes = Path(tempfile.mkdtemp(prefix="trueline-mps-"))  # its sockets need a short path
    folder = logs / "mps"
    folder.mkdir(parents=True, exist_ok=True)
    own = {PIPES: str(pipes), LOGS: str(folder)}
    # A session of its own, so that neither Ctrl-C nor a signal to the run's processes reaches it.
    command = ["/bin/sh", "-c", GUARD]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | own, start_new_session=True)
    try:
        yield own if succeeds(own, CONTROL, "-d") and succeeds(own, sys.executable, "-c", CLIENT) else {}
    finally:
        with suppress(subprocess.TimeoutExpired):
            guard.communicate(timeout=SECONDS)


def succeeds(own: dict[str, str], *command: str) -> bool:
    """Run a program with the service's folders in its environment, and tell whether it succeeded."""
    environment = os.environ | own
    try:
        done = subprocess.run(command, input=b"", capture_output=True, timeout=SECONDS, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
