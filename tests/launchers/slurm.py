"""A Slurm of one node on this machine, for as long as a `with` block lasts.

All that it writes is in a temporary folder; its daemons listen on the loopback interface. It takes
root, and Debian's packages that `.ci/packages` names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_START_SECONDS = 30
# As many as the tests' largest job has ranks, whatever the machine has.
_CPUS = 3
_HOST = socket.gethostname().split(".")[0]
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sinfo", "scancel")
# Where Debian has daemons, which is not on every user's PATH.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class UnavailableError(RuntimeError):
    """This machine or user cannot have a Slurm; the text says what is missing."""


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A Slurm that runs."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """What its commands need in the environment."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        """What one of its commands prints."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
        )
        return done.stdout

    def processes(self) -> list[int]:
        """All that it consists of and runs: they have its name in the environment."""
        mark = f"SLURM_CONF={self.environ['SLURM_CONF']}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        return found


def check_available() -> None:
    """Raises UnavailableError unless `cluster` can work here."""
    if os.geteuid() != 0:
        raise UnavailableError("a Slurm that a test starts needs root")
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        raise UnavailableError(
            f"{', '.join(missing)} not found; Debian's packages for it are in .ci/packages"
        )


@contextlib.contextmanager
def cluster(node: str = _HOST) -> Iterator[Slurm]:
    """Starts it and, however the block is left, ends it with all that it runs.

    Args:
        node: what it calls this machine.

    Raises:
        UnavailableError: if it cannot be started.
    """
    check_available()
    with tempfile.TemporaryDirectory(prefix="adasum_slurm_") as name:
        folder = Path(name)
        folder.chmod(0o755)  # munged's clients look into it
        daemons: list[subprocess.Popen] = []
        slurm = Slurm(folder)
        try:
            _write_configuration(folder, node)
            for command in _daemons(folder, node):
                daemons.append(_start(command, slurm))
            _wait_until_idle(slurm, daemons)
            yield slurm
        finally:
            slurm.call("scancel", "--signal=KILL", "--state=RUNNING")
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(5)
            for pid in slurm.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for daemon in daemons:
                daemon.wait()


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _write_configuration(folder: Path, node: str) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    ctld, slurmd = _free_ports(2)
    (folder / "slurm.conf").write_text(f"""\
ClusterName=adasum
SlurmctldHost={_HOST}(127.0.0.1)
SlurmctldPort={ctld}
SlurmdPort={slurmd}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={node} NodeHostname={_HOST} NodeAddr=127.0.0.1 CPUs={_CPUS}
PartitionName=all Nodes={node} Default=YES MaxTime=10 State=UP
""")


def _daemons(folder: Path, node: str) -> list[list[str]]:
    munge = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
    configuration = str(folder / "slurm.conf")
    return [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge],
        ["slurmctld", "-D", "-f", configuration],
        ["slurmd", "-D", "-f", configuration, "-N", node],
    ]


def _start(command: list[str], slurm: Slurm) -> subprocess.Popen:
    program = shutil.which(command[0], path=_PATH)
    with (slurm.folder / f"{command[0]}.output").open("wb") as output:
        return subprocess.Popen(
            [program, *command[1:]],
            env={**os.environ, **slurm.environ, "PATH": _PATH},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_until_idle(slurm: Slurm, daemons: list[subprocess.Popen]) -> None:
    limit = time.monotonic() + _START_SECONDS
    while slurm.call("sinfo", "--noheader", "--format=%T").strip() != "idle":
        ended = any(daemon.poll() is not None for daemon in daemons)
        if ended or time.monotonic() > limit:
            said = "\n".join(
                f"{file.name}: {file.read_text(errors='replace')[-2000:]}"
                for file in sorted([*slurm.folder.glob("*.log"), *slurm.folder.glob("*.output")])
            )
            raise UnavailableError(f"Slurm did not start here:\n{said}")
        time.sleep(0.2)
