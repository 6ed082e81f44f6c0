"""On one CUDA device: moments on the host, and a forecast that is near what is in use."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from trueline.config.model import TrainingConfig
from trueline.training.engines import optimizer as optimizing
from trueline.training.engines.optimizer import MOMENTS, HostMomentsAdamW, make_optimizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
def test_moments_that_visit_the_gpu_are_stepped_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of small tensors, and of one that is pinned in place; none of them stays on the device."""
    monkeypatch.setattr(optimizing, "PIECE", 2**20)
    ends = []
    for offload in ("none", "moments"):
        torch.manual_seed(0)
        shapes = ((4100, 4099), (777,))
        parameters = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
        enumerated = ((str(at), one) for at, one in enumerate(parameters))
        settings = TrainingConfig(learning_rate=0.1, weight_decay=0.1, offload=offload)
        optimizer = make_optimizer(enumerated, settings)
        if isinstance(optimizer, HostMomentsAdamW):
            optimizer.reserve(parameters)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        kept = [optimizer.state[parameter][key] for parameter in parameters for key in MOMENTS["adamw"]]
        ends.append([*(one.detach().cpu() for one in parameters), *(one.cpu() for one in kept)])
    assert all(one.device.type == "cpu" and one.is_pinned() for one in kept)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*ends, strict=True))


@pytest.mark.gpu
def test_a_forecast_is_near_what_is_in_use(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_memory.py", str(tmp_path / "run"), "--shape", "135M"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
