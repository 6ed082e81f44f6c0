"""The house rules: layers, homes of third-party libraries, sizes, typing, and documents that tell the truth."""

import argparse
import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TypeGuard

import pytest
import yaml

from trueline.cli import load_options, make_parser
from trueline.config.algorithm import PRESETS
from trueline.verbs import TASK_VERBS, VERBS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "trueline"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TREES = {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text()) for file in SOURCES}
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))

# Top first. A part imports itself and the parts of lower layers; the pairs below are the only neighbours that meet.
LAYERS = (
    {"__init__", "api", "cli", "completion", "demo", "replay", "verify"},
    {"verbs", "objects", "options", "cluster_address", "hub"},
    {"doctor", "report"},
    {"rl", "offline", "jobs"},
    {"runs"},
    {"plan"},
    {"sync"},
    {"rollout", "training"},
    {"runtime"},
    {"environments"},
    {"models", "rewards"},
    {"algorithms"},
    {"usercode"},
    {"data"},
    {"config", "monitoring"},
    {"files"},
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
NEIGHBOURS = {
    ("__init__", "api"),
    ("cli", "api"),
    ("cli", "completion"),
    ("cli", "demo"),
    ("cli", "replay"),
    ("cli", "verify"),
    ("demo", "api"),
    ("monitoring", "config"),
    ("jobs", "offline"),
}
HOMES = {  # third-party library -> the files that may import it
    "ray": r"runtime/.*",
    "vllm": r"rollout/vllm_\w+\.py|environments/tools/vllm_\w+\.py",
    "deepspeed": r"training/engines/deepspeed_\w+\.py",
    "mcp": r"environments/tools/mcp_servers\.py",
    "openai": r"environments/hosted\.py",
    "peft": r"models/lora\.py",
    "PIL": r"data/pictures\.py",
    "bitsandbytes": r"models/lora\.py",
    "wandb": r"monitoring/trackers\.py",
    "mlflow": r"monitoring/trackers\.py",
    "trackio": r"monitoring/trackers\.py",
    "starlette": r"usercode/http_server\.py|rewards/server\.py|environments/endpoint\.py|report/live\.py",
    "uvicorn": r"usercode/http_server\.py",
}
USER_CODE = {  # where user code runs
    "usercode/child.py",
    "rewards/scoring.py",
    "rollout/episode.py",
    "environments/tools/toolbox.py",
    "data/named/verifiers_program.py",
}
BROAD_EXCEPTS = 6
REMOTE_CALLS = {"submit", "call", "_submit", "_engines"}
IRREGULAR = re.compile(
    "told|said|made|given|kept|found|sent|held|left|shown|drawn|met|known|written|taken|seen|built|spent|bound|grown|"
    "hung|paid|lost|thrown|chosen|begun|gone|broken|hidden|laid|led|fed|torn|spoken|meant|brought|stood"
)
NO_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "speed", "succeed"}
HOMELESS = {"utils.py", "common.py", "helpers.py", "misc.py", "constants.py"}

FILE_LINES, FUNCTION_LINES, MEDIAN_LINES, PERCENTILE_95_LINES = 450, 60, 10, 30
MODULES_IN_A_FOLDER, SHARED_LINES = 14, 6
NESTING, ANNOTATED_SHARE, EXAMPLE_LINES = 4, 0.95, 60
DYNAMIC_ACCESS_PER_1000_LINES = 1  # getattr and hasattr
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Test = Callable[[str, ast.AST], str | None]


def places(broken: Test) -> list[str]:
    """`file:line: what` for every node that breaks a rule."""
    found = [
        f"trueline/{name}:{node.lineno}: {said}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if (said := broken(name, node)) is not None
    ]
    return sorted(found)


def accept(violations: list[str]) -> None:
    assert not violations, "\n" + "\n".join(violations)


def functions() -> list[tuple[str, Function]]:
    return [(name, node) for name, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, Function)]


