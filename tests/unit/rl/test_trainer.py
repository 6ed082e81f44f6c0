"""The wiring of the loop: what reaches models, losses and reports, seen from whole runs in this process.

Covers `trueline.rl.models`.
"""

import asyncio
import hashlib
import json
import math
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import losses
from tests.support.letters import rows_of, run_letters
from tests.support.stored import store_samples
from trueline.algorithms.advantages import fresh_logprobs
from trueline.algorithms.losses import LOSSES, Loss, value
from trueline.cli import main
from trueline.config.algorithm import AlgorithmConfig
from trueline.config.model import TrainingConfig
from trueline.config.rl import ResolvedRollout, RLConfig
from trueline.data.types import LossOutput, Sample
from trueline.models.ring_attention import Mesh
from trueline.monitoring.timing import Timer
from trueline.rl.models import DeviceSharing
from trueline.rl.step import describe_tokens, open_samples
from trueline.rl.trainer import RLTrainer
from trueline.rollout.hf_engine import Request
from trueline.rollout.pool import EnginePool
from trueline.rollout.rollouts import Rollouts
from trueline.runs.guard import UpdateMonitor
from trueline.runs.state import RLState
from trueline.runtime.actors import ActorDeath, ActorFailure, Stored
from trueline.sync.weights import WeightSync
from trueline.training.group import ModelGroup
from trueline.training.report import LossSettings
from trueline.training.samples import SampleBlock, StoredSamples

FIRST_STEP = ["steps=2", "rollout.temperature=0.7"]


@pytest.mark.parametrize("words", [[], ["model.lora.rank=4"]])
def test_at_another_temperature_models_and_engine_still_agree(words: list[str], tmp_path: Path) -> None:
    """Engine, old log-probs, update and reference divide by one temperature, so ratio is 1 and gap and KL are 0."""
    assert run_letters(tmp_path, "grpo", "algorithm.kl.coefficient=0.1", *FIRST_STEP, *words) == 0
    for row in rows_of(tmp_path)[1:]:
        assert row["mismatch/logprob_gap_max"] < 1e-4
        assert row["policy/ratio_deviation_max"] < 1e-4
        assert abs(row["mismatch/sampler_z"]) < 4 and abs(row["mismatch/sampler_z_run"]) < 4
    assert abs(rows_of(tmp_path)[1]["policy/kl"]) < 1e-6  # before the first update the policy is its reference
    assert rows_of(tmp_path)[2]["policy/kl"] > 1e-5


def test_at_another_temperature_a_teacher_that_is_the_policy_has_nothing_to_say(tmp_path: Path) -> None:
    run_letters(tmp_path, "grpo", "--dry-run")  # makes the model
    words = [f"teacher.path={tmp_path}/model", "reward.function=", *FIRST_STEP]
    assert run_letters(tmp_path, "on_policy_distill", *words) == 0
    assert abs(rows_of(tmp_path)[1]["distill/kl_per_token"]) < 1e-5


def test_prompts_that_are_computed_once_teach_the_same(tmp_path: Path) -> None:
    """Of a group, in the passes of the policy and of its reference."""
    rows = []
    prompts = "".join(json.dumps({"prompt": f"{number} little words: " * 3}) + "\n" for number in range(8))
    for sharing in ("auto", "false"):
        (folder := tmp_path / sharing).mkdir()
        (folder / "long.jsonl").write_text(prompts)
        words = [f"{section}.share_prefixes={sharing}" for section in ("training", "reference")]
        words += [f"data.path={folder}/long.jsonl", "algorithm.kl.coefficient=0.1", "minibatches=2", "steps=2"]
        assert run_letters(folder, "grpo", *words) == 0
        rows.append(rows_of(folder)[1:])
    for shared, whole in zip(*rows, strict=True):
        assert shared["speed/shared_prefixes"] > 0.4 and "speed/shared_prefixes" not in whole
        names = ("loss", "grad_norm", "policy/entropy", "policy/kl", "reward/mean")
        assert {name: shared[name] for name in names} == pytest.approx(
            {name: whole[name] for name in names}, rel=1e-3, abs=1e-5
        )


