"""`trueline verify` with every architecture, and with real ranks and a real engine.

Covers `trueline.verify.trainers` and `trueline.verify.engine`.
"""

from pathlib import Path

import pytest

from tests.support.architectures import ARCHITECTURES, make_model
from tests.support.model_table import check_cell
from tests.support.tiny import make_tiny_model
from trueline.config.base import ConfigError, merge
from trueline.config.verify import VerifyConfig
from trueline.runtime.cluster import machine_at_hand
from trueline.verify.comparison import Comparison, Measurement
from trueline.verify.divisions import OVER_RANKS, SPLIT
from trueline.verify.run import CHECKS
from trueline.verify.subject import Subject, open_subject
from trueline.verify.trainers import SharedRanks


def subject_of(model: Path, folder: Path, runtime: str) -> Subject:
    folder.mkdir()
    config = VerifyConfig.parse({"model": {"path": str(model)}, "runtime": runtime, "tokens": 64})
    return open_subject(config, machine_at_hand(), folder)


def check(subject: Subject, *names: str) -> list[Comparison]:
    return [one for name in names for one in CHECKS[name](subject)]


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("kind", list(ARCHITECTURES))
def test_what_holds_for_an_architecture(kind: str, tmp_path: Path) -> None:
    try:
        found = check(subject_of(make_model(tmp_path / "model", kind), tmp_path / "work", "local"), *CHECKS)
    except ConfigError as error:
        cell = f"refused: {str(error).partition(': ')[2]}"
    else:
        assert not [one for one in found if one.result == "differs"]
        refused = [one.remark for one in found if one.result == "refused"]
        assert all("training.packing=true joins sequences" in remark for remark in refused)
        cell = "exact, padded" if refused else "exact"
    for family in ARCHITECTURES[kind].families:
        check_cell(family, "verify", cell)


@pytest.mark.slow
def test_real_ranks_and_a_real_engine_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layouts are opened, one after the other in the same two processes; then vLLM samples."""
    subject, opened = subject_of(make_tiny_model(tmp_path / "model", tied=True), tmp_path / "work", "ray"), []
    really_open = SharedRanks.open

    def note(self: SharedRanks, more: dict[str, dict[str, object]]) -> object:
        group = really_open(self, more)
        assert len(group.actors) == len(self.actors) == 2
        opened.append(group.mesh)
        return group

    monkeypatch.setattr(SharedRanks, "open", note)
    ranks = check(subject, "ranks")
    assert [one for one in ranks if one.result != "holds"] == []
    layouts = [f"{name}, 2 ranks" for name in (*OVER_RANKS, *SPLIT)]
    assert [one.check for one in ranks] == [name for name in layouts for _ in range(2)]
    assert [(mesh.ring, mesh.tensor) for mesh in opened] == [(1, 1)] * len(OVER_RANKS) + [(2, 1), (1, 2)]
    assert all(one.gap for one in ranks), "computed in another way, so not the same bits"
    sampled = check(subject, "engine")
    assert [one.result for one in sampled] == ["holds"] * 4
    assert sampled[0].gap, "vLLM's kernels are not Transformers'"


@pytest.mark.slow
def test_ranks_that_compute_something_else_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside a rank is a difference as well, and the next layout is opened in the same processes."""
    subject = subject_of(make_tiny_model(tmp_path / "model", tied=False), tmp_path / "work", "ray")
    plain = subject.plain
    object.__setattr__(subject, "plain", Measurement([row + 1e-3 for row in plain.logprobs], plain.gradient * 1.001))
    broken = merge(OVER_RANKS["ZeRO 2"], {"training": {"betas": [0.9, 2.0]}})
    layouts = {"ZeRO 2": OVER_RANKS["ZeRO 2"], "broken": broken, "FSDP2": OVER_RANKS["FSDP2"]}
    monkeypatch.setattr("trueline.verify.divisions.OVER_RANKS", layouts)
    monkeypatch.setattr("trueline.verify.divisions.SPLIT", {})
    found = check(subject, "ranks")
    shown = [(one.check.partition(",")[0], one.what, one.result) for one in found]
    sound = [[(name, what, "differs") for what in ("log-probs", "gradients")] for name in ("ZeRO 2", "FSDP2")]
    assert shown == [*sound[0], ("broken", "all", "differs"), *sound[1]]
    assert "Invalid beta parameter" in found[2].remark
