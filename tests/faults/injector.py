"""Makes a rank fail: how, in which call and at which place of it, as the environment says.

    TF_ADASUM_TEST_FAULT="rank=2,call=3,place=dots,kind=kill"
    TF_ADASUM_TEST_FAULT="rank=0,call=1,place=vote,kind=delay,seconds=2;rank=1,call=1,kind=exit3"

Only the tests' ranks read it. `rank` is the number that the rank had at first.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tf_adasum import native

VARIABLE = "TF_ADASUM_TEST_FAULT"

# At any place.
DEADLY = ("kill", "segv", "exit0", "exit3", "interrupt")
PAUSES = ("stop", "delay")
SIGNALS = (*DEADLY, *PAUSES, "halt", "interrupt_mpirun")
# Between calls.
ERRORS = ("exception", "memory")
# What the rank calls instead of the right thing.
MISTAKES = ("nan", "shape", "dtype", "skip", "extra", "other")
KINDS = (*SIGNALS, *ERRORS, *MISTAKES)

# Before MPI is there; between calls; some time after a call has begun.
OUTSIDE = ("start", "before", "after", "time")
# Those of ops/core that a rank comes to in a call.
INSIDE = (
    *("agree", "agreed", "fill", "halve", "reduce", "dots", "gather", "emit"),
    *("vote", "commit", "shrink"),
)
# For tests that need some ranks to be further than others, which chance seldom brings: before the
# last rank is told a sum of numbers; before a broadcast sends a tensor.
BETWEEN = ("answer", "tensor")
PLACES = (*OUTSIDE, *INSIDE, *BETWEEN)


class InjectedError(RuntimeError):
    """What a fault raises."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to one rank, once."""

    rank: int
    kind: str
    place: str = "before"
    call: int = 0
    """It happens in this call or, if that does not come to the place, in one after it."""
    nth: int = 1
    """How often the rank comes to the place, from that call on, until it happens."""
    seconds: float = 2.0
    """How long a pause lasts, or after how long it happens at the place "time"."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self
        places = PLACES if self.kind in SIGNALS else ("start", "before", "after")
        assert self.place in places, self

    def __str__(self) -> str:
        values = dataclasses.asdict(self)
        return ",".join(f"{name}={value}" for name, value in values.items())


def parse(text: str) -> list[Fault]:
    """The faults of an environment variable: the other direction of `text`."""
    kinds = {"rank": int, "call": int, "nth": int, "seconds": float}
    faults = []
    for each in filter(None, text.split(";")):
        pairs = (pair.split("=") for pair in each.split(","))
        faults.append(Fault(**{name: kinds.get(name, str)(value) for name, value in pairs}))
    return faults


def text(faults: list[Fault]) -> str:
    return ";".join(map(str, faults))


def mistakes(faults: list[Fault], has_tensors: list[bool]) -> dict[int, Fault]:
    """The faults that are a wrong call, by the number of the call.

    has_tensors: of each call. What is wrong with a tensor needs one.
    """
    found = {}
    for fault in faults:
        needs_tensors = fault.kind in ("nan", "shape", "dtype")
        fitting = (
            call
            for call in range(fault.call, len(has_tensors))
            if has_tensors[call] or not needs_tensors
        )
        if fault.kind in MISTAKES:
            found[next(fitting)] = fault
    return found


class Injector:
    """The faults of this rank, but for wrong calls.

    The program says where it is; in a call the core does, by its hook.
    """

    def __init__(self, faults: list[Fault], tell: Callable[[Fault], None]):
        """tell: called before each fault."""
        self._waiting = {fault: 0 for fault in faults if fault.kind not in MISTAKES}
        self._timers: list[threading.Timer] = []
        self._tell = tell
        self._call = -1
        self._hook = native.FaultHook(lambda place: self._at(place.decode()))

    def start(self) -> None:
        """Before anything of MPI."""
        self._at("start")

    def install(self) -> None:
        """From now on the core says where it is."""
        native.core_library().adasum_set_fault_hook(self._hook)

    @contextmanager
    def around(self, call: int) -> Iterator[None]:
        """Around a call."""
        self._call = call
        self._at("before")
        for fault in list(self._waiting):
            if fault.place == "time" and call >= fault.call:
                del self._waiting[fault]
                timer = threading.Timer(fault.seconds, self._happen, [fault])
                timer.daemon = True
                timer.start()
                self._timers.append(timer)
        # Until the call has ended: from the hook no exception gets out.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        self._at("after")

    def cancel(self) -> None:
        """Lets nothing happen at the place "time" any more."""
        for timer in self._timers:
            timer.cancel()

    def _at(self, place: str) -> None:
        for fault in list(self._waiting):
            if fault.place != place or (place != "start" and self._call < fault.call):
                continue
            self._waiting[fault] += 1
            if self._waiting[fault] == fault.nth:
                del self._waiting[fault]
                self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        self._tell(fault)
        _HAPPENINGS[fault.kind](fault)


def _stop(fault: Fault) -> None:
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep {fault.seconds}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


def _raise(error: BaseException) -> None:
    raise error


_HAPPENINGS: dict[str, Callable[[Fault], None]] = {
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda fault: ctypes.string_at(0),
    "exit0": lambda fault: os._exit(0),
    "exit3": lambda fault: os._exit(3),
    "interrupt": lambda fault: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT),
    "interrupt_mpirun": lambda fault: os.kill(os.getppid(), signal.SIGINT),
    "stop": _stop,
    "halt": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "delay": lambda fault: time.sleep(fault.seconds),
    "exception": lambda fault: _raise(InjectedError(f"rank {fault.rank} fails")),
    "memory": lambda fault: _raise(MemoryError(f"rank {fault.rank} has none left")),
}
