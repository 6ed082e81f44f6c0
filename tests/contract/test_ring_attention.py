"""Attention over a ring of real processes is that of one process, and so are its gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import run_ranks
from trueline.models.ring_attention import RingGroup, gather_ring, local_positions, padded_lengths, ring_attention

WORLD, RING_SIZES = 4, (1, 2, 4)
SIZE, SCALE = 8, 0.4
NAMES = ("out", "query", "key", "value")
CASES = {  # lengths, query heads, key heads, dtype, relative error
    "one sequence": ([64], 2, 2, torch.float32, 1e-5),
    "many lengths": ([13, 5, 32, 1, 8, 40], 4, 4, torch.float32, 1e-5),
    "grouped heads": ([13, 32, 7], 4, 2, torch.float32, 1e-5),
    "one key head": ([9, 16], 3, 1, torch.float64, 1e-10),
    "float64": ([13, 5, 32, 1, 8, 40], 4, 2, torch.float64, 1e-10),
    "bfloat16": ([24, 31], 4, 2, torch.bfloat16, 2e-2),
}
LEAK_LENGTHS, LEAK_CHANGED = [11, 16, 6, 24], 1
GATHER_LENGTHS = [13, 16, 3]


def make_inputs(case: str, size: int) -> list[Tensor]:
    """Query, key, value and the gradient of the output, over padded sequences; the padding holds values too."""
    lengths, heads, key_heads, dtype, _ = CASES[case]
    total = sum(padded_lengths(lengths, size))
    generator = torch.Generator().manual_seed(len(case))
    shapes = [(total, count, SIZE) for count in (heads, key_heads, key_heads, heads)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    made[3] *= real(lengths, size)[:, None, None]  # no loss comes from padding
    return made


def real(lengths: list[int], size: int) -> Tensor:
    """Which of the padded positions hold tokens."""
    padded = padded_lengths(lengths, size)
    return torch.cat([torch.arange(total) < length for length, total in zip(lengths, padded, strict=True)])


def attend(inputs: list[Tensor], lengths: list[int], ring: RingGroup) -> dict[str, Tensor]:
    """This rank's part of the output and of the gradients."""
    rows = local_positions(lengths, ring.rank, ring.size)
    query, key, value, dout = (tensor[rows] for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    shares = [length // ring.size for length in padded_lengths(lengths, ring.size)]
    out = ring_attention(query, key, value, shares, ring, SCALE)
    return dict(zip(NAMES, [out.detach(), *torch.autograd.grad(out, leaves, dout)], strict=True))


def changed_sequence(inputs: list[Tensor], size: int) -> list[Tensor]:
    padded = padded_lengths(LEAK_LENGTHS, size)
    copies = [tensor.clone() for tensor in inputs]
    for tensor in copies:
        tensor.split(padded)[LEAK_CHANGED].mul_(-3).add_(1)
    return copies


def gather(ring: RingGroup) -> dict[str, Tensor]:
    values, weights = gather_inputs(ring.size)
    local = values[local_positions(GATHER_LENGTHS, ring.rank, ring.size)].requires_grad_()
    whole = gather_ring(local, GATHER_LENGTHS, ring)
    (gradient,) = torch.autograd.grad((whole.square() * weights).sum(), local)
    return {"whole": whole.detach(), "gradient": gradient}


def gather_inputs(size: int) -> tuple[Tensor, Tensor]:
    total = sum(padded_lengths(GATHER_LENGTHS, size))
    values = torch.arange(total * 3, dtype=torch.float32).view(total, 3)
    return values, values.cos()


def on_rank(rank: int, world: int) -> dict[int, Any]:
    """Rings of one, two and four ranks; those of two lie side by side, each with every second rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/meet", rank=rank, world_size=world)
    found = {}
    for size in RING_SIZES:
        rings = world // size
        groups = [dist.new_group(list(range(first, world, rings))) for first in range(rings)]
        found[size] = on_ring(RingGroup(rank // rings, size, groups[rank % rings]))
    dist.destroy_process_group()
    return found


def on_ring(ring: RingGroup) -> dict[str, Any]:
    found: dict[str, Any] = {case: attend(make_inputs(case, ring.size), CASES[case][0], ring) for case in CASES}
    inputs = leak_inputs(ring.size)
    found["before"] = attend(inputs, LEAK_LENGTHS, ring)
    found["after"] = attend(changed_sequence(inputs, ring.size), LEAK_LENGTHS, ring)
    found["gather"] = gather(ring)
    return found


def leak_inputs(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    total = sum(padded_lengths(LEAK_LENGTHS, size))
    return [torch.randn(total, 2, SIZE, generator=generator) for _ in range(4)]


@pytest.fixture(scope="module")
def every_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, Any]]:
    return run_ranks(on_rank, WORLD, tmp_path_factory.mktemp("ring"))


@pytest.fixture(
    params=[(size, first) for size in RING_SIZES for first in range(WORLD // size)], ids="{0[0]}-{0[1]}".format
)
def ranks(every_rank: list[dict[int, Any]], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the ranks of one ring found."""
    size, first = request.param
    return [rank[size] for rank in every_rank[first :: WORLD // size]]


def assemble(parts: list[Tensor], lengths: list[int]) -> Tensor:
    """The ranks' parts on the axis of the padded sequences."""
    order = torch.cat([local_positions(lengths, rank, len(parts)) for rank in range(len(parts))])
    return torch.cat(parts)[order.argsort()]


def expected(case: str, size: int) -> dict[str, Tensor]:
    """Causal softmax over the tokens of each sequence alone, in float64, by autograd."""
    lengths, heads, key_heads, _, _ = CASES[case]
    here = real(lengths, size)
    query, key, value, dout = (tensor[here].double() for tensor in make_inputs(case, size))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    outs = []
    for q, k, v in zip(*(leaf.split(lengths) for leaf in leaves), strict=True):
        k, v = (tensor.repeat_interleave(heads // key_heads, dim=1) for tensor in (k, v))
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        scores = (torch.einsum("qhd,khd->hqk", q, k) * SCALE).masked_fill(later, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    out = torch.cat(outs)
    return dict(zip(NAMES, [out.detach(), *torch.autograd.grad(out, leaves, dout)], strict=True))


def accept(parts: list[dict[str, Tensor]], case: str) -> None:
    lengths, *_, dtype, tolerance = CASES[case]
    here = real(lengths, len(parts))
    for name, wanted in expected(case, len(parts)).items():
        found = assemble([part[name] for part in parts], lengths)
        assert found.dtype == dtype
        error = (found[here].double() - wanted).norm() / wanted.norm()
        assert error <= tolerance, f"{case}: {name} is off by {error:.1e}"
        assert name == "out" or not found[~here].any(), f"{case}: padding has a gradient of {name}"


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_full_attention(ranks: list[dict[str, Any]], case: str) -> None:
    accept([rank[case] for rank in ranks], case)


def test_no_sequence_sees_another(ranks: list[dict[str, Any]]) -> None:
    padded = padded_lengths(LEAK_LENGTHS, len(ranks))
    for name in NAMES:
        before, after = (assemble([rank[when][name] for rank in ranks], padded) for when in ("before", "after"))
        same = [torch.equal(*pair) for pair in zip(before.split(padded), after.split(padded), strict=True)]
        assert same == [place != LEAK_CHANGED for place in range(len(padded))], name


def test_every_rank_gathers_all_values_and_gets_its_own_gradient(ranks: list[dict[str, Any]]) -> None:
    values, weights = gather_inputs(len(ranks))
    for number, rank in enumerate(ranks):
        rows = local_positions(GATHER_LENGTHS, number, len(ranks))
        assert torch.equal(rank["gather"]["whole"], values)
        assert torch.equal(rank["gather"]["gradient"], (2 * values * weights)[rows])


def test_chunks_of_the_layout() -> None:
    assert padded_lengths([1, 8, 9], 4) == [8, 8, 16]
    assert padded_lengths([8, 16], 4) == [8, 16]
    held = [local_positions([7, 4], rank, 2).tolist() for rank in range(2)]  # padded to 8 and 4
    assert held == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


@pytest.mark.parametrize("lengths", [[6], [5, 3], [4, 6]])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    values = torch.zeros(8, 1, SIZE)
    ring: Any = RingGroup(0, 1, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two equal chunks"):
        ring_attention(values, values, values, lengths, ring, SCALE)
