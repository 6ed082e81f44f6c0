"""The recorded steps of a run: from which weights and kept samples each can be computed again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from trueline.algorithms.advantages import needs
from trueline.algorithms.entries import is_own
from trueline.config.base import ConfigError, Tree, merge
from trueline.config.model import ModelConfig
from trueline.config.rl import RLConfig
from trueline.config.run import CheckpointConfig
from trueline.models.truncation import Truncation
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.user_files import changed_places, found_again
from trueline.plan.resolve import RoleModel, critic_start, reward_models, role_model
from trueline.rl.models import CRITIC, policy_specs
from trueline.runs.processes import model_group, open_processes, role_group
from trueline.runtime.cluster import machine_at_hand
from trueline.runtime.placement import Layout
from trueline.training.checkpoints import Checkpoints, step_of
from trueline.training.group import ModelGroup, start_groups
from trueline.training.kept_samples import KeptStep, SampleFiles, open_step
from trueline.training.report import LossSettings, Metrics
from trueline.training.samples import Fields, StoredSamples
from trueline.training.worker import Worker, worker_target

POLICY, VALUE = "policy", "value"  # losses of updates, each of its own model
FOLDERS = {POLICY: "", VALUE: CRITIC}  # inside a checkpoint
TRUST = "read it, and add --trust-code to run it on this machine"
Models = dict[str, ModelGroup]  # by their losses


@dataclass(frozen=True)
class RecordedRun:
    folder: RunFolder
    keys: Tree  # that replace those of the run
    archive: bool = False  # of somebody else
    trusted: bool = True  # its code may run

    @cached_property
    def files(self) -> SampleFiles:
        return SampleFiles(self.folder.path)

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """Return the checkpoints by their steps."""
        return {step_of(one): one for one in Checkpoints(self.folder.path, CheckpointConfig()).list_finished()}

    @cached_property
    def log(self) -> dict[int, Metrics]:
        return {row["step"]: row for row in self.folder.rows()}

    def open(self, step: int) -> KeptStep:
        return open_step(self.files.file(step))

    def starts(self, step: int) -> list[int]:
        """Return the steps whose weights are there and from which this one can be computed, the nearest first."""
        kept = self.files.steps()
        weights = sorted((one for one in (0, *self.checkpoints) if one < step), reverse=True)
        return [start for start in weights if not missing(kept, start, step)]

    def start(self, step: int) -> int:
        if found := self.starts(step):
            return found[0]
        kept = self.files.steps()
        nearest = max((one for one in (0, *self.checkpoints) if one < step), default=0)
        lost = ", ".join(self.files.file(one).name for one in missing(kept, nearest, step)[:3])
        can = [one for one in kept if self.starts(one)]
        raise ConfigError(
            f"step {step} cannot be replayed: it needs the weights after step {nearest} and the samples of the steps "
            f"since, and of these {lost} is not in {self.files.folder}; "
            + (
                f"steps that can be replayed: {spans(can)}"
                if can
                else "the run kept none (monitoring.keep_samples_mib)"
            )
        )

    def config(self, kept: KeptStep) -> RLConfig:
        """Return the configuration of a step, in one process unless the given keys name a layout."""
        tree = merge(self.places(kept.config), self.keys)
        if self.keys.get("runtime") != "ray":
            tree = merge(merge(tree, one_process(tree["model"]["dtype"])), self.keys)
        config = RLConfig.parse(tree)
        if config.runtime == "local" and (config.training.ranks or 1) > 1:
            raise ConfigError(f"training.ranks={config.training.ranks} needs processes: add runtime=ray")
        if config.model.lora.dropout:
            raise ConfigError(f"model.lora.dropout={config.model.lora.dropout} draws at random, so no step repeats")
        return config

    def places(self, tree: Tree) -> Tree:
        """Return the configuration with its files and folders as they are found now."""
        if not self.archive:
            return found_again(tree, self.folder.path.parent)

        def inside(place: str) -> str:
            return str(self.folder.path / place) if (self.folder.path / place).exists() else place

        config = RLConfig.parse(changed_places(tree, inside))
        if not config.model.path.startswith(str(self.folder.path)) and "path" not in self.keys.get("model", {}):
            raise ConfigError(
                f"the archive has no weights of {Path(config.model.path).name}: name them with model.path=..."
            )
        if is_own(config.algorithm.loss) and not self.trusted:
            raise ConfigError(f"algorithm.loss={config.algorithm.loss} is code of the archive: {TRUST}")
        return config.with_keys({"model": {"trust_remote_code": self.trusted}}).model_dump()

    @contextmanager
    def weights(self, step: int, start: int, config: RLConfig) -> Iterator[Models]:
        """Open the models with the weights after a step, computed from those after step `start`."""
        with open_models(config) as models:
            if start:
                load(models, self.checkpoints[start])
            for one in range(start + 1, step + 1):
                kept = self.open(one)
                play(models, kept, self.config(kept), self.keys)
            yield models


def one_process(dtype: str) -> Tree:
    """Return the layout of one process; other keys of a layout are without effect there."""
    engine = "torch" if dtype == "float32" else "fsdp2"  # which has float32 master weights
    one = {"engine": engine, "ranks": 1, "compile": False}
    model = {"context_parallel": 1, "tensor_parallel": 1}
    rollout = {"engine": "hf", "workers": None}
    return {"runtime": "local", "model": model, "training": one, "critic": one, "rollout": rollout}


def missing(kept: list[int], start: int, step: int) -> list[int]:
    return [one for one in range(start + 1, step + 1) if one not in kept]


def spans(steps: list[int]) -> str:
    """Write steps as a person does: 1-4, 7."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@contextmanager
