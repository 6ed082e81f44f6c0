"""The command line; heavy libraries load only when a run starts."""

import argparse
import errno
import os
import re
import select
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from trueline.api import examine, load_config, quiet_libraries, say, start, suggest_verbs, unknown_verb
from trueline.completion import PrintCompletion
from trueline.config.base import NEAR, Config, ConfigError, keys_of, likeness, suggestion
from trueline.config.rl import RLConfig
from trueline.config.run import RunConfig
from trueline.config.sampling import GenerateConfig, ServingConfig
from trueline.config.supervised import SupervisedConfig
from trueline.config.verify import VerifyConfig
from trueline.monitoring.run_folder import RUNS, RunFolder, default_name
from trueline.options import CommandParser, Words, default_text, given_keys, keys_first, positive, verb_first
from trueline.verbs import DATA, GROUPS, REWARD, TOOLS, VERBS, Verb

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
SERVE_FLAGS = {"--model": "model.path", "--host": "host", "--port": "port"}
TRIAL_FLAGS = REWARD | DATA
MODEL = {"--model": "model.path"}
TOOL_KEYS: dict[str, type[Config]] = {"serve-reward": ServingConfig, "verify": VerifyConfig}
WITHOUT_VERB = ("-h", "--help", "--version", "--print-completion")
LATEST = "default: the latest run in runs/"
LISTED_KEYS = 5  # most keys that are listed as similar to a word
CLOSED_PIPE = 141  # as a shell reports a program that SIGPIPE has ended
Run = Callable[[argparse.Namespace], int]
Respell = Callable[[Words], Words]


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        status = run_words(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not is_output_closed():
            raise
        return CLOSED_PIPE


def is_output_closed() -> bool:
    """Return whether nobody reads the output any more, as behind `| head`; the rest of it is then discarded."""
    streams = select.poll()
    for stream in (sys.stdout, sys.stderr):
        streams.register(stream.fileno(), 0)  # errors are always reported
    closed = [number for number, event in streams.poll(0) if event & select.POLLERR]
    for number in closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return bool(closed)


def run_words(arguments: Sequence[str] | None) -> int:
    options, overrides = make_parser().parse_known_args(arguments)
    options.overrides = overrides
    try:
        return int(options.run(options))
    except ConfigError as error:
        say(f"error: {error}")
        return 2
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        say(f"error: {error}: free disk space or fix the permissions, then continue with --resume")
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 130


def make_parser() -> CommandParser:
    parser = CommandParser(prog="trueline", usage="trueline [-h] [--version] VERB ...", epilog=describe_verbs())
    parser.description = "Train language models from feedback."
    parser.set_defaults(takes_overrides=False)
    parser.add_argument("--version", action="version", version=f"trueline {installed_version()}")
    about = "print a script that completes verbs, flags and keys: source <(trueline --print-completion bash)"
    parser.add_argument("--print-completion", action=PrintCompletion, choices=["bash"], help=about)
    verbs = parser.add_subparsers(required=True, metavar="VERB", prog="trueline", help=argparse.SUPPRESS)
    for name, command in VERBS.items():
        add_run(verbs, name, command, run_command)
    tools: dict[str, CommandParser] = {}
    for name, (meaning, example) in TOOLS.items():
        tools[name] = verbs.add_parser(name, description=f"{meaning}.")
        tools[name].example = f"trueline {example}"
    add_words(tools)
    add_commands(tools, verbs.choices)
    parser.set_defaults(verbs=list(verbs.choices))
    require_verb(parser, verbs.choices, list)
    return parser


def describe_verbs() -> str:
    meanings = {name: verb.meaning for name, verb in VERBS.items()} | {name: TOOLS[name][0] for name in TOOLS}
    width, lines = max(map(len, meanings)), list[str]()
    for title, names in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:{width}}  {meanings[name]}" for name in names), ""]
    return "\n".join([*lines, "`trueline VERB --help` shows a verb's options, its most used keys and an example."])


