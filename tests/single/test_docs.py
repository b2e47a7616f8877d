"""What the pages say: their Python runs, and what they name is there.

The ```python blocks of a page run one after the other in one namespace. An HTML comment, which a
reader does not see, may stand before a block:

    <!-- run before:
    code that makes what the block takes for granted
    -->

    <!-- not run: the reason -->
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tf_adasum

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>run before:|not run:)(?P<said>.*?)-->\n+)?"
    r"^(?P<indent> *)```(?P<language>\S*)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    """What stands between two fences, and in a comment before them."""

    language: str
    line: int
    code: str
    before: str
    not_run: str


def blocks(text: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(text):
        said = found["said"] or ""
        indent = len(found["indent"])
        yield Block(
            language=found["language"],
            line=text.count("\n", 0, found.start("code")) + 1,
            code="".join(line[indent:] for line in found["code"].splitlines(keepends=True)),
            before=said if found["mark"] == "run before:" else "",
            not_run=said.strip() if found["mark"] == "not run:" else "",
        )


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text()) if block.language in ("python", "py")]


def run(page: Path) -> None:
    """Errors are of the page's lines."""
    namespace = {"__name__": page.stem}
    for block in python_blocks(page):
        if block.not_run:
            continue
        exec(compile(block.before, f"{page} (before line {block.line})", "exec"), namespace)
        exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=lambda page: page.name)
def test_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)
    skipped = [f"line {b.line}: {b.not_run}" for b in python_blocks(page) if b.not_run]
    if skipped:
        print(f"{page.name}, not run: {'; '.join(skipped)}")


def test_blocks_are_found_with_what_stands_before_them():
    text = "a\n```python\nx = 1\n```\n<!-- run before:\ny = 2\n-->\n```python\nx += y\n```\n"
    text += "- in a list\n\n  ```python\n  z = x\n  ```\n"
    text += "<!-- not run: it\nhangs -->\n```python\n!\n```\n"
    first, second, third, fourth = blocks(text)
    assert (first.line, first.code, first.before) == (3, "x = 1\n", "")
    assert (second.code, second.before) == ("x += y\n", "\ny = 2\n")
    assert third.code == "z = x\n"
    assert (fourth.not_run, fourth.before) == ("it\nhangs", "")


def test_a_page_whose_python_fails_fails_at_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\na = 1\nb = a.missing\n```\n")
    with pytest.raises(AttributeError) as error:
        run(page)
    assert error.traceback[-1].lineno + 1 == 5


def code_of(text: str) -> list[str]:
    """Shell commands and what stands in backticks, comments left out, lines with \\ joined."""
    shell = [b.code for b in blocks(text) if b.language in ("", "sh", "bash", "shell", "console")]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S))
    lines = "\n".join([*shell, *inline]).replace("\\\n", " ").splitlines()
    return [re.sub(r"(^|\s)#.*", "", line) for line in lines]


def made_targets(lines: list[str]) -> set[str]:
    call = r"(?:^|&& )(?:\w+=\S+ )*make\b([^;&|]*)"
    words = [word for line in lines for found in re.findall(call, line) for word in found.split()]
    return {word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)}


def started_programs(lines: list[str]) -> Iterator[tuple[str, set[str]]]:
    """Programs of this project that lines start, and their options."""
    program = r"python[\d.]* (-m tf_adasum \w+|(?:benchmarks|tests|examples)/\S+\.py)([^;&|]*)"
    for line in lines:
        for found in re.finditer(program, line):
            path = re.sub(r"^-m tf_adasum (\w+)$", r"tf_adasum/\1.py", found[1])
            yield path, set(re.findall(r"(?:^|\s)(--[\w-]+)", found[2]))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_exist(page):
    lines = code_of(page.read_text())
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert made_targets(lines) <= targets
    common = (ROOT / "benchmarks" / "report.py").read_text()
    for path, options in started_programs(lines):
        assert (ROOT / path).is_file(), path
        source = (ROOT / path).read_text() + (common if path.startswith("benchmarks/") else "")
        known = set(re.findall(r"\"(--[\w-]+)\"", source)) | {"--help"}
        assert options <= known, path


def test_commands_are_found():
    text = "```\nmake demo X=1 test  # or so\n```\n\n"
    text += "```\nmpirun -np 2 python -m tf_adasum bench \\\n  --json x && ls --all\n```\n"
    text += "`PYTHON=p make lint`, `make` it, `python benchmarks/a.py --quick`"
    lines = code_of(text)
    assert made_targets(lines) == {"demo", "test", "lint"}
    assert list(started_programs(lines)) == [
        ("tf_adasum/bench.py", {"--json"}),
        ("benchmarks/a.py", {"--quick"}),
    ]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_that_are_named_exist(page):
    text = page.read_text()
    folders = "tf_adasum|ops|tests|benchmarks|bazel|docs|examples"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]+\w)`?", text))
    missing = {name for name in named if not (ROOT / name).exists()}
    links = re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", text)
    missing |= {link for link in links if not (page.parent / link).exists()}
    assert not missing - {"benchmarks/results"}, page


def documented() -> list[str]:
    return re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", documented())
def test_what_the_api_page_shows_is_there_with_a_docstring(name):
    module, _, attribute = name.rpartition(".")
    if module == "tf_adasum.legacy.callbacks":
        pytest.importorskip("tf_keras")
    assert inspect.getdoc(getattr(importlib.import_module(module), attribute))


def test_every_public_name_is_on_the_api_page():
    shown = {id(_found(name)) for name in documented() if "legacy.callbacks" not in name}
    values = [getattr(tf_adasum, name) for name in dir(tf_adasum)]
    for name, value in zip(dir(tf_adasum), values, strict=True):
        if inspect.isroutine(value) or inspect.isclass(value):
            assert id(value) in shown, name
    for module in (tf_adasum.callbacks, tf_adasum.reference):
        for name, value in vars(module).items():
            public = inspect.isroutine(value) or inspect.isclass(value)
            if public and not name.startswith("_") and value.__module__.startswith("tf_adasum."):
                assert id(value) in shown, name


def _found(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
