import math
from typing import Any

import pytest
import torch
from torch import nn

from trueline.config.model import TrainingConfig
from trueline.training.engines import optimizer as optimizing
from trueline.training.engines.optimizer import (
    MOMENTS,
    HostMomentsAdamW,
    MovingAverage,
    learning_rate_at,
    make_optimizer,
    moments_of,
    set_moments,
)


def config(**settings: Any) -> TrainingConfig:
    return TrainingConfig(learning_rate=0.1, **settings)


def rates(count: int, total: int, **settings: Any) -> list[float]:
    return [learning_rate_at(step, config(**settings), total) for step in range(count)]


def test_constant_stays_where_it_is() -> None:
    assert rates(8, 5) == [0.1] * 8


def test_warm_up_rises_in_equal_steps_and_never_starts_at_zero() -> None:
    assert rates(6, 10, warmup_steps=4) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_linear_falls_in_equal_steps_to_zero_at_the_end() -> None:
    found = rates(13, 12, schedule="linear", warmup_steps=2)
    assert found[2:] == pytest.approx([0.1 * (10 - past) / 10 for past in range(11)])


def test_cosine_is_half_a_wave() -> None:
    found = rates(13, 12, schedule="cosine", warmup_steps=2)
    assert found[2:] == pytest.approx([0.05 * (1 + math.cos(math.pi * past / 10)) for past in range(11)])
    assert found[7] == pytest.approx(0.05)  # half way


def test_wsd_stays_then_falls_in_equal_steps_to_zero() -> None:
    """After 2 steps of warm-up 20 remain; the last quarter of them, 5, falls."""
    found = rates(23, 22, schedule="wsd", warmup_steps=2, decay_share=0.25)
    assert found == pytest.approx([0.05, 0.1, *[0.1] * 16, 0.08, 0.06, 0.04, 0.02, 0.0])
    linear = rates(20, 17, schedule="linear", warmup_steps=3)
    assert rates(20, 17, schedule="wsd", decay_share=1.0, warmup_steps=3) == pytest.approx(linear)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_a_run_may_be_all_warm_up_and_its_end_stays(schedule: str) -> None:
    assert learning_rate_at(2, config(schedule=schedule, warmup_steps=5), 5) == pytest.approx(0.06)
    assert learning_rate_at(50, config(schedule=schedule), 10) == pytest.approx(0.1 * (schedule == "constant"))


def test_weight_decay_is_for_matrices() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    module[0].weight.grad = torch.zeros(2, 3)
    for parameter in module.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(module.named_parameters(), config(weight_decay=0.5)).step()
    assert module[0].weight.flatten().tolist() == pytest.approx([1 - 0.1 * 0.5] * 6)
    for vector in (module[0].bias, module[1].weight, module[1].bias):
        assert vector.tolist() == [1.0, 1.0]


def test_the_first_step_is_adams() -> None:
    """After one step both moments are unbiased: the change is rate * g / (|g| + epsilon)."""
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    parameter.grad = torch.tensor([0.5, -3.0])
    make_optimizer([("weight", parameter)], config(epsilon=0.25)).step()
    expected = [1.0 - 0.1 * 0.5 / 0.75, 2.0 + 0.1 * 3.0 / 3.25]
    assert parameter.tolist() == pytest.approx(expected)


def test_frozen_parameters_are_left_out() -> None:
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    groups = make_optimizer([("a", frozen), ("b", nn.Parameter(torch.zeros(2, 2)))], config()).param_groups
    assert all(parameter is not frozen for group in groups for parameter in group["params"])


# Muon