def installed_version() -> str:
    try:
        return metadata.version("trueline")
    except metadata.PackageNotFoundError:
        return "(not installed: run from its sources)"


def require_verb(parser: CommandParser, verbs: Collection[str], respell: Respell, others: Collection[str] = ()) -> None:
    """Let a parser take a verb first; argparse would list all verbs where one is unknown."""

    def check(words: Words) -> Words:
        words = respell(words)
        if words and words[0].startswith("-") and words[0].partition("=")[0] not in WITHOUT_VERB:
            parser.error(f"{words[0]} needs a verb before it: write `{parser.prog} VERB ...`")
        if words and not words[0].startswith("-") and words[0] not in verbs:
            no_run = f"{words[0]!r} starts no run: `{parser.prog} -h` lists the verbs that do"
            parser.error(no_run if words[0] in others else unknown_verb(words[0], verbs))
        return words

    parser.respell = check


def add_run(verbs: Any, name: str, command: Verb, run: Run) -> CommandParser:
    parser: CommandParser = verbs.add_parser(name, description=f"{command.meaning}.", help=command.meaning)
    parser.add_config_options(command.flags, command.kind)
    parser.defaults, parser.common_keys = command.defaults, command.keys
    parser.example = f"{parser.prog} --model Qwen/Qwen3-0.6B {command.example}"
    parser.respell = keys_first
    parser.add_argument("--dry-run", action="store_true", help="print the resolved keys and the placement, then stop")
    about = "continue this run (a folder, or a name in runs/); without RUN: the run --name, or the latest"
    parser.add_argument("--resume", nargs="?", default=False, const=True, metavar="RUN", help=about)
    parser.set_defaults(run=run, verb=name, restart=False)
    if command.is_training:
        about = "with --resume: start over a run that has no checkpoint yet"
        parser.add_argument("--restart", action="store_true", help=about)
    return parser


def add_runs(
    parser: CommandParser, run: Run, others: Collection[str] = (), flag: str = "", default: str = ""
) -> list[CommandParser]:
    """Let a parser take a whole command of a run, from its verb on; return one parser per verb."""
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    require_verb(parser, VERBS, lambda words: verb_first(words, VERBS, flag, default), others)
    return [add_run(verbs, name, command, run) for name, command in VERBS.items()]


def add_commands(tools: dict[str, CommandParser], every: Collection[str]) -> None:
    """Let the tools that look at a run take its whole command."""
    kinds = tools["data"].add_subparsers(required=True, metavar="preview")
    about = "Show rows as they will be trained on, with learned tokens marked, or prompts as engines will get them"
    preview = kinds.add_parser("preview", help=about, description=f"{about}.")
    for parser in add_runs(preview, preview_data, flag="--task", default="sft"):
        parser.add_argument("--rows", type=positive, default=3, help="how many (default 3)")
        parser.add_argument("--task", metavar="VERB", help="verb of the run, instead of the word after `preview`")
    devices = "NODESxGPUSxNAME, e.g. 8x8xH100, or GPUSxNAME for one node; a GPU without a name: 8x80GiB@990TFLOPs"
    shape = "published shape instead of --model, e.g. llama-70b"
    for parser in add_runs(tools["plan"], plan_run, every):
        parser.example += " --devices 8xH100"
        parser.add_argument("--devices", required=True, help=devices)
        parser.add_argument("--model-shape", metavar="NAME", help=shape)
    deep = "also load the models, sample 16 prompts and train one step, in a folder that is removed again"
    for parser in add_runs(tools["doctor"], run_doctor, every):
        parser.add_argument("--deep", action="store_true", help=deep)


