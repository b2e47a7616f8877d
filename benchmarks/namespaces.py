"""Several "hosts" on one Linux machine, joined by links of limited speed.

Each host is a network namespace with one interface, `e0`; a bridge in a namespace of its own joins
them, and a token bucket limits what each sends. Nothing outside these namespaces is changed: even
the hosts' names are known inside only. They are removed when the `with` block is left, however that
happens; what a killed process left is removed by the next one.

Needs root, and iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tf_adasum import launch, native

_PREFIX = "adasum"


class UnavailableError(RuntimeError):
    """This machine or user cannot have such hosts; the text says what is missing."""


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Hosts that exist; names resolve on them."""

    names: list[str]
    folder: Path

    def mpirun_command(self, ranks_per_host: int | Sequence[int]) -> list[str]:
        """The start of a command line that runs a program, with so many ranks on each host.

        The first ranks are on the first host. Between hosts messages go over TCP on the links.
        """
        if isinstance(ranks_per_host, int):
            ranks_per_host = [ranks_per_host] * len(self.names)
        slots = zip(self.names, ranks_per_host, strict=True)
        ranks = sum(ranks_per_host)
        mpirun, *flags = launch.mpirun_command(ranks)
        # Open MPI takes each host's cores for that host's own, so it cannot know.
        crowded = ranks > len(os.sched_getaffinity(0))
        return [
            *(str(self.folder / "on_host"), self.names[0]),
            *(mpirun, *flags),
            *("--host", ",".join(f"{name}:{number}" for name, number in slots)),
            *("--prtemca", "plm_ssh_agent", str(self.folder / "agent")),
            *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"),
            *("--mca", "btl_tcp_if_include", "e0"),
            *("--mca", "mpi_yield_when_idle", str(int(crowded))),
        ]

    def cut(self, host: int) -> None:
        """Takes a host's link down."""
        _call(f"ip -n {self.names[host]} link set e0 down")

    def processes(self) -> list[str]:
        """The command lines of the processes that run on them."""
        pids = [pid for name in self.names for pid in _call(f"ip netns pids {name}").split()]
        found = []
        for pid in pids:
            with contextlib.suppress(FileNotFoundError):
                found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        return found


def check_available() -> None:
    """Raises UnavailableError unless `hosts` can work here."""
    if os.geteuid() != 0:
        raise UnavailableError("network namespaces need root")
    missing = [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        raise UnavailableError(
            f"{', '.join(missing)} not found: apt-get install iproute2 util-linux"
        )
    running = native.core_library().adasum_mpi_running().decode()
    if not running.startswith("Open MPI"):
        raise UnavailableError(f"ranks are started on these hosts by Open MPI alone, not {running}")


@contextlib.contextmanager
def hosts(number: int, rate: str, burst: str = "256kb") -> Iterator[Hosts]:
    """Makes hosts and removes them.

    Args:
        number: how many.
        rate: how fast each of them can send, as `tc` writes it: "2gbit".
        burst: how much passes at once after a pause.

    Raises:
        UnavailableError: if they cannot be made.
    """
    check_available()
    _remove_leftovers()
    names = [f"{_PREFIX}{os.getpid()}h{i}" for i in range(number)]
    switch = f"{_PREFIX}{os.getpid()}switch"
    # Else the default action would leave everything behind.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with tempfile.TemporaryDirectory(prefix="tf_adasum_") as folder:
            _connect(names, switch, f"rate {rate} burst {burst}")
            _write_scripts(Path(folder), names)
            yield Hosts(names, Path(folder))
    finally:
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in [*names, switch]:
            _remove(name)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)


def _connect(names: list[str], switch: str, limit: str) -> None:
    try:
        for name in [switch, *names]:
            _call(f"ip netns add {name}")
        _call(f"ip -n {switch} link add name b0 type bridge")
        _call(f"ip -n {switch} link set b0 up")
        for i, name in enumerate(names):
            _call(f"ip -n {switch} link add p{i} type veth peer name e0 netns {name}")
            _call(f"ip -n {switch} link set p{i} master b0 up")
            _call(f"ip -n {name} address add {_address(i)}/24 dev e0")
            _call(f"ip -n {name} link set lo up")
            _call(f"ip -n {name} link set e0 up")
            _call(f"tc -n {name} qdisc add dev e0 root tbf {limit} latency 50ms")
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"{shlex.join(error.cmd)} failed: {error.stderr.strip()}") from None


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _write_scripts(folder: Path, names: list[str]) -> None:
    lines = ["127.0.0.1 localhost", *(f"{_address(i)} {name}" for i, name in enumerate(names))]
    known = folder / "hosts"
    known.write_text("\n".join(lines) + "\n")
    # A name of its own, or MPI takes all hosts for one and tries shared memory between them.
    enter = (
        'host=$1; shift\nexec nsenter --net=/run/netns/"$host" unshare --uts --mount '
        f'sh -c \'hostname "$0"; mount --bind {shlex.quote(str(known))} /etc/hosts; '
    )
    # The one takes words, the other, like ssh, text for a shell.
    for script, rest in (
        ("on_host", 'exec "$@"\' "$host" "$@"'),
        ("agent", 'exec sh -c "$*"\' "$host" "$@"'),
    ):
        path = folder / script
        path.write_text(f"#!/bin/sh\n{enter}{rest}\n")
        path.chmod(0o755)


def _remove_leftovers() -> None:
    for line in _call("ip netns list").splitlines():
        found = re.match(rf"{_PREFIX}(\d+)(h\d+|switch)\b", line)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(found[0])


def _remove(name: str) -> None:
    if not Path(f"/run/netns/{name}").exists():
        return
    for pid in _call(f"ip netns pids {name}").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _call(f"ip netns delete {name}")


def _call(command: str) -> str:
    done: Any = subprocess.run(command.split(), check=True, capture_output=True, text=True)
    return done.stdout
