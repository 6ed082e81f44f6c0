from tests.support.mistakes.home import GRPO, SFT, Mistake

MISTAKES: list[Mistake] = [
    ([*GRPO, "--data", "nowhere.jsonl"], 2, r"data.path=nowhere.jsonl: there is no such file or folder \(looked in"),
    ([*GRPO, "--data", "gsm8k"], 2, r"data.path=gsm8k: there is no such file or folder .*owner/name"),
    ([*GRPO, "--data", "openai/gsm8k"], 2, r"data.path=openai/gsm8k: neither a file nor a dataset .*name a file"),
    ([*GRPO, "--data", "empty.jsonl"], 2, r"data.path=empty.jsonl: the dataset is empty; at least one row"),
    ([*GRPO, "--data", "notes.txt"], 2, r"data.path=notes.txt: ending '.txt' is not known; use one of"),
    ([*GRPO, "--data", "bad.jsonl"], 2, r"bad.jsonl, line 2: not valid JSON .*mend or remove it"),
    ([*GRPO, "--data", "columns.jsonl"], 2, r"columns.jsonl, line 1 has none of .*frage.*data.prompt_column="),
    ([*GRPO, "--data", "blank.jsonl"], 2, r"blank.jsonl, line 2: column 'prompt' must be non-empty text"),
    ([*GRPO, "--data", "split"], 2, r"data.path=split: test.jsonl looks held out .*evaluation.data=split/test.jsonl"),
    (
        [*GRPO, "--data", "long.jsonl", "--reward", "mine.py:constant"],
        2,
        r"row 1 of long.jsonl has 300 tokens; .*the limit",
    ),
    ([*GRPO, "data.prompt_column=quest"], 2, r"data.prompt_column=quest: .*prompts.jsonl, line 1 has no such column"),
    ([*GRPO, "--eval-data", "held.jsonl"], 2, r"evaluation.data=held.jsonl: there is no such file"),
    ([*GRPO, "rollout.max_prompt_tokens=200", "rollout.max_new_tokens=100"], 2, r"exceed the model's context of 256"),
    ([*SFT, "--data", "prompts.jsonl"], 2, r"prompts.jsonl.* has the columns prompt, wanted, .*data.<part>_column="),
    (
        [*SFT, "--data", "calls.jsonl"],
        2,
        r"calls.jsonl, line 1: .*calls add, which only a chat template can show.*FILE",
    ),
    (["dpo", *SFT[1:], "--data", "same.jsonl"], 2, r"same.jsonl, line 1: chosen and rejected are the same"),
]