def lines_of(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        return [f"trueline.{alias.name}" for alias in node.names] if module == "trueline" else [module]
    return []


def called_name(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def part_of(name: str) -> str:
    """`rl/trainer.py` -> rl, `cli.py` -> cli, `__init__.py` -> what the package itself offers."""
    return name.split("/")[0].removesuffix(".py")


# Layers and homes


def test_every_part_has_a_layer() -> None:
    assert {part_of(name) for name in TREES} <= set(LEVEL)


def test_imports_go_down_only() -> None:
    def broken(name: str, node: ast.AST) -> str | None:
        upward = [module for module in imported_modules(node) if not may_import(part_of(name), module)]
        return f"{part_of(name)} must not import {upward[0]}" if upward else None

    accept(places(broken))


def may_import(part: str, module: str) -> bool:
    if module.split(".")[0] != "trueline":
        return not module.startswith(".")  # relative imports hide the layer
    target = module.split(".")[1] if "." in module else "__init__"
    if part not in LEVEL or target not in LEVEL:
        return part == target
    return part == target or LEVEL[target] > LEVEL[part] or (part, target) in NEIGHBOURS


@pytest.mark.parametrize(
    ("part", "module", "allowed"),
    [
        ("rl", "trueline.rollout.pool", True),
        ("rl", "trueline.offline.trainer", False),
        ("runs", "trueline.rl.trainer", False),
        ("config", "trueline.verbs", False),
        ("rollout", "trueline.rl.trainer", False),
        ("sync", "trueline.training.group", True),
        ("monitoring", "trueline.config.run", True),
        ("config", "trueline.monitoring.progress", False),
        ("data", "trueline.config.data", True),
        ("runtime", "trueline.rollout.engine", False),
        ("algorithms", "torch", True),
    ],
)
def test_the_layer_rule_itself(part: str, module: str, allowed: bool) -> None:
    assert may_import(part, module) is allowed


def test_folders_import_each_other_in_one_direction() -> None:
    """A reader can start at the bottom: whatever a folder imports, directly or not, does not import that folder."""
    imports: dict[str, set[str]] = {part_of(name): set() for name in TREES}
    for name, tree in TREES.items():
        modules = [module for node in ast.walk(tree) for module in imported_modules(node)]
        targets = {module.split(".")[1] for module in modules if module.startswith("trueline.")}
        imports[part_of(name)] |= targets - {part_of(name)}
    cycles = []
    while imports:
        free = [part for part, targets in imports.items() if not targets & imports.keys()]
        cycles = [] if free else [f"{part} imports {', '.join(sorted(targets))}" for part, targets in imports.items()]
        imports = {} if cycles else {part: targets for part, targets in imports.items() if part not in free}
    accept(cycles)


def test_modules_of_the_package_that_are_imported_are_there() -> None:
    """mypy takes an import of what is not installed for a library without types."""
    known = {"trueline", *(f"trueline.{name.removesuffix('.py').replace('/', '.')}" for name in TREES)}
    known |= {name.removesuffix(".__init__") for name in known}
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    nodes = [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text()))]
    named = [(file, node.module) for file, node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    accept([f"{file}: {name}" for file, name in named if name.startswith("trueline") and name not in known])


def test_libraries_are_touched_in_their_home_only() -> None:
    def broken(name: str, node: ast.AST) -> str | None:
        libraries = {module.split(".")[0] for module in imported_modules(node)} & set(HOMES)
        strays = [library for library in libraries if not re.fullmatch(HOMES[library], name)]
        return f"{strays[0]} is imported in {HOMES[strays[0]]} only" if strays else None

    accept(places(broken))


def test_loops_and_workers_name_no_algorithm() -> None:
    """What one of them asks for is a step of its entry's own, in a table."""
    names = [
        *map(re.escape, [*PRESETS, *TASK_VERBS]),
        r"distill(?!ation_target)\w*",
        "teacher",
        "mismatched",
        r"positive_\w+",
    ]
    pattern = re.compile(rf"\b({'|'.join(names)})\b", re.IGNORECASE)
    files = [PACKAGE / name for name in ("rl/trainer.py", "offline/trainer.py", "training/worker.py")]
    lines = [(file, line) for file in files for line in file.read_text().splitlines()]
    accept([f"{file.relative_to(ROOT)}: {line.strip()}" for file, line in lines if pattern.search(line)])


def test_no_homeless_helpers() -> None:
    accept([f"{file.relative_to(ROOT)}: name the concept" for file in SOURCES if file.name in HOMELESS])


# Sizes and shape


def test_files_are_short() -> None:
    sizes = {file: len(file.read_text().splitlines()) for file in SOURCES}
    accept([f"{file.relative_to(ROOT)}: {size} lines" for file, size in sizes.items() if size > FILE_LINES])


def test_functions_are_short() -> None:
    sizes = sorted(lines_of(function) for _, function in functions())
    accept(
        [
            f"trueline/{name}:{function.lineno}: {function.name} has {lines_of(function)} lines"
            for name, function in functions()
            if lines_of(function) > FUNCTION_LINES
        ]
    )
    assert median(sizes) <= MEDIAN_LINES
    assert sizes[int(len(sizes) * 0.95)] <= PERCENTILE_95_LINES


def test_folders_are_small() -> None:
    counts = Counter(file.parent for file in SOURCES if file.name != "__init__.py")
    accept(
        [
            f"{folder.relative_to(ROOT)}: {count} modules"
            for folder, count in counts.items()
            if count > MODULES_IN_A_FOLDER
        ]
    )


def test_no_two_functions_share_a_run_of_lines() -> None:
    """Six equal lines of code in a row are written once."""
    seen: dict[tuple[str, ...], tuple[str, Function]] = {}
    repeated = []
    for name, function in functions():
        lines = [line.strip() for line in ast.unparse(function).splitlines()]
        for start in range(len(lines) - SHARED_LINES + 1):
            run = tuple(lines[start : start + SHARED_LINES])
            where, other = seen.setdefault(run, (name, function))
            if other not in ast.walk(function) and function not in ast.walk(other):
                repeated.append(f"trueline/{name}: {function.name} and {where}: {other.name}: {run[0]}")
    accept(repeated)


def test_nesting_is_shallow() -> None:
    accept(
        [
            f"trueline/{name}:{function.lineno}: {function.name} nests {depth(function)} deep"
            for name, function in functions()
            if depth(function) > NESTING
        ]
    )


def depth(node: ast.AST) -> int:
    """Blocks inside blocks below `node`; an `elif` is no deeper than its `if`, an inner function starts anew."""
    return max((deepest(node, child) for child in ast.iter_child_nodes(node)), default=0)


def deepest(parent: ast.AST, child: ast.AST) -> int:
    if isinstance(child, Function | ast.ClassDef | ast.Lambda):
        return 0
    is_elif = isinstance(parent, ast.If) and isinstance(child, ast.If) and child.col_offset == parent.col_offset
    return depth(child) + (isinstance(child, BLOCKS) and not is_elif)


def test_the_depth_rule_itself() -> None:
    chain = "def f():\n if a:\n  pass\n elif b:\n  pass\n elif c:\n  for x in y:\n   pass"
    assert depth(ast.parse(chain).body[0]) == 2
    assert depth(ast.parse("def f():\n with a:\n  while b:\n   try:\n    pass\n   finally:\n    pass").body[0]) == 3


# Names


def test_class_names_are_unique() -> None:
    classes = [(node.name, name) for name, tree in TREES.items() for node in ast.walk(tree) if is_class(node)]
    counts = Counter(name for name, _ in classes)
    accept([f"trueline/{file}: {name} is the name of another class too" for name, file in classes if counts[name] > 1])


def is_class(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


def test_functions_are_verbs_or_nouns() -> None:
    """`joined` and `told` say neither what is done nor what is returned: `join_pieces`, `tool_names`."""
    accept(
        [
            f"trueline/{name}:{function.lineno}: {function.name} is a bare participle"
            for name, function in functions()
            if is_participle(function.name)
        ]
    )


def is_participle(name: str) -> bool:
    word = name.strip("_")
    regular = word.endswith("ed") and "_" not in word and word not in NO_PARTICIPLES
    return regular or IRREGULAR.fullmatch(word) is not None


def test_the_participle_rule_itself() -> None:
    assert is_participle("_joined") and is_participle("told")
    assert not is_participle("embed") and not is_participle("speed") and not is_participle("join_pieces")


def test_every_module_is_in_a_test() -> None:
    """A module has a test file of its name, or is imported or named in one."""
    texts = [file.read_text() for file in (ROOT / "tests").rglob("*.py")]
    files = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    accept(
        [
            f"trueline/{name}: no test names it"
            for name in TREES
            if not name.endswith("__init__.py")
            and f"test_{Path(name).name}" not in files
            and not any(dotted(name) in text or imports_it(name, text) for text in texts)
        ]
    )


def dotted(name: str) -> str:
    return f"trueline.{name.removesuffix('.py').replace('/', '.')}"


def imports_it(name: str, text: str) -> bool:
    package, _, module = dotted(name).rpartition(".")
    return re.search(rf"from {re.escape(package)} import .*\b{module}\b", text) is not None


# Habits


def test_functions_are_annotated() -> None:
    bare = [f"trueline/{name}:{one.lineno}: {one.name}" for name, one in functions() if not annotated(one)]
    share = 1 - len(bare) / len(functions())
    assert share >= ANNOTATED_SHARE, f"{share:.1%} annotated; bare:\n" + "\n".join(bare)


def annotated(function: Function) -> bool:
    return function.returns is not None and all(argument.annotation is not None for argument in parameters(function))


def parameters(function: Function) -> Iterator[ast.arg]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    yield from positional[1:] if positional and positional[0].arg in ("self", "cls") else positional
    yield from given.kwonlyargs
    yield from (argument for argument in (given.vararg, given.kwarg) if argument is not None)


def test_attributes_are_named_not_looked_up() -> None:
    uses = places(lambda name, node: called_name(node) if called_name(node) in ("getattr", "hasattr") else None)
    lines = sum(len(file.read_text().splitlines()) for file in SOURCES)
    rate = len(uses) / (lines / 1000)
    assert rate <= DYNAMIC_ACCESS_PER_1000_LINES, f"{rate:.1f} per 1,000 lines:\n" + "\n".join(uses)


def test_everything_is_caught_only_where_user_code_runs() -> None:
    def broken(name: str, node: ast.AST) -> str | None:
        return "catches everything" if name not in USER_CODE and catches_all(node) else None

    accept(places(broken))
    caught = places(lambda name, node: "catches everything" if catches_all(node) else None)
    assert len(caught) <= BROAD_EXCEPTS, "\n" + "\n".join(caught)


def catches_all(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in caught)


def test_no_method_of_another_process_is_called_by_a_string() -> None:
    """`actor.submit(Worker.score, ...)`: a type checker sees whether both sides agree."""

    def by_string(name: str, node: ast.AST) -> str | None:
        asked = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REMOTE_CALLS
        return "a string" if asked and node.args and isinstance(node.args[0], ast.Constant) else None

    accept(places(by_string))


def test_no_key_is_asserted() -> None:
    """A plan holds what it has resolved; whoever starts from it need not hope that a key was filled in."""
    kinds = [command.kind for command in VERBS.values()]
    paths = [key.path for kind in kinds for key in kind().leaves() if key.kind.endswith("null")]
    keys = {tuple(f"config.{path}".split(".")[-2:]) for path in paths}

    def asserted(name: str, node: ast.AST) -> str | None:
        inner = ast.walk(node) if isinstance(node, ast.Assert) else ()
        found = [one for one in inner if isinstance(one, ast.Attribute) and (last_name(one.value), one.attr) in keys]
        return ast.unparse(found[0]) if found else None

    accept(places(asserted))


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_no_print() -> None:
    accept(places(lambda name, node: "print" if called_name(node) == "print" else None))


# Documents, examples and imports


def verb_of(file: Path) -> str:
    """The longest verb that the file's name begins with: `dr_grpo.yaml`, `grpo_two_gpus.yaml`."""
    verbs = [verb for verb in VERBS if re.match(rf"{re.escape(verb)}[._]", file.name)]
    assert verbs, f"{file.name} begins with no verb: {', '.join(VERBS)}"
    return max(verbs, key=len)


def test_there_are_examples() -> None:
    assert {verb_of(file) for file in EXAMPLES} == set(VERBS)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_example_loads(file: Path) -> None:
    command = VERBS[verb_of(file)]
    command.kind.load([file], [], command.defaults)
    assert isinstance(yaml.safe_load(file.read_text()), dict)
    assert len(file.read_text().splitlines()) < EXAMPLE_LINES


def test_every_extra_is_in_the_install_page() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "install.md").read_text(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(extras)


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"trueline\b", line)]


