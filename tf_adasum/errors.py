"""The errors of collectives, and how they come out of the C API."""

from __future__ import annotations

from tf_adasum import native


class DisagreementError(ValueError):
    """The ranks pass different things to one collective; raised on every rank, naming them."""


class RankLostError(RuntimeError):
    """The process of a rank has died; raised on those that live, where MPI is fault tolerant."""


def check(status: int) -> None:
    if status == 0:
        return
    message = native.core_library().adasum_last_error().decode(errors="replace")
    if status == native.DISAGREEMENT:
        raise DisagreementError(message)
    if status == native.INVALID_ARGUMENT:
        raise ValueError(message)
    if status == native.RANK_LOST:
        raise RankLostError(message)
    raise RuntimeError(message)