def open_models(config: RLConfig) -> Iterator[Models]:
    """Start the trained models of a run as they began."""
    roles = [critic_role(config)] if "critic" in needs(config.algorithm) else []
    ranks, updates = config.training.ranks or 1, config.steps * config.minibatches * config.epochs
    layout = Layout(ranks, roles=tuple(role.layout() for role in roles), width=config.model.width())
    with TemporaryDirectory() as logs, open_processes(machine_at_hand(), layout, Path(logs), config.runtime) as opened:
        specs = policy_specs(config, ranks)
        models = {POLICY: model_group(POLICY, opened.policy(worker_target(config.training), specs), specs)}
        for role in roles:
            models[VALUE] = role_group(role, opened, config.seed, config.timeout_seconds, updates)
        try:
            start_groups(list(models.values()))
            yield models
        finally:
            for model in models.values():
                model.stop()


def critic_role(config: RLConfig) -> RoleModel:
    judges = [] if config.critic.path else reward_models(config.reward, config.reward_model, config.model)
    policy: ModelConfig = config.model
    return role_model("critic", critic_start(config, judges), config.critic, policy, head="value")


def load(models: Models, checkpoint: Path) -> None:
    for loss, model in models.items():
        model.call(Worker.load, str(checkpoint / FOLDERS[loss]))


def play(models: Models, kept: KeptStep, config: RLConfig, keys: Tree) -> list[tuple[str, Metrics]]:
    """Make the updates of a step again; return the metrics of each, with its loss."""
    found = []
    for update in kept.updates:
        given = update.settings | (
            {"temperature": config.rollout.temperature} if "temperature" in keys.get("rollout", {}) else {}
        )
        given["kept"] = Truncation(**given["kept"]) if given["kept"] else None
        settings = LossSettings(section=config.algorithm, **given)
        metrics = models[update.loss].update(kept.of_update(update), update.loss, settings)
        found.append((update.loss, metrics))
    return found


def score(models: Models, samples: StoredSamples, temperature: float) -> list[np.ndarray]:
    """Return the log-probs of each sample's tokens under the policy."""
    blocks = models[POLICY].score_stored(samples, "old_logprobs", temperature=temperature)
    fields = Fields(samples.fields.lengths, blocks)
    return [fields.part("old_logprobs", number) for number in samples.numbers]