def test_readme_has_commands() -> None:
    assert readme_commands()


@pytest.mark.parametrize("command", readme_commands())
def test_readme_command_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options, options.overrides = parsed(shlex.split(command, comments=True)[1:])
    verb = vars(options).get("verb")
    if verb is not None:
        options.resume = False  # there is no run to go on with
        load_options(options)


def parsed(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    options, overrides = make_parser().parse_known_args(words)
    assert not [word for word in overrides if word.startswith("-")], f"unknown option in {words}"
    assert options.takes_overrides or not overrides, f"no verb for {overrides}"
    return options, overrides


def test_configuration_and_command_line_start_without_heavy_libraries() -> None:
    modules = [f"trueline.config.{file.stem}" for file in sorted((PACKAGE / "config").glob("[!_]*.py"))]
    program = f"import sys, trueline.cli, {', '.join(modules)}; sys.stdout.write(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "trueline.cli" in loaded and not {"torch", "starlette", "uvicorn"} & set(loaded)


def test_no_path_of_one_workplace() -> None:
    """A path that exists on one machine only means nothing to a reader of the project."""
    pattern = re.compile(r"(?<![\w.~])/(?:" + "|".join(["work", "root", "home"]) + r")/")
    accept(
        [
            f"{file}:{number}: {line.strip()[:100]}"
            for file in tracked_files()
            for number, line in enumerate(text_of(ROOT / file).splitlines(), 1)
            if pattern.search(line)
        ]
    )


def test_nothing_ignored_is_tracked() -> None:
    """.gitignore does not untrack what was added before or by force, and a virtual environment is full of paths."""
    folders = Counter(name.split("/")[0] for name in git_files("--cached", "--ignored"))
    accept([f"{folder}: {count} tracked files that .gitignore names" for folder, count in folders.items()])


def tracked_files() -> list[str]:
    """What git tracks or would track; what it tracks in spite of .gitignore has a test of its own."""
    ignored = set(git_files("--cached", "--ignored"))
    return [name for name in git_files("--cached", "--others") if name not in ignored and (ROOT / name).is_file()]


def test_tables_of_what_was_measured_are_as_measured() -> None:
    command = [sys.executable, "benchmarks/tables.py", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0, "run python benchmarks/tables.py"


def git_files(*options: str) -> list[str]:
    command = ["git", "ls-files", "--exclude-standard", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no git checkout: {done.stderr.strip()}")
    return done.stdout.splitlines()


def text_of(file: Path) -> str:
    content = file.read_bytes()
    return "" if b"\0" in content[:8192] else content.decode("utf-8", errors="replace")
