"""Runs all tests: those of one process beside those of ranks, which leave cores idle.

    python tests/all.py

The former run at a low priority, since some of the latter wait for limits of time. What they print
comes when both have ended. Ends with status 1 if a test has failed.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SINGLE = "tests/single"


def main() -> int:
    pytest = [sys.executable, "-m", "pytest"]
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryFile() as printed:
        single = subprocess.Popen(
            ["nice", *pytest, SINGLE], cwd=root, stdout=printed, stderr=subprocess.STDOUT
        )
        try:
            codes = [subprocess.call([*pytest, f"--ignore={SINGLE}"], cwd=root), single.wait()]
        except KeyboardInterrupt:
            codes = [single.wait(), 1]  # it was interrupted too
        finally:
            printed.seek(0)
            shutil.copyfileobj(printed, sys.stdout.buffer)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
