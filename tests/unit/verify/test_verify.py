"""`trueline verify` in one process: what holds for sound code, and that each planted fault is found."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.templates import families
from tests.support.tiny import make_tiny_model
from tests.unit.data.test_templates import chat_of
from trueline.cli import main
from trueline.config.verify import VerifyConfig
from trueline.data.chat import ChatFormat
from trueline.models.attention import Arrangement, Padded
from trueline.models.loading import load_model
from trueline.rollout.engine import EngineSpec
from trueline.rollout.hf_engine import HFEngine
from trueline.runs.processes import engine_specs
from trueline.runtime.actors import ActorFailure
from trueline.runtime.cluster import machine_at_hand
from trueline.training.engines.torch_engine import TorchEngine
from trueline.training.worker import Worker
from trueline.verify import trainers, weights
from trueline.verify.comparison import Bounds, Comparison, Measurement, compare, compare_logprobs, table
from trueline.verify.divisions import EITHER, HERE, compare_here, compare_passes, guard
from trueline.verify.engine import compare_engine
from trueline.verify.masks import EXCHANGES, check_exchange
from trueline.verify.run import CHECKS, make_check
from trueline.verify.subject import Subject, open_subject
from trueline.verify.weights import compare_saved

LIMITS = Bounds(5e-5, 5e-4, 5e-4)


def subject_of(model: Path, folder: Path) -> Subject:
    folder.mkdir(exist_ok=True)
    config = VerifyConfig.parse({"model": {"path": str(model)}, "runtime": "local", "tokens": 64})
    return open_subject(config, machine_at_hand(), folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tied=True)


@pytest.fixture(scope="module")
def opened(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(model, tmp_path_factory.mktemp("verified"))


@pytest.fixture
def subject(opened: Subject, tmp_path: Path) -> Subject:
    """The same numbers of plain Transformers, and a new folder."""
    fresh = object.__new__(Subject)
    for name in Subject.__slots__:
        object.__setattr__(fresh, name, tmp_path if name == "folder" else getattr(opened, name))
    return fresh


def results(found: list[Comparison]) -> dict[tuple[str, str], str]:
    return {(one.check, one.what): one.result for one in found}


def differing(found: list[Comparison]) -> set[str]:
    return {one.check for one in found if one.result != "holds"}


# A sound model


def test_the_command_prints_a_table_and_its_status_is_zero(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", "--model", str(model), "runtime=local", "tokens=48", "--checks", "template,ranks"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == ["check", "compared", "gap", "limit", "result"]
    assert "0 holds, 0 differs, 2 left out" in printed
    assert "left out: the model has no chat template" in printed
    assert "left out: runtime=local has one process" in printed
    assert main([*words[:-1], "template", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["check"] == "template" and row["result"] == "left out"


def test_all_checks_are_made_unless_some_are_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in CHECKS:
        monkeypatch.setitem(CHECKS, name, lambda subject, name=name: iter([compare(name, "log-probs", 0.0, 1.0)]))
    words = ["verify", "--model", str(model), "runtime=local", "tokens=48"]
    for more, made in (([], [*CHECKS]), (["--checks", "saved, passes"], ["saved", "passes"])):
        assert main([*words, *more]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]] == made


def test_what_a_failing_check_has_found_is_kept_and_its_logs_too(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(subject: Subject) -> Iterator[Comparison]:
        (subject.folder / "logs").mkdir()
        (subject.folder / "saved").mkdir()
        yield compare("one", "log-probs", 0.0, 1.0)
        raise ActorFailure("policy-0.start: its process died")

    monkeypatch.setitem(CHECKS, "ranks", fail)
    assert main(["verify", "--model", str(model), "runtime=local", "tokens=48", "--checks", "ranks"]) == 1
    said = capsys.readouterr()
    assert "1 holds, 1 differs" in said.out and "differs: policy-0.start: its process died" in said.out
    logs = Path(said.err.splitlines()[-1].removeprefix("logs       "))
    assert [one.name for one in logs.parent.iterdir()] == ["logs"]
    shutil.rmtree(logs.parent)


def test_help_names_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    assert f"only these: {', '.join(CHECKS)}" in " ".join(capsys.readouterr().out.split())


def test_a_difference_is_the_exit_status(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CHECKS, "passes", lambda subject: iter([compare("one", "log-probs", 2.0, 1.0)]))
    assert main(["verify", "--model", str(model), "runtime=local", "tokens=48", "--checks", "passes"]) == 1
    assert "0 holds, 1 differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--model", "MODEL", "--checks", "passes,masks"],
            "--checks masks: not known; choose from template, passes, saved, ranks, engine",
        ),
        ([], "verify needs a model: name it with --model"),
        (["--model", "MODEL", "tokens=20"], "tokens=20: the chat template alone takes 20; set it to"),
        (["--model", "MODEL", "runtime=local", "rollout.engine=vllm"], "runtime=local keeps everything in one process"),
    ],
)
def test_bad_input_is_named(
    words: list[str], said: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trueline.verify.run.CHECKS", dict.fromkeys(CHECKS, lambda subject: iter([])))
    assert main(["verify", *(str(model) if word == "MODEL" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_run_keeps_the_table_of_its_model_and_its_report_shows_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data := tmp_path / "rows.jsonl").write_text('{"prompt": "2+2=", "completion": "4"}\n' * 4)
    words = ["--model", str(model), "--data", str(data), "--name", "run", f"folder={tmp_path}", "runtime=local"]
    assert main(["sft", *words, "steps=1", "samples_per_step=2", "monitoring.doctor=false"]) == 0
    capsys.readouterr()
    run, page = tmp_path / "run", tmp_path / "page.html"
    assert main(["verify", "--model", str(run), "runtime=local", "tokens=48", "--checks", "saved"]) == 0
    said = capsys.readouterr()
    assert f"taken      model.path={run}: step_000001, the newest checkpoint" in said.err
    kept = json.loads((run / "verify.json").read_text())
    assert kept["text"] == said.out and len(kept["rows"]) == 3
    assert main(["report", str(run), "--out", str(page)]) == 0
    (shown,) = json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])["runs"]
    assert shown["verified"] == said.out


# Planted faults

Fault = Callable[[pytest.MonkeyPatch], None]


def skip_passes(patch: pytest.MonkeyPatch) -> None:
    """Only the last pass of a step counts."""
    backward = TorchEngine.backward

    def last_only(self: TorchEngine, loss: Any, last: bool = True) -> None:
        backward(self, loss if last else 0.0 * loss, last=last)

    patch.setattr(TorchEngine, "backward", last_only)


def forget_places(patch: pytest.MonkeyPatch) -> None:
    """Padded sequences get other positions, and so other rotary embeddings."""
    inputs = Padded.inputs

    def moved(self: Padded, tokens: Any) -> Any:
        found = inputs(self, tokens)
        return found | {"position_ids": 2 * torch.arange(found["input_ids"].shape[1])[None]}

    patch.setattr(Padded, "inputs", moved)


def join_sequences(patch: pytest.MonkeyPatch) -> None:
    """Packed sequences see those before them."""
    make = Arrangement.__init__

    def joined(self: Arrangement, lengths: list[int]) -> None:
        make(self, [sum(lengths)])

    patch.setattr(Arrangement, "__init__", joined)


def untie_head(patch: pytest.MonkeyPatch) -> None:
    """The head is a copy of the embeddings, which gets a gradient of its own."""

    def untied(*args: Any, **named: Any) -> Any:
        model = load_model(*args, **named)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    patch.setattr("trueline.training.worker.load_model", untied)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (untie_head, {"all in one pass", "one in a pass", "padded, three in a pass"}),
        (skip_passes, {"one in a pass", "padded, three in a pass"}),
        (forget_places, {"padded, three in a pass"}),
        (join_sequences, {"all in one pass", "one in a pass", "padded, three in a pass"}),
    ],
)
def test_a_faulty_pass_is_found(
    fault: Fault, found: set[str], subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    some = {name: HERE[name] for name in ("all in one pass", "one in a pass", "padded, three in a pass")}
    monkeypatch.setattr("trueline.verify.divisions.HERE", some)
    monkeypatch.setattr("trueline.verify.divisions.EITHER", {})
    comparisons = list(compare_passes(subject))
    assert differing(comparisons) == found
    assert {one.result for one in comparisons if one.check in found} <= {"differs", "holds"}  # nothing is refused


def test_keys_reach_the_model(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is computed as it says: so many passes, of padded or packed sequences."""
    seen: dict[str, tuple[int, bool, bool, int]] = {}
    accumulate = Worker.accumulate

    def count(self: Worker, packed: Any, passes: Any, *rest: Any) -> Any:
        checkpoints = bool(self.model.is_gradient_checkpointing)
        seen[name] = (len(passes), self.spec.ranks.packing, checkpoints, self.scorer.chunk)
        return accumulate(self, packed, passes, *rest)

    monkeypatch.setattr(Worker, "accumulate", count)
    for name, keys in (HERE | EITHER).items():
        compare_here(subject, name, keys)
    chunk = seen["all in one pass"][3]
    assert seen == {
        "all in one pass": (1, True, False, chunk),
        "three in a pass": (2, True, False, chunk),
        "one in a pass": (6, True, False, chunk),
        "shared prefixes": (1, True, False, chunk),
        "padded": (1, False, False, chunk),
        "padded, three in a pass": (2, False, False, chunk),
        "checkpointing": (1, True, True, chunk),
        "short slices of the head": (1, True, False, 7),
    }


