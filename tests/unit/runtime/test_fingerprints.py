"""Bit patterns as numbers: equal for equal weights, another number for anything else."""

import pytest
import torch
from torch import nn

from trueline.runtime import fingerprints
from trueline.runtime.fingerprints import (
    bit_sum,
    bit_sums,
    fingerprint,
    holdings,
    plain_parameters,
    salt_print,
    scramble,
    wrap_int64,
)


def test_any_bit_and_any_place_counts() -> None:
    torch.manual_seed(0)
    for dtype, size in ((torch.bfloat16, 5000), (torch.float32, 3001), (torch.bfloat16, 3)):
        tensor = torch.randn(size).to(dtype)
        first = int(fingerprint(tensor))
        assert int(fingerprint(tensor.clone())) == first
        bits = fingerprints.PATTERNS[tensor.element_size()]
        for place in (0, size // 2, size - 1):
            other = tensor.clone()
            other.view(bits)[place] ^= 1
            assert int(fingerprint(other)) != first
        for shift in (1, 2):
            assert int(fingerprint(tensor.roll(shift))) != first


def test_rectangles_of_equal_sums_differ() -> None:
    """Rows and columns have the same sums; only the places differ."""
    words = torch.zeros(2 * fingerprints.ROW, dtype=torch.float32)
    one, other = words.clone(), words.clone()
    one[0], one[fingerprints.ROW * 2 - 1] = 1.0, 1.0
    other[fingerprints.ROW - 1], other[fingerprints.ROW] = 1.0, 1.0
    assert int(fingerprint(one)) != int(fingerprint(other))


def test_pieces_make_no_difference() -> None:
    tensor = torch.randn(10_000)
    whole = int(fingerprint(tensor))
    kept, fingerprints.PIECE = fingerprints.PIECE, fingerprints.ROW * 16
    try:
        assert int(fingerprint(tensor)) == whole
    finally:
        fingerprints.PIECE = kept


def test_zeros_count_alike_whatever_their_sign() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        plus, minus = torch.tensor([0.0, 1.0, 0.0]).to(dtype), torch.tensor([-0.0, 1.0, -0.0]).to(dtype)
        assert int(fingerprint(plus)) == int(fingerprint(minus))
        assert int(bit_sum(plus)) == int(bit_sum(minus))


def test_the_sum_does_not_ask_how_weights_are_fused_or_cut() -> None:
    one, other = torch.randn(6, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    fused = torch.cat([one, other])
    assert int(bit_sum(fused)) == int(bit_sum(one) + bit_sum(other))
    assert int(bit_sum(fused[:, :4]) + bit_sum(fused[:, 4:])) == int(bit_sum(fused))
    assert int(bit_sum(fused.t())) == int(bit_sum(fused))
    other.view(torch.int16)[0, 0] += 1
    assert int(bit_sum(torch.cat([one, other]))) == int(bit_sum(fused)) + 1


def test_labels_are_told_apart() -> None:
    value = fingerprint(torch.randn(8))
    assert int(salt_print(value, "0 a")) != int(salt_print(value, "1 a")) != int(salt_print(value, "0 b"))


def test_a_sum_wraps_as_devices_do() -> None:
    largest = torch.tensor(2**63 - 1)
    assert wrap_int64(2**63 - 1 + 5) == int(largest + 5)
    assert wrap_int64(-(2**63) - 1) == int(torch.tensor(-(2**63)) - 1)


def test_tied_weights_count_once_and_packed_ones_stay_named() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 4, bias=False), "two": nn.Linear(4, 4, bias=False)})
    model["three"], model["four"] = nn.Linear(4, 2), nn.Linear(4, 2, bias=False)
    model["two"].weight = nn.Parameter(model["one"].weight.data)
    model["four"].weight = nn.Parameter(torch.empty(0))
    assert [name for name, _ in plain_parameters(model)] == ["one.weight", "three.weight", "three.bias", "four.weight"]
    before = holdings(model)
    assert before["four.weight"] == (0, 0)
    assert before["three.bias"][1] == 2
    assert bit_sums(model, torch.float32)["three.bias"] == int(bit_sum(model["three"].bias))
    scramble(model)
    after = holdings(model)
    assert all(before[name] != after[name] for name in ("one.weight", "three.weight", "three.bias"))


def test_sums_are_of_the_type_that_is_asked_for() -> None:
    """A trainer's float32 is compared with what an engine holds in bfloat16, and the other way round."""
    model = nn.Linear(8, 8)
    wide = bit_sums(model, torch.float32)
    narrow = bit_sums(model, torch.bfloat16)
    assert narrow == {name: int(bit_sum(weight.detach().bfloat16())) for name, weight in model.named_parameters()}
    assert all(narrow[name] != wide[name] for name in wide)
    model.bfloat16()
    assert bit_sums(model, torch.bfloat16) == narrow
    assert bit_sums(model, torch.float32) == {
        name: int(bit_sum(weight.detach().float())) for name, weight in model.named_parameters()
    }


def test_a_sum_is_that_of_all_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums above 32 bits too; and a minus zero in each piece counts as zero."""
    tensor = torch.full((1000,), -1e30)
    tensor[::7] = -0.0
    wanted = sum(int(value) for value in tensor.view(torch.int32) if int(value) != -(2**31))
    assert int(bit_sum(tensor)) == wanted < -(2**32)
    monkeypatch.setattr(fingerprints, "PIECE", 256)
    assert int(bit_sum(tensor)) == wanted


def test_whole_numbers_are_no_weights() -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("packed", nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False))
    assert list(bit_sums(model, torch.float32)) == ["weight", "bias"]
    assert fingerprints.as_numbers([]) == []
