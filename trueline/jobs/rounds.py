"""Recipes in rounds: sample from the current model, train it on the best completions, and repeat."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from trueline.config.base import ConfigError, Tree
from trueline.config.rl import SamplingControls
from trueline.config.run import RunConfig
from trueline.config.sampling import EvalConfig, GenerateConfig, RoundsConfig, SamplingConfig
from trueline.jobs import sampling
from trueline.jobs.sample_file import write_json
from trueline.models.loading import check_model
from trueline.monitoring.progress import Progress
from trueline.monitoring.run_folder import RunFolder
from trueline.offline.build import prepare_supervised
from trueline.plan.describe import describe_rounds
from trueline.plan.findings import reproducible
from trueline.plan.resolve import check_engines, rate_keys
from trueline.plan.sampling import SamplingPlan, plan_eval, plan_generate
from trueline.runs.launch import Job, Start, launch
from trueline.training.export import export, find_checkpoint

DONE, ROUNDS = "done.json", "rounds.json"


@dataclass(frozen=True, slots=True)
class Stage:
    """An ordinary run inside the folder of a recipe."""

    round: int
    verb: str  # and its name in the folder of the round
    prepare: Callable[[Any, Start], Job]
    config: RunConfig

    @property
    def name(self) -> str:
        return f"round_{self.round}/{self.verb}"


@dataclass(frozen=True, slots=True)
class Recipe:
    config: RoundsConfig
    folder: Path
    prompts: int  # of each round

    def stages(self) -> Iterator[Stage]:
        """Yield the stages in order, each made when its turn comes, for its model is that of the rounds before it."""
        for number in range(self.config.rounds + 1):
            if number > 0:
                yield Stage(number, "generate", sampling.prepare_generate, self.generation(number))
                yield Stage(number, self.config.trainer, prepare_supervised, self.training(number))
            if self.config.evaluation.named_sets():
                yield Stage(number, "eval", sampling.prepare_eval, self.evaluation(number))

    def generation(self, number: int) -> GenerateConfig:
        place = {"skip": (number - 1) * self.prompts, "limit": self.prompts}
        return GenerateConfig.parse(self.config.generate_keys() | place | self.keys(number, "generate", number - 1))

    def training(self, number: int) -> RunConfig:
        tree = self.config.training_keys() | self.keys(number, self.config.trainer, number - 1)
        tree["data"] |= {"path": str(self.folder / f"round_{number}/generate" / self.config.learnt)}
        return self.config.trained.parse(tree)

    def evaluation(self, number: int) -> EvalConfig:
        tree = self.config.model_dump(
            include={*SamplingConfig.model_fields, "evaluation"} - {"checkpoint", "monitoring", "health"},
            exclude={"rollout": set(SamplingControls.model_fields)},  # those of `evaluation` take their place
        )
        tree["data"] |= {"path": "", "mixture": {}}
        return EvalConfig.parse(tree | self.keys(number, "eval", number))

    def keys(self, number: int, name: str, rounds_before: int) -> Tree:
        """Return the keys that say where a stage lives and which model it has."""
        model = self.config.model.with_keys({"path": self.model_after(rounds_before)}).model_dump()
        return {"folder": str(self.folder / f"round_{number}"), "name": name, "model": model}

    def model_after(self, number: int) -> str:
        """Return a round's model, adapters merged: engines and the next round's adapters need a whole model."""
        if number == 0:
            return self.config.model.path
        run, merged = self.folder / f"round_{number}" / self.config.trainer, self.folder / f"round_{number}/model"
        if not self.config.model.lora.rank:
            return str(find_checkpoint(run) / "model")
        if not merged.exists():
            export(run, merged, merge=True)
        return str(merged)

    def summary(self, number: int) -> Any:
        return read_json(self.folder / f"round_{number}/generate" / sampling.SUMMARY)

    def learnt(self, number: int) -> int:
        """Return how many rows a round's samples gave to train on."""
        return int(self.summary(number)[Path(self.config.learnt).stem])

    def result(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = {"round": number}
        if self.config.evaluation.named_sets():
            metrics = read_json(self.folder / f"round_{number}/eval" / sampling.EVALUATION)["metrics"]
            found |= {name: value for name, value in metrics.items() if name.startswith("evaluation/reward")}
        if number > 0:
            found |= {name: self.summary(number).get(name) for name in ("reward_mean", "reward_best_mean")}
            found["learnt"] = self.learnt(number)
        return found


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def prepare_rounds(config: RoundsConfig, start: Start) -> Job:
    recipe, plan = plan_rounds(config, start.folder.path)
    text, work = describe_rounds(recipe.config, plan, recipe.prompts), partial(run_rounds, recipe, start.verb)
    return Job(recipe.config, text, config.rounds, work, findings=plan.findings)


def run_rounds(recipe: Recipe, verb: str, folder: RunFolder, progress: Progress) -> int:
    if status := run_stages(recipe, verb, progress):
        progress.note(f"Continue with: {folder.resume_command()}")
        return status
    results = [recipe.result(number) for number in range(recipe.config.rounds + 1)]
    write_json(folder.path / ROUNDS, results)
    progress.console.print(rounds_table(results))
    progress.note(f"done: model in {recipe.model_after(recipe.config.rounds)}")
    return 0


def plan_rounds(config: RoundsConfig, folder: Path) -> tuple[Recipe, SamplingPlan[GenerateConfig]]:
    """Check what can be known of all stages before the first one starts; return its plan as well."""
    check_engines(config, "training")
    config = reproducible(config)
    if config.trainer == "dpo" and not config.has_reward():
        why = "iterative_dpo prefers completions by their rewards"
        raise ConfigError(f"reward.function is empty: {why}: name one with --reward")
    first = Recipe(config, folder, config.prompts_per_round or 1)
    plan = plan_generate(first.generation(1))
    first.training(1)
    check_model(plan.config.model)
    if config.evaluation.named_sets():
        plan_eval(first.evaluation(0))
    rate = rate_keys(plan.facts.parameters, config.trained.task, config.model, config.training)
    config = config.with_keys({"model": {"path": plan.config.model.path}, "training": rate})
    every = sum(len(one.prompts) for one in plan.sets.values())
    return Recipe(config, folder, config.prompts_per_round or every), plan


def run_stages(recipe: Recipe, verb: str, progress: Progress) -> int:
    """Run the stages that are not done yet; the first that does not come to its end gives the exit status."""
    done = read_json(recipe.folder / DONE) if (recipe.folder / DONE).exists() else []
    for stage in recipe.stages():
        if stage.name in done:
            continue
        progress.console.print(f"\n[bold]{verb} {stage.name}[/] of {recipe.config.rounds} rounds")
        begun = (recipe.folder / stage.name).exists()
        if status := launch(stage.config, stage.verb, stage.prepare, resume=begun):
            return status
        if stage.verb == "generate" and not recipe.learnt(stage.round):
            # Not done: with other keys of selection the same samples may give some.
            assert isinstance(stage.config, GenerateConfig)
            why = sampling.selection_warnings(recipe.summary(stage.round), stage.config)[-1]
            missing = f"{recipe.config.trainer} in {recipe.config.learnt}"
            progress.note(f"error: {stage.name} has nothing for {missing}: {why}")
            return 1
        done.append(stage.name)
        write_json(recipe.folder / DONE, done)
    return 0


def rounds_table(results: list[dict[str, Any]]) -> Table:
    table = Table("round", "held-out reward", "mean of samples", "mean of the best", "learned")
    for row in results:
        held_out = sampling.format_number(row.get("evaluation/reward"), row.get("evaluation/reward_ci95"))
        sampled = [sampling.format_number(row.get(name)) for name in ("reward_mean", "reward_best_mean")]
        table.add_row(str(row["round"]), held_out, *sampled, str(row.get("learnt", "-")))
    return table
