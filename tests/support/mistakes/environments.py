"""Mistakes around environments, tools and agents, and files for those in rows."""

import json
from pathlib import Path

from tests.support.mistakes.home import GRPO, LOCAL, SMALL, Mistake

PLAY = ["grpo", "--model", "model", "--data", "prompts.jsonl", *LOCAL, *SMALL]
GENERATE = ["generate", "--model", "model", "--data", "prompts.jsonl", "runtime=local", "rollout.max_new_tokens=4"]
EVAL = ["eval", "--model", "model", "--eval-data", "prompts.jsonl", "--reward", "mine.py:digits", *GENERATE[5:]]
STEP = r"return a text to continue, a number to end with that reward, or a dict"
UNSEEN = r"the model would not see the tools python, because the chat template of .*model drops them: .*FILE"

CODE = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def undocumented(a: int) -> int:
    return a


def unhinted(a):
    """Do something."""


class Game:
    def __init__(self, size=3): ...

    def reset(self, prompt):
        return "go"

    def step(self, reply):
        return {"messages": "more", "reward": 0.1}


class NoBoard(Game):
    def __init__(self):
        raise RuntimeError("no board")


class Gym(Game):
    def step(self, reply):
        return "seen", 1.0, True, False, {}


class Nothing(Game):
    def step(self, reply): ...


class Pair(Game):
    def reset(self, prompt):
        return "go", {}


class Strict(Game):
    def step(self, reply):
        return {"yes": 1.0}[reply]


class Half:
    def reset(self, prompt): ...


def silent(policy):
    return 1.0


def main(prompt, client):
    raise PermissionError("no key")