def test_the_only_update_of_a_step_brings_its_old_log_probs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy does not score before it, and every number is that of a run in which it does."""
    asked: list[str] = []
    scored = ModelGroup.score_stored

    def spy(self: ModelGroup, *args: Any, **named: Any) -> list[SampleBlock]:
        asked.append(self.name)
        return scored(self, *args, **named)

    monkeypatch.setattr(ModelGroup, "score_stored", spy)
    found = []
    for logprobs_from_update in (True, False):
        folder = tmp_path / str(logprobs_from_update)
        folder.mkdir()
        asked.clear()
        if not logprobs_from_update:
            monkeypatch.setattr("trueline.rl.trainer.fresh_old_logprobs", lambda config: False)
        assert run_letters(folder, "grpo", "algorithm.kl.coefficient=0.1", "steps=3") == 0
        assert asked.count("policy") == (0 if logprobs_from_update else 3)
        assert asked.count("reference") == 3
        found.append(rows_of(folder))
    for one, other in zip(*found, strict=True):
        same = [name for name in one if not name.startswith(("time/", "speed/", "memory/", "sync/seconds", "sync/gb"))]
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
    assert found[0][3]["mismatch/logprob_gap_mean"] > 0


def test_engines_do_not_wait_for_metrics_that_only_the_report_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of a step are described while the next ones are sampled, unless a checkpoint stores the numbers."""
    found, released, waited = [], threading.Event(), []
    release = Rollouts.release

    def spy(self: Rollouts, version: int) -> None:
        released.set()
        release(self, version)

    def slow(chat: Any, stored: StoredSamples, config: RLConfig) -> Any:
        if (stage := len(waited) % 3) < 2 and not config.checkpoint.save:  # the last step is always stored
            waited.append(released.wait(60))
            released.clear()
        else:
            waited.append(stage == 2)
        return describe_tokens(chat, stored, config)

    monkeypatch.setattr(Rollouts, "release", spy)
    monkeypatch.setattr("trueline.rl.trainer.describe_tokens", slow)
    for save in ("false", "true"):
        (folder := tmp_path / save).mkdir()
        words = ["steps=3", "algorithm.kl.coefficient=0.1", f"checkpoint.save={save}", "checkpoint.every=1"]
        assert run_letters(folder, "grpo", *words) == 0
        found.append(rows_of(folder))
    assert waited[:3] == [True] * 3
    for one, other in zip(*found, strict=True):
        same = [name for name in one if not name.startswith(("time/", "speed/", "memory/", "sync/seconds", "sync/gb"))]
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
    saved = json.loads((tmp_path / "true" / "run" / "checkpoints" / "step_000003" / "metrics.json").read_text())
    assert saved["mismatch/kl"] == found[0][3]["mismatch/kl"] and saved["policy/sequence_kl"] > 0


def test_a_failure_while_tokens_are_described_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(chat: Any, stored: StoredSamples, config: RLConfig) -> Any:
        raise ActorFailure("samples of this step are lost")

    monkeypatch.setattr("trueline.rl.trainer.describe_tokens", fail)
    assert run_letters(tmp_path, "grpo", "steps=2", "checkpoint.save=false") == 1
    assert "samples of this step are lost" in "".join(capsys.readouterr())


def test_a_synchronous_run_is_the_same_whatever_updates_do_to_running_answers(tmp_path: Path) -> None:
    """None runs while weights change."""
    found = []
    for mode in ("wait", "interrupt", "keep"):
        folder = tmp_path / mode
        folder.mkdir()
        assert run_letters(folder, "grpo", "steps=3", f"rollout.on_update={mode}", "rollout.too_old=drop") == 0
        weights = folder / "run" / "checkpoints" / "step_000003" / "model" / "model.safetensors"
        found.append((hashlib.sha256(weights.read_bytes()).hexdigest(), [row.get("loss") for row in rows_of(folder)]))
    assert found[0] == found[1] == found[2]


