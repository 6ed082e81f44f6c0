import pytest

from trueline.training.mesh import Mesh


@pytest.mark.parametrize(
    ("world", "ring", "tensor"), [(1, 1, 1), (8, 1, 1), (8, 2, 1), (8, 1, 4), (8, 2, 2), (12, 3, 2)]
)
def test_every_rank_has_one_place(world: int, ring: int, tensor: int) -> None:
    mesh = Mesh(world, ring, tensor)
    assert mesh.data * mesh.width == world
    rings = [mesh.ring_ranks(data, place) for data in range(mesh.data) for place in range(tensor)]
    assert sorted(rank for ranks in rings for rank in ranks) == list(range(world))
    for ranks in rings:
        assert len(ranks) == ring
        assert len({mesh.data_place(rank) for rank in ranks}) == 1  # a ring shares its samples


def test_tensor_ranks_are_neighbours_and_data_is_outermost() -> None:
    mesh = Mesh(8, ring=2, tensor=2)
    assert [mesh.data_place(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (mesh.ring_ranks(0, 0), mesh.ring_ranks(0, 1), mesh.ring_ranks(1, 0)) == ([0, 2], [1, 3], [4, 6])


def test_without_a_ring_nobody_is_joined() -> None:
    assert Mesh(4).join_ring(0) is None
