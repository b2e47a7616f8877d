"""Every instruction set gives the same bits, so that ranks on different processors agree."""

import subprocess
import sys

PROGRAM = """
import hashlib
import ml_dtypes
import numpy as np
from cases import DTYPES, SHAPES, vectors
from tf_adasum import core, native

digest = hashlib.sha256()
def add(per_rank, op):
    for array in core.simulate(per_rank, op)[0]:
        digest.update(array.tobytes())

for dtype in DTYPES.values():
    for seed, shapes in enumerate(SHAPES.values()):
        for op in ("adasum", "sum", "average"):
            add(vectors(shapes, dtype, 5, seed), op)
    # Denormal numbers, and some that are or become infinite.
    info = ml_dtypes.finfo(dtype)
    for scale in (5 * float(info.smallest_subnormal), 0.3 * float(info.max)):
        with np.errstate(over="ignore"):
            ranks = [[(v * scale).astype(dtype) for v in of] for of in vectors([(77,)], "d", 5)]
        for op in ("adasum", "sum", "average"):
            add(ranks, op)
print(native.core_library().adasum_simd().decode(), digest.hexdigest())
"""


def _run(simd: str, monkeypatch) -> tuple[str, str]:
    monkeypatch.setenv("TF_ADASUM_SIMD", simd)
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    used, digest = ended.stdout.split()
    return used, digest


def test_same_bits(monkeypatch):
    results = [_run(simd, monkeypatch) for simd in ("plain", "avx2", "")]
    assert results[0][0] == "plain"
    assert len({digest for _, digest in results}) == 1, results
