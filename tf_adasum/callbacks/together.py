"""Where ranks meet between steps: what a callback exchanges has to find every rank at one place."""

from __future__ import annotations

import sys

import keras
import numpy as np

from tf_adasum import core, optimizer
from tf_adasum.core import Sum


class Together(keras.callbacks.Callback):
    """A callback that does something together with the other ranks.

    Ranks may have different numbers of batches, and one may leave an epoch early. So before any
    other collective of a callback comes `come_together`, which waits for the rest of the steps of
    the others and takes part in their syncs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.neighbours: list[keras.callbacks.Callback] = [self]
        """The list that this callback is in, itself included, as `fit` calls it."""

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self.neighbours = list_around(self)

    def come_together(self, passing: bool = False) -> None:
        """Brings all ranks here, and to the same weights.

        There are two kinds of places: the end of an epoch's batches, to which every rank comes, and
        places on the way there, to which a rank may come that others do not. A rank at the end
        stays, and does what is done at each place on the way, until all ranks are at the end.

        Args:
            passing: whether this rank will go on with steps of the same epoch.
        """
        if core.size() == 1:
            return
        while True:
            if adasum := optimizer.find(getattr(self.model, "optimizer", None)):
                adasum.sync()
            (passing_ranks,) = core.allreduce(
                np.array([float(passing)]), op=Sum, name="callbacks: ranks in mid-epoch"
            )
            if passing_ranks:
                for callback in self.neighbours:
                    if isinstance(callback, Together):
                        callback.on_passing()
            if passing or not passing_ranks:
                return

    def on_passing(self) -> None:
        """What is done on every rank at a place on the way to the end of the epoch."""


def list_around(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """The list of a `keras.callbacks.CallbackList` that is calling this callback just now.

    Keras tells a callback its model and parameters, never its neighbours; but their list is what
    the caller iterates over, so it is found among the callers. A list of the callback alone if
    somebody else calls it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList) and any(
            each is callback for each in caller.callbacks
        ):
            return caller.callbacks
        frame = frame.f_back
    return [callback]


def append_once(
    callbacks: list[keras.callbacks.Callback], callback: keras.callbacks.Callback
) -> None:
    """Puts a callback behind all others, unless one of its class is in the list already.

    To be called in `set_model`: Keras's loop over the list then comes to the new one too.
    """
    if not any(type(each) is type(callback) for each in callbacks):
        callbacks.append(callback)
