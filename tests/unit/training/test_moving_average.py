import pytest
import torch

from trueline.training.moving_average import MovingAverage


def test_each_update_moves_a_share_of_the_way() -> None:
    piece = torch.tensor([1.0, 2.0])
    average = MovingAverage([piece], decay=0.75)
    piece.copy_(torch.tensor([5.0, 2.0]))
    average.update()
    assert average.average[0].tolist() == [2.0, 2.0]  # 0.75 * 1 + 0.25 * 5
    average.update()
    assert average.average[0].tolist() == [2.75, 2.0]
    assert piece.tolist() == [5.0, 2.0]


def test_inside_the_pieces_hold_the_average_and_afterwards_their_own() -> None:
    piece = torch.nn.Parameter(torch.tensor([1.0]))
    average = MovingAverage([piece], decay=0.5)
    piece.data.fill_(3.0)
    with average.in_place():
        assert piece.item() == 1.0
        piece.data.fill_(7.0)  # whoever writes there writes the average
    assert piece.item() == 3.0
    assert average.average[0].item() == 7.0


def test_an_error_inside_leaves_the_pieces_as_they_were() -> None:
    piece = torch.tensor([1.0])
    average = MovingAverage([piece], decay=0.5)
    piece.fill_(3.0)
    with pytest.raises(RuntimeError, match="inside"), average.in_place():
        raise RuntimeError("inside")
    assert piece.item() == 3.0
