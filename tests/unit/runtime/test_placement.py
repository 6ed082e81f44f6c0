import pytest

from trueline.config.base import ConfigError
from trueline.runtime.cluster import Machine
from trueline.runtime.placement import Layout, RoleRanks, check_devices, crowding


def machine(gpus: int) -> Machine:
    return Machine(cpus=8, memory_bytes=2**34, gpus=gpus, gpu_bytes=2**34)


def layout(policy: int, engines: int, width: int = 1, colocated: bool = False, *beside: RoleRanks) -> Layout:
    return Layout(policy, engines, width, colocated, beside)


def critic(ranks: int, shared: bool) -> RoleRanks:
    return RoleRanks("critic", ranks, shared)


@pytest.mark.parametrize(
    ("wanted", "gpus", "fits"),
    [
        (layout(4, 2, 2), 8, True),
        (layout(4, 2, 2), 7, False),
        (layout(4, 2, 2, colocated=True), 4, True),
        (layout(4, 2, 2, colocated=True), 3, False),
        (layout(16, 16), 0, True),  # processes on a CPU share its cores
        (layout(2, 2, 1, False, critic(2, shared=True)), 4, True),
        (layout(2, 2, 1, False, critic(2, shared=False)), 6, True),
        (layout(2, 2, 1, False, critic(2, shared=False)), 5, False),
        (layout(2, 2, 1, True, critic(1, shared=False)), 2, False),
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


def test_a_model_that_shares_the_policys_gpus_has_no_more_ranks_than_the_policy() -> None:
    with pytest.raises(ConfigError, match=r"critic\.ranks=3.*training\.ranks=2.*critic\.placement=separate"):
        check_devices(layout(2, 1, 1, False, critic(3, shared=True)), machine(4))


def test_engines_that_share_the_policys_gpus_take_no_more_of_them() -> None:
    with pytest.raises(ConfigError, match=r"engines=1 x rollout\.tensor_parallel=4 share.*at most training\.ranks=1"):
        check_devices(layout(1, 1, 4, colocated=True), machine(4))


def test_more_processes_of_a_kind_than_cores_are_told_on_cpus_alone() -> None:
    crowded = layout(9, 3, 3, False, critic(10, shared=True), RoleRanks("reference", 8, True))
    found = crowding(crowded, machine(0))
    assert [line.partition(":")[0] for line in found] == [
        "critic.ranks=10",
        "training.ranks=9",
        "rollout.engines=3 x rollout.tensor_parallel=3",
    ]
    assert all("8 CPU cores" in line for line in found)
    assert crowding(crowded, machine(16)) == []
    assert crowding(layout(8, 8, 1, False, critic(8, shared=True)), machine(0)) == []
