"""Build the documentation as a site: `python -m tests.support.site FOLDER`, or `make site`.

Its pages are those of docs/, what they link to in the repository, and the pages that `reference.py` makes.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SETTINGS = DOCS / "zensical.toml"
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
AS_IT_IS = {".css", ".ipynb", ".json", ".png", ".svg"}
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml"}


def place(file: Path) -> Path:
    """Return where the site has a file of the repository: docs/ is its root, all else is in files/."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS)
    inside = Path("files") / file.relative_to(ROOT)
    return inside if file.suffix in {*AS_IT_IS, ".md"} else inside.with_name(f"{inside.name}.md")


class Source:
    """The folder that the site is built from."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, reference.pages()
        self.waiting = sorted(file for file in DOCS.rglob("*") if file.is_file() and file != SETTINGS)
        self.seen = set(self.waiting)

    def write(self) -> None:
        for name, text in self.made.items():
            self.put(Path(name), text)
        while self.waiting:
            file = self.waiting.pop()
            if file.suffix in AS_IT_IS:
                self.put(place(file), file.read_bytes())
            else:
                self.put(place(file), self.page(file))

    def put(self, name: Path, content: str | bytes) -> None:
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)

    def page(self, file: Path) -> str:
        """Return a file as Markdown, with links that lead to where the site has their targets."""
        if file.suffix == ".md":
            return self.with_links(file, file.read_text())
        if file.is_dir():
            return self.listing(file)
        return f"# {file.relative_to(ROOT)}\n\n{fenced(file)}"

    def listing(self, folder: Path) -> str:
        """Show a folder: its README if it has one, else the content of its files."""
        if (readme := folder / "README.md").exists():
            return self.with_links(readme, readme.read_text(), at=place(folder))
        files = sorted(file for file in folder.iterdir() if file.suffix in LANGUAGES)
        return f"# {folder.relative_to(ROOT)}\n\n" + "\n".join(f"## {file.name}\n\n{fenced(file)}" for file in files)

    def with_links(self, file: Path, text: str, at: Path | None = None) -> str:
        here = (at or place(file)).parent
        pieces = CODE.split(text)  # every second one is code
        pieces[::2] = [self.linked(file, piece, here) for piece in pieces[::2]]
        pieces[1::2] = [one if one.startswith("```") else one.replace("\\|", "|") for one in pieces[1::2]]
        return "".join(pieces)

    def linked(self, file: Path, text: str, here: Path) -> str:
        def moved(found: re.Match[str]) -> str:
            target = (file.parent / found[1]).resolve()
            if place(target).as_posix() in self.made:
                return found[0]
            if target not in self.seen:
                self.seen.add(target)
                self.waiting.append(target)
            return f"]({os.path.relpath(place(target), here)}"

        return LINK.sub(moved, text)


def fenced(file: Path) -> str:
    return f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n````\n"


def build(folder: Path, *, inside: Sequence[str] = ()) -> Path:
    """Build the site anew in a folder, `inside` another program if asked, and return the folder of its pages."""
    for part in ("source", "html"):
        shutil.rmtree(folder / part, ignore_errors=True)
    Source(folder / "source").write()
    shutil.copy(SETTINGS, folder / SETTINGS.name)
    command = [*inside, sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(COLOUR.sub("", done.stdout + done.stderr))
    return folder / "html"


def navigation(tree: object) -> list[str]:
    """Return every page that a navigation names."""
    if isinstance(tree, str):
        return [tree]
    return [name for inner in (tree.values() if isinstance(tree, dict) else tree) for name in navigation(inner)]


if __name__ == "__main__":
    sys.stdout.write(f"{build(Path(sys.argv[1]).resolve()) / 'index.html'}\n")