def test_prefixes_are_shared_in_their_row(subject: Subject) -> None:
    with trainers.open_here(subject, {"training": {"share_prefixes": True}}) as group:
        assert group.plan(subject.samples).saved > 0
    with trainers.open_here(subject, {}) as group:
        assert group.plan(subject.samples).saved == 0


def test_weights_that_are_not_saved_are_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    original = load_model(subject.config.model, torch.float32)
    monkeypatch.setattr(weights, "open_model", lambda *args, **named: (original, None))
    assert differing(list(compare_saved(subject))) == {"saved and opened", "adapter, merged"}


def test_a_lost_moment_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    load = TorchEngine.load_state

    def without(self: TorchEngine, name: str, state: dict[str, Any]) -> None:
        load(self, name, {"weight": state["weight"]} if name.endswith("q_proj.weight") else state)

    monkeypatch.setattr(TorchEngine, "load_state", without)
    found = [one for one in compare_saved(subject) if one.check == "resumed"]
    assert [one.result for one in found] == ["differs"]


def test_steps_that_change_nothing_prove_nothing(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "RATE", trainers.STILL)
    (one,) = [one for one in compare_saved(subject) if one.check == "saved and opened"]
    assert (one.result, one.remark) == ("differs", "the steps before it changed too little")


def test_the_adapter_of_the_configuration_is_the_one_that_is_checked(model: Path, tmp_path: Path) -> None:
    keys = {"model": {"path": str(model), "lora": {"rank": 3, "targets": "q_proj"}}, "runtime": "local", "tokens": 48}
    subject = open_subject(VerifyConfig.parse(keys), machine_at_hand(), tmp_path)
    assert subject.config.model.lora.rank == 0  # in all other checks
    found = results(list(compare_saved(subject)))
    assert found["adapter, merged", "log-probs"] == "holds"
    described = json.loads((tmp_path / "adapter" / "model" / "adapter_config.json").read_text())
    assert (described["r"], described["target_modules"]) == (3, ["q_proj"])


