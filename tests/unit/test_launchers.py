"""Launchers of clusters, checked as far as possible without one."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_house import parsed
from trueline.cli import load_options

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "launch"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
LAUNCHERS = sorted(path for path in FOLDER.iterdir() if path.suffix in (".sh", ".yaml"))
SECRET = re.compile(r"(?i)(hf_[a-z]{10}|AUTH_TOKEN=|password|api_key)")


def commands(file: Path) -> list[str]:
    """Each command of a script on one line; of a RayJob, its entrypoint."""
    if file.suffix == ".yaml":
        return [yaml.safe_load(file.read_text())["spec"]["entrypoint"]]
    lines = file.read_text().replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if not line.lstrip().startswith("#")]


def starting(file: Path, words: str) -> list[list[str]]:
    """The words of every command that begins with these, after whatever hands it on."""
    found = [line[line.index(words) :] for line in commands(file) if re.search(rf"(^|\s){words}\s", line)]
    return [shlex.split(line.removesuffix("&"), comments=True) for line in found]


def test_there_is_a_launcher_for_each_way() -> None:
    assert {file.name for file in LAUNCHERS} == {"two_machines.sh", "ray_job.sh", "slurm.sh", "kuberay.yaml"}


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_a_script_is_valid_bash(file: Path) -> None:
    done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "set -euo pipefail" in file.read_text() and file.stat().st_mode & 0o100


@pytest.mark.parametrize(
    "file",
    sorted([*FOLDER.parent.glob("*/*.sh"), *(FOLDER.parents[1] / "scripts").iterdir()]),
    ids=lambda file: f"{file.parent.name}-{file.stem}",
)
def test_a_script_pleases_shellcheck(file: Path) -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", LAUNCHERS, ids=lambda file: file.name)
def test_the_run_of_a_launcher_has_known_keys_a_token_and_no_secret(file: Path) -> None:
    found = starting(file, "trueline")
    assert len(found) == 1
    options, options.overrides = parsed(found[0][1:])
    config: Any = load_options(options)
    assert config.folder == "/shared/runs" and config.name and config.model.path == "/shared/model"
    text = file.read_text()
    assert "RAY_AUTH_MODE=token" in text or "mode: token" in text
    for number, line in enumerate(text.splitlines(), 1):
        assert not SECRET.search(line), f"{file.name}:{number}"


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_ray_knows_the_options(file: Path) -> None:
    from ray.dashboard.modules.job.cli import submit
    from ray.scripts.scripts import start

    for words, command in (("ray start", start), ("ray job submit", submit)):
        for found in starting(file, words):
            own = found[: found.index("--")] if "--" in found else found
            given = {word.partition("=")[0] for word in own if word.startswith("--")}
            known = {option for parameter in command.params for option in parameter.opts}
            assert given and given <= known, given - known


def test_the_ray_job_has_the_fields_of_one_and_the_locked_ray() -> None:
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob") and job["metadata"]["name"]
    spec = job["spec"]
    assert set(spec) == {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
    cluster = spec["rayClusterSpec"]
    locked = re.search(r"^ray(?:\[\w+\])?==([\d.]+)", (FOLDER.parents[1] / "requirements/cpu.txt").read_text(), re.M)
    assert locked and cluster["rayVersion"] == locked[1]
    assert set(cluster) == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"] and workers["groupName"]
    for group in (cluster["headGroupSpec"], workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {"name", "image", "resources", "volumeMounts"} <= set(container)
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