class Decoder(nn.Module):
    """The kinds of parameters that models have: outside layers, and matrices, vectors and blocks of experts in one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 4, bias=False)])
        self.layers[1].experts = nn.Parameter(torch.randn(2, 3, 4))
        self.head = nn.Linear(4, 7, bias=False)


MATRICES = ["layers.0.weight", "layers.1.weight"]


def set_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_steps_the_matrices_of_layers_and_adamw_all_else() -> None:
    """Three steps with other gradients, at rates that a schedule changes, beside the two optimizers of PyTorch."""
    module, plain = Decoder(), Decoder()
    joined = make_optimizer(module.named_parameters(), config(optimizer="muon", weight_decay=0.5, betas=[0.8, 0.9]))
    named = dict(plain.named_parameters())
    rest = [parameter for name, parameter in named.items() if name not in MATRICES]
    decays = [{"params": [one], "weight_decay": 0.5 if one.ndim > 1 else 0.0} for one in rest]
    adapter_only = [
        torch.optim.Muon([named[name] for name in MATRICES], weight_decay=0.5, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(decays, betas=(0.8, 0.9), eps=1e-8, fused=True),
    ]
    for step, rate in enumerate((0.1, 0.05, 0.2)):
        for optimizer in (joined, *adapter_only):
            for group in optimizer.param_groups:
                group["lr"] = rate
        for model, optimizers in ((module, [joined]), (plain, adapter_only)):
            set_gradients(model, step)
            for optimizer in optimizers:
                optimizer.step()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, named[name]), name
        assert moments_of(joined, parameter).keys() == set(MOMENTS["muon" if name in MATRICES else "adamw"]), name
    joined.zero_grad()
    assert all(parameter.grad is None for parameter in module.parameters())


def test_muon_takes_the_rate_of_adamw() -> None:
    """A first step moves a matrix by about 0.2 of the rate in the root mean square, whatever its shape and gradient."""
    for shape in ((64, 64), (32, 128), (128, 32)):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = 1e-3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
        make_optimizer([("layers.0.weight", parameter)], config(optimizer="muon")).step()
        assert parameter.square().mean().sqrt().item() == pytest.approx(0.2 * 0.1, rel=0.3), shape


def test_moments_are_taken_up_again_by_the_optimizer_that_keeps_them() -> None:
    first, second = Decoder(), Decoder()
    optimizers = [make_optimizer(model.named_parameters(), config(optimizer="muon")) for model in (first, second)]
    set_gradients(first, 0)
    optimizers[0].step()
    second.load_state_dict(first.state_dict())
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        set_moments(optimizers[1], other, moments_of(optimizers[0], one), 1)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        set_gradients(model, 1)
        optimizer.step()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def stepped(parameters: list[nn.Parameter], settings: TrainingConfig, steps: int) -> torch.optim.Optimizer:
    optimizer = make_optimizer(((str(at), one) for at, one in enumerate(parameters)), settings)
    generator = torch.Generator().manual_seed(1)
    for number in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 1)
        optimizer.step()
    return optimizer


def test_moments_on_the_host_step_as_those_on_the_device_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with pieces that end inside a tensor."""
    monkeypatch.setattr(optimizing, "PIECE", 4096)
    ends = []
    for offload in ("none", "moments"):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in ((100, 133), (4096,), (7,))]
        optimizer = stepped(parameters, config(offload=offload, weight_decay=0.1), 3)
        kept = [optimizer.state[parameter] for parameter in parameters]
        assert [float(state["step"]) for state in kept] == [3.0] * 3
        ends.append([*parameters, *(state[key] for state in kept for key in MOMENTS["adamw"])])
    assert isinstance(optimizer, HostMomentsAdamW)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*ends, strict=True))


def test_moments_are_loaded_into_the_memory_that_was_reserved() -> None:
    """And taken as they are where there is none, at the step that they were saved."""
    for offload in ("none", "moments"):
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = make_optimizer([("weight", parameter)], config(offload=offload))
        if isinstance(optimizer, HostMomentsAdamW):
            optimizer.reserve([parameter])
        place = optimizer.state[parameter].get("exp_avg")
        values = {"exp_avg": torch.ones(3), "exp_avg_sq": torch.full((3,), 2.0)}
        set_moments(optimizer, parameter, values, 5)
        state = optimizer.state[parameter]
        assert float(state["step"]) == 5.0 and all(torch.equal(state[key], values[key]) for key in values)
        assert (state["exp_avg"] is place) == (offload == "moments")
        values["exp_avg"].zero_()
        assert torch.equal(state["exp_avg"], torch.ones(3))  # a copy


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
