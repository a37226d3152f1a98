"""Rules that hold for the files of the repository itself."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

import lora_jax
from lora_jax.bench.cli import add_subcommands
from lora_jax.cli_args import OptionParser, _flags
from lora_jax.config import EngineArgs
from lora_jax.server.options import ServerArgs

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Folders at the top level: what starts with one of these in a document is a path of ours.
TOP = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")} | {".ci"}


@cache
def tracked() -> tuple[Path, ...]:
    """Files under version control, and new ones that are not ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return tuple(p for name in listing.split("\0") if name and (p := ROOT / name).is_file() and not p.is_symlink())


@cache
def text_files() -> tuple[tuple[str, str], ...]:
    out = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" not in data[:8192]:
            out.append((str(path.relative_to(ROOT)), data.decode("utf-8")))
    return tuple(out)


def named_paths(markdown: str) -> set[str]:
    """Paths of this repository that a document names, in links, inline code and code blocks."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", markdown)
    found = {link for link in links if "://" not in link and not link.startswith("mailto:")}
    for code in re.findall(r"```.*?```|`[^`\n]+`", markdown, flags=re.DOTALL):
        for word in re.findall(r"[\w./-]+", code):
            word = word.removeprefix("./").rstrip(".")
            first, _, rest = word.partition("/")
            if first in TOP and rest:
                found.add(word)
    return found


def test_named_paths_sees_what_it_should():
    text = "See [a](docs/a.md#x), [web](https://x.y/docs/z.md), `lora_jax/b.py`, `model/dir` and\n"
    text += "```\npython scripts/c.py --x\n```"
    assert named_paths(text) == {"docs/a.md", "lora_jax/b.py", "scripts/c.py"}


@pytest.mark.parametrize("document", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_path_in_the_documents_exists(document: Path):
    missing = [
        name
        for name in named_paths(document.read_text())
        if not (ROOT / name).exists() and not (document.parent / name).exists()
    ]
    assert not missing, f"{document.name} names {missing}"


def test_files_are_short():
    long = {name: text.count("\n") for name, text in text_files() if name.endswith(".py")}
    assert long, "no Python files found"
    assert not {n: k for n, k in long.items() if k > MAX_LINES}, f"split these: at most {MAX_LINES} lines each"


def test_no_path_or_host_of_one_machine():
    """Such a line works nowhere else. The words are put together here, so that this file does not hold them."""
    words = [
        "/" + "work/",
        "/" + "root/",
        "/" + "home/",
        "/" + "Users/",
        "C:" + "\\",
        "pypi" + ".org",
        "python" + "hosted.org",
    ]
    bad = [(name, word) for name, text in text_files() if name != "LICENSE" for word in words if word in text]
    assert not bad


def test_license_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_changelog_has_this_version():
    assert re.search(rf"^## {re.escape(lora_jax.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_every_bound_on_a_dependency_has_its_reason():
    """A pin or an upper bound nobody can explain is never lifted: the line before, or the line itself, says why."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    project = tomllib.loads("\n".join(lines))["project"]
    bounded = [r for r in project["dependencies"] + project["optional-dependencies"]["dev"] if "<" in r or "==" in r]
    assert bounded
    for requirement in bounded:
        (at,) = [i for i, line in enumerate(lines) if line.strip().startswith(f'"{requirement}"')]
        assert "#" in lines[at] or lines[at - 1].lstrip().startswith("#"), f"{requirement} has no reason beside it"


def test_options_that_the_readme_names_exist():
    readme = (ROOT / "README.md").read_text()
    options = {f.name for cls in (EngineArgs, ServerArgs) for f in dataclasses.fields(cls)}
    parser = OptionParser()
    add_subcommands(parser)
    flags = set(_flags(parser)) | {f"--{name.replace('_', '-')}" for name in options}
    named = set(re.findall(r"(?<![\w=-])--[a-z][a-z-]+", readme)) - {"--help"}
    table = readme.partition("## Options")[2].partition("\n## ")[0]
    fields = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named and fields
    assert not named - flags and not fields - options