def test_an_asynchronous_run_scores_sampled_tokens_again_that_leave_engines_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one length and answers that are all cut off fill the context of the engine."""
    asked: list[tuple[list[int], list[bool]]] = []
    gap = WeightSync.gap

    def spy(self: WeightSync, tokens: list[int], counted: list[bool] | None = None) -> float:
        if counted is not None:
            asked.append((tokens, counted))
        return gap(self, tokens, counted)

    monkeypatch.setattr(WeightSync, "gap", spy)
    stops = ["rollout.max_staleness=1", "rollout.max_prompt_tokens=2", "rollout.max_new_tokens=3", "steps=2"]
    assert run_letters(tmp_path, "grpo", *stops, prompts=10) == 0
    assert len(asked) == 2
    for tokens, counted in asked:
        assert len(tokens) == 4 and counted[:2] == [False, False] and all(counted[2:])
    assert all(0 < row["mismatch/numerics"] < 1e-4 for row in rows_of(tmp_path)[1:])


def test_engines_that_are_gone_are_started_until_they_are_there_and_then_asked_again() -> None:
    """One dies in its start, and one in the update itself; the update is made again, and requests go on behind it."""
    said: list[str] = []

    class Sync:
        check, pool = True, property(lambda self: self)
        deaths = [{0: "killed"}, {0: "killed in its start"}, {}, {0: "half", 1: "half"}, {}]

        def missing(self) -> dict[int, str]:
            return self.deaths.pop(0)

        def restart_engines(self) -> None:
            said.append("restart")

        def publish(self, version: int) -> dict[str, float]:
            said.append(f"publish {version}")
            if len(self.deaths) == 2:
                raise ActorDeath("engine-1.receive: its process died")
            return {"sync/version": version}

        def has_lost_engines(self) -> bool:
            return True

        def verify(self) -> dict[str, float]:
            said.append("verify")
            return {}

        def readmit_engines(self) -> None:
            said.append("readmit")

    def note(text: str) -> None:
        said.append(text.split(";")[0])

    trainer: Any = RLTrainer.__new__(RLTrainer)
    loop: Any = None
    trainer.sync, trainer.sharing = Sync(), DeviceSharing(EnginePool([]), loop, False)
    trainer.timer, trainer.example = Timer(), None
    trainer.progress, trainer.state = SimpleNamespace(note=note), SimpleNamespace(version=7)
    assert trainer.publish() == {"sync/version": 7}
    started = ["warning: killed", "restart", "warning: killed in its start", "restart", "publish 7"]
    assert said == [*started, "warning: half", "warning: half", "restart", "publish 7", "verify", "readmit"]


def test_old_log_probs_are_computed_first_where_they_are_read_or_used_twice() -> None:
    grpo = AlgorithmConfig.parse({"preset": "grpo"})
    in_reward = {"preset": "grpo", "kl": {"place": "reward", "coefficient": 0.1}}
    assert fresh_logprobs(grpo, updates=1, dropout=0.0)
    assert not fresh_logprobs(grpo, updates=2, dropout=0.0)
    assert not fresh_logprobs(grpo, updates=1, dropout=0.1)
    engines = AlgorithmConfig.parse(
        {"preset": "grpo", "old_logprobs": "rollout", "importance_sampling": {"mode": "none"}}
    )
    own = {"preset": "grpo", "advantage": "trueline.algorithms.advantages:group_norm"}
    for other in (in_reward, {"preset": "on_policy_distill"}, own, {"top_entropy_share": 0.5}):
        assert not fresh_logprobs(AlgorithmConfig.parse(other), 1, 0.0)
    assert not fresh_logprobs(engines, 1, 0.0)


def off(power: float, least: float = 0.0) -> Any:
    """A way to draw that is wrong, and reports the log-probs of the right one."""

    def draw(
        logits: torch.Tensor, requests: list[Request], sampled: list[list[int]], generators: list[torch.Generator]
    ) -> tuple[list[int], list[float]]:
        scores = (logits / requests[0].params.temperature).log_softmax(-1)
        shares = (scores * power).softmax(-1)
        shares[shares < least * shares.max(-1, keepdim=True).values] = 0.0
        chosen = [torch.multinomial(row, 1, generator=one) for row, one in zip(shares, generators, strict=True)]
        drawn = torch.cat(chosen)
        return drawn.tolist(), scores.gather(-1, drawn[:, None])[:, 0].tolist()

    return draw


@pytest.mark.parametrize("draw", [off(1.5), off(1.0, 0.3)], ids=["temperature", "truncated"])
def test_an_engine_that_draws_from_another_distribution_is_caught(
    draw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At another temperature, or from the likeliest tokens alone, while log-probs agree to the last digit."""
    monkeypatch.setattr("trueline.rollout.hf_engine.draw", draw)
    assert run_letters(tmp_path, "grpo", "steps=6", "rollout.temperature=0.7") == 0
    rows = rows_of(tmp_path)[1:]
    assert max(row["mismatch/logprob_gap_max"] for row in rows) < 1e-4
    z, effect = rows[-1]["mismatch/sampler_z_run"], rows[-1]["mismatch/sampler_effect_run"]
    assert z > 10 and effect > 0.1 and rows[-1]["health/sampler"] == 2


