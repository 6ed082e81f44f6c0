"""The one table of verbs that make a run: its configuration, help, flags, what starts it, what it sets."""

from dataclasses import dataclass, field

from trueline.config.algorithm import PRESETS
from trueline.config.base import Tree
from trueline.config.rl import RLConfig
from trueline.config.rounds import IterativeDPOConfig, RaftConfig
from trueline.config.run import RunConfig
from trueline.config.sampling import EvalConfig, GenerateConfig
from trueline.config.supervised import (
    DistillRunConfig,
    KTORunConfig,
    PreferenceRunConfig,
    ProcessRewardRunConfig,
    RewardModelRunConfig,
    SftConfig,
    SupervisedConfig,
)

COMMON = {"--model": "model.path", "--name": "name"}
DATA, HELD_OUT, REWARD = {"--data": "data.path"}, {"--eval-data": "evaluation.data"}, {"--reward": "reward.function"}
PLAYED = {"--environment": "environment.function", "--agent": "environment.agent", "--tools": "environment.tools"}


@dataclass(frozen=True, slots=True)
class Verb:
    """A command: the kind of configuration that it reads, and what it sets before files and overrides."""

    kind: type[RunConfig]
    meaning: str
    prepare: str  # `package.module:function` that plans it
    flags: dict[str, str]  # each one's key
    defaults: Tree = field(default_factory=dict)


def rl(preset: str) -> Verb:
    meaning, defaults = f"reinforcement learning with {preset}", {"algorithm": {"preset": preset}}
    flags = COMMON | DATA | HELD_OUT | REWARD | PLAYED
    return Verb(RLConfig, meaning, "trueline.rl.launch:prepare_rl", flags, defaults)


def offline(kind: type[SupervisedConfig], meaning: str, defaults: Tree | None = None) -> Verb:
    return Verb(kind, meaning, "trueline.offline.launch:prepare_supervised", COMMON | DATA | HELD_OUT, defaults or {})


def preference(meaning: str, keys: Tree) -> Verb:
    return offline(PreferenceRunConfig, meaning, {"preference": keys})


def job(kind: type[RunConfig], meaning: str, prepare: str, flags: dict[str, str], defaults: Tree | None = None) -> Verb:
    return Verb(kind, meaning, f"trueline.jobs.{prepare}", COMMON | REWARD | PLAYED | flags, defaults or {})


TASK_VERBS: dict[str, Verb] = {
    "sft": offline(SftConfig, "supervised fine-tuning on conversations, answers or plain text"),
    "rm": offline(RewardModelRunConfig, "train a reward model on pairs of answers"),
    "prm": offline(ProcessRewardRunConfig, "train a process reward model on rated steps"),
    "dpo": preference("direct preference optimisation on pairs", {"loss": "sigmoid", "beta": 0.1}),
    "cdpo": preference("DPO with noisy labels", {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.1}),
    "ipo": preference("identity preference optimisation", {"loss": "ipo", "beta": 0.1}),
    "simpo": preference("preferences without a reference model", {"loss": "simpo", "beta": 2.0, "gamma": 1.0}),
    "orpo": preference("supervised loss plus odds ratio, without a reference model", {"loss": "orpo"}),
    "kto": offline(KTORunConfig, "learn from answers labelled good or bad"),
    "distill": offline(DistillRunConfig, "learn a teacher's next-token distributions"),
}

VERBS: dict[str, Verb] = {
    **{preset: rl(preset) for preset in PRESETS},
    **TASK_VERBS,
    "generate": job(
        GenerateConfig,
        "sample answers with rewards to a file: best-of-n, rejection sampling, preference pairs",
        "sampling:prepare_generate",
        DATA,
    ),
    "eval": job(
        EvalConfig,
        "sample held-out prompts and report mean@k, pass@k and maj@k",
        "sampling:prepare_eval",
        HELD_OUT | {"--data": "evaluation.data"},
    ),
    "raft": job(
        RaftConfig,
        "rounds of best-of-n or rejection sampling, each followed by sft",
        "rounds:prepare_rounds",
        DATA | HELD_OUT,
    ),
    "iterative_dpo": job(
        IterativeDPOConfig,
        "rounds of best-against-worst pairs, each followed by dpo against the present model",
        "rounds:prepare_rounds",
        DATA | HELD_OUT,
    ),
}
