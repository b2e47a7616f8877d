"""Runs all tests in two processes at a time, since most of them wait half of the time: those that
share ranks, and the others. Takes pytest's options.

What the others' process prints is shown at once, and that of the first when both are done.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile


def main(options: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        shared = _start("shared", options, stdout=output, stderr=subprocess.STDOUT)
        others = _start("others", options)
        try:
            codes = [others.wait(), shared.wait()]
        finally:
            for process in (others, shared):
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
            for process in (others, shared):
                process.wait()
            output.seek(0)
            print("\nTests that share ranks:", output.read(), sep="\n", flush=True)
    return max(codes)


def _start(part: str, options: list[str], **streams: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "pytest", "--part", part, *options]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **streams)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