def test_draws_that_a_format_has_narrowed_are_not_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RLTrainer.sample

    def held(self: RLTrainer) -> list[Any]:
        groups = whole(self)
        if self.state.step == 0:
            groups[0][-1].metrics["agent/structured"] = 1.0
        return groups

    monkeypatch.setattr(RLTrainer, "sample", held)
    assert run_letters(tmp_path, "grpo", "steps=2") == 0
    assert ["mismatch/sampler_z" in row for row in rows_of(tmp_path)[1:]] == [False, True]


@pytest.mark.parametrize(("minibatches", "epochs"), [(2, 1), (4, 2)])
def test_minibatches_are_parts_of_the_whole(
    minibatches: int, epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every epoch each sample is in one minibatch, in another order each time; all of them are reported."""
    seen: list[list[int]] = []
    found: list[dict[str, float]] = []
    tested: list[bool] = []
    whole = UpdateMonitor.update

    def spy(self: UpdateMonitor, samples: StoredSamples, *args: Any, **named: Any) -> dict[str, float]:
        seen.append(samples.numbers)
        tested.append(args[1].draws)
        found.append(whole(self, samples, *args, **named))
        return found[-1]

    monkeypatch.setattr(UpdateMonitor, "update", spy)
    words = [f"minibatches={minibatches}", f"epochs={epochs}", "steps=1"]
    assert run_letters(tmp_path, "grpo", *words, "training.schedule=linear") == 0
    assert len(seen) == minibatches * epochs
    assert tested == [True, *[False] * (len(seen) - 1)]  # only the first update has the weights that sampled
    assert {len(part) for part in seen} == {64 // minibatches}
    orders = [list(chain(*seen[start : start + minibatches])) for start in range(0, len(seen), minibatches)]
    assert all(Counter(order) == Counter(orders[0]) and len(set(order)) == 64 for order in orders)
    assert epochs == 1 or orders[0] != orders[1]
    row = rows_of(tmp_path)[1]
    for name in ("loss", "grad_norm", "policy/entropy"):
        values = [metrics[name] for metrics in found]
        assert len(set(values)) > 1
        assert row[name] == pytest.approx(sum(values) / len(values))
    largest = max(metrics["policy/ratio_deviation_max"] for metrics in found)
    assert row["policy/ratio_deviation_max"] == largest > 1e-4
    assert row["learning_rate"] == found[-1]["learning_rate"] < found[0]["learning_rate"]


def test_a_critic_learns_from_every_minibatch(tmp_path: Path) -> None:
    """Two steps of one minibatch and one step of two make as many optimizer steps of policy and critic."""
    words = ["prompts_per_step=16", "critic.schedule=linear", "critic.learning_rate=1e-3"]
    assert run_letters(tmp_path, "ppo", *words, "minibatches=2", "steps=1") == 0
    row = rows_of(tmp_path)[1]
    assert row["critic/learning_rate"] == pytest.approx(5e-4)  # the second of two


def test_the_checkpoint_with_the_best_held_out_reward_stays(tmp_path: Path) -> None:
    """A rate that ruins the model again makes an early step the best one."""
    words = [f"evaluation.data={tmp_path}/prompts.jsonl", "evaluation.every=1", "evaluation.limit=8", "steps=6"]
    kept = ["checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_best=1", "training.learning_rate=0.05"]
    assert run_letters(tmp_path, "dr_grpo", *words, *kept) == 0
    rewards = {row["step"]: row["evaluation/reward"] for row in rows_of(tmp_path) if row["step"]}
    best = max(rewards, key=lambda step: rewards[step])
    assert best != 6
    found = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert found == {f"step_{best:06d}", "step_000006"}


OWN = """
from trueline.algorithms.advantages import gae
from trueline.algorithms.entries import entry


@entry("mine", needs=("critic", "greedy"))
def own_gae(samples, config):
    assert any(sample.baseline for sample in samples)
    gae(samples, config)
"""


def test_an_advantage_of_the_users_own_gets_its_critic_and_greedy_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_trainer.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["algorithm.advantage=own_trainer:own_gae", "algorithm.critic_warmup_steps=1", "critic.learning_rate=1e-3"]
    assert run_letters(tmp_path, "grpo", *words, "steps=2") == 0
    first, second = rows_of(tmp_path)[1:]
    assert first["critic/grad_norm"] > 0 and "grad_norm" not in first  # the policy waits
    assert second["critic/grad_norm"] > 0 and second["grad_norm"] > 0
    assert "sync/version" not in first and second["sync/version"] == 1  # no weights travel while none change
    assert second["rollout/staleness_max"] == 0
    assert "critic/explained_variance" in second
    assert (tmp_path / "run" / "checkpoints" / "step_000002" / "critic").is_dir()


def test_engines_that_slept_get_their_weights_back_though_none_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trueline.rl.build.DeviceSharing", lambda pool, loop, _, *rest: DeviceSharing(pool, loop, True, *rest)
    )
    words = ["algorithm.critic_warmup_steps=1", "critic.learning_rate=1e-3", "steps=2"]
    assert run_letters(tmp_path, "ppo", *words) == 0
    assert [row["sync/version"] for row in rows_of(tmp_path)[1:]] == [0, 1]


@pytest.mark.parametrize("placement", ["shared", "separate"])
def test_policy_and_critic_learn_at_once_where_each_has_its_own_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    under_way, most = [], []
    update = UpdateMonitor.update

    def spy(self: UpdateMonitor, *args: Any) -> dict[str, float]:
        under_way.append(self)
        deadline = time.monotonic() + (20 if placement == "separate" else 0)
        while len(under_way) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        most.append(len(under_way))
        found = update(self, *args)
        under_way.remove(self)
        return found

    monkeypatch.setattr(UpdateMonitor, "update", spy)
    assert run_letters(tmp_path, "ppo", "steps=1", f"critic.placement={placement}") == 0
    assert max(most) == (2 if placement == "separate" else 1)
    assert {"grad_norm", "critic/grad_norm"} <= rows_of(tmp_path)[1].keys()


def split_run(folder: Path, verb: str, *words: str) -> list[list[dict[str, Any]]]:
    """What four steps report, made at a stretch and in two parts."""
    losses.CALLS.clear()
    assert run_letters(folder / "whole", verb, "steps=4", *words) == 0
    losses.CALLS.clear()
    assert run_letters(folder / "parts", verb, "steps=2", *words) == 0
    assert main([verb, "--resume", "--name", "run", f"folder={folder}/parts", "steps=4"]) == 0
    return [rows_of(folder / name)[1:] for name in ("whole", "parts")]


def test_the_policy_waits_until_the_critic_explains_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2 alone explains enough; a later limit shows that a resumed run has not forgotten it."""
    found = iter([0.1, 0.6, 0.1, 0.1])
    monkeypatch.setattr("trueline.rl.metrics.explained_variance", lambda samples: next(found))
    words = ["algorithm.critic_warmup_variance=0.5", "critic.learning_rate=1e-3"]
    assert run_letters(tmp_path, "ppo", *words, "steps=3", "algorithm.critic_warmup_limit=2") == 0
    again = ["--resume", "--name", "run", f"folder={tmp_path}", "steps=6", "algorithm.critic_warmup_limit=5"]
    found = iter([0.1] * 3)
    assert main(["ppo", *again]) == 0
    assert ["grad_norm" in row for row in rows_of(tmp_path)[1:]] == [False, False, True, True, True, True]


def test_a_run_resumes_behind_the_groups_that_dynamic_sampling_dropped(tmp_path: Path) -> None:
    """A third of the prompts earn one reward whatever is answered; those drawn before the stop do not come again."""
    words = [f"reward.function={tmp_path}/whole/reward.py:some_uniform", "algorithm.shaping.overlong_factor=0"]
    whole, parts = split_run(tmp_path, "dapo", *words)
    assert sum(row["rollout/dropped_groups"] for row in whole[:2]) > 0
    assert not any("mismatch/sampler_z" in row for row in whole)  # answers are selected by their rewards
    for name in ("loss", "grad_norm", "reward/mean", "rollout/dropped_groups"):
        assert [row[name] for row in whole] == [row[name] for row in parts]


def test_an_environment_whose_metrics_bear_names_of_the_run_changes_none_of_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(
        "class Game:\n"
        "    def reset(self, prompt):\n"
        "        return None\n"
        "    def step(self, reply):\n"
        "        own = {'step': 99, 'reward': 7, 'reward/mean': 5, 'policy/entropy': -1, 'time/step': 0}\n"
        "        return {'reward': 0.25, 'done': True, 'metrics': own}\n"
    )
    game = [f"environment.function={tmp_path}/game.py:Game", "reward.function=", "prompts_per_step=2", "steps=1"]
    assert run_letters(tmp_path, "reinforce++", *game) == 0
    assert run_letters(tmp_path, "reinforce++", *game, "--resume", "steps=2") == 0
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2]
    row = rows_of(tmp_path)[2]
    assert (row["environment/step"], row["environment/reward/mean"], row["reward/mean"]) == (99, 5, 0.25)
    assert row["policy/entropy"] > 0 and row["time/step"] > 0
    shown = [json.loads(line) for line in (tmp_path / "run" / "transcripts.jsonl").read_text().splitlines()]
    assert {one["step"] for one in shown} == {1, 2} and {one["reward"] for one in shown} == {0.25}


