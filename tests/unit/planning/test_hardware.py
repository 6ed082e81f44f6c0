"""The devices of a plan on paper."""

import pytest

from trueline.config.base import ConfigError
from trueline.monitoring.speed import PEAK_TFLOPS
from trueline.planning.hardware import DEVICES, Devices, read_devices

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8x8xH100", Devices(8, 8, "H100")),
        ("8xH100", Devices(1, 8, "H100")),
        ("2x4xh200", Devices(2, 4, "H200")),
        ("1xA100", Devices(1, 1, "A100")),
    ],
)
def test_devices_are_read(text: str, expected: Devices) -> None:
    assert read_devices(text) == expected


@pytest.mark.parametrize("text", ["", "H100", "8", "0xH100", "8x0xH100", "8x8x8xH100", "8 x H100", "-1xH100"])
def test_what_is_written_otherwise_is_answered_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write NODESxGPUSxNAME, e\.g\. 8x8xH100, or GPUSxNAME"):
        read_devices(text)


def test_an_unknown_device_is_answered_with_the_table() -> None:
    with pytest.raises(ConfigError, match="V100 is not known; choose from A100, H100, H200, B200"):
        read_devices("8xV100")


def test_a_planner_sees_all_nodes_as_one_machine() -> None:
    machine = read_devices("8x8xH100").machine()
    assert (machine.gpus, machine.gpu_name) == (64, "H100")
    assert machine.gpu_bytes == int(79.1 * GIB) and machine.memory_bytes == 64 * 256 * GIB


def test_every_device_has_a_peak() -> None:
    assert set(DEVICES) <= set(PEAK_TFLOPS)


def test_nodes_exchange_by_all_their_ways_and_one_gpu_sends_by_its_own() -> None:
    devices = read_devices("2x8xH100")
    assert devices.exchange_rate(8) == pytest.approx(0.7 * 450e9)
    assert devices.exchange_rate(16) == pytest.approx(0.7 * 8 * 50e9)
    assert devices.send_rate() == pytest.approx(0.7 * 50e9)
    assert read_devices("8xH100").send_rate() == pytest.approx(0.7 * 450e9)
