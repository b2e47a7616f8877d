"""Every instruction set gives the same bits, so that ranks on different processors agree."""

import subprocess
import sys

PROGRAM = """
import hashlib
from cases import DTYPES, SHAPES, vectors
from tf_adasum import core, native

digest = hashlib.sha256()
for dtype in DTYPES.values():
    for seed, shapes in enumerate(SHAPES.values()):
        for op in ("adasum", "sum", "average"):
            for array in core.simulate(vectors(shapes, dtype, 5, seed), op)[0]:
                digest.update(array.tobytes())
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
