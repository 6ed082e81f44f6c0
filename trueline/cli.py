"""The command line: one verb per algorithm and task. Heavy libraries are imported only once a run starts."""

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

from trueline.api import examine, load, quiet_libraries, say, start, trains, unknown_verb
from trueline.config.base import NEAR, Config, ConfigError, keys_of, likeness, suggestion
from trueline.config.run import RunConfig
from trueline.config.sampling import GenerateConfig, ServingConfig
from trueline.config.supervised import SupervisedConfig
from trueline.monitoring.run_folder import RunFolder
from trueline.options import (
    CommandParser,
    Words,
    add_config_options,
    given_flags,
    keys_first,
    positive,
    verb_first,
)
from trueline.verbs import DATA, REWARD, VERBS, Verb

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
SERVE_FLAGS = {"--model": "model.path", "--host": "host", "--port": "port"}
TRIAL_FLAGS = REWARD | DATA
LAST = "default: the run in runs/ that was touched last"
MOST_KEYS = 5  # that are named as near to a word
CLOSED_PIPE = 141  # as a shell reports a program that SIGPIPE has ended


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        status = run_words(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not output_closed():
            raise
        return CLOSED_PIPE


def output_closed() -> bool:
    """Tell whether nobody reads the output any more, as behind `| head`; what is left of it goes nowhere then."""
    streams = select.poll()
    for stream in (sys.stdout, sys.stderr):
        streams.register(stream.fileno(), 0)  # errors are always reported
    closed = [number for number, event in streams.poll(0) if event & select.POLLERR]
    for number in closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return bool(closed)


def run_words(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    options, overrides = parser.parse_known_args(arguments)
    options.overrides = overrides
    try:
        return int(options.run(options))
    except ConfigError as error:
        say(f"error: {error}")
        return 2
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        say(f"error: {error}: make room on the disk or see to its permissions, then go on with --resume")
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 130


def checked_verb(
    parser: CommandParser, verbs: Collection[str], respell: Callable[[Words], Words], others: Collection[str] = ()
) -> None:
    """Let a parser take a verb first; argparse would answer an unknown one with the list of all."""

    def check(words: Words) -> Words:
        words = respell(words)
        if words and words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
            parser.error(f"a verb must stand in front of {words[0]}: write `{parser.prog} VERB ...`")
        if words and not words[0].startswith("-") and words[0] not in verbs:
            no_run = f"{words[0]!r} makes no run: `{parser.prog} -h` lists the verbs that do"
            parser.error(no_run if words[0] in others else unknown_verb(words[0], verbs))
        return words

    parser.respell = check


def make_parser() -> CommandParser:
    parser = CommandParser(prog="trueline", description="Train language models from feedback.")
    parser.set_defaults(takes_overrides=False)
    parser.add_argument("--version", action="version", version=f"trueline {installed_version()}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, command in VERBS.items():
        verb = verbs.add_parser(name, help=command.meaning)
        add_run_options(verb, command)
        verb.set_defaults(run=run_command, verb=name)
    serve = verbs.add_parser("serve-reward", help="serve a reward model over HTTP, with a token")
    add_config_options(serve, SERVE_FLAGS, ServingConfig)
    serve.set_defaults(run=serve_reward)
    config = verbs.add_parser("config", help="list every key with its default and meaning")
    config.add_argument("of", nargs="*", metavar="VERB WORD", help="verb of the keys; words that a key must contain")
    config.add_argument("--filter", action="append", default=[], metavar="WORD", help="the same as WORD")
    config.set_defaults(run=show_config)
    add_data_verbs(verbs)
    add_reward_verbs(verbs)
    add_export(verbs)
    add_explain(verbs)
    add_plan(verbs)
    add_report_verbs(verbs)
    add_doctor(verbs)
    demo = verbs.add_parser("demo", help="make a small model and teach it arithmetic, start to end, in minutes")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--steps", type=positive, default=80, help="of GRPO; 30 show the most of it (default 80)")
    demo.add_argument("--folder", type=Path, help="new folder for model, data and runs; default runs/demo-TIME")
    demo.set_defaults(run=run_demo)
    parser.set_defaults(verbs=list(verbs.choices))
    checked_verb(parser, verbs.choices, list)
    return parser


def installed_version() -> str:
    try:
        return metadata.version("trueline")
    except metadata.PackageNotFoundError:
        return "(not installed: run from its sources)"


def add_behind(parser: CommandParser, verbs: Any, run: Callable[[argparse.Namespace], int]) -> list[CommandParser]:
    """Let a parser take, behind the name of a run's verb, exactly what the run takes; return one parser a verb."""
    kinds = parser.add_subparsers(required=True, metavar="VERB")
    for name, command in VERBS.items():
        kinds.add_parser(name, help=command.meaning, parents=[verbs.choices[name]], add_help=False)
        kinds.choices[name].set_defaults(run=run)
        kinds.choices[name].respell = keys_first
    return list(kinds.choices.values())


def add_data_verbs(verbs: Any) -> None:
    data = verbs.add_parser("data", help="look at what will be trained on")
    kinds = data.add_subparsers(required=True, metavar="preview")
    about = "show three rows as they will be trained on, learnt tokens marked, or prompts as engines will get them"
    preview = kinds.add_parser("preview", help=about, description=about)
    for kind in add_behind(preview, verbs, preview_data):
        kind.add_argument("--rows", type=positive, default=3)
        kind.add_argument("--task", metavar="VERB", help="verb of the run, in place of the word behind `preview`")
    checked_verb(preview, VERBS, lambda words: verb_first(words, VERBS, "--task", default="sft"))


def add_reward_verbs(verbs: Any) -> None:
    reward = verbs.add_parser("reward", help="look at what a reward says")
    kinds = reward.add_subparsers(required=True, metavar="try")
    trial = kinds.add_parser("try", help="ask a reward about rows of the data: what it is given and what it says")
    trial.add_argument("--reply", help="reply to ask about; default: each row's label or completion")
    trial.add_argument("--rows", type=positive, default=3, help="how many, from the first on (default 3)")
    add_config_options(trial, TRIAL_FLAGS, GenerateConfig)
    trial.stray = "give a reply as --reply {0!r}"
    trial.set_defaults(run=try_reward)


def add_export(verbs: Any) -> None:
    export = verbs.add_parser("export", help="write a Hugging Face folder from a run or checkpoint")
    export.add_argument("source", type=Path, help="run folder (its newest checkpoint) or checkpoint folder")
    export.add_argument("target", type=Path, help="new folder")
    export.add_argument("--merge", action="store_true", help="add a LoRA's matrices to the weights they belong to")
    export.add_argument("--average", action="store_true", help="the moving average of the weights, where one was kept")
    export.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: as trained")
    export.set_defaults(run=run_export)


def add_explain(verbs: Any) -> None:
    about = "tell what a run is doing: what holds it up if it does not move, and the stacks of its processes"
    explain = verbs.add_parser("explain", help=about)
    explain.add_argument("of", nargs="?", metavar="RUN", help=f"folder of the run, or its name below runs/; {LAST}")
    explain.set_defaults(run=run_explain)


def add_plan(verbs: Any) -> None:
    about = "plan a run on devices that are not here: who goes where, memory and seconds of each phase"
    plan = verbs.add_parser("plan", help=about, description=f"{about}. It takes what the run takes.")
    devices = "NODESxGPUSxNAME, e.g. 8x8xH100, or GPUSxNAME for one node; a GPU without a name: 8x80GiB@990TFLOPs"
    for kind in add_behind(plan, verbs, plan_run):
        kind.add_argument("--devices", required=True, help=devices)
        kind.add_argument("--model-shape", metavar="NAME", help="published shape in place of --model, e.g. llama-70b")
    checked_verb(plan, VERBS, lambda words: verb_first(words, VERBS), verbs.choices)


def add_report_verbs(verbs: Any) -> None:
    runs = f"folder of a run, or its name below runs/; several, or a folder of runs, are compared; {LAST}"
    report = verbs.add_parser(
        "report", help="write one HTML file: curves, times, configuration and transcripts of runs"
    )
    report.add_argument("of", nargs="*", metavar="RUN", help=runs)
    report.add_argument("--out", type=Path, metavar="FILE", help="default: report-RUN.html here")
    report.add_argument("--svg", metavar="METRIC,...", help="draw only these curves, as an SVG file")
    report.add_argument(
        "--mean", type=positive, metavar="STEPS", help="with --svg: means of so many; default as on the page"
    )
    report.set_defaults(run=run_report)
    watch = verbs.add_parser("watch", help="serve that page to this machine, and keep it up to date")
    watch.add_argument("of", nargs="*", metavar="RUN", help=runs)
    watch.add_argument("--port", type=int, default=0, help="default: any free one")
    watch.set_defaults(run=run_watch)


def add_doctor(verbs: Any) -> None:
    about = "look at a run before it starts: what would be refused, and what would go wrong"
    doctor = verbs.add_parser("doctor", help=about, description=f"{about}. Without --deep no weights are loaded.")
    deep = "start its processes, sample 16 prompts and train one step, in a folder that is removed again"
    for kind in add_behind(doctor, verbs, run_doctor):
        kind.add_argument("--deep", action="store_true", help=deep)
    checked_verb(doctor, VERBS, lambda words: verb_first(words, VERBS), verbs.choices)


def add_run_options(verb: CommandParser, command: Verb) -> None:
    add_config_options(verb, command.flags, command.kind)
    verb.respell = keys_first
    verb.add_argument("--dry-run", action="store_true", help="print the resolved keys and the placement, then stop")
    about = "go on with this run (a folder, or a name below runs/), or with the run --name, or that touched last"
    verb.add_argument("--resume", nargs="?", default=False, const=True, metavar="RUN", help=about)
    if trains(command):
        about = "with --resume: start a run over that has no checkpoint yet"
        verb.add_argument("--restart", action="store_true", help=about)
    else:
        verb.set_defaults(restart=False)


def load_options(options: argparse.Namespace) -> RunConfig:
    command = VERBS[options.verb]
    asked = command.kind.asked(options.config, [*given_flags(options, command.flags), *options.overrides])
    return load(options.verb, asked, resume=options.resume, restart=options.restart)


def run_command(options: argparse.Namespace) -> int:
    return start(options.verb, load_options(options), resume=bool(options.resume), dry_run=options.dry_run)


def run_doctor(options: argparse.Namespace) -> int:
    from trueline.doctor.findings import refusal, show  # noqa: PLC0415

    try:
        config = load_options(options)
    except ConfigError as error:
        return show({"plan": [refusal(error, VERBS[options.verb].kind)]})
    return show(examine(options.verb, config, resume=bool(options.resume), deep=options.deep))


def serve_reward(options: argparse.Namespace) -> int:
    config = ServingConfig.load(options.config, [*given_flags(options, SERVE_FLAGS), *options.overrides])
    quiet_libraries()
    from trueline.jobs.serve_reward import serve  # noqa: PLC0415

    return serve(config)


def preview_data(options: argparse.Namespace) -> int:
    config = load_options(options)
    quiet_libraries()
    if isinstance(config, SupervisedConfig):
        from trueline.offline.launch import show_preview  # noqa: PLC0415

        return show_preview(config, options.rows)
    from trueline.jobs.preview import show_prompts  # noqa: PLC0415

    return show_prompts(config, options.rows)


def try_reward(options: argparse.Namespace) -> int:
    config = GenerateConfig.load(options.config, [*given_flags(options, TRIAL_FLAGS), *options.overrides])
    quiet_libraries()
    from trueline.jobs.try_reward import show_trial  # noqa: PLC0415

    return show_trial(config, options.reply, options.rows)


def run_export(options: argparse.Namespace) -> int:
    quiet_libraries()
    from trueline.training.export import Export, export  # noqa: PLC0415

    written = export(options.source, options.target, Export(options.merge, options.average, options.dtype))
    say(f"written: {written}")
    return 0


def run_explain(options: argparse.Namespace) -> int:
    from trueline.monitoring.watch import explain  # noqa: PLC0415
    from trueline.report.runs import find_run  # noqa: PLC0415

    of = latest_run() if options.of is None else options.of
    sys.stdout.write(explain(find_run(of).path) + "\n")
    return 0


def latest_run() -> str:
    base = Path(RunConfig.model_fields["folder"].default)
    if not (runs := RunFolder.all_in(base)):
        raise ConfigError(f"there is no run in {base.resolve()}: name one")
    say(f"run        {runs[0].path}, the one that was touched last")
    return str(runs[0].path)


def chosen_runs(words: Words) -> Words:
    """Return the folders of the runs that are meant, and print which, where they are not all named."""
    from trueline.report.runs import describe_choice, find_runs  # noqa: PLC0415

    found = find_runs(words)
    if line := describe_choice(words, found):
        say(line)
    return [str(folder.path) for folder in found.values()]


def plan_run(options: argparse.Namespace) -> int:
    command, shape = VERBS[options.verb], options.model_shape
    if not trains(command):
        raise ConfigError(
            f"plan {options.verb}: only runs of one training are planned on paper; `trueline {options.verb} ... "
            "--dry-run` plans it on this machine"
        )
    if shape is not None and vars(options)["model.path"] not in (None, shape):
        raise ConfigError(f"--model-shape {shape} and --model {vars(options)['model.path']}: give one of the two")
    options.overrides = [*options.overrides, *[f"model.path={shape}"] * (shape is not None)]
    config = load_options(options)
    quiet_libraries()
    from trueline.planning.hardware import read_devices  # noqa: PLC0415
    from trueline.planning.paper import plan_on_paper  # noqa: PLC0415

    sys.stdout.write(plan_on_paper(config, read_devices(options.devices)) + "\n")
    return 0


def run_report(options: argparse.Namespace) -> int:
    from trueline.report.page import write_report  # noqa: PLC0415
    from trueline.report.picture import write_picture  # noqa: PLC0415

    runs = chosen_runs(options.of)
    if options.svg is None and options.mean is not None:
        raise ConfigError(f"--mean {options.mean} is for --svg: on the page, means are chosen there; leave --mean out")
    if options.svg is None:
        written = write_report(runs, options.out, say)
    else:
        written = write_picture(runs, options.svg.split(","), options.out, options.mean)
    say(f"written: {written}")
    return 0


def run_watch(options: argparse.Namespace) -> int:
    quiet_libraries()
    from trueline.report.live import watch  # noqa: PLC0415

    return watch(chosen_runs(options.of), options.port)


def run_demo(options: argparse.Namespace) -> int:
    quiet_libraries()
    from trueline.demo.run import run  # noqa: PLC0415
    from trueline.monitoring.run_folder import default_name  # noqa: PLC0415

    return run(options.folder or Path("runs") / default_name("demo"), options.seed, options.steps)


def show_config(options: argparse.Namespace) -> int:
    verb, *words = options.of or ["grpo"]
    every = [*VERBS, "serve-reward"]
    if verb not in every:
        unknown = unknown_verb(verb, every)
        about = f"; keys about a word: `trueline config grpo {verb}`" * ("did you mean" not in unknown)
        raise ConfigError(unknown + about)
    config: Config = VERBS[verb].kind.parse(VERBS[verb].defaults) if verb in VERBS else ServingConfig()
    wanted = [word.lower() for word in (*words, *options.filter)]
    keys = [key for key in config.leaves() if all(word in f"{key.path} {key.meaning}".lower() for word in wanted)]
    if not keys:
        near = near_keys(type(config), wanted)
        raise ConfigError(f"no key of {verb} has {' and '.join(map(repr, wanted))} in its name or meaning{near}")
    for key in keys:
        sys.stdout.write(f"{key.path} = {key.default}  [{key.kind}]\n    {key.meaning}\n")
    return 0


def near_keys(kind: type[Config], wanted: Words) -> str:
    """Name keys with a word that is almost one of these, or that others call so."""
    parts = {key: re.split(r"[._]", key) for key in keys_of(kind)}
    near = [key for key, names in parts.items() if any(likeness(a, b) >= NEAR for a in wanted for b in names)]
    return f"; near are {', '.join(near[:MOST_KEYS])}" if near else suggestion(kind, "_".join(wanted))


if __name__ == "__main__":
    sys.exit(main())
