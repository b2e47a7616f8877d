"""BUILD against ops/CMakeLists.txt, by what each compiles and how; and, on request, Bazel itself.

BUILD is Starlark, which is Python here: it is run with stand-ins for Bazel's functions that write
down what they are given.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ranks import run

from tf_adasum import native

ROOT = Path(__file__).resolve().parents[2]
KINDS = (".cc", ".h", ".inc")


@dataclass
class Rule:
    srcs: list[str]
    copts: list[str]
    textual_hdrs: list[str]


def bazel_rules(xla: bool) -> list[Rule]:
    """What BUILD asks for, on x86-64."""
    rules: list[Rule] = []

    def rule(srcs=(), copts=(), textual_hdrs=(), **_):
        rules.append(Rule(list(srcs), list(copts), list(textual_hdrs)))

    def glob(patterns, exclude=()):
        found = {str(path.relative_to(ROOT)) for p in patterns for path in ROOT.glob(p)}
        return sorted(
            found - {str(path.relative_to(ROOT)) for p in exclude for path in ROOT.glob(p)}
        )

    functions = {
        "load": lambda *_: None,
        "package": lambda **_: None,
        "cc_import": lambda **_: None,
        "cc_library": rule,
        "cc_binary": rule,
        "glob": glob,
        "select": lambda branches: branches["@platforms//cpu:x86_64"],
        "XLA": xla,
    }
    exec(compile((ROOT / "BUILD").read_text(), "BUILD", "exec"), functions)
    return rules


def tensorflows_folder() -> str:
    return next(iter(importlib.util.find_spec("tensorflow").submodule_search_locations))


@pytest.fixture(scope="module")
def cmake_commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The options that each source of the two libraries is compiled with, as CMake is set up."""
    tree, place = tmp_path_factory.mktemp("cmake"), tensorflows_folder()
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    settings = {
        "ADASUM_MPI": "OFF",
        "TF_VERSION": native.build_info()["tensorflow"],
        "TF_INCLUDE_DIR": f"{place}/include",
        "TF_LIBRARY_DIR": place,
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    command = [cmake, "-S", str(ROOT / "ops"), "-B", str(tree), *defines]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return dict(_commands(json.loads((tree / "compile_commands.json").read_text())))


def _commands(entries: list[dict[str, str]]) -> Iterator[tuple[str, list[str]]]:
    for entry in entries:
        source = Path(entry["file"])
        target = any(f"/{name}.dir/" in entry["command"] for name in ("adasum_core", "adasum_tf"))
        if target and source.is_relative_to(ROOT):
            yield str(source.relative_to(ROOT)), shlex.split(entry["command"])


def test_bazel_compiles_what_cmake_does(cmake_commands):
    sources = [s for rule in bazel_rules(native.build_info()["xla"]) for s in rule.srcs]
    compiled = [source for source in sources if source.endswith(".cc")]
    assert sorted(compiled) == sorted(cmake_commands)


def test_all_sources_are_there():
    rules = bazel_rules(xla=True)
    named = {name for rule in rules for name in (*rule.srcs, *rule.textual_hdrs)}
    tree = {str(path.relative_to(ROOT)) for path in (ROOT / "ops").rglob("*")}
    assert named == {name for name in tree if name.endswith(KINDS)}


def test_without_xla_its_sources_are_left_out():
    left_out = {s for rule in bazel_rules(True) for s in rule.srcs}
    left_out -= {s for rule in bazel_rules(False) for s in rule.srcs}
    assert left_out == {"ops/tf/xla_handlers.cc", "ops/tf/xla_kernels.cc"}


def test_instruction_sets_and_rounding_are_those_of_cmake(cmake_commands):
    def relevant(options: list[str]) -> set[str]:
        return {o for o in options if o.startswith(("-m", "-f", "-std=")) and o != "-fPIC"}

    for rule in bazel_rules(native.build_info()["xla"]):
        for source in rule.srcs:
            if source.endswith(".cc"):
                theirs = relevant(cmake_commands[source])
                assert relevant(rule.copts) == theirs, source


# Minutes of compiling, so only `make bazel` asks for it.
@pytest.fixture(scope="module")
def checkout_with_bazels_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and the tests, with the libraries that Bazel has made."""
    if os.environ.get("TF_ADASUM_BAZEL", "0") != "1":
        pytest.skip("takes minutes: run it by `make bazel`, or with TF_ADASUM_BAZEL=1")
    if not shutil.which("bazel"):
        pytest.skip("no bazel on PATH; bazel/build.sh names Debian's packages")
    environ = {**os.environ, "PYTHON": sys.executable}
    built = subprocess.run(
        [str(ROOT / "bazel" / "build.sh"), "--noshow_progress"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    assert built.returncode == 0, built.stdout
    library = Path(built.stdout.splitlines()[-1])

    checkout = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "_lib")
    for folder in ("tf_adasum", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    libraries = checkout / "tf_adasum" / "_lib"
    libraries.mkdir()
    shutil.copy(library, libraries / native.TENSORFLOW_OPS.name)
    shutil.copy(library.with_name(native.CORE.name), libraries)
    info = {**native.build_info(), "cuda": None}
    (libraries / "build_info.json").write_text(json.dumps(info))
    return checkout


def test_bazels_library_passes_the_tests_of_the_ops(checkout_with_bazels_library):
    checkout = str(checkout_with_bazels_library)
    files = [f"tests/mpi/test_{name}_mpi.py" for name in ("collectives", "xla")]
    command = [sys.executable, "-m", "pytest", "-q", *files]
    ended = run(["env", "-C", checkout, *command], 900, PYTHONPATH=checkout)
    assert ended.code == 0, ended.output
    assert " passed" in ended.output.splitlines()[-1]
