"""`python -m tf_adasum run -np 4 train.py`: the mpirun that fits this package, printed and run.

The line that it prints is all that it does: copied into a shell it does the same.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import tf_adasum
from tf_adasum import launch

_EPILOG = """\
examples:
  python -m tf_adasum run -np 4 train.py --epochs 90
  python -m tf_adasum run -np 4 -m my_package.train
  python -m tf_adasum run -H node1:8,node2:8 train.py
  python -m tf_adasum run -np 4 --mpi-args "--mca btl_tcp_if_include eth0" train.py

The exit status is mpirun's. The line goes to stderr, so stdout is the program's alone.
"""

# Set in a job of Slurm, PBS, LSF or Grid Engine, which tells mpirun how many ranks each host is to
# have.
_BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1. Received: {text}")
    return int(text)


def _hosts(text: str) -> list[tuple[str, int]]:
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if not name or (colon and not (slots.isdecimal() and int(slots) > 0)):
            raise argparse.ArgumentTypeError(
                f"must be HOST:RANKS, separated by commas. Received: {text}"
            )
        hosts.append((name, int(slots) if colon else 1))
    return hosts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tf_adasum run",
        usage="%(prog)s (-np N | -H HOST:RANKS,...) [option ...] "
        "(SCRIPT | -m MODULE) [argument ...]",
        description="Runs a Python program as several ranks with the launcher of the MPI that "
        "tf_adasum was built for, and prints the command line.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    ranks = "how many ranks (as many as -H has room for)"
    add("-np", "-n", dest="np", type=_positive, metavar="N", help=ranks)
    add(
        "-H",
        "--hosts",
        type=_hosts,
        metavar="HOST:RANKS,...",
        help="where, and how many ranks each host has room for (1); by default this host, or those "
        "of the batch job",
    )
    add(
        "--elastic",
        action="store_true",
        help="with Open MPI 5: the others can go on when a process dies, if the optimizer has "
        "elastic=True",
    )
    add(
        "--mpi-args",
        type=shlex.split,
        default=[],
        metavar="'FLAGS'",
        help="handed on to mpirun as they are; a single one with =, as in --mpi-args=--tag-output",
    )
    add("--dry-run", action="store_true", help="print the line on stdout, and do not run it")
    add("-m", dest="module", nargs=argparse.REMAINDER, help="a module, as in `python -m`")
    add("program", nargs=argparse.REMAINDER, metavar="SCRIPT", help="and its arguments")
    return parser


def _program(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    if options.module is not None:
        if not options.module:
            parser.error("argument -m: expected a module")
        return ["-m", *options.module]
    script = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not script:
        parser.error("what is to be run? Name a SCRIPT, or a module by -m")
    if script[0].startswith("-"):
        parser.error(f"unknown option {script[0]}; mpirun's own go into --mpi-args")
    # Else each rank would say so for itself. On other hosts it may be elsewhere.
    if options.hosts is None and not Path(script[0]).exists():
        parser.error(f"there is no file {script[0]}")
    return script


def _additions() -> dict[str, str]:
    """What the ranks' environment has in addition to this process's."""
    found = launch.allow_root() if launch.is_open_mpi() else {}
    # Where `python -m` looks first, which is not where a script's own imports do.
    folder = Path(tf_adasum.__file__).resolve().parents[1]
    if folder == Path.cwd() and str(folder) not in sys.path[1:]:
        given = os.environ.get("PYTHONPATH")
        found["PYTHONPATH"] = f"{folder}{os.pathsep}{given}" if given else str(folder)
    return found


def main(argv: Sequence[str]) -> int:
    """Becomes mpirun, unless the command line is wrong (2) or `--dry-run` (0)."""
    parser = _parser()
    options = parser.parse_args(argv)
    program = _program(parser, options)
    launcher, number = launch.launched_by()
    # An interactive job's shell is one process that srun has started.
    if launcher is not None and (launcher != "srun" or number > 1):
        parser.error(f"{launcher} has started this process, and mpirun does not start within it")
    hosts = options.hosts or []
    room = sum(slots for _, slots in hosts)
    np = options.np or room
    if not np:
        parser.error("how many ranks? Give -np or -H")
    if hosts and np > room:
        parser.error(f"argument -np: -H has room for {room} ranks. Received: {np}")
    try:
        additions = _additions()
        environ = {**os.environ, **additions}
        mpirun = launch.mpirun_command(
            np,
            hosts=hosts,
            elastic=options.elastic,
            oversubscribe=not hosts and not any(environ.get(name) for name in _BATCH_JOBS),
            environ=environ,
        )
    except (FileNotFoundError, ValueError, ImportError) as error:
        parser.error(str(error))
    command = [*mpirun, *options.mpi_args, sys.executable, *program]
    line = " ".join([*(f"{n}={shlex.quote(v)}" for n, v in additions.items()), shlex.join(command)])
    if options.dry_run:
        print(line)
        return 0
    print(line, file=sys.stderr, flush=True)
    # In place of this process, so that a signal or the exit status needs no passing on.
    os.execve(command[0], command, environ)
