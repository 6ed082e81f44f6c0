from itertools import islice

import pytest

from trueline.data.loader import Order


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 20])
def test_an_order_goes_on_from_its_position_alone(shuffle: bool, position: int) -> None:
    whole = list(islice(Order(7, seed=3, shuffle=shuffle), 30))
    assert list(islice(Order(7, seed=3, shuffle=shuffle, position=position), 30 - position)) == whole[position:]


def test_every_epoch_has_every_row_once_in_a_new_order() -> None:
    order = Order(50, seed=1, shuffle=True)
    epochs = [list(islice(order, 50)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_without_shuffling_rows_come_as_they_stand() -> None:
    assert list(islice(Order(3, seed=1, shuffle=False), 7)) == [0, 1, 2, 0, 1, 2, 0]


def test_the_seed_decides_the_order() -> None:
    first, same, other = (list(islice(Order(50, seed, True), 50)) for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_position_counts_what_was_drawn() -> None:
    order = Order(4, seed=0, shuffle=True, position=5)
    list(islice(order, 3))
    assert order.position == 8
