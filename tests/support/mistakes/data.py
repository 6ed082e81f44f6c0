from tests.support.mistakes.home import GRPO, SFT, Mistake

MISTAKES: list[Mistake] = [
    ([*GRPO, "--data", "nowhere.jsonl"], r"data.path=nowhere.jsonl: no such file or folder in /"),
    ([*GRPO, "--data", "gsm8k"], r"data.path=gsm8k: no such file or folder .*owner/name"),
    ([*GRPO, "--data", "openai/gsm8k"], r"data.path=openai/gsm8k: neither a file nor a dataset .*name a file"),
    ([*GRPO, "--data", "empty.jsonl"], r"data.path=empty.jsonl: the dataset is empty: add at least one row"),
    ([*GRPO, "--data", "notes.txt"], r"data.path=notes.txt: unknown ending '.txt': use one of"),
    ([*GRPO, "--data", "bad.jsonl"], r"bad.jsonl, line 2: not JSON .*fix or delete this line"),
    ([*GRPO, "--data", "columns.jsonl"], r"columns.jsonl, line 1 has none of .*set data.prompt_column to one of frage"),
    ([*GRPO, "--data", "blank.jsonl"], r"blank.jsonl, line 2: column 'prompt' must be non-empty text"),
    (
        [*GRPO, "--data", "split"],
        r"data.path=split contains train.jsonl and test.jsonl, which looks held out.*evaluation.data=split/test.jsonl",
    ),
    (
        [*GRPO, "--data", "long.jsonl", "--reward", "mine.py:constant"],
        r"row 1 of long.jsonl has 300 tokens; .*the limit",
    ),
    ([*GRPO, "data.prompt_column=quest"], r"data.prompt_column=quest: .*prompts.jsonl, line 1 has no such column"),
    ([*GRPO, "--eval-data", "held.jsonl"], r"evaluation.data=held.jsonl: no such file"),
    ([*GRPO, "rollout.max_prompt_tokens=200", "rollout.max_new_tokens=100"], r"exceed the model's context of 256"),
    ([*SFT, "--data", "prompts.jsonl"], r"prompts.jsonl.* has the columns prompt, wanted, .*data.<part>_column="),
    ([*SFT, "--data", "calls.jsonl"], r"calls.jsonl, line 1: .*calls add, which only a chat template can show.*FILE"),
    (["dpo", *SFT[1:], "--data", "same.jsonl"], r"same.jsonl, line 1: chosen and rejected are the same"),
    # Rows
    ([*SFT, "--data", "human.jsonl", "--dry-run"], r"format messages \(.*\); roles: Human as user, gpt as assista", 0),
    ([*SFT, "--data", "alice.jsonl"], r"alice.jsonl, line 2: .*message 1: unknown role 'alice': use one of"),
    ([*SFT, "--data", "asks.jsonl", "--dry-run"], r"1 whose last message has no reply", 0),
    ([*SFT, "--data", "greets.jsonl", "--dry-run"], r"1 that begin with the assistant", 0),
    (
        [*SFT, "--data", "twice.jsonl", "data.chat_template=turns.jinja"],
        r"twice.jsonl, line 1: the chat template rejects the roles user, user: roles must alternate; change the row",
    ),
    ([*SFT, "--data", "untold.jsonl"], r"untold.jsonl, line 1: .*message 2: expected role and content .*None"),
    ([*SFT, "--data", "offered.jsonl"], r"offered.jsonl, line 1: the model would not see the tools add, .*rename"),
    ([*GRPO, "--data", "printed.jsonl"], r"printed.jsonl, line 1: .*messages as text that is not JSON, .*json.dumps"),
    (["kto", *SFT[1:], "--data", "yes.jsonl"], r"column 'label' must be true or false \(or 1 or 0\), found 'good'"),
    (
        ["dpo", *SFT[1:], "--data", "accepted.jsonl"],
        r"has the columns prompt, accepted, rejected, which match no known",
    ),
    (["dpo", *SFT[1:], "--data", "numbers.jsonl"], r"column 'chosen' must be non-empty text, found 1"),
    (["prm", *SFT[1:], "--data", "ratings.jsonl"], r"ratings.jsonl, line 1: label 2 must be true, false or 0 to 1"),
    (
        ["rm", *SFT[1:], "--data", "margins.jsonl", "reward_model.margin_column=margin"],
        r"column 'margin' must be a number, found 'big'",
    ),
    # Files
    ([*SFT, "--data", "semicolons.csv"], r"separated by commas, not semicolons: save it so"),
    ([*SFT, "--data", "quotes.csv"], r"quotes.csv, line 2: .*: check its quotation marks"),
    ([*SFT, "--data", "damaged.parquet"], r"data.path=damaged.parquet: cannot be read as parquet"),
    ([*SFT, "--data", "packed.jsonl.gz"], r"unknown ending '.gz': unpack it and use one of"),
    ([*SFT, "--data", "nodata"], r"data.path=nodata: no data file in this folder; supported endings"),
]
