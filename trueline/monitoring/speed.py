"""The speed of a step, for one run and for each of its devices."""

import re

# Dense bfloat16 matrix TFLOP/s of one device, from the makers' data sheets; the first name that fits is taken. Those
# that compute no bfloat16 (V100, T4) have none.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 6000 Ada": 364.0,
    "RTX A6000": 154.8,
    "RTX 5090": 209.5,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "MI355X": 2516.6,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI250X": 191.5,  # of one of its two dies, each of which is a device
    "MI210": 181.0,
}


def peak_tflops(device_name: str) -> float | None:
    return next((peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def flops_per_token(parameters: int, *, adapters: bool) -> int:
    """Count FLOPs: two per parameter in the forward and four in the backward pass, two of them for weight gradients."""
    return (4 if adapters else 6) * parameters


def speed_metrics(tokens: int, seconds: float, devices: int, flops: int, device_name: str) -> dict[str, float]:
    """Return tokens per second, and MFU where the device's peak is known (attention and recomputation not counted)."""
    rate = tokens / seconds
    metrics = {"speed/tokens_per_second": rate, "speed/tokens_per_second_per_device": rate / devices}
    peak = peak_tflops(device_name)
    if peak is not None:
        metrics["speed/mfu"] = flops * rate / (devices * peak * 1e12)
    return metrics
