"""What is said of plans: every kind of run says the same fact in the same words."""

from pathlib import Path
from typing import Any

import pytest

from trueline.config.model import FrozenConfig, ModelConfig, PolicyTrainingConfig, TrainingConfig
from trueline.config.rl import ResolvedRollout, RLConfig
from trueline.config.sampling import GenerateConfig
from trueline.config.supervised import SftConfig
from trueline.data.types import Prompt
from trueline.plan import inputs
from trueline.plan import offline as offline_planning
from trueline.plan import sampling as job_planning
from trueline.plan.describe import describe, engines_line, machine_line, prompts_line, ranks_line, sharing_line
from trueline.plan.inputs import PromptSet
from trueline.plan.offline import plan_supervised
from trueline.plan.rl import plan_rl
from trueline.plan.sampling import plan_generate
from trueline.runtime.cluster import Machine

GIB = 2**30


def test_every_kind_of_run_says_a_fact_in_the_same_words(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (inputs, offline_planning, job_planning):
        monkeypatch.setattr(module, "machine_at_hand", lambda: Machine(3, 64 * GIB, 0, 0))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')

    def tree(rank: int = 0, **keys: Any) -> dict[str, Any]:
        model = {"path": str(model_folder), "lora": {"rank": rank}}
        return {"runtime": "local", "data": {"path": str(tmp_path / "rows.jsonl")}, "model": model, **keys}

    judged = {"reward": {"function": "exact"}}
    rl, offline, job = said = [
        describe(plan_rl(RLConfig.parse(tree(**judged)))),
        describe(plan_supervised(SftConfig.parse(tree()))),
        describe(plan_generate(GenerateConfig.parse(tree(**judged)))),
    ]
    machine = "machine    3 CPU cores, 64.0 GiB of memory free"
    model = f"model      {model_folder}: 0.0 M parameters, float32"
    assert [lines.splitlines()[0].partition(";")[0] for lines in said] == [machine] * 3
    assert [lines.splitlines()[1] for lines in said] == [model] * 3
    assert all("\nwarning: no chat template: messages are joined by line breaks" in lines for lines in said)
    data = "; longest prompt 4 tokens, completions up to 32\n"
    assert f"data       1 prompts, 0 held out{data}" in rl and f"data       1 prompts{data}" in job
    assert "policy     1 x torch rank, micro-batches of up to" in rl
    assert "training   1 x torch rank, micro-batches of up to" in offline
    assert "\nprefixes   the prompt of a group is computed once" in rl and "\nprefixes" not in offline
    adapted = [
        describe(plan_rl(RLConfig.parse(tree(2, **judged)))),
        describe(plan_supervised(SftConfig.parse(tree(2)))),
    ]
    assert [lines.splitlines()[1] for lines in adapted] == [f"{model}, LoRA rank 2"] * 2


def test_what_is_about_training_is_said_of_trained_models_only() -> None:
    wide = ModelConfig(tensor_parallel=2, context_parallel=3, gradient_checkpointing=True)
    trained = TrainingConfig.parse({"deepspeed": {"zero_stage": 1}, "micro_batch_tokens": 64})
    shape = "tensor 2 x context 3"
    assert ranks_line("critic", 6, trained, wide) == (
        f"critic     6 x deepspeed rank, ZeRO 1, {shape}, micro-batches of up to 64 tokens, gradient checkpointing"
    )
    frozen = FrozenConfig(engine="torch")
    assert (
        ranks_line("critic", 6, frozen, wide) == f"critic     6 x torch rank, {shape}, micro-batches as memory allows"
    )
    short = FrozenConfig(engine="torch", micro_batch_tokens=7)
    assert ranks_line("ref", 1, short, ModelConfig()) == "ref        1 x torch rank, micro-batches of up to 7 tokens"


def test_who_computes_a_prompt() -> None:
    def said(sharing: Any = "auto", ring: int = 1, **keys: Any) -> str:
        ranks = PolicyTrainingConfig(share_prefixes=sharing, **keys)
        return sharing_line(ranks, ModelConfig(context_parallel=ring), "a group")

    once = "prefixes   the prompt of a group is computed once in a pass"
    assert said() == f"{once}, if that saves 10% of a step's tokens (training.share_prefixes=auto)"
    assert said(True) == f"{once} (training.share_prefixes=true)"
    again = "prefixes   each sequence of a group computes the prompt again"
    assert said(False) == f"{again} (training.share_prefixes=false)"
    assert said(ring=2) == f"{again} (context_parallel=2 divides sequences)"
    assert said(packing=False) == f"{again} (training.packing=false pads sequences)"
    assert said(replay_routing="measure").startswith(f"{again} (training.replay_routing=measure has experts of its own")


def test_devices_engines_and_prompts() -> None:
    assert machine_line(Machine(3, GIB, 2, 5 * GIB)) == "machine    2 GPUs, 1.0 GiB of memory free"
    rollout = ResolvedRollout(engines=2, tensor_parallel=4, max_new_tokens=9, max_prompt_tokens=8)
    assert engines_line(rollout) == "engines    2 x vllm, tensor parallel 4"
    one = Prompt(0, [{"role": "user", "content": "a"}])
    sets = [PromptSet([one] * 3, dropped=1, longest=5), PromptSet([one], dropped=2, longest=7)]
    ending = ", 3 too long and dropped; longest prompt 7 tokens, completions up to 9"
    assert prompts_line(sets, rollout) == f"data       4 prompts{ending}"
    assert prompts_line(sets, rollout, held_out=2) == f"data       4 prompts, 2 held out{ending}"
