"""Ray and torch.distributed. Without a cluster's address, everything listens on this machine's loopback alone."""

import os
import sys

LOOPBACK: dict[str, str] = {}
if "RAY_ADDRESS" not in os.environ:
    interface = "lo0" if sys.platform == "darwin" else "lo"
    LOOPBACK = {
        # Ray reads this at import: off, it binds to 127.0.0.1, as it does on Windows and macOS.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,  # where its ranks meet; their data goes between GPUs
    }
    os.environ.update(LOOPBACK)
