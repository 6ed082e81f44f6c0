from tests.support.mistakes.home import GRPO, SFT, Mistake

MISTAKES: list[Mistake] = [
    ([*GRPO, "model.path="], 2, r"model.path is empty: name a model, e.g. --model"),
    ([*GRPO, "--model", "nothere"], 2, r"model.path=nothere: there is no such folder or run .*owner/name"),
    ([*GRPO, "--model", "runs/none"], 2, r"model.path=runs/none: there is no such folder or run \(looked in"),
    (
        [*GRPO, "--model", "runs/begun"],
        2,
        r"model.path=runs/begun is a run of sft without a checkpoint yet: .*--resume",
    ),
    ([*GRPO, "--model", "owner/name"], 2, r"model.path=owner/name: cannot be opened \(.*name a folder"),
    ([*GRPO, "--model", "bare"], 2, r"model.path=bare: no tokenizer \(.*save one into the folder"),
    ([*GRPO, "--model", "split"], 2, r"model.path=split: no config.json.*name a folder that"),
    (
        [*GRPO, "--model", "judge", "--reward", "model"],
        2,
        r"model: its config.json says Llama.*no reward model: train one",
    ),
    (["distill", *SFT[1:], "--data", "sft.jsonl"], 2, r"distill.teacher is empty: name the model to learn from"),
]
