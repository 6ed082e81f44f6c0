"""Ray and torch.distributed; without RAY_ADDRESS, everything listens only on this machine's loopback.

RAY_ADDRESS is set before this is imported: by the user, from `cluster.address`, or by the run for its processes.
"""

import os
import sys

REACH: dict[str, str] = {}  # environment of the run's processes
if "RAY_ADDRESS" in os.environ:
    REACH = {"RAY_ADDRESS": os.environ["RAY_ADDRESS"]}
else:
    interface = "lo0" if sys.platform == "darwin" else "lo"
    REACH = {
        # Ray reads this at import; 0 binds to 127.0.0.1, as on Windows and macOS.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,  # of the rendezvous; data goes between GPUs
    }
    os.environ.update(REACH)
