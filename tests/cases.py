"""The cases that every way of running the core is held against `tf_adasum.reference` with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from tf_adasum import reference

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

# Shapes of the tensors of one call.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one element": [(1,)],
    "scalar": [()],
    "empty": [(0,)],
    "fewer elements than ranks": [(3,)],
    "odd": [(1001,)],
    "matrix": [(17, 23)],
    "several with empty ones": [(5,), (0, 4), (1,), (2, 3, 5), (0,)],
    "64 mixed": [(1 + (37 * i) % 211,) for i in range(60)] + [(), (0,), (64, 33), (4096,)],
}


def vectors(
    shapes: Sequence[tuple[int, ...]], dtype: np.dtype, ranks: int, seed: int = 0
) -> list[list[np.ndarray]]:
    """[rank][tensor], each partly along a direction that all ranks share, as gradients are."""
    rng = np.random.default_rng(seed)
    shared = [rng.normal(size=shape) for shape in shapes]
    return [
        [(s + rng.normal(size=s.shape)).astype(dtype).reshape(s.shape) for s in shared]
        for _ in range(ranks)
    ]


def unit_roundoff(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps) / 2


def allowed_error(
    want: np.ndarray,
    vectors: Sequence[np.ndarray],
    dtype: np.dtype,
    levels: int | None = None,
    largest: float = 0.0,
) -> float:
    """The error in norm that a tensor's result may have.

    1e-6 of the result for float32, 1e-13 for float64, and for every dtype what one rounding at each
    level of the tree explains: of values that may cancel later on, so in units of the largest
    vector, or of `largest` if that is more.
    """
    ranks = len(vectors)
    result = np.linalg.norm(want.ravel())
    largest = max(largest, *(np.linalg.norm(v.astype(np.float64).ravel()) for v in vectors))
    if levels is None:
        levels = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    rounding = levels * unit_roundoff(dtype) * max(result, largest)
    return max({"float32": 1e-6, "float64": 1e-13}.get(dtype.name, 0) * result, rounding)


def expected(
    per_rank: list[list[np.ndarray]],
    op: str,
    algorithm: str = "rvh",
    hosts: Sequence[int] | None = None,
) -> list[np.ndarray]:
    """What `reference` says about each tensor, in float64."""
    hosts = [0] * len(per_rank) if hosts is None else hosts
    combine = {
        "rvh": reference.tree,
        "ring": reference.ring,
        "hierarchical": lambda v: reference.hierarchical(v, hosts, "average"),
        "hierarchical_sum": lambda v: reference.hierarchical(v, hosts, "sum"),
    }[algorithm]
    if op != "adasum":
        reduce = {"sum": np.sum, "average": np.mean}[op]

        def combine(v):
            return reduce(np.asarray(v, np.float64), axis=0)

    return [combine([arrays[t] for arrays in per_rank]) for t in range(len(per_rank[0]))]


def assert_close(got: np.ndarray, want: np.ndarray, allowed: float, what: str) -> None:
    assert got.shape == want.shape, f"{what}: shape {got.shape} instead of {want.shape}"
    error = np.linalg.norm(got.astype(np.float64).ravel() - want.ravel())
    assert error <= allowed, f"{what}: error {error} > {allowed}"


def check_table(
    reduce: Callable[[list[list[np.ndarray]], str], list[np.ndarray]],
    ranks: int,
    algorithm: str = "rvh",
    hosts: Sequence[int] | None = None,
    *,
    shapes_names: Sequence[str] = tuple(SHAPES),
    dtypes: Sequence[str] = tuple(DTYPES),
    ops: Sequence[str] = ("adasum", "sum", "average"),
) -> None:
    """Holds every shape, dtype and op against the reference, and two runs against each other.

    `reduce` gets all ranks' arrays and returns the result of one of them.
    """
    for shapes_name in shapes_names:
        shapes = SHAPES[shapes_name]
        for dtype_name in dtypes:
            dtype = DTYPES[dtype_name]
            per_rank = vectors(shapes, dtype, ranks)
            for op in ops:
                got = reduce(per_rank, op)
                again = reduce(per_rank, op)
                for t, want in enumerate(expected(per_rank, op, algorithm, hosts)):
                    what = f"{ranks} ranks, {shapes_name}, tensor {t}, {dtype_name}, {op}"
                    assert got[t].dtype == dtype, what
                    vectors_of_t = [arrays[t] for arrays in per_rank]
                    allowed = allowed_error(want, vectors_of_t, dtype)
                    if algorithm != "rvh":
                        # Each rank may add a rounding, and a host's sum is larger than its parts.
                        in_host = np.sum(np.abs(np.asarray(vectors_of_t, np.float64)), axis=0)
                        largest = np.linalg.norm(in_host.ravel())
                        allowed = allowed_error(want, vectors_of_t, dtype, ranks, largest)
                    assert_close(got[t], want, allowed, what)
                    assert got[t].tobytes() == again[t].tobytes(), f"two runs differ: {what}"


def layouts(dtype: np.dtype) -> dict[str, np.ndarray]:
    """Arrays whose elements do not lie one after the other, and others that are special."""
    base = (np.arange(120.0) - 40).reshape(4, 5, 6).astype(dtype)
    read_only = base.copy()
    read_only.flags.writeable = False
    fields = np.zeros(9, [("before", np.uint8), ("it", dtype)])
    fields["it"] = base.ravel()[::-13][:9]
    arrays = {
        "transposed": base.T,
        "negative steps": base[::-1, ::-2],
        "steps": base[1::2, :, ::3],
        "column": base[2, :, 3],
        "diagonal": np.diagonal(base[:, :4, 0]),
        "Fortran order": np.asfortranarray(base),
        "read-only": read_only,
        "repeated rows": np.broadcast_to(base[0, 0], (3, 6)),
        "repeated number": np.broadcast_to(base[0, 0, 1], (7,)),
        "unaligned": np.frombuffer(b"x" + base.tobytes(), dtype, offset=1),
        "field of records": fields["it"],
        "several pieces": np.resize(base, (300, 400)).T,
        "0-d": np.array(base[1, 2, 3]),
        "0-d view": base[1, 2, 3, ...],
        "scalar": base[1, 2, 3],
        "empty": base[:0, 0, 0],
        "empty inside": base[:, 2:2, ::-1],
    }
    if dtype.newbyteorder("S") != dtype:
        arrays["other byte order"] = base.astype(dtype.newbyteorder("S"))
    return arrays


# What is no vector of numbers to combine, or not yet: to be refused by name, and moved as bytes.
OTHER_DTYPES = [
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
    *("complex64", "complex128", "longdouble", "clongdouble"),
    *("U3", "S3", "V5", "datetime64[s]", "timedelta64[ns]"),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4),
    [("weight", "f4"), ("count", "i2")],
]
OTHER_DTYPES = [np.dtype(dtype) for dtype in OTHER_DTYPES]


def many_tensors(ranks: int, number: int = 10_000) -> list[list[np.ndarray]]:
    """[rank][tensor], of mixed dtypes and shapes, some empty, some without dimensions."""
    shapes = [(), (0,), (1,), (17,), (3, 5), (2, 0, 3), (2, 3, 4), (64,)]
    dtypes = list(DTYPES.values())
    rng = np.random.default_rng(0)
    return [
        [
            rng.normal(size=shapes[t % 8]).astype(dtypes[t // 8 % 4]).reshape(shapes[t % 8])
            for t in range(number)
        ]
        for _ in range(ranks)
    ]
