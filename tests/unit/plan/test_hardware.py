"""The devices of a plan on paper."""

import pytest

from trueline.config.base import ConfigError
from trueline.monitoring.timing import peak_tflops
from trueline.plan.hardware import DEVICES, read_devices

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8x8xH100", (8, 8, "H100")),
        ("8xH100", (1, 8, "H100")),
        ("2x4xh200", (2, 4, "H200")),
        ("1xA100", (1, 1, "A100")),
        ("8xA100-80GB", (1, 8, "A100")),
        ("8xA100-SXM4-40GB", (1, 8, "A100-40GB")),
        ("1xNVIDIA H100 NVL", (1, 1, "H100 NVL")),
        ("4xrtx4090", (1, 4, "RTX 4090")),
        ("2x4x4090", (2, 4, "RTX 4090")),
        ("1xRTX_6000_Ada", (1, 1, "RTX 6000 Ada")),
        ("1xA6000", (1, 1, "RTX A6000")),
        ("8xMI300X", (1, 8, "MI300X")),
        ("8xAMD Instinct MI355X", (1, 8, "MI355X")),
    ],
)
def test_devices_are_read_by_their_usual_names(text: str, expected: tuple[int, int, str]) -> None:
    found = read_devices(text)
    assert (found.nodes, found.gpus_of_node, found.name) == expected
    assert found.device is DEVICES[found.name] and found.tflops == peak_tflops(found.name)


@pytest.mark.parametrize(
    "text", ["", "H100", "8", "8x8", "0xH100", "8x0xH100", "8x8x8xH100", "8 x H100", "-1xH100", "1x0GiB"]
)
def test_what_is_written_otherwise_is_answered_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write NODESxGPUSxNAME, e\.g\. 8x8xH100, or GPUSxNAME.*80GiB@990TFLOPs"):
        read_devices(text)


def test_an_unknown_device_is_answered_with_near_names_and_the_other_form() -> None:
    with pytest.raises(ConfigError, match=r"H1000 is not known \(near are .*H100.*2x8x80GiB@990TFLOPs"):
        read_devices("8xH1000")
    with pytest.raises(ConfigError, match=r"xyzzy is not known .known are A100, .*1x80GiB"):
        read_devices("8xxyzzy")
    with pytest.raises(ConfigError, match="80GiB@0TFLOPs is not known"):
        read_devices("1x80GiB@0TFLOPs")


def test_a_device_without_a_name_is_given_by_its_figures() -> None:
    one, many = read_devices("1x80GiB"), read_devices("2x8x40gb@494.5TFLOPs")
    assert (one.device.gib, one.tflops) == (80.0, None)
    assert (many.nodes, many.gpus_of_node) == (2, 8) and many.device.gib == pytest.approx(40e9 / GIB)
    half = DEVICES["H100"]
    assert many.flops() == pytest.approx(0.5 * read_devices("1xH100").flops())
    assert many.device.memory_rate == pytest.approx(half.memory_rate / 2)
    assert many.device.link_rate == pytest.approx(half.link_rate / 2)


def test_a_planner_sees_all_nodes_as_one_machine() -> None:
    machine = read_devices("8x8xH100").machine()
    assert (machine.gpus, machine.gpu_name) == (64, "H100")
    assert machine.gpu_bytes == int(79.1 * GIB) and machine.memory_bytes == 64 * 256 * GIB


def test_every_device_has_a_peak_but_those_without_bfloat16() -> None:
    assert {name for name in DEVICES if peak_tflops(name) is None} == {"V100", "V100-16GB", "T4"}
    assert peak_tflops("A100-40GB") == 312 and peak_tflops("H100 NVL") == 835 and peak_tflops("GH200") == 989
    assert peak_tflops("A10G") == 70 and peak_tflops("A10") == 125 and peak_tflops("NVIDIA L40S") == 362


def test_nodes_exchange_by_all_their_ways_and_one_gpu_sends_by_its_own() -> None:
    devices = read_devices("2x8xH100")
    assert devices.exchange_rate(8) == pytest.approx(0.7 * 450e9)
    assert devices.exchange_rate(16) == pytest.approx(0.7 * 8 * 50e9)
    assert devices.send_rate() == pytest.approx(0.7 * 50e9)
    assert read_devices("8xH100").send_rate() == pytest.approx(0.7 * 450e9)