def add_words(tools: dict[str, CommandParser]) -> None:
    """Add the options of all other tools."""
    (serve := tools["serve-reward"]).add_config_options(SERVE_FLAGS, ServingConfig)
    serve.common_keys = ("port", "token_variable", "max_tokens", "normalize", "batch")
    serve.set_defaults(run=serve_reward)
    (config := tools["config"]).set_defaults(run=show_config)
    config.add_argument("of", nargs="*", metavar="VERB WORD", help="a verb, and words that its keys must contain")
    config.add_argument("--filter", action="append", default=[], metavar="WORD", help="the same as WORD")
    kinds = tools["reward"].add_subparsers(required=True, metavar="try")
    about = "Score rows of the data with a reward, and show what it receives and returns"
    trial = kinds.add_parser("try", help=about, description=f"{about}.")
    trial.add_argument("--reply", help="completion to score; default: each row's label or completion")
    trial.add_argument("--rows", type=positive, default=3, help="how many, from the first (default 3)")
    trial.add_config_options(TRIAL_FLAGS, GenerateConfig)
    trial.stray, trial.example = "give a reply as --reply {0!r}", tools["reward"].example
    trial.set_defaults(run=try_reward)
    (export := tools["export"]).set_defaults(run=run_export)
    export.add_argument("source", type=Path, help="run folder (its newest checkpoint) or checkpoint folder")
    export.add_argument("target", type=Path, help="new folder")
    export.add_argument("--merge", action="store_true", help="merge a LoRA into the weights")
    export.add_argument("--average", action="store_true", help="export the moving average of the weights")
    export.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: as trained")
    export.add_argument("--push-to-hub", metavar="OWNER/NAME", help="also upload it to the Hub, as a private model")
    export.add_argument("--public", action="store_true", help="with --push-to-hub: let everybody see a new one")
    runs = f"folder of a run, or its name in runs/; several, or a folder of runs, are compared; {LATEST}"
    (report := tools["report"]).set_defaults(run=run_report)
    report.add_argument("of", nargs="*", metavar="RUN", help=runs)
    report.add_argument("--out", type=Path, metavar="FILE", help="default: report-RUN.html here")
    report.add_argument("--svg", metavar="METRIC,...", help="draw only these curves, as an SVG file")
    mean = "with --svg: average over this many steps; default as on the page"
    report.add_argument("--mean", type=positive, metavar="STEPS", help=mean)
    (watch := tools["watch"]).set_defaults(run=run_watch)
    watch.add_argument("of", nargs="*", metavar="RUN", help=runs)
    watch.add_argument("--port", type=int, default=0, help="default: any free port")
    (demo := tools["demo"]).set_defaults(run=run_demo)
    demo.add_argument("--seed", type=int, default=0, help="of model, data and sampling (default 0)")
    demo.add_argument("--steps", type=positive, default=80, help="steps of GRPO (default 80; 30 give most of the gain)")
    demo.add_argument("--folder", type=Path, help="new folder for model, data and runs; default runs/demo-TIME")
    (explain := tools["explain"]).set_defaults(run=run_explain)
    explain.add_argument("of", nargs="?", metavar="RUN", help=f"folder of the run, or its name in runs/; {LATEST}")

    add_replay(tools["replay"])
    add_verify(tools["verify"])


def add_verify(verify: CommandParser) -> None:
    verify.add_config_options(MODEL, VerifyConfig)
    verify.stray = "name the model with --model, and give keys as key=value"
    verify.set_defaults(run=run_verify)
    verify.add_argument("--checks", metavar="NAME,...", help="only these: template, passes, saved, ranks, engine")
    verify.add_argument("--json", action="store_true", help="print all numbers as JSON")


def add_replay(replay: CommandParser) -> None:
    replay.add_config_options({}, RLConfig)
    replay.stray = "give one run or archive, and keys as key=value"
    replay.set_defaults(run=run_replay)
    replay.add_argument("of", metavar="RUN", help="folder of the run, its name in runs/, or an archive of --pack")
    replay.add_argument("--step", type=positive, help="default: the last one that can be replayed")
    replay.add_argument("--steps", metavar="FIRST-LAST", help="several steps")
    replay.add_argument("--json", action="store_true", help="print all numbers as JSON")
    replay.add_argument("--rewards", action="store_true", help="ask for the rewards again instead")
    replay.add_argument("--pack", type=Path, metavar="FILE", help="write what replays these steps elsewhere")
    replay.add_argument(
        "--without-model", action="store_true", help="with --pack: leave the model that it began from out"
    )
    replay.add_argument("--trust-code", action="store_true", help="run the code that is in an archive")


