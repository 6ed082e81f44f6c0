import pytest

from trueline.config.base import ConfigError
from trueline.runtime.cluster import Machine, Node
from trueline.runtime.placement import Layout, RoleRanks, check_devices, crowding, place_processes


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
    assert [one.what.partition(":")[0] for one in found] == [
        "critic.ranks=10",
        "training.ranks=9",
        "rollout.engines=3 x rollout.tensor_parallel=3",
    ]
    assert all("8 CPU cores" in one.what for one in found)
    assert crowding(crowded, machine(16)) == []
    assert crowding(layout(8, 8, 1, False, critic(8, shared=True)), machine(0)) == []


# Several nodes


def cluster(*gpus: int, cpus: int = 0) -> Machine:
    """Nodes with so many GPUs each; without any, with so many CPU slots."""
    nodes = [
        Node(f"10.0.0.{at}", "", cpus or 8, 2**34, count) if not cpus else Node(f"10.0.0.{at}", "", count, 2**34)
        for at, count in enumerate(gpus)
    ]
    return Machine(sum(one.cpus for one in nodes), 2**36, sum(one.gpus for one in nodes), 2**34, "", tuple(nodes))


def test_processes_fill_node_after_node_and_engines_take_the_freest() -> None:
    found = place_processes(layout(3, 2, 2, False, critic(2, shared=False)), cluster(4, 6))
    assert (found.policy, found.roles, found.engines) == ([0, 0, 0], {"critic": [0, 1]}, [1, 1])
    found = place_processes(layout(2, 1), cluster(0, 1, 2, cpus=1))
    assert (found.policy, found.engines, found.nodes()) == ([1, 2], [2], [1, 2])


def test_copies_of_a_model_stay_within_a_node_where_they_fit() -> None:
    pairs = Layout(4, width=2)
    assert place_processes(pairs, cluster(3, 3)).policy == [0, 0, 1, 1]
    assert place_processes(Layout(4, width=4), cluster(2, 2)).policy == [0, 0, 1, 1]  # it fits into none
    wide = RoleRanks("critic", 4, False, width=2)
    assert place_processes(Layout(1, roles=(wide,)), cluster(4, 3)).roles == {"critic": [0, 0, 1, 1]}


def test_what_shares_lies_with_its_ranks() -> None:
    beside = RoleRanks("reference", 4, True)
    found = place_processes(Layout(4, 2, 2, True, (beside,)), cluster(2, 2))
    assert (found.engines, found.roles) == ([0, 1], {"reference": [0, 0, 1, 1]})
    with pytest.raises(ConfigError, match=r"tensor_parallel=2: engine 1 would span 10\.0\.0\.0 and 10\.0\.0\.1"):
        place_processes(Layout(6, 3, 2, True), cluster(3, 3))


@pytest.mark.parametrize(
    ("wanted", "nodes", "said"),
    [
        (layout(2, 1, 4), (4, 2), r"tensor_parallel=4 needs 4 GPUs on one node: 10\.0\.0\.0 has 2 of 4 left"),
        (layout(1, 1, 8), (4, 4), r"rollout\.tensor_parallel=8.*need 9 GPUs, there are 8"),
        (layout(9, 0), (4, 4), r"training\.ranks=9"),
    ],
)
def test_a_wish_that_no_node_can_grant_is_refused_with_what_each_has(
    wanted: Layout, nodes: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_devices(wanted, cluster(*nodes))


def test_cpu_slots_are_counted_on_a_cluster_alone() -> None:
    with pytest.raises(ConfigError, match=r"training\.ranks=4 needs 4 CPU slots: 10\.0\.0\.0 has 0 of 1 left"):
        check_devices(layout(4, 0), cluster(1, 2, cpus=1))
    check_devices(layout(4, 4), machine(0))
    assert crowding(layout(4, 0), cluster(1, 2, cpus=1)) == []
