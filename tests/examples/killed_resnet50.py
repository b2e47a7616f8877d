"""resnet50_imagenet.py, whose last rank is killed when an epoch begins.

mpirun -np 2 python killed_resnet50.py EPOCH ARGUMENTS...
"""

import os
import runpy
import signal
import sys

import running

import tf_adasum as adasum

epoch_of_death = int(sys.argv.pop(1))
callbacks = running.load("resnet50.callbacks")


def die(self, epoch, logs=None):
    if epoch + 1 == epoch_of_death and adasum.rank() == adasum.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


callbacks.StopAt.on_epoch_begin = die
runpy.run_path(str(running.EXAMPLES / "resnet50_imagenet.py"), run_name="__main__")
