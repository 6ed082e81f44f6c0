"""The documentation as a site: it builds without a network, and is whole; its reference has what the code has."""

import json
import re
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import trueline
from tests.support import reference, site
from tests.test_house import ROOT
from trueline.cli import main
from trueline.monitoring.findings import CODES
from trueline.verbs import TOOLS, VERBS

CUT_OFF = ["unshare", "--net", "--map-root-user"]  # starts a program without a network
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
OUTSIDE = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it that links can lead to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.places = file, set[str]()
        self.links, self.loaded = list[str](), list[str]()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    can_cut = not subprocess.run([*CUT_OFF, "true"], capture_output=True).returncode
    return site.build(tmp_path_factory.mktemp("site"), inside=CUT_OFF if can_cut else ())


@pytest.fixture(scope="module")
def pages(html: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in html.rglob("*.html") if file.name != "404.html"}


def test_every_link_leads_to_a_page_and_a_place_in_it(pages: dict[Path, Page]) -> None:
    assert len(pages) > 40
    broken, followed = [], 0
    for file, page in pages.items():
        for link in page.links:
            if re.match(r"\w+:", link):
                continue
            name, _, place = link.partition("#")
            target = (file.parent / name).resolve() if name else file
            known = pages[target].places if target in pages else set()
            followed += 1
            if not target.is_file() or (place and place not in known):
                broken.append(f"{file.name}: {link}")
    assert followed > 1000
    assert not broken, broken


def test_tables_are_tables(pages: dict[Path, Page]) -> None:
    """What a host of repositories shows as one must be one here, with the bars that its code has."""
    texts = {file.name: file.read_text() for file in pages}
    assert not [name for name, text in texts.items() if re.search(r"^(<p>)?\| ?(---|`|\w)", text, re.MULTILINE)]
    assert not [name for name, text in texts.items() if re.search(r"<code>[^<\n]*\\\|", text)]


def test_pages_load_nothing_from_elsewhere(html: Path, pages: dict[Path, Page]) -> None:
    loaded = {f"{file.name}: {name}" for file, page in pages.items() for name in page.loaded}
    assert len(loaded) > 100
    assert not [name for name in loaded if re.search(r": (\w+:)?//", name) and ": data:" not in name]
    sheets = list(html.rglob("*.css"))
    assert (html / "site.css").read_bytes() == (site.DOCS / "site.css").read_bytes()
    assert sheets and not [sheet.name for sheet in sheets if OUTSIDE.search(sheet.read_text())]
    assert not OUTSIDE.search((html / "index.html").read_text())


def test_pages_have_search_and_both_palettes(html: Path, pages: dict[Path, Page]) -> None:
    front = (html / "index.html").read_text()
    assert {"default", "slate"} <= set(re.findall(r'data-md-color-scheme="(\w+)"', front))
    assert 'data-md-component="search"' in front
    found = {entry["location"].partition("#")[0] for entry in json.loads((html / "search.json").read_text())["items"]}
    assert found >= {file.relative_to(html).as_posix() for file in pages if "files" not in file.parts}


def test_every_page_is_in_the_navigation() -> None:
    named = site.navigation(tomllib.loads(site.SETTINGS.read_text())["project"]["nav"])
    ours = {file.relative_to(site.DOCS).as_posix() for file in site.DOCS.rglob("*.md")} | set(reference.pages())
    paths = {name.partition("#")[0] for name in named}
    assert not ours - paths, f"add these to nav in docs/zensical.toml: {sorted(ours - paths)}"
    assert {name for name in paths - ours if not name.startswith("files/")} == set()


@pytest.mark.parametrize("broken", ["[page](nowhere.md)", "[place](../agents.md#nowhere)"])
def test_a_broken_link_stops_the_build(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference.pages()
    monkeypatch.setattr(reference, "pages", lambda: {**whole, "reference/broken.md": f"# Broken\n\n{broken}\n"})
    with pytest.raises(SystemExit, match="does not exist"):
        site.build(tmp_path)


# The reference


@pytest.mark.parametrize("verb", [*VERBS, "serve-reward", "verify"])
def test_the_keys_are_those_that_the_command_line_lists(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = [reference.keys_page(*row) for row in reference.KEYS.values() if verb in row[1]]
    rows = {}
    for row in text.splitlines():
        meaning, _, about = row.partition("<br>")
        if row.startswith("| `") and (" Only `" not in meaning or f"`{verb}`" in meaning):
            rows[row.split("`")[1]] = about
    assert main(["config", verb]) == 0
    said = capsys.readouterr().out
    listed = re.findall(r"^(\S+) = (.*?)  \[([^\n]*)\]$", said, flags=re.DOTALL | re.MULTILINE)
    assert len(listed) > 10
    for key, default, kind in listed:
        about = rows.pop(key)
        others = re.findall(r"(`[^`]*`|empty) \(([^)]*)\)", about)
        own = [value for value, verbs in others if f"`{verb}`" in verbs]
        usual = re.search(r"default (`[^`]*`|empty)", about)
        assert about.startswith(f"`{kind}`, ") and usual
        assert (own or [usual[1]]) == [
            f"`{json.dumps(default) if chr(10) in default else default}`" if default else "empty"
        ]
    assert not rows


def test_the_first_default_is_that_of_most_verbs() -> None:
    text = reference.described("int", "How many.", {"a": "1", "b": "2", "c": "2"}, ("a", "b", "c", "d"))
    assert text == "How many. Only `a`, `b`, `c`.<br>`int`, default `2`; `1` (`a`)"


def test_the_verbs_are_those_of_the_command_line() -> None:
    text = reference.verbs_page()
    headings = set(re.findall(r"^### trueline (\S+)$", text, flags=re.MULTILINE))
    assert headings == {*VERBS, *TOOLS}
    assert "### trueline data preview\n" in text and "usage: trueline serve-reward" in text


def test_the_page_of_python_has_every_public_name() -> None:
    text = reference.python_page()
    assert re.findall(r"^## trueline\.(\w+)$", text, flags=re.MULTILINE) == trueline.__all__
    assert "    dry_run: bool = False,\n" in text and "| `transcripts` |" in text and "| `plot(*names: str)" in text


def test_the_page_of_findings_has_every_code() -> None:
    assert re.findall(r"^\| `(\S+)` \|", reference.findings_page(), flags=re.MULTILINE) == list(CODES)


# Claims


def test_what_is_said_to_be_proven_names_tests() -> None:
    named = NAMED_TEST.findall((ROOT / "docs" / "proofs.md").read_text())
    assert len(named) > 20
    missing = [
        f"{file}::{name}" for file, name in named if not re.search(rf"^def {name}\(", source(file), re.MULTILINE)
    ]
    assert not [one for one in missing if not one.endswith("::")], missing
    rows = [row for row in (ROOT / "docs" / "proofs.md").read_text().splitlines() if row.startswith("| ")]
    assert not [row for row in rows if not row.startswith("| claim") and not NAMED_TEST.search(row)]


def source(file: str) -> str:
    return (ROOT / file).read_text()
