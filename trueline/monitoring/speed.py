"""The speed of a step, for one run and for each of its devices."""

import re

# Dense bfloat16 matrix TFLOP/s of one device, from the makers' data sheets; the first name that fits is taken.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "A10": 125.0,
}


def flops_per_token(parameters: int, *, adapters: bool) -> int:
    """Count FLOPs: two per parameter in the forward and four in the backward pass, two of them for weight gradients."""
    return (4 if adapters else 6) * parameters


def speed_metrics(tokens: int, seconds: float, devices: int, flops: int, device_name: str) -> dict[str, float]:
    """Return tokens per second, and MFU where the device's peak is known (attention and recomputation not counted)."""
    rate = tokens / seconds
    metrics = {"speed/tokens_per_second": rate, "speed/tokens_per_second_per_device": rate / devices}
    peak = next((value for name, value in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)
    if peak is not None:
        metrics["speed/mfu"] = flops * rate / (devices * peak * 1e12)
    return metrics
