"""Writes docs/results.md from the JSON files that the programs of the paper's evidence wrote.

A section for each file that is there: what the program does (the beginning of its docstring), its
tables, its picture, and the command, machine and date of the run. What has not been run is not on
the page.

    python benchmarks/results_page.py
    python benchmarks/results_page.py --results benchmarks/results --page results.md
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report

PROGRAMS = [
    "fig1_orthogonality",
    "fig2_sequential_emulation",
    "fig5_resnet_large_batch",
    "table2_local_steps",
    "fig6_lenet",
    "table3_bert",
    "local_steps_study",
    "wire_accuracy",
    "appendix_convergence",
]
"""In the order of the page. Each has `section`, which makes Markdown of its figures."""

_HEAD = """\
# The paper's evidence, reproduced

Made by `python benchmarks/results_page.py` from the JSON files in `results`, which the
programs below wrote. `make reproduce` runs them all.
"""


def page(results: Path, beside: Path) -> str:
    """The page's text.

    Args:
        results: the folder of the JSON files and pictures.
        beside: the folder that the page is to be in, for links.
    """
    sections = [_HEAD]
    for name in PROGRAMS:
        path = results / f"{name}.json"
        if not path.exists():
            continue
        figures = json.loads(path.read_text())
        program = importlib.import_module(name)
        # A file of runs that have not all come to their end has no figures yet.
        if (text := program.section(figures)) is not None:
            sections.append(_section(program.__doc__, text, figures, path, beside))
    return "\n".join(sections)


def _section(doc: str, text: str, figures: dict[str, Any], path: Path, beside: Path) -> str:
    first, *paragraphs = doc.strip().split("\n\n")
    title = " ".join(first.split()).rstrip(".")
    told = []
    for paragraph in paragraphs:
        # From here on it is about running it.
        if paragraph.startswith("Takes "):
            break
        told.append(paragraph)
    picture = path.with_suffix(".png")
    shown = f"\n![{title}]({os.path.relpath(picture, beside)})\n" if picture.exists() else ""
    here, software = figures["machine"], figures["software"]
    return (
        f"## {title}\n\n"
        + "\n\n".join(_markdown(paragraph) for paragraph in told)
        + f"\n\n{text}\n{shown}\n"
        + f"`{figures['command']}`, {figures['date']}, {here['processor']}, {here['cores']} cores, "
        f"TensorFlow {software.get('tensorflow') or software.get('tensorflow-cpu')}, "
        f"commit {software.get('commit', 'unknown')}.\n"
    )


def _markdown(paragraph: str) -> str:
    """An indented paragraph, such as a formula, becomes a block of its own."""
    lines = paragraph.split("\n")
    if all(line.startswith("    ") for line in lines):
        return "```\n" + "\n".join(line[4:] for line in lines) + "\n```"
    return paragraph


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    docs = report.ROOT / "docs"
    parser.add_argument("--results", type=Path, default=docs / "results", metavar="FOLDER")
    parser.add_argument("--page", type=Path, default=docs / "results.md", metavar="FILE")
    options = parser.parse_args(argv)
    options.page.write_text(page(options.results, options.page.parent))
    print(options.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
