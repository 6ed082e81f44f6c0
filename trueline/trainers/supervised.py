"""Supervised training: the same worker, the same update, no sampling."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from trueline.algorithms.weighting import set_weights
from trueline.config.base import ConfigError
from trueline.config.supervised import SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.loader import Order
from trueline.data.readers import Example, read_examples
from trueline.data.sources import open_source
from trueline.data.types import Sample
from trueline.models.loading import ModelFacts, check_model, load_tokenizer
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.monitoring.timing import Timer
from trueline.monitoring.trackers import Tracker
from trueline.runtime.actors import Target
from trueline.runtime.cluster import Machine, ray_cluster, this_machine
from trueline.runtime.placement import Layout, Processes, check_devices
from trueline.trainers.interrupts import Interrupts
from trueline.trainers.plan import check_installed, resolve_dtype, resolve_path
from trueline.training.checkpoints import Checkpoints
from trueline.training.group import LossSettings, ModelGroup
from trueline.training.worker import WorkerSpec


@dataclass(frozen=True, slots=True)
class SupervisedPlan:
    config: SupervisedConfig  # resolved
    machine: Machine
    facts: ModelFacts
    layout: Layout
    samples: list[Sample]
    steps: int


def plan_supervised(config: SupervisedConfig) -> SupervisedPlan:
    """Read, check and tokenize before any model is loaded."""
    examples = read_examples(open_source(config.data.path, "data.path"), config.data, config.completion_column)
    check_installed("training.engine", config.training.engine, "torch")
    facts, machine = check_model(config.model), this_machine()
    ranks = config.training.ranks or (max(machine.gpus, 1) if config.training.engine == "deepspeed" else 1)
    steps = config.steps or max(len(examples) * config.epochs // config.samples_per_step, 1)
    config = config.replaced(
        {
            "model": {
                "dtype": resolve_dtype(config.model.dtype, config.training, machine),
                "path": resolve_path(config.model.path),
            },
            "training": {"ranks": ranks},
            "steps": steps,
            "max_tokens": config.max_tokens or min(facts.context, config.training.micro_batch_tokens),
        }
    )
    layout = Layout(policy_ranks=ranks, reference_ranks=0, engines=0, tensor_parallel=1, colocated=False)
    check_devices(layout, machine)
    chat = ChatFormat(load_tokenizer(config.model), config.data.chat_template == "auto")
    assert config.max_tokens
    samples = [to_sample(example, chat, config.max_tokens) for example in examples]
    return SupervisedPlan(config, machine, facts, layout, samples, steps)


def to_sample(example: Example, chat: ChatFormat, max_tokens: int) -> Sample:
    """The prompt is read, the completion is learnt."""
    prompt = chat.prompt_tokens(example.messages)
    completion = chat.completion_tokens(example.completion)
    if len(prompt) + len(completion) > max_tokens:
        raise ConfigError(
            f"{example.place}: {len(prompt) + len(completion)} tokens are more than max_tokens={max_tokens}: "
            "shorten the row or raise the limit"
        )
    mask = [False] * len(prompt) + [True] * len(completion)
    mask[0] = False  # nothing comes before the first token, so it has no log-prob
    return Sample(torch.tensor(prompt + completion), torch.tensor(mask))


def describe_plan(plan: SupervisedPlan) -> str:
    config = plan.config
    devices = f"{plan.machine.gpus} GPUs" if plan.machine.gpus else f"{plan.machine.cpus} CPU cores"
    return "\n".join(
        [
            f"machine    {devices}",
            f"model      {config.model.path}: {plan.facts.parameters / 1e6:.1f} M parameters, {config.model.dtype}",
            f"training   {plan.layout.policy_ranks} x {config.training.engine} rank, ZeRO {config.training.zero_stage}",
            f"data       {len(plan.samples)} rows, longest {max(sample.length() for sample in plan.samples)} tokens",
            f"length     {plan.steps} steps of {config.samples_per_step} rows",
        ]
    )


@dataclass(slots=True)
class SupervisedState:
    step: int = 0
    rows: int = 0


@dataclass(slots=True)
class SupervisedTrainer:
    plan: SupervisedPlan
    model: ModelGroup
    checkpoints: Checkpoints
    tracker: Tracker
    progress: Progress
    state: SupervisedState

    def fit(self) -> SupervisedState:
        plan, state, timer = self.plan, self.state, Timer()
        config = plan.config
        order = Order(len(plan.samples), config.seed, config.data.shuffle, state.rows)
        with self.progress, Interrupts(self.progress.note) as interrupts:
            while state.step < plan.steps and not interrupts.requested:
                minibatch = [plan.samples[next(order)] for _ in range(config.samples_per_step)]
                set_weights(minibatch, "token_mean", budget=0)
                with timer.phase("train"):
                    metrics = self.model.update(minibatch, "sft", LossSettings())
                state.step, state.rows = state.step + 1, order.position
                if self.checkpoints.due(state.step):
                    self.save()
                tokens = sum(sample.length() for sample in minibatch)
                times = timer.flush()
                metrics |= times | {"speed/tokens_per_second": tokens / times["time/step"]}
                self.tracker.log(state.step, metrics)
                self.progress.step(state.step, metrics)
            self.save()
        return state

    def save(self) -> None:
        self.checkpoints.save(self.state.step, asdict(self.state), self._write)

    def _write(self, folder: Path) -> None:
        self.model.call("save", str(folder))


@contextmanager
def supervised_trainer(plan: SupervisedPlan, folder: RunFolder, progress: Progress) -> Iterator[SupervisedTrainer]:
    config, world = plan.config, plan.layout.policy_ranks
    local = config.runtime == "local"
    with ExitStack() as stack:
        if not local:
            stack.enter_context(ray_cluster(plan.machine))
        specs = [
            WorkerSpec(config.model, config.training, rank, world, plan.steps, config.seed, config.timeout_seconds)
            for rank in range(world)
        ]
        processes = Processes(plan.machine, plan.layout, folder.logs, local)
        actors = processes.policy(Target("trueline.training.worker:Worker"), specs)
        model = ModelGroup("model", actors, config.training, config.timeout_seconds)
        model.start()
        checkpoints = Checkpoints(folder.path, config.checkpoint)
        newest = checkpoints.newest()
        state = SupervisedState(**checkpoints.read_state(newest)) if newest else SupervisedState()
        if newest is not None:
            model.call("load", str(newest))
            progress.note(f"resumed from {newest} at step {state.step}")
        tracker = Tracker(folder, config.monitoring.tensorboard, state.step)
        stack.callback(tracker.close)
        yield SupervisedTrainer(plan, model, checkpoints, tracker, progress, state)
