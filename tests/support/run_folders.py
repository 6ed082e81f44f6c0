"""Folders as runs leave them, made up: for what reads them and would take hours to have them made."""

import json
import math
import random
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from trueline.config.reward import RewardPartConfig
from trueline.config.run import MonitoringConfig
from trueline.monitoring.findings import Finding
from trueline.monitoring.run_folder import HEAD, RunFolder
from trueline.monitoring.trackers import Tracker
from trueline.monitoring.transcripts import pack_numbers
from trueline.rewards.replay import write_failure
from trueline.rl.transcripts import MOST_TOKENS

START = 1.8e9
PHASES = {"rollout": 3.0, "score": 0.7, "train": 2.0, "save": 0.1, "sync": 0.3}
PLAN = "machine    2 CPU cores\nloss       ppo_clip: ratio clipped, by https://me:secret@host/"
CONFIG = "name: {name}\nseed: 0\nsteps: {steps}\ntraining:\n  learning_rate: {rate}\n  betas:\n  - 0.9\n  - 0.95\n"
CROWDED = Finding("watch", "crowded_cores", "9 processes on 2 CPU cores")
TURNS = [
    {
        "role": "assistant",
        "content": "I must add them.",
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "calculator", "arguments": '{"sum": "12+30"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call00000", "name": "calculator", "content": "42"},
    {"role": "assistant", "content": "The answer is 42."},
]


def make_run(path: Path, steps: int, *, rate: float = 1e-5, seed: int = 0, judged: bool = False) -> RunFolder:
    """Write a run of RL through the tracker that real ones are written by."""
    folder, chance = made_folder(path, "grpo", steps, rate), random.Random(seed)
    tracker, start = Tracker(folder, MonitoringConfig(tensorboard=False)), START
    for step in range(steps + 1):
        metrics = rl_metrics(step, steps, chance)
        tracker.log(step, {**metrics, **(verdicts(step, steps) if judged else {})})
        add_event(folder, step, start, metrics, chance)
        start += metrics["time/step"]
        shown = [made_transcript(step, steps, chance) for _ in range(4)]
        tracker.show(step, [row | ({} if step % 4 else {"tokens": [made_tokens(row, step)]}) for row in shown])
        if step % 50 == 0:
            tracker.show(step, [made_transcript(step, steps, chance) | {"purpose": "evaluate"} for _ in range(3)])
        tracker.account(step, {"trained": [4 * step + n for n in range(4)], "too_old": [4 * steps + step]})
    tracker.close()
    return folder


def made_folder(path: Path, verb: str, steps: int, rate: float = 1e-5) -> RunFolder:
    folder = RunFolder(path)
    folder.logs.mkdir(parents=True)
    folder.write_plan(PLAN, [CROWDED])
    folder.findings.write_text(json.dumps({"step": 0, **CROWDED.row()}) + "\n")
    folder.config.write_text(f"{HEAD}{verb}\n{CONFIG.format(name=path.name, steps=steps, rate=rate)}")
    return folder


def rl_metrics(step: int, steps: int, chance: random.Random) -> dict[str, float]:
    """Return as many numbers as a step of RL reports."""
    done, noise = step / max(steps, 1), lambda: chance.gauss(0, 1)
    reward = 0.1 + 0.8 * (1 - math.exp(-4 * done)) + 0.04 * noise()
    times = {f"time/{name}": seconds * chance.uniform(0.8, 1.4) for name, seconds in PHASES.items()}
    evaluated = {"evaluation/reward": reward - 0.05, "evaluation/reward_ci95": 0.02} if step % 50 == 0 else {}
    return {
        "loss": 0.02 * noise(),
        "policy/kl": 0.15 * done + 0.01 * abs(noise()),
        "policy/entropy": 1.4 * math.exp(-2 * done) + 0.02 * noise(),
        "grad_norm": abs(0.8 + 0.2 * noise()),
        "reward/mean": reward,
        "reward/std": 0.3,
        "response_length/mean": 220 + 300 * done + 12 * noise(),
        "response_length/truncated_share": max(0.0, 0.1 + 0.03 * noise()),
        "mismatch/logprob_gap_mean": abs(2e-3 + 3e-4 * noise()),
        "memory/device_gib": 61 + 0.5 * noise(),
        **{f"reward/part/other_{number}": noise() for number in range(40)},
        **evaluated,
        **times,
        "time/step": sum(times.values()) + 0.2,
        "speed/tokens": 61000 + 30000 * done,
        "speed/tokens_per_second": 9500 + 300 * noise(),
    }


def verdicts(step: int, steps: int) -> dict[str, float]:
    """Return verdicts of a run that is watched late, and bad at its end."""
    level = 2 if step > 0.95 * steps else 1 if 0.7 * steps < step < 0.74 * steps else 0
    return {"health/level": level, "health/kl_grows": level, "health/reward_flat": 0}


def made_transcript(step: int, steps: int, chance: random.Random) -> dict[str, Any]:
    reward = float(chance.random() < 0.1 + 0.8 * step / max(steps, 1))
    reply = "Let us think about it step by step. " * chance.randint(2, 90)
    row = {"purpose": "train", "prompt": f"What is {step}+{step}?", "reply": reply, "label": str(2 * step)}
    row |= {"source": f"data/{chance.choice(['sums', 'words'])}.jsonl", "reward": reward}
    row |= {"outcome": "finished" if reward else chance.choice(["finished", "truncated"]), "reward/reward": reward}
    return row | ({"turns": TURNS} if chance.random() < 0.2 else {})


def made_tokens(row: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the tokens of a reply, word by word, as a run keeps them; a tool's answer stands between turns."""
    turns = [str(turn["content"]) for turn in row.get("turns", [])] or [row["reply"]]
    texts = [(text, at % 2 == 0) for at, turn in enumerate(turns) for text in re.findall(r"\s*\S+|\s+", turn)]
    kept, noise = texts[:MOST_TOKENS], np.random.default_rng(seed)
    values = {name: noise.normal(size=len(kept)) for name in ("logprob", "log_ratio", "entropy")}
    values |= {"logprob": -np.abs(values["logprob"]), "log_ratio": values["log_ratio"] / 50}
    values |= {"entropy": np.abs(values["entropy"]), "advantage": np.full(len(kept), row["reward"] - 0.5)}
    return {
        "text": [text for text, _ in kept],
        "sampled": [len(list(turn)) for _, turn in groupby(kept, key=lambda one: one[1])],
        **{name: pack_numbers(column) for name, column in values.items()},
        **({"left_out": len(texts) - len(kept)} if len(texts) > len(kept) else {}),
    }


def add_event(folder: RunFolder, step: int, start: float, metrics: dict[str, float], chance: random.Random) -> None:
    """Add a step's events: phases one after the other, and who is called in each."""
    called = {"rollout": {"engine-0": "generate", "engine-1": "generate", "rewards": "reward", "environments": "Game"}}
    called |= {"score": {"policy-0": "score", "reference": "score"}, "train": {"policy-0": "update"}}
    called |= {"sync": {"policy-0": "send", "engine-0": "receive", "engine-1": "receive"}}
    spans: list[list[Any]] = []
    since = 0.1
    for phase in PHASES:
        ended = since + metrics[f"time/{phase}"]
        spans.append(["run", phase, round(since, 3), round(ended, 3)])
        for who, what in called.get(phase, {}).items():
            spans.append(
                [who, what, round(since + 0.05, 3), round(ended - chance.uniform(0.0, 0.4) * (ended - since), 3)]
            )
        since = ended
    gib = {"run": 1.2, "policy-0": 18 + 0.01 * step, "engine-0": 9.5, "engine-1": 9.4}
    memory = {name: round(value + chance.uniform(0, 0.3), 3) for name, value in gib.items()}
    row = {"step": step, "start": round(start, 3), "seconds": round(metrics["time/step"], 3), "spans": spans}
    with folder.events.open("a") as lines:
        lines.write(json.dumps(row | {"memory": memory}) + "\n")


def make_failure(folder: RunFolder) -> None:
    part = RewardPartConfig(function="examples/reward.py:reward")
    call = {"messages": [], "reply": "12"}
    write_failure(folder.path / "failures" / "reward-0.json", part, call, "Traceback\nKeyError: 'label'")
