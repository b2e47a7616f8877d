"""What is in an sdist, and that versions agree. `make release-check` builds from one, and tries."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import tf_adasum

ROOT = Path(__file__).resolve().parents[2]

# What a user who builds, tests or reads does not need.
LEFT_OUT = {".ci/packages", ".ci/run", ".gitignore"}


def files_of_the_project() -> set[str]:
    """Those in git, and those that a commit of everything would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("no git checkout: there is nothing to compare with")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def test_the_sdist_has_the_files_of_the_project(tmp_path):
    files = files_of_the_project()
    # In a copy: setuptools would take what its notes in the checkout say of earlier builds.
    checkout = tmp_path / "checkout"
    for name in files:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    wanted = files - LEFT_OUT
    backend = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", backend, str(tmp_path)]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True, timeout=120)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
        setup_cfg = archive.extractfile(f"{sdist.name[: -len('.tar.gz')]}/setup.cfg").read()
    made = {name for name in files if name == "PKG-INFO" or ".egg-info/" in name}
    assert files - made == wanted
    assert b"name = tf-adasum" in setup_cfg
    # The core, the ops and what sets both up, whatever this checkout says.
    assert {"setup.py", "pyproject.toml", "ops/CMakeLists.txt", "ops/tf/ops.cc"} <= files
    assert {
        "ops/core/adasum.h",
        "ops/core/kernels_cpu.inc",
        "ops/core/accelerator_cuda.cu",
    } <= files


def test_versions_agree():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    version = settings["metadata"]["version"]
    assert tf_adasum.__version__ == version
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == version
    assert version in (ROOT / "CHANGELOG.md").read_text()
