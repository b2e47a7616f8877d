"""What the programs of this folder have in common: options, a progress bar, tables, JSON files."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tf_adasum import native
from tf_adasum.tables import format_table, geometric_mean, number, size_name

__all__ = [
    "RESULTS",
    "ROOT",
    "Progress",
    "command",
    "describe",
    "format_table",
    "geometric_mean",
    "integers",
    "machine",
    "number",
    "parser",
    "size_name",
    "software",
    "write",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("numpy", "tensorflow", "tensorflow-cpu", "keras", "mpi4py", "horovod")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all programs have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="a short run, with rough figures")
    made.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="where the JSON file and the plot go (benchmarks/results)",
    )
    return made


def integers(text: str) -> list[int]:
    """An option's value such as `2,4,8`."""
    return [int(part) for part in text.split(",")]


class Progress:
    """A bar on standard error; where that is no terminal, a line now and then."""

    _WIDTH = 24
    _SECONDS_BETWEEN_LINES = 20

    def __init__(self, total: int):
        self._total = total
        self._done = 0
        self._started = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def advance(self, label: str, steps: int = 1) -> None:
        """Says that `steps` of the total are done, and what the last of them was."""
        self._done += steps
        now = time.monotonic()
        last = self._done >= self._total
        if not (self._terminal or last or now - self._shown > self._SECONDS_BETWEEN_LINES):
            return
        self._shown = now
        filled = self._WIDTH * min(self._done, self._total) // max(self._total, 1)
        elapsed = now - self._started
        left = elapsed / self._done * max(self._total - self._done, 0)
        line = (
            f"[{'#' * filled}{'-' * (self._WIDTH - filled)}] {self._done}/{self._total}  "
            f"{_clock(elapsed)}, {_clock(left)} left  {label}"
        )
        if self._terminal:
            columns = shutil.get_terminal_size().columns - 1
            print(f"\r{line:{columns}.{columns}}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves the bar's line."""
        if self._terminal:
            print(file=sys.stderr)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def machine() -> dict[str, Any]:
    """What this was measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def software() -> dict[str, str]:
    """Versions of what took part, and this checkout's commit."""
    core = native.core_library()
    versions = {
        "python": platform.python_version(),
        "mpi": core.adasum_mpi_running().decode().split(",")[0],
        "instruction set": core.adasum_simd().decode(),
        "compiler": native.build_info()["compiler"],
    }
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    if described.returncode == 0:
        versions["commit"] = described.stdout.strip()
    return versions


def command() -> str:
    """How this program was called, without the folders of this machine."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def write(name: str, folder: Path, figures: dict[str, Any]) -> Path:
    """Writes `<name>.json` into the folder: the figures, and where they come from."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "software": software(),
        **figures,
    }
    # By rename: a program that is killed leaves the old file or the new one.
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(path)
    return path


def describe() -> str:
    """The machine and the software in two lines, to be printed above figures."""
    here, versions = machine(), software()
    return (
        f"{here['processor']}, {here['cores']} cores, {here['memory_bytes'] / 2**30:.0f} GiB, "
        f"{here['system']}\n{', '.join(f'{name} {version}' for name, version in versions.items())}"
    )
