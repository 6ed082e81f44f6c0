from tests.support.mistakes.home import GRPO, TRY, Mistake

MISTAKES: list[Mistake] = [
    ([*GRPO, "--reward", ""], 2, r"reward.function is empty: give --reward"),
    ([*GRPO, "--reward", "accuracy"], 2, r"reward.function=accuracy: not a built-in \(code, .*file.py:function"),
    ([*GRPO, "--reward", "runs/none"], 2, r"reward.function=runs/none: .*nor file.py:function.* or a folder"),
    ([*GRPO, "--reward", "their.py:f"], 2, r"their.py:f: there is no file their.py \(looked in"),
    ([*GRPO, "--reward", "mine.py:digit"], 2, r"mine.py has no function 'digit'; it has digits, solution"),
    ([*GRPO, "--reward", "mine.py:solution"], 2, r"no value for its parameter 'solution'; a reward is given .*rename"),
    ([*GRPO, "--reward", "broken.py:f"], 2, r"broken.py:f: .*ModuleNotFoundError: No module named 'nonsense'"),
    ([*GRPO, "--reward", "judge"], 2, r"judge.url"),
    ([*GRPO, "--reward", "mine.py:raises"], 1, r"reward.max_failure_share.*KeyError"),
    ([*GRPO, "--reward", "mine.py:nothing"], 1, r"a reward must be a finite number, got None of type NoneType"),
    ([*GRPO, "--reward", "mine.py:listed"], 1, r"a reward must be a finite number, got \[1.0\] of type list"),
    ([*TRY, "mine.py:listed"], 1, r"reward none: .*a reward must be a finite number, got \[1.0\]"),
    ([*TRY, "judge"], 2, r"judge.url"),
    ([*TRY, "./judge"], 2, r"reward.function=./judge is a reward model, which must be loaded: .*`trueline eval`"),
    ([*GRPO, "--reward", "mine.py:constant", "steps=11"], 0, r"all answers have one reward.*in 10 steps in a row all "),
    ([*GRPO, "--reward", "mine.py:constant", "steps=2"], 0, r"in 2 steps in a row all completions had the same rew"),
    (
        [*GRPO, "--data", "labels.jsonl", "--reward", "mine.py:equal", "--dry-run"],
        0,
        r"warning: reward.function=mine.py:equal of labels.jsonl: the label 4 is of type int .*str\(label\)",
    ),
]
