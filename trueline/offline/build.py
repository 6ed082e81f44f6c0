"""Start the processes of an offline plan, score rows with the starting model if need be, and make the trainer."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trueline.config.supervised import SupervisedConfig
from trueline.data.types import Sample
from trueline.files import atomic_path
from trueline.monitoring.events import Events
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.timing import Timer
from trueline.monitoring.trackers import Tracker
from trueline.offline.trainer import SupervisedTrainer
from trueline.plan.offline import SupervisedPlan, forecast_memory, plan_supervised
from trueline.plan.resolve import suited_rate
from trueline.runs.guard import UpdateMonitor
from trueline.runs.launch import Job, Start, training
from trueline.runs.processes import model_group, open_processes
from trueline.runs.rescue import MemoryWatch, care_of
from trueline.runs.state import SupervisedState, check_data, restore
from trueline.training.checkpoints import Checkpoints, save_tensors
from trueline.training.group import ModelGroup, prepare_saving
from trueline.training.worker import Worker, WorkerSpec, worker_target


def prepare_supervised(config: SupervisedConfig, start: Start) -> Job:
    plan = plan_supervised(config)
    return training(plan, plan.steps, partial(supervised_trainer, plan.without_records()))


@contextmanager
def supervised_trainer(plan: SupervisedPlan, folder: RunFolder, progress: Progress) -> Iterator[SupervisedTrainer]:
    config, task = plan.config, plan.material.train.task
    checkpoints = Checkpoints(folder.path, config.checkpoint, progress.note)
    data = plan.fingerprint()
    check_data(checkpoints, data)
    with ExitStack() as stack:
        place = (plan.machine, plan.layout, folder.logs, config.runtime)
        saves = config.checkpoint.save
        processes = stack.enter_context(open_processes(*place, [config.model.path], saves=saves))
        specs = worker_specs(plan)
        model = model_group("model", processes.policy(worker_target(config.training), specs), specs)
        model.report = progress.report
        model.start()
        if task.reference(config):
            cache = ReferenceCache(folder.path / "reference.safetensors", config.model.path)
            fill_reference(model, used_samples(plan), cache, progress)
        state = restore(SupervisedState, checkpoints, lambda newest: model.call(Worker.load, str(newest)), progress)
        if config.checkpoint.save:
            prepare_saving([model])
        tracker = Tracker(folder, config.monitoring, state.step, state.tracker, progress.note)
        stack.callback(tracker.close, progress.follower.write_report)
        tracker.follow(Events(folder.logs))
        state.tracker, state.data = tracker.run_ids, data
        guard = UpdateMonitor(model, config.training, progress.report)
        guard.skipped = state.skipped_steps
        guard.suited = suited_rate(plan.facts.parameters, config.task, adapters=config.model.lora.rank > 0)
        ranks = plan.layout.policy_ranks
        forecast = plan.forecast or forecast_memory(config, plan.facts, plan.machine, ranks, plan.longest)
        watch = MemoryWatch(forecast, timer := Timer())
        care = care_of(config, folder, checkpoints, progress)
        yield SupervisedTrainer(plan, model, checkpoints, tracker, progress, state, guard, timer, watch, care)


def used_samples(plan: SupervisedPlan) -> list[Sample]:
    """Return the samples that the whole run trains and evaluates on; a short run over much data uses few of them."""
    config, train, held_out = plan.config, plan.material.train, plan.material.held_out
    order = train.order(config.seed, config.data.shuffle, 0)
    samples = train.samples_of(next(order) for _ in range(plan.steps * config.samples_per_step))
    return samples + (held_out.samples_of(range(held_out.rows())) if held_out else [])


def worker_specs(plan: SupervisedPlan) -> list[WorkerSpec]:
    config, world, task = plan.config, plan.layout.policy_ranks, plan.material.train.task
    run, target = (plan.steps, config.seed, config.timeout_seconds), task.distillation_target(config)
    first = WorkerSpec(config.model, config.training, 0, world, *run, head=task.head, distillation_target=target)
    first = replace(first, deterministic=config.deterministic)
    template = plan.chat.template.with_defaults()
    return [replace(first, rank=rank, chat_template=template) for rank in range(world)]


# Log-probs of the model that training starts from: computed once, kept with the run


SAMPLES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class ReferenceCache:
    """Log-probs of some samples under the named model, kept in a file."""

    file: Path
    model: str

    def key(self, samples: list[Sample]) -> str:
        digest = hashlib.sha256(self.model.encode())
        for sample in samples:
            digest.update(sample.tokens.numpy().tobytes())
            digest.update(sample.mask.numpy().tobytes())
            for picture in sample.pictures:
                digest.update(picture.data)
        return digest.hexdigest()

    def read(self, samples: list[Sample]) -> torch.Tensor | None:
        # What is not there, or not whole, is computed again.
        with suppress(OSError, SafetensorError), safe_open(self.file, framework="pt") as saved:
            known = saved.metadata()["key"] == self.key(samples)
            return saved.get_tensor("logprobs") if known else None
        return None

    def write(self, samples: list[Sample], logprobs: torch.Tensor) -> None:
        with atomic_path(self.file) as aside:
            save_tensors(aside, {"logprobs": logprobs}, {"key": self.key(samples)})


def fill_reference(model: ModelGroup, samples: list[Sample], cache: ReferenceCache, progress: Progress) -> None:
    """Set `ref_logprobs` before a checkpoint is loaded, while the model still is the one that training starts from."""
    if (flat := cache.read(samples)) is None:
        progress.note(f"reference  scoring {len(samples)} sequences once")
        parts = [
            part
            for start in range(0, len(samples), SAMPLES_AT_ONCE)
            for part in model.score(samples[start : start + SAMPLES_AT_ONCE])
        ]
        flat = torch.cat(parts)
        try:
            cache.write(samples, flat)
        except (OSError, SafetensorError) as error:
            progress.note(f"warning: {cache.file} cannot be written ({error}); --resume will score them again")
    for sample, logprobs in zip(samples, flat.split([sample.length() for sample in samples]), strict=True):
        sample.ref_logprobs = logprobs