def load_options(options: argparse.Namespace) -> RunConfig:
    command = VERBS[options.verb]
    keys = command.kind.merge_sources(options.config, given_keys(options, command.flags))
    return load_config(options.verb, keys, resume=options.resume, restart=options.restart)


def run_command(options: argparse.Namespace) -> int:
    return start(options.verb, load_options(options), resume=bool(options.resume), dry_run=options.dry_run)


def run_doctor(options: argparse.Namespace) -> int:
    from trueline.doctor.table import refusal, show  # noqa: PLC0415

    try:
        config = load_options(options)
    except ConfigError as error:
        return show({"plan": [refusal(error)]})
    return show(examine(options.verb, config, resume=bool(options.resume), deep=options.deep))


def serve_reward(options: argparse.Namespace) -> int:
    config = ServingConfig.load(options.config, given_keys(options, SERVE_FLAGS))
    quiet_libraries()
    from trueline.jobs.serve_reward import serve  # noqa: PLC0415

    return serve(config)


def preview_data(options: argparse.Namespace) -> int:
    config = load_options(options)
    quiet_libraries()
    from trueline.jobs.preview import show_prompts, show_rows  # noqa: PLC0415

    if isinstance(config, SupervisedConfig):
        return show_rows(config, options.rows)
    return show_prompts(config, options.rows)


def try_reward(options: argparse.Namespace) -> int:
    config = GenerateConfig.load(options.config, given_keys(options, TRIAL_FLAGS))
    quiet_libraries()
    from trueline.jobs.preview import show_trial  # noqa: PLC0415

    return show_trial(config, options.reply, options.rows)


def run_export(options: argparse.Namespace) -> int:
    quiet_libraries()
    from trueline.hub import push  # noqa: PLC0415
    from trueline.report.card import write_card  # noqa: PLC0415
    from trueline.training.export import export, find_checkpoint  # noqa: PLC0415

    if options.public and not options.push_to_hub:
        raise ConfigError("--public needs --push-to-hub OWNER/NAME: give both, or neither")
    how = {"merge": options.merge, "average": options.average, "dtype": options.dtype}
    written = export(options.source, options.target, **how)
    write_card(find_checkpoint(options.source), written, lambda verb: usual_config(verb).model_dump(mode="json"))
    say(f"written: {written}")
    if options.push_to_hub:
        say(f"pushed:  {push(written, options.push_to_hub, public=options.public)}")
    return 0


def run_explain(options: argparse.Namespace) -> int:
    from trueline.monitoring.watch import explain  # noqa: PLC0415
    from trueline.report.runs import find_run  # noqa: PLC0415

    if options.of is None:
        if not (runs := RunFolder.all_in(RUNS)):
            raise ConfigError(f"{RUNS.resolve()} holds no run: name one")
        options.of = str(runs[0].path)
        say(f"run        {options.of}, the latest")
    sys.stdout.write(explain(find_run(options.of).path) + "\n")
    return 0


def run_replay(options: argparse.Namespace) -> int:
    steps = [options.step] if options.step else []
    if options.steps is not None:
        found = re.fullmatch(r"(\d+)-(\d+)", options.steps)
        if steps or found is None or not 0 < int(found[1]) <= int(found[2]):
            raise ConfigError(f"--steps {options.steps}: write FIRST-LAST, e.g. --steps 3-7, and no --step beside it")
        steps = [int(found[1]), int(found[2])]
    keys = RLConfig.merge_sources(options.config, options.overrides)
    quiet_libraries()
    from trueline.replay.run import ReplayRequest, replay  # noqa: PLC0415

    if options.without_model and not options.pack:
        raise ConfigError("--without-model needs --pack FILE: it leaves the model out of that file")
    base, asked = not options.without_model, (options.rewards, options.trust_code)
    return replay(ReplayRequest(options.of, steps, keys, options.json, options.pack, base, *asked), say)


