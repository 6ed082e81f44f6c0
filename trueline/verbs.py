"""Every verb of the command line: its help and, if it starts a run, its configuration, flags and launcher."""

from dataclasses import dataclass, field
from typing import Any

from trueline.config import supervised as tasks
from trueline.config.algorithm import PRESETS
from trueline.config.base import Tree
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.sampling import EvalConfig, GenerateConfig, IterativeDPOConfig, RaftConfig

Flags = dict[str, str]
Keys = tuple[str, ...]

COMMON = {"--model": "model.path", "--name": "name"}
DATA, HELD_OUT, REWARD = {"--data": "data.path"}, {"--eval-data": "evaluation.data"}, {"--reward": "reward.function"}
EPISODES = {"--environment": "environment.function", "--agent": "environment.agent", "--tools": "environment.tools"}
RATE, LENGTH = "training.learning_rate", "rollout.max_new_tokens"  # keys that several verbs list
LORA, SHARE, TEACHER = "model.lora.rank", "evaluation.share", "distill.teacher"


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb that starts a run."""

    kind: type[RunConfig]
    meaning: str
    prepare: str  # `package.module:function` that plans the run
    flags: Flags  # flag -> its key
    keys: Keys  # that users change most; its help lists them
    example: str  # flags and keys that complete `trueline VERB --model MODEL`
    defaults: Tree = field(default_factory=dict)  # which files and overrides replace

    @property
    def is_training(self) -> bool:
        """Whether it trains one model and resumes from checkpoints; other jobs resume from what they have written."""
        return issubclass(self.kind, RLConfig | tasks.SupervisedConfig)


def rl(preset: str) -> Verb:
    key, more = OWN_KEYS.get(preset, ("algorithm.group_size", "--reward math"))
    flags, keys = COMMON | DATA | HELD_OUT | REWARD | EPISODES, ("steps", "prompts_per_step", key, RATE, LENGTH)
    example, defaults = f"--data data.jsonl {more}".strip(), dict[str, Any](algorithm={"preset": preset})
    if PRESETS[preset].get("distillation", {}).get("teacher") == "average":
        defaults["training"] = {"ema_decay": 0.99}
    return Verb(RLConfig, RL_MEANINGS[preset], "trueline.rl.build:prepare_rl", flags, keys, example, defaults)


def offline(kind: type[RunConfig], meaning: str, key: str, data: str = "data.jsonl", **defaults: Tree) -> Verb:
    keys, prepare = ("epochs", "samples_per_step", RATE, LORA, key), "trueline.offline.build:prepare_supervised"
    return Verb(kind, meaning, prepare, COMMON | DATA | HELD_OUT, keys, f"--data {data}", defaults)


def preference(meaning: str, keys: Tree, key: str = "preference.beta") -> Verb:
    return offline(tasks.PreferenceRunConfig, meaning, key, "pairs.jsonl", preference=keys)


def job(kind: type[RunConfig], meaning: str, prepare: str, flags: Flags, keys: Keys, data: str = "data.jsonl") -> Verb:
    example = f"--data {data} --reward math"
    return Verb(kind, meaning, f"trueline.jobs.{prepare}", COMMON | REWARD | EPISODES | flags, keys, example)


def rounds(kind: type[RunConfig], meaning: str, key: str) -> Verb:
    keys = ("rounds", "samples", "prompts_per_round", key, RATE)
    return job(kind, f"In rounds: sample, {meaning}", "rounds:prepare_rounds", DATA | HELD_OUT, keys)


OWN_KEYS = {  # preset -> the key that its help lists besides the usual ones, and what its example needs
    "on_policy_distill": ("teacher.path", "teacher.path=teacher/"),
    "sdft": ("algorithm.distillation.column", ""),
    "sdpo": ("algorithm.distillation.rewarded", "--reward math"),
    "opsd": ("algorithm.distillation.column", ""),
}
RL_MEANINGS = {
    "ppo": "Clipped policy loss with a critic",
    "reinforce++": "No critic; advantages are normalised over the batch",
    "reinforce++_baseline": "REINFORCE++ with the group's mean reward as the baseline",
    "grpo": "No critic; rewards are normalised within each prompt's group",
    "dr_grpo": "GRPO without dividing by length or by the group's deviation",
    "maxrl": "Climb the log of the success rate: advantages over the group's mean reward",
    "otb": "GRPO with the baseline of least variance at each token",
    "rloo": "REINFORCE with the mean of the group's other rewards as the baseline",
    "remax": "REINFORCE with the greedy completion's reward as the baseline",
    "dapo": "GRPO with dynamic sampling and a higher upper clip",
    "gdpo": "GRPO for several rewards: each is normalised on its own",
    "gspo": "GRPO with one clipped ratio per completion",
    "cispo": "GRPO with capped importance weights instead of clipping",
    "dppo": "GRPO that drops tokens by how far their probability has moved, not by its ratio",
    "vapo": "PPO with length-adaptive advantages and a critic warm-up",
    "on_policy_distill": "Imitate a teacher on the policy's own completions",
    "sdft": "Imitate itself as it replies with a demonstration at hand",
    "sdpo": "Imitate itself as it replies with feedback and a rewarded reply at hand",
    "opsd": "Imitate its starting weights as they reply with the solution at hand",
}
TASK_VERBS: dict[str, Verb] = {
    "sft": offline(tasks.SftConfig, "Fine-tune on conversations, completions or plain text", "max_tokens"),
    "rm": offline(tasks.RewardModelRunConfig, "Train a reward model on preference pairs", SHARE, "pairs.jsonl"),
    "prm": offline(tasks.ProcessRewardRunConfig, "Train a process reward model on rated steps", SHARE, "steps.jsonl"),
    "dpo": preference("Direct preference optimisation", {"loss": "sigmoid", "beta": 0.1}),
    "cdpo": preference("DPO for noisy labels", {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.1}),
    "ipo": preference("Identity preference optimisation", {"loss": "ipo", "beta": 0.1}),
    "simpo": preference("Preferences without a reference model", {"loss": "simpo", "beta": 2.0, "gamma": 1.0}),
    "orpo": preference(
        "SFT plus an odds-ratio loss, without a reference model", {"loss": "orpo"}, "preference.odds_coefficient"
    ),
    "kto": offline(tasks.KTORunConfig, "Learn from completions rated good or bad", "kto.beta", "rated.jsonl"),
    "distill": offline(
        tasks.DistillRunConfig, "Learn a teacher's next-token distributions", TEACHER, f"data.jsonl {TEACHER}=teacher/"
    ),
}
VERBS: dict[str, Verb] = {
    **{preset: rl(preset) for preset in PRESETS},
    **TASK_VERBS,
    "generate": job(
        GenerateConfig,
        "Sample completions to a file: all, best-of-n, by reward, or as preference pairs",
        "sampling:prepare_generate",
        DATA,
        ("samples", "keep", "pairs", "rollout.temperature", LENGTH),
    ),
    "eval": job(
        EvalConfig,
        "Evaluate a model on held-out prompts: mean@k, pass@k and maj@k",
        "sampling:prepare_eval",
        HELD_OUT | {"--data": "evaluation.data"},
        ("evaluation.samples", "evaluation.temperature", "evaluation.limit", "evaluation.pass_reward", LENGTH),
        "held_out.jsonl",
    ),
    "raft": rounds(RaftConfig, "keep the best completions, fine-tune on them", "keep"),
    "iterative_dpo": rounds(
        IterativeDPOConfig, "pair the best with the worst completion, train with DPO", "preference.beta"
    ),
}

TOOLS: dict[str, tuple[str, str]] = {  # verbs that start no run: what each is for, and an example
    "serve-reward": ("Serve a reward model over HTTP", "serve-reward --model runs/judge --port 8900"),
    "config": ("List configuration keys with defaults and meanings", "config grpo learning_rate"),
    "data": ("Show rows as they will be trained on", "data preview sft --model model/ --data data.jsonl --rows 5"),
    "reward": ("Score rows of the data with a reward", "reward try --reward math --data data.jsonl --reply 42"),
    "export": ("Write a run's model as a Hugging Face folder", "export runs/first model/ --dtype bfloat16"),
    "plan": (
        "Plan a run on GPUs you name: placement, memory and time",
        "plan grpo --devices 8x8xH100 --model-shape llama-70b",
    ),
    "report": ("Write curves, times and transcripts of runs to an HTML file", "report first second --out both.html"),
    "watch": ("Serve that page, up to date, to this machine", "watch first --port 8000"),
    "doctor": ("Check a run before it starts", "doctor grpo --model model/ --data data.jsonl --reward math --deep"),
    "demo": ("Teach a small new model to add, in minutes", "demo --steps 30"),
    "explain": ("Show what a run is doing, or why it is stuck", "explain runs/first"),
    "replay": ("Compute a recorded step of RL again, and name what differs", "replay first --step 12"),
    "verify": ("Compute with a model as runs may, and show how far the results agree", "verify --model model/"),
}
GROUPS: dict[str, tuple[str, ...]] = {  # as `trueline --help` shows them
    "train with RL": (*PRESETS, "raft", "iterative_dpo"),
    "train on data": tuple(TASK_VERBS),
    "sample and evaluate": ("generate", "eval", "reward", "serve-reward", "export"),
    "look and diagnose": ("doctor", "verify", "plan", "data", "config", "explain", "replay", "report", "watch", "demo"),
}
