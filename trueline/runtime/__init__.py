"""Ray and torch.distributed. Without a cluster's address, everything listens on this machine's loopback alone.

What decides, RAY_ADDRESS, is set before this is imported: by the user, from `cluster.address`, or by the run for its
processes.
"""

import os
import sys

REACH: dict[str, str] = {}  # what processes have to know for that
if "RAY_ADDRESS" in os.environ:
    REACH = {"RAY_ADDRESS": os.environ["RAY_ADDRESS"]}
else:
    interface = "lo0" if sys.platform == "darwin" else "lo"
    REACH = {
        # Ray reads this at import: off, it binds to 127.0.0.1, as it does on Windows and macOS.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,  # where its ranks meet; their data goes between GPUs
    }
    os.environ.update(REACH)