def test_a_run_resumes_with_its_count_of_skipped_steps(tmp_path: Path) -> None:
    """Step 2 of 4 is skipped; a rate that falls step by step shows that the skipped one is not counted as made."""
    words = ["algorithm.loss=tests.support.losses:bad_once", "training.schedule=linear", "training.warmup_steps=3"]
    whole, parts = split_run(tmp_path, "grpo", *words)
    assert [row["skipped_steps"] for row in whole] == [0, 1, 1, 1]
    for name in ("skipped_steps", "learning_rate", "reward/mean", "mismatch/sampler_z_run"):
        assert [row[name] for row in whole] == [row[name] for row in parts]
    assert whole[2]["learning_rate"] == whole[1]["learning_rate"]


def test_a_run_resumes_with_its_critics_count_of_skipped_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad_once(*args: Any) -> LossOutput:
        losses.CALLS.append(1)
        found = value(*args)
        return replace(found, values=found.values * math.nan) if len(losses.CALLS) == losses.BAD_CALL else found

    monkeypatch.setitem(LOSSES, "value", Loss(bad_once))
    found = split_run(tmp_path, "ppo", "critic.learning_rate=1e-3")
    for rows in found:
        assert [row["critic/skipped_steps"] for row in rows] == [0, 1, 1, 1]
        assert [row["skipped_steps"] for row in rows] == [0, 0, 0, 0]


