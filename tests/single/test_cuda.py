"""What a build with CUDA has in it, on a machine with or without a GPU."""

import ctypes
import os
import re
import shutil
import struct
import subprocess

import numpy as np
import pytest

from tf_adasum import core, native
from tf_adasum.arrays import Tensors
from tf_adasum.errors import check
from tf_adasum.reductions import reduce_options

CUDA = native.Device(memory=1)

needs_cuda = pytest.mark.skipif(not native.has_cuda(), reason="built without CUDA: no nvcc")


_PTX, _ELF = 1, 2


def _code() -> set[tuple[int, int]]:
    """Kind and architecture of each piece of code for GPUs in the core.

    CUDA's compiler puts them into containers: a header with a magic number, its own size and that
    of the rest; then pieces, each with kind, size of its header and of itself, and architecture.
    """
    data, magic = native.CORE.read_bytes(), struct.pack("<I", 0xBA55ED50)
    found, at = set(), 0
    while (at := data.find(magic, at)) >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        piece, end = at + header, at + header + size
        while piece < end:
            kind, piece_header, piece_size = struct.unpack_from("<HxxIQ", data, piece)
            found.add((kind, *struct.unpack_from("<I", data, piece + 28)))
            piece += piece_header + piece_size
        at = end
    return found


def _allreduce_on(device):
    tensors = Tensors([np.ones(3, np.float32)])
    options = reduce_options("sum", None, None, None)
    options.device = ctypes.pointer(device)
    core.init()
    library = native.core_library()
    check(library.adasum_allreduce(tensors.tensors, tensors.pointers, 1, ctypes.byref(options)))


def test_is_built_with_cuda_where_there_is_a_compiler():
    wanted = os.environ.get("TF_ADASUM_CUDA", "1") != "0" and shutil.which("nvcc") is not None
    assert native.has_cuda() or not wanted
    assert native.core_library().adasum_has_cuda() == int(native.has_cuda())


@needs_cuda
def test_has_code_for_every_architecture_that_the_compiler_knows():
    known = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=True)
    wanted = {int(number) for number in re.findall(r"compute_(\d+)\s", known.stdout)}
    wanted = {number for number in wanted if number >= 70}
    assert _code() == {(_PTX, min(wanted)), *((_ELF, number) for number in wanted)}


@needs_cuda
def test_tensorflow_has_kernels_for_gpus():
    from tensorflow.python.framework import kernels

    from tf_adasum import collectives

    collectives.ops()
    ops = ("Allreduce", "Sync", "Broadcast", "BroadcastVariables", "Allgather", "Barrier", "Place")
    for op in ops:
        found = kernels.get_registered_kernels_for_op(f"Adasum{op}").kernel
        assert {kernel.device_type for kernel in found} >= {"CPU", "GPU"}, op


@needs_cuda
@pytest.mark.skipif(native.core_library().adasum_cuda_devices() > 0, reason="there is a GPU")
def test_a_tensor_on_a_gpu_that_is_not_there():
    with pytest.raises(RuntimeError, match="there is no GPU that CUDA could use in this process"):
        _allreduce_on(CUDA)


@pytest.mark.skipif(native.has_cuda(), reason="built with CUDA")
def test_a_build_without_cuda_says_so():
    with pytest.raises(RuntimeError, match="was built without CUDA: install it again where nvcc"):
        _allreduce_on(CUDA)


def test_a_device_that_is_unknown():
    with pytest.raises(ValueError, match=r"`memory` must be 0 \(host\), 1 \(CUDA\).*Received: 9"):
        _allreduce_on(native.Device(memory=9))
