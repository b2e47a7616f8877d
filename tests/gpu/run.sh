#!/usr/bin/env bash
# Tests and measures the core on a GPU, without TensorFlow or Python: within 5 minutes, from nothing.
# Needs nvcc, cmake and an MPI (mpicc, mpirun on PATH); what is missing is said. Ends with 0 only if
# everything that could run was right. Usage: tests/gpu/run.sh [FOLDER OF THE BUILD]
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${1:-$root/build/gpu}
failed=0

step() { printf '\n== %s\n' "$*"; }
try() { "$@" || { failed=1; echo "FAILED ($?): $*"; }; }

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

nvcc=${CUDACXX:-$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}
[[ -x $nvcc ]] || { echo "No nvcc: name it by CUDACXX"; exit 1; }
command -v cmake >/dev/null || { echo "No cmake"; exit 1; }
step "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1)"
# Only this machine's architecture, which is quick.
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)
[[ $arch =~ ^[0-9]+$ ]] || arch=90
mpi=()
command -v "${MPICC:-mpicc}" >/dev/null && mpi=(-DMPI_C_COMPILER="$(command -v "${MPICC:-mpicc}")")

step "build for sm_$arch"
cmake -S "$root/ops" -B "$build" -DADASUM_BUILD_TF=OFF -DADASUM_GPU_TESTS=ON \
  -DADASUM_MPI=$([[ ${#mpi[@]} -gt 0 ]] && echo ON || echo OFF) \
  -DCMAKE_CUDA_COMPILER="$nvcc" -DCMAKE_CUDA_ARCHITECTURES="$arch" "${mpi[@]}" >"$build.log" 2>&1 &&
  cmake --build "$build" --parallel --target gpu_tests >>"$build.log" 2>&1 ||
  { tail -30 "$build.log"; echo "The build failed"; exit 1; }

step "ranks as threads, tensors on the GPU, against the definition"
DEVICE=cuda try timeout 120 "$build/core_ranks_cuda" 40 1

step "bandwidth of the kernels beside a copy"
try timeout 90 "$build/gpu_bandwidth"

if [[ ${#mpi[@]} -gt 0 ]] && command -v mpirun >/dev/null; then
  for way in auto staged direct nccl; do
    for ranks in 2 3 4; do
      step "$ranks processes, $(nvidia-smi -L | wc -l) GPUs, messages: $way"
      log=$(TF_ADASUM_DEVICE_TRANSPORT=$way timeout 60 mpirun --oversubscribe --bind-to none \
        -x TF_ADASUM_DEVICE_TRANSPORT -np $ranks "$build/gpu_ranks" 1 16 64 2>&1)
      code=$?
      if grep -o "TF_ADASUM_DEVICE_TRANSPORT=$way is not possible.*" <<<"$log" | head -1; then
        break
      fi
      echo "$log"
      [[ $code == 0 ]] || { failed=1; echo "FAILED ($code)"; }
    done
  done
else
  step "processes: left out, since there is no MPI (mpicc and mpirun on PATH)"
fi

echo
[[ $failed == 0 ]] && echo "All that ran was right." || echo "Something failed."
exit $failed