class Here:
    """A rollout worker that is called at once."""

    async def run_kept(self, task: Any, *args: Any) -> Any:
        head, arrays = task(None, *args)
        return head, Stored(arrays)

    def run(self, work: Any, what: str) -> Any:
        return asyncio.run(work)

    loop = property(lambda self: self)


def bare_trainer(config: RLConfig, **state: Any) -> RLTrainer:
    """One that has a configuration and counters, and no models."""
    nothing: Any = None
    here: Any = Here()
    parts = (nothing, here, *(nothing,) * 6)
    rollout = ResolvedRollout.parse(
        config.rollout.model_dump(exclude_none=True) | {"engines": 1, "max_prompt_tokens": 8}
    )
    return RLTrainer(
        config,
        rollout,
        *parts,
        RLState(**state),
        nothing,
        nothing,
        None,
        nothing,
        nothing,
        here,
        nothing,
        nothing,
        nothing,
    )


def answer(tokens: int, reward: float, *, group: int = 0, truncated: bool = False) -> Sample:
    """Of a prompt of two tokens; policy and reference are a nat apart on every token."""
    sample = Sample(torch.arange(2 + tokens), torch.arange(2 + tokens) >= 2, group=group, truncated=truncated)
    sample.task_reward = sample.reward = reward
    sample.token_rewards = torch.zeros(2 + tokens)
    sample.token_rewards[-1] = reward
    sample.rollout_logprobs = sample.old_logprobs = -1.0 * sample.mask
    sample.ref_logprobs = -2.0 * sample.mask
    return sample


