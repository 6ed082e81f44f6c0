"""The wheel and the source archive: what is inside, and that an installed wheel works outside the checkout."""

import importlib.util
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email import message_from_string
from pathlib import Path

import pytest

from tests.support.tiny import make_tiny_model
from trueline.demo.material import make_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"trueline-{PROJECT['version']}"
DATA = ("py.typed", "config/foreign_names.yaml", "monitoring/codes.csv", "monitoring/metrics.csv", "report/page.html")
DATA += (
    "report/page.js",
    "report/vendor/uPlot.iife.min.js",
    "report/vendor/uPlot.min.css",
    "report/vendor/uPlot.LICENSE",
)
INFO = {f"{NAME}.dist-info/{file}" for file in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
BESIDE = {".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
Command = Callable[..., str]


def build(source: Path, target: Path, kind: str) -> Path:
    """Build without isolation, so that nothing is downloaded."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (file,) = target.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: `make setup` installs it")
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


def package_files() -> set[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "trueline"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no git checkout: {done.stderr.strip()}")
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    files = package_files()
    assert {f"trueline/{name}" for name in DATA} <= files
    assert set(contents(wheel)) == files | INFO
    assert wheel.name == f"{NAME}-py3-none-any.whl"


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    about = message_from_string(contents(wheel)[f"{NAME}.dist-info/METADATA"].decode())
    assert (about["Version"], about["License-Expression"]) == (PROJECT["version"], PROJECT["license"])
    assert about["Author"] == "Trueline contributors" and about["Summary"] == PROJECT["description"]
    assert set(about.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert about.get_all("Classifier") == PROJECT["classifiers"]


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build(ROOT, tmp_path / "archive", "sdist")) as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    assert names == package_files() | BESIDE
    for name in ("trueline/__pycache__/cli.pyc", "trueline/config/.mypy_cache/3.11", "tests/test_one.py"):
        (tmp_path / NAME / name).parent.mkdir(parents=True)
        (tmp_path / NAME / name).touch()
    assert contents(build(tmp_path / NAME, tmp_path / "again", "wheel")) == contents(wheel)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A venv with the wheel, which sees the libraries of this one; its commands run in a folder of their own."""
    folder, elsewhere = tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "libraries.pth").write_text("".join(f"{path}\n" for path in libraries))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--ignore-installed", wheel], check=True, capture_output=True)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(program: str, *words: str) -> str:
        command = [folder / "bin" / program, *words]
        done = subprocess.run(command, cwd=elsewhere, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert (
        run("python", "-c", "import trueline; print(trueline.__file__)").strip() == f"{packages}/trueline/__init__.py"
    )
    return run


def test_an_installed_wheel_answers_outside_the_checkout(installed: Command) -> None:
    assert installed("trueline", "--version") == f"trueline {PROJECT['version']}\n"
    assert "train with RL:" in installed("trueline", "--help")
    assert "algorithm.group_size = " in installed("trueline", "config", "grpo")
    assert "complete -o default" in installed("trueline", "--print-completion", "bash")
    assert installed("python", "-c", "import trueline; print(trueline.train.__module__)") == "trueline.api\n"


def test_an_installed_wheel_plans_a_run(installed: Command, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", tied=True)
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 64)
    words = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl"), "--reward", "math"]
    said = installed("trueline", "grpo", *words, "--dry-run", "runtime=local")
    assert "algorithm" in said and "placement" in said
