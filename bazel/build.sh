#!/usr/bin/env bash
# Builds the op library, and the core that it links to, with Bazel, for the TensorFlow of PYTHON and
# the MPI of MPICC, by default those of .venv, else the first on PATH; prints where the op library
# is, the core is beside it. Takes minutes. In Debian:
#   apt-get install bazel-bootstrap bazel-platforms bazel-rules-java bazel-rules-proto
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v bazel > /dev/null; then
  echo "No bazel on PATH; for Debian's see $0." >&2
  exit 1
fi

find_tool() { # what was given, else .venv's, else the first on PATH
  local found
  if [[ -n "$2" ]]; then
    found=$(command -v "$2") || { echo "$2 is no executable file." >&2; exit 1; }
  elif [[ -x ".venv/bin/$1" ]]; then
    found=.venv/bin/$1
  else
    found=$(command -v "$1") || { echo "No $1 on PATH." >&2; exit 1; }
  fi
  # Absolute, but a link stays one: a virtual environment's interpreter is known by its folder.
  echo "$(cd "$(dirname "$found")" && pwd)/$(basename "$found")"
}
PYTHON=$(find_tool python "${PYTHON:-}")
MPICC=$(find_tool mpicc "${MPICC:-}")
export PYTHON MPICC

bazel build "$@" //:adasum_ops.so //:libadasum_core.so >&2
echo "$PWD/bazel-bin/adasum_ops.so"