'''
TEMPLATE = "{% for one in messages %}<{{ one.role }}>{{ one.content }}</s>{% endfor %}<assistant>"
TURNS = (
    "{% for one in messages %}{% if (one.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ one.content }}</s>{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def talk(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in pairs]


ROWS: dict[str, list[dict[str, object]]] = {
    "human.jsonl": [{"messages": talk(("Human", "a"), ("gpt", "b"))}],
    "alice.jsonl": [{"messages": talk(("user", "a"), ("assistant", "b"))}, {"messages": talk(("alice", "a"))}],
    "asks.jsonl": [{"messages": talk(("user", "a"), ("assistant", "b"), ("user", "c"))}],
    "greets.jsonl": [{"messages": talk(("assistant", "a"), ("user", "b"), ("assistant", "c"))}],
    "twice.jsonl": [{"messages": talk(("user", "a"), ("user", "b"), ("assistant", "c"))}],
    "untold.jsonl": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}],
    "printed.jsonl": [{"prompt": str(talk(("user", "a")))}],
    "offered.jsonl": [{"messages": talk(("user", "a"), ("assistant", "b")), "tools": TOOLS}],
    "yes.jsonl": [{"prompt": "a", "completion": "b", "label": "good"}],
    "accepted.jsonl": [{"prompt": "a", "accepted": "b", "rejected": "c"}],
    "numbers.jsonl": [{"prompt": "a", "chosen": 1, "rejected": 2}],
    "ratings.jsonl": [{"prompt": "a", "completions": ["b", "c"], "labels": [1, 5]}],
    "margins.jsonl": [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}],
}
FILES = {
    "code.py": CODE,
    "syntax.py": "def f(:\n",
    "dead.py": "raise SystemExit('no database')\n",
    "toolless.jinja": TEMPLATE,
    "turns.jinja": TURNS,
    "semicolons.csv": "prompt;completion\na;b\n",
    "quotes.csv": 'prompt,completion\n"a" b,c\n',
    "damaged.parquet": "PAR1 and no more",
    "packed.jsonl.gz": "",
    "nodata/readme.md": "nothing",
}


def add_files(folder: Path) -> None:
    rows = {name: "".join(json.dumps(row) + "\n" for row in found) for name, found in ROWS.items()}
    for name, text in (FILES | rows).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


MISTAKES: list[Mistake] = [
    # Tools
    ([*GRPO, "--tools", "python", "data.chat_template=toolless.jinja"], UNSEEN + r".*data.system_prompt"),
    ([*GENERATE, "--tools", "python", "data.chat_template=toolless.jinja"], UNSEEN),
    ([*EVAL, "--tools", "python", "data.chat_template=toolless.jinja"], UNSEEN),
    ([*GRPO, "--tools", "python"], r"would not see the tools python, because model has no chat template: set"),
    ([*PLAY, "--tools", "code.py:add"], r"reward.function is empty: give --reward"),
    ([*GRPO, "--tools", "code.py:undocumented"], r"the tool undocumented has no docstring, by which .*: write one"),
    ([*GRPO, "--tools", "code.py:unhinted"], r"the tool unhinted: its parameter a has no type hint: give it one of"),
    ([*GRPO, "--tools", "code.py:add,code.py:add"], r"there is a tool 'add' already; rename one of them"),
    ([*GRPO, "--tools", "code.py"], r"the tool 'code.py' is neither python, .*name one function of a file"),
    ([*GRPO, "--tools", "nodata"], r"the tool 'nodata' is neither python, file.py:function"),
    ([*GRPO, "--tools", "syntax.py:f"], r"environment.tools=syntax.py:f: .*SyntaxError: invalid syntax"),
    ([*GRPO, "--tools", ""], r"environment.tools: is empty: name tools, e.g. --tools python"),
    ([*GRPO, "--tools", "search"], r"the tool search is an example, no built-in: copy examples/tools/search.py"),
    ([*GRPO, "--tools", "python", "environment.options.second=3"], r"options.second: none of the tools .*seconds"),
    ([*GRPO, "--tools", "mcp:no-such-server"], r"the MCP server 'no-such-server' does not answer: check its URL or"),
    ([*GRPO, "--tools", "mcp:python dead.py"], r"'python dead.py' does not answer: .*it printed: .*no database"),
    ([*GRPO, "--tools", "mcp:http://127.0.0.1:9/mcp"], r"does not answer: check its URL .*ConnectError"),
    # Environments
    ([*PLAY, "--environment", "code.py"], r"environment.function=code.py: name a class or a function of a file"),
    ([*PLAY, "--environment", "code.py:Half"], r"Half has no method 'step': it needs `reset` and `step`"),
    ([*PLAY, "--environment", "code.py:NoBoard"], r"environment.function=code.py:NoBoard: .*RuntimeError: no board"),
    ([*PLAY, "--environment", "code.py:Gym"], rf"`step` returned \('seen', 1.0, True, False, \{{\}}\): {STEP}"),
    ([*PLAY, "--environment", "code.py:Nothing"], rf"`step` returned None: {STEP}"),
    ([*PLAY, "--environment", "code.py:Pair"], r"`reset` returned \('go', \{\}\) of type tuple as messages: return"),
    ([*PLAY, "--environment", "code.py:Strict", "--dry-run"], r"warning: .*Strict failed on the made-up reply", 0),
    (
        [*PLAY, "--environment", "code.py:Game", "environment.options.sise=4"],
        r"environment.options.sise: there is no such option; there are size",
    ),
    (
        [*PLAY, "--environment", "code.py:Game", "environment.max_turns=1", "environment.max_turn_tokens=2"],
        r"warning: 100% of the completions are truncated; raise environment.max_turns=1\b",
        0,
    ),
    (GENERATE, r"warning: \d+% of the completions are truncated; raise rollout.max_new_tokens=4", 0),
    (EVAL, r"warning: \d+% of the completions are truncated; raise rollout.max_new_tokens=4", 0),
    ([*PLAY, "--environment", "code.py:silent"], r"a trial episode ended before it asked the model for a reply"),
    # Agents
    ([*PLAY, "--agent", "no-such-agent"], r"environment.agent=no-such-agent: there is no command 'no-such-agent'"),
    ([*PLAY, "--agent", "python dead.py"], r"python ended with status 1; it printed: no database"),
    ([*PLAY, "--agent", "code.py"], r"there is no command 'code.py' .*a function is named code.py:NAME"),
    ([*PLAY, "--agent", "code.py:main"], r"environment.agent=code.py:main: .*PermissionError: no key"),
    ([*PLAY, "--agent", "code.py:main", "--environment", "code.py:Game"], r"exclude each other: keep one of them"),
]
