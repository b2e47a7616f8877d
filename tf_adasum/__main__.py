"""`python -m tf_adasum demo`, `doctor`, `bench`, `run`."""

from __future__ import annotations

import argparse
import importlib
import sys

_COMMANDS = {
    "demo": "train a small network on real data, with and without Adasum, on 4 ranks",
    "doctor": "say what was built and what is here, and whether training can work",
    "bench": "measure the allreduce on this cluster, and say what to choose",
    "run": "run a program as several ranks, with the right mpirun",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tf_adasum",
        description="Adasum for TensorFlow and Keras.",
        epilog="commands: " + "; ".join(f"{name}: {what}" for name, what in _COMMANDS.items()),
    )
    parser.add_argument("command", choices=_COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see COMMAND --help")
    parsed = parser.parse_args(argv)
    return importlib.import_module(f"tf_adasum.{parsed.command}").main(parsed.arguments) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
