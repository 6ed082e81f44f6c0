import pytest

from trueline.config.base import ConfigError
from trueline.runtime.cluster import Machine
from trueline.runtime.placement import Layout, check_devices


def machine(gpus: int) -> Machine:
    return Machine(cpus=8, memory_bytes=2**34, gpus=gpus, gpu_bytes=2**34)


def layout(policy: int, engines: int, width: int = 1, colocated: bool = False, reference: int = 0) -> Layout:
    return Layout(policy, reference, engines, width, colocated)


@pytest.mark.parametrize(
    ("wanted", "gpus", "fits"),
    [
        (layout(4, 2, 2), 8, True),
        (layout(4, 2, 2), 7, False),
        (layout(4, 2, 2, colocated=True), 4, True),
        (layout(2, 2, 2, colocated=True), 3, False),
        (layout(16, 16), 0, True),  # processes on a CPU share its cores
    ],
)
def test_gpus_are_added_up_or_shared(wanted: Layout, gpus: int, fits: bool) -> None:
    if fits:
        check_devices(wanted, machine(gpus))
        return
    with pytest.raises(ConfigError) as caught:
        check_devices(wanted, machine(gpus))
    for part in ("training.ranks", "rollout.engines", "rollout.tensor_parallel", f"there are {gpus}"):
        assert part in str(caught.value)


def test_the_reference_lives_on_the_policys_gpus() -> None:
    check_devices(layout(2, 1, reference=2), machine(4))
    with pytest.raises(ConfigError, match=r"reference\.ranks=3.*training\.ranks=2"):
        check_devices(layout(2, 1, reference=3), machine(4))