def test_assess_shapes_then_compares() -> None:
    algorithm = {"preset": "dr_grpo", "shaping": {"overlong_factor": 0.5, "overlong_share": 0.5}}
    config = RLConfig.parse({"algorithm": algorithm, "rollout": {"max_new_tokens": 8}})
    stored = store_samples([answer(4, 1.0), answer(8, 1.0), answer(4, -1.0), answer(4, 0.0)])
    bare_trainer(config).assign_advantages(stored)
    samples = open_samples(stored)
    assert [sample.reward for sample in samples] == [1.0, 0.5, -1.0, 0.0]  # 8 of 8 tokens: the whole punishment
    assert [sample.task_reward for sample in samples] == [1.0, 1.0, -1.0, 0.0]
    mean = (1.0 + 0.5 - 1.0) / 4
    expected = [1.0 - mean, 0.5 - mean, -1.0 - mean, -mean]
    assert [sample.advantages[-1].item() for sample in samples] == pytest.approx(expected)
    assert all(not sample.advantages[:2].any() for sample in samples)


def test_assess_takes_the_coefficient_that_has_adapted() -> None:
    algorithm = {"preset": "reinforce++", "whiten": False, "kl": {"coefficient": 0.1, "target": 1.0}}
    config = RLConfig.parse({"algorithm": algorithm, "rollout": {"max_new_tokens": 8}})
    for adapted, coefficient in ((None, 0.1), (0.25, 0.25)):
        stored = store_samples([answer(4, 1.0)])
        bare_trainer(config, kl_coefficient=adapted).assign_advantages(stored)
        samples = open_samples(stored)
        assert samples[0].reward == pytest.approx(1.0 - 4 * coefficient)
        assert samples[0].task_reward == 1.0


def test_losses_get_the_temperature_the_adapted_coefficient_and_the_good_tokens() -> None:
    told: list[tuple[str, LossSettings]] = []

    class Listening:
        model = ModelGroup("policy", [], TrainingConfig(micro_batch_tokens=99), 60.0, Mesh(1))

        def update(self, minibatch: list[Sample], loss: str, settings: LossSettings) -> dict[str, float]:
            told.append((loss, settings))
            return {}

    algorithm = {"preset": "grpo", "positive_nll": 0.1, "kl": {"coefficient": 0.1, "target": 1.0}}
    config = RLConfig.parse({"algorithm": algorithm, "rollout": {"max_new_tokens": 8, "temperature": 0.7}})
    trainer = bare_trainer(config, kl_coefficient=0.25)
    trainer.guard = Listening()  # type: ignore[assignment]
    samples = store_samples([answer(4, 1.0), answer(3, 1.0), answer(8, 0.0)])
    trainer.assign_advantages(samples)
    trainer.update(samples)
    ((loss, settings),) = told
    assert (loss, settings.temperature, settings.section) == ("policy", 0.7, config.algorithm)
    assert settings.statistics == {"positive_tokens": 7.0, "kl_coefficient": 0.25}


def test_a_minibatch_without_weight_is_not_stepped_on() -> None:
    """All of its answers are filtered: an optimizer step would only decay weights and moments."""
    algorithm = {"preset": "dapo", "shaping": {"overlong_filter": True, "overlong_factor": 0.0}}
    config = RLConfig.parse({"algorithm": algorithm, "rollout": {"max_new_tokens": 8}})
    samples = store_samples([answer(8, 1.0, truncated=True), answer(8, 0.0, truncated=True)])
    trainer = bare_trainer(config)
    trainer.assign_advantages(samples)
    assert trainer.update(samples) == {}
