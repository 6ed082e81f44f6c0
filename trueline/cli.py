"""The command line: one verb per algorithm and task. Heavy libraries are imported only once a run starts."""

import argparse
import difflib
import errno
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from trueline.api import examine, load, quiet_libraries, say, start, trains, unknown_verb
from trueline.config.base import Config, ConfigError, suggestion
from trueline.config.run import RunConfig
from trueline.config.sampling import GenerateConfig, ServingConfig
from trueline.config.supervised import SupervisedConfig
from trueline.verbs import DATA, REWARD, TASK_VERBS, VERBS, Verb

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
SERVE_FLAGS = {"--model": "model.path", "--host": "host", "--port": "port"}
TRIAL_FLAGS = REWARD | DATA
PLAN_FLAGS = {"--model": "model.path"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbs = parser.get_default("verbs")
    if words and not words[0].startswith("-") and words[0] not in verbs:
        parser.error(unknown_verb(words[0], verbs))
    if words[:1] == ["doctor"] and words[1:] and not words[1].startswith("-") and words[1] not in VERBS:
        makes_none = (
            f"doctor looks at a run before it starts, and {words[1]!r} makes none; `trueline doctor -h` lists who does"
        )
        parser.error(makes_none if words[1] in verbs else unknown_verb(words[1], VERBS))
    options, overrides = parser.parse_known_args(words)
    flags = [word for word in overrides if word.startswith("-")]
    if flags or (overrides and not options.takes_overrides):
        parser.error(unknown_option((flags or overrides)[0], options))
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


def unknown_option(word: str, options: argparse.Namespace) -> str:
    said = f"unknown option {word}; keys are written as key=value"
    if not options.takes_overrides or "verb" not in options:
        return said
    command = VERBS[options.verb]
    if near := difflib.get_close_matches(word, command.flags, n=1, cutoff=0.8):
        return f"{said}; did you mean {near[0]!r}?"
    return said + suggestion(command.kind, word.lstrip("-").partition("=")[0].replace("-", "_"))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def one_of(verbs: Collection[str]) -> Callable[[str], str]:
    """Make a type for argparse, whose own error for `choices` would list all of them."""

    def check(word: str) -> str:
        if word not in verbs:
            raise argparse.ArgumentTypeError(unknown_verb(word, verbs))
        return word

    return check


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trueline", description="Train language models from feedback.")
    parser.set_defaults(takes_overrides=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, command in VERBS.items():
        verb = verbs.add_parser(name, help=command.meaning)
        add_run_options(verb, command)
        verb.set_defaults(run=run_command, verb=name)
    serve = verbs.add_parser("serve-reward", help="serve a reward model over HTTP, with a token")
    add_config_options(serve, SERVE_FLAGS)
    serve.set_defaults(run=serve_reward)
    config = verbs.add_parser("config", help="list every key with its default and meaning")
    every = [*VERBS, "serve-reward"]
    config.add_argument("of", nargs="?", default="grpo", type=one_of(every), metavar="VERB", help="verb of the keys")
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
    return parser


def add_data_verbs(verbs: Any) -> None:
    data = verbs.add_parser("data", help="look at what will be trained on")
    kinds = data.add_subparsers(required=True, metavar="WHAT")
    preview = kinds.add_parser("preview", help="show three rows as they will be trained on, learnt tokens marked")
    about = f"verb that will train: {', '.join(TASK_VERBS)}"
    preview.add_argument("--task", dest="verb", default="sft", type=one_of(TASK_VERBS), metavar="VERB", help=about)
    preview.add_argument("--rows", type=int, default=3)
    add_config_options(preview, VERBS["sft"].flags)
    preview.set_defaults(run=preview_data, resume=False, restart=False)


def add_reward_verbs(verbs: Any) -> None:
    reward = verbs.add_parser("reward", help="look at what a reward says")
    kinds = reward.add_subparsers(required=True, metavar="WHAT")
    trial = kinds.add_parser("try", help="ask a reward about rows of the data: what it is given and what it says")
    trial.add_argument("--reply", help="reply to ask about; default: each row's label or completion")
    trial.add_argument("--rows", type=positive, default=3, help="how many, from the first on (default 3)")
    add_config_options(trial, TRIAL_FLAGS)
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
    explain.add_argument("of", metavar="RUN", help="folder of the run, or its name below runs/")
    explain.set_defaults(run=run_explain)


def add_plan(verbs: Any) -> None:
    about = "plan a run on devices that are not here: who goes where, memory and seconds of each phase"
    plan = verbs.add_parser("plan", help=about)
    planned = [name for name, command in VERBS.items() if trains(command)]
    plan.add_argument("of", type=one_of(planned), metavar="VERB", help="verb of the run")
    plan.add_argument("--devices", required=True, help="NODESxGPUSxNAME, e.g. 8x8xH100, or GPUSxNAME for one node")
    plan.add_argument("--model-shape", metavar="NAME", help="published shape in place of --model, e.g. llama-70b")
    add_config_options(plan, PLAN_FLAGS)
    plan.set_defaults(run=plan_run)


def add_report_verbs(verbs: Any) -> None:
    runs = "folder of a run, or its name below runs/; several are compared"
    report = verbs.add_parser(
        "report", help="write one HTML file: curves, times, configuration and transcripts of runs"
    )
    report.add_argument("of", nargs="+", metavar="RUN", help=runs)
    report.add_argument("--out", type=Path, metavar="FILE", help="default: report-RUN.html here")
    report.add_argument("--svg", metavar="METRIC,...", help="draw only these curves, as an SVG file")
    report.add_argument(
        "--mean", type=positive, metavar="STEPS", help="with --svg: means of so many; default as on the page"
    )
    report.set_defaults(run=run_report)
    watch = verbs.add_parser("watch", help="serve that page to this machine, and keep it up to date")
    watch.add_argument("of", nargs="+", metavar="RUN", help=runs)
    watch.add_argument("--port", type=int, default=0, help="default: any free one")
    watch.set_defaults(run=run_watch)


def add_doctor(verbs: Any) -> None:
    """Add a verb that takes, behind its name, exactly what a run takes."""
    about = "look at a run before it starts: what would be refused, and what would go wrong"
    doctor = verbs.add_parser("doctor", help=about, description=f"{about}. Without --deep no weights are loaded.")
    deep = "start its processes, sample 16 prompts and train one step, in a folder that is removed again"
    kinds = doctor.add_subparsers(required=True, metavar="VERB")
    for name, command in VERBS.items():
        kinds.add_parser(name, help=command.meaning, parents=[verbs.choices[name]], add_help=False)
        kinds.choices[name].set_defaults(run=run_doctor)
        kinds.choices[name].add_argument("--deep", action="store_true", help=deep)


def add_run_options(verb: argparse.ArgumentParser, command: Verb) -> None:
    add_config_options(verb, command.flags)
    verb.add_argument("--dry-run", action="store_true", help="print the resolved keys and the placement, then stop")
    verb.add_argument("--resume", action="store_true", help="go on with the run --name, or that touched last")
    if trains(command):
        about = "with --resume: start a run over that has no checkpoint yet"
        verb.add_argument("--restart", action="store_true", help=about)
    else:
        verb.set_defaults(restart=False)


def add_config_options(verb: argparse.ArgumentParser, flags: dict[str, str]) -> None:
    for flag, key in flags.items():
        verb.add_argument(flag, dest=key, metavar=key.rpartition(".")[2].upper(), help=f"same as {key}=...")
    verb.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help="YAML; later files win")
    verb.epilog = "Any key of `trueline config` can be set as key=value, e.g. training.learning_rate=1e-5"
    verb.set_defaults(takes_overrides=True)


def given_flags(options: argparse.Namespace, flags: dict[str, str]) -> list[str]:
    values = vars(options)
    return [f"{key}={values[key]}" for key in flags.values() if values[key] is not None]


def load_options(options: argparse.Namespace) -> RunConfig:
    command = VERBS[options.verb]
    asked = command.kind.asked(options.config, [*given_flags(options, command.flags), *options.overrides])
    return load(options.verb, asked, resume=options.resume, restart=options.restart)


def run_command(options: argparse.Namespace) -> int:
    return start(options.verb, load_options(options), resume=options.resume, dry_run=options.dry_run)


def run_doctor(options: argparse.Namespace) -> int:
    from trueline.doctor.findings import refusal, show  # noqa: PLC0415

    try:
        config = load_options(options)
    except ConfigError as error:
        return show({"plan": [refusal(error, VERBS[options.verb].kind)]})
    return show(examine(options.verb, config, resume=options.resume, deep=options.deep))


def serve_reward(options: argparse.Namespace) -> int:
    config = ServingConfig.load(options.config, [*given_flags(options, SERVE_FLAGS), *options.overrides])
    quiet_libraries()
    from trueline.jobs.serve_reward import serve  # noqa: PLC0415

    return serve(config)


def preview_data(options: argparse.Namespace) -> int:
    config = load_options(options)
    quiet_libraries()
    from trueline.offline.launch import show_preview  # noqa: PLC0415

    assert isinstance(config, SupervisedConfig)
    return show_preview(config, options.rows)


def try_reward(options: argparse.Namespace) -> int:
    if stray := [word for word in options.overrides if "=" not in word]:
        raise ConfigError(f"{stray[0]!r} is neither an option nor key=value: give a reply as --reply {stray[0]!r}")
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

    sys.stdout.write(explain(find_run(options.of).path) + "\n")
    return 0


def plan_run(options: argparse.Namespace) -> int:
    asked = [*given_flags(options, PLAN_FLAGS), *options.overrides]
    asked += [f"model.path={options.model_shape}"] * (options.model_shape is not None)
    config = load(options.of, VERBS[options.of].kind.asked(options.config, asked))
    quiet_libraries()
    from trueline.planning.hardware import read_devices  # noqa: PLC0415
    from trueline.planning.paper import plan_on_paper  # noqa: PLC0415

    sys.stdout.write(plan_on_paper(config, read_devices(options.devices)) + "\n")
    return 0


def run_report(options: argparse.Namespace) -> int:
    from trueline.report.page import write_report  # noqa: PLC0415
    from trueline.report.picture import write_picture  # noqa: PLC0415

    if options.svg is None and options.mean is not None:
        raise ConfigError(f"--mean {options.mean} is for --svg: on the page, means are chosen there; leave --mean out")
    if options.svg is None:
        written = write_report(options.of, options.out, say)
    else:
        written = write_picture(options.of, options.svg.split(","), options.out, options.mean)
    say(f"written: {written}")
    return 0


def run_watch(options: argparse.Namespace) -> int:
    quiet_libraries()
    from trueline.report.live import watch  # noqa: PLC0415

    return watch(options.of, options.port)


def run_demo(options: argparse.Namespace) -> int:
    quiet_libraries()
    from trueline.demo.run import run  # noqa: PLC0415
    from trueline.monitoring.run_folder import default_name  # noqa: PLC0415

    return run(options.folder or Path("runs") / default_name("demo"), options.seed, options.steps)


def show_config(options: argparse.Namespace) -> int:
    config: Config = ServingConfig()
    if options.of in VERBS:
        config = VERBS[options.of].kind.parse(VERBS[options.of].defaults)
    for key in config.leaves():
        sys.stdout.write(f"{key.path} = {key.default}  [{key.kind}]\n    {key.meaning}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