def test_wrong_log_probs_of_an_engine_are_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once at late positions alone, and once in batches alone."""
    generate, queue = HFEngine.generate, HFEngine._queue

    async def late(self: HFEngine, *args: Any) -> Any:
        found = await generate(self, *args)
        shift = 3e-4 * (np.arange(len(found.tokens)) >= 12)
        return replace(found, logprobs=(found.logprobs + shift).astype(np.float32))

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "generate", late)
        found = results(list(compare_engine(subject)))
    assert found["engine", "log-probs"] == "holds"
    assert found["engine", "log-probs by position"] == "differs"

    async def crowded(self: HFEngine, *args: Any) -> Any:
        shift = 0.01 if self.waiting else 0.0
        found = await queue(self, *args)
        return replace(found, logprobs=(found.logprobs + shift).astype(np.float32))

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "_queue", crowded)
        assert "engine, alone or in a batch" in differing(list(compare_engine(subject)))


def test_other_rotary_embeddings_in_the_engines_configuration_are_found(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(subject.config.model.path, tmp_path / "other")
    settings = json.loads((other / "config.json").read_text())
    settings["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    (other / "config.json").write_text(json.dumps(settings))

    def altered(*args: Any) -> list[EngineSpec]:
        return [replace(spec, model=str(other)) for spec in engine_specs(*args)]

    monkeypatch.setattr("trueline.verify.engine.engine_specs", altered)
    found = results(list(compare_engine(subject)))
    assert found["engine", "log-probs"] == found["engine", "log-probs by prompt length"] == "differs"
    assert found["engine, alone or in a batch", "log-probs"] == "holds"


def test_an_engine_that_cannot_run_the_model_is_named(subject: Subject) -> None:
    subject = replaced(subject, {"rollout": {"tensor_parallel": 3}})
    (one,) = make_check("engine", subject)
    assert (one.check, one.result) == ("engine", "refused") and "set rollout.tensor_parallel=1 (got 3)" in one.remark


def replaced(subject: Subject, keys: dict[str, Any]) -> Subject:
    object.__setattr__(subject, "config", subject.config.with_keys(keys))
    return subject


# Templates


@pytest.mark.parametrize("family", [pytest.param(name) for name in families()])
def test_masks_of_every_family(family: str) -> None:
    chat = chat_of(family)
    found = [
        one for name, talk in EXCHANGES.items() for one in guard(name, lambda talk=talk: check_exchange(chat, "", talk))
    ]
    assert not [one for one in found if one.result == "differs"]
    assert sum(one.result == "holds" for one in found) >= 5


@pytest.mark.parametrize("moved", [-1, 1])
def test_a_mask_that_is_off_by_one_is_found(moved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = ChatFormat.encode

    def shifted(self: ChatFormat, *args: Any, **named: Any) -> Any:
        return [replace(one, mask=np.roll(one.mask, moved).tolist()) for one in encode(self, *args, **named)]

    monkeypatch.setattr(ChatFormat, "encode", shifted)
    found = [one for talk in EXCHANGES.values() for one in check_exchange(chat_of("qwen3"), "", talk)]
    assert {one.what for one in found if one.result == "differs"} == {"learned tokens", "prompt"}
    assert all(one.result == "differs" for one in found if one.what == "learned tokens")


def test_a_whole_conversation_that_is_learned_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = ChatFormat.encode

    def everything(self: ChatFormat, *args: Any, **named: Any) -> Any:
        return [replace(one, mask=[False] + [True] * (len(one.mask) - 1)) for one in encode(self, *args, **named)]

    monkeypatch.setattr(ChatFormat, "encode", everything)
    one, _ = check_exchange(chat_of("qwen3"), "", EXCHANGES["one turn"])
    assert one.result == "differs" and "'Where is the ferry?' is learned with reply 1" in one.remark


def test_a_prompt_that_transformers_renders_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatFormat, "prompt_tokens", lambda self, messages, tools=(): [1, 2, 3])
    _, one = check_exchange(chat_of("qwen3"), "", EXCHANGES["one turn"])
    assert (one.what, one.result) == ("prompt", "differs")


# Numbers


def test_a_gap_that_is_not_a_number_differs() -> None:
    assert compare("a", "b", float("nan"), 1.0).result == "differs"
    assert compare("a", "b", 1.0, 1.0).result == "holds"
    assert compare("a", "b", 1.1, 1.0).result == "differs"
    assert compare("a", "b", float("nan"), 1.0).as_row()["gap"] == "nan"


def test_one_wrong_token_among_many_is_found() -> None:
    right = [np.zeros(1000, np.float32), np.zeros(1000, np.float32)]
    wrong = [right[0], right[1].copy()]
    wrong[1][999] = 0.01  # a mean gap of 5e-6
    one = compare_logprobs("a", right, wrong, LIMITS)
    assert (one.what, one.result) == ("log-probs, largest gap", "differs")
    assert compare_logprobs("a", right, [row + 5e-6 for row in right], LIMITS).result == "holds"


def test_limits_follow_what_rounding_does() -> None:
    rows, gradient = [np.zeros(4, np.float32)], np.ones(4)
    moved = Measurement([np.array([0.1, 0, 0, 0.3], np.float32)], np.full(4, 1.5))
    found = Bounds.of(Measurement(rows, gradient), moved)
    assert found == pytest.approx((0.5, 1.5, 2.5))
    assert Bounds.of(Measurement(rows, gradient), Measurement(rows, gradient)) == LIMITS


def test_the_table_has_a_row_for_each_comparison() -> None:
    lines = table([compare("a check", "weights", 0, 0, "7 tensors"), compare("b", "log-probs", 0.5, 0.25)]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["a", "check", "weights", "0", "0", "holds:", "7", "tensors"],
        ["b", "log-probs", "5.0e-01", "2.5e-01", "differs"],
    ]