def run_verify(options: argparse.Namespace) -> int:
    config = VerifyConfig.load(options.config, given_keys(options, MODEL))
    quiet_libraries()
    from trueline.verify.run import verify  # noqa: PLC0415

    chosen = [name.strip() for name in (options.checks or "").split(",") if name.strip()]
    return verify(config, chosen, options.json, say)


def choose_runs(words: Words) -> dict[str, RunFolder]:
    """Return the runs that the words mean, and print them where not all are named."""
    from trueline.report.runs import describe_choice, find_runs  # noqa: PLC0415

    found = find_runs(words)
    if line := describe_choice(words, found):
        say(line)
    return found


def plan_run(options: argparse.Namespace) -> int:
    verb, shape, model = options.verb, options.model_shape, vars(options)["model.path"]
    if not VERBS[verb].is_training:
        other = f"use `trueline {verb} ... --dry-run` to plan it on this machine"
        raise ConfigError(f"plan {verb}: plan takes verbs that train one model; {other}")
    if shape is not None and model not in (None, shape):
        raise ConfigError(f"--model-shape {shape} and --model {model}: give only one of them")
    options.overrides = [*options.overrides, *[f"model.path={shape}"] * (shape is not None)]
    config = load_options(options)
    quiet_libraries()
    from trueline.plan.hardware import read_devices  # noqa: PLC0415
    from trueline.plan.paper import plan_on_paper  # noqa: PLC0415

    sys.stdout.write(plan_on_paper(config, read_devices(options.devices)) + "\n")
    return 0


def run_report(options: argparse.Namespace) -> int:
    from trueline.report.page import write_picture, write_report  # noqa: PLC0415

    runs = choose_runs(options.of)
    if options.svg is None and options.mean is not None:
        raise ConfigError(f"--mean {options.mean} needs --svg; the page lets you choose the mean yourself")
    if options.svg is None:
        written = write_report(runs, options.out, say)
    else:
        written = write_picture(runs, options.svg, options.out, options.mean)
    say(f"written: {written}")
    return 0


def run_watch(options: argparse.Namespace) -> int:
    runs = choose_runs(options.of)
    from trueline.report.live import watch  # noqa: PLC0415

    return watch(runs, options.port)


def run_demo(options: argparse.Namespace) -> int:
    quiet_libraries()
    from trueline.demo.run import run  # noqa: PLC0415

    return run(options.folder or RUNS / default_name("demo"), options.seed, options.steps)


def usual_config(verb: str) -> RunConfig:
    """Return the keys of a verb as they are if nobody sets them."""
    return VERBS[verb].kind.parse(VERBS[verb].defaults)


def show_config(options: argparse.Namespace) -> int:
    verb, *words = options.of or ["grpo"]
    every = [*VERBS, *TOOL_KEYS]
    if verb not in every:
        about = "" if suggest_verbs(verb, every) else f"; keys about a word: `trueline config grpo {verb}`"
        raise ConfigError(unknown_verb(verb, every) + about)
    config: Config = usual_config(verb) if verb in VERBS else TOOL_KEYS[verb]()
    wanted = [word.lower() for word in (*words, *options.filter)]
    keys = [key for key in config.leaves() if all(word in f"{key.path} {key.meaning}".lower() for word in wanted)]
    if not keys:
        # Keys with a word that is almost one of these, or that another library calls so.
        parts = {key: re.split(r"[._]", key) for key in keys_of(type(config))}
        near = [key for key, names in parts.items() if any(likeness(a, b) >= NEAR for a in wanted for b in names)]
        guess = f"; similar: {', '.join(near[:LISTED_KEYS])}" if near else suggestion(type(config), "_".join(wanted))
        raise ConfigError(f"no key of {verb} has {' and '.join(map(repr, wanted))} in its name or meaning{guess}")
    for key in keys:
        sys.stdout.write(f"{key.path} = {default_text(key)}  [{key.kind}]\n    {key.meaning}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
