"""The part of table2_local_steps.py that is timed; started by it under mpirun.

The ResNet learns Fashion-MNIST with AdasumOptimizer, once for each of --local-steps, in turns of an
epoch, as in two_hosts_training.py. Rank 0 prints a line of JSON for each epoch.
"""

from __future__ import annotations

import argparse

import lenet
import report
import resnet
import two_hosts_training

from tf_adasum.demo_report import Settings

TEST_IMAGES = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local-steps", type=report.integers, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--train-images", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    options = parser.parse_args()
    two_hosts_training.start()
    settings = Settings(batch_size=options.batch, learning_rate=resnet.BASE_RATE)
    data, test = (
        (images[:number], labels[:number])
        for (images, labels), number in zip(
            lenet.load("fashion_mnist"), (options.train_images, TEST_IMAGES), strict=True
        )
    )
    trainings = [
        two_hosts_training.prepare(local_steps, data, settings, resnet.model)
        for local_steps in options.local_steps
    ]
    two_hosts_training.take_turns(trainings, options.epochs, test)


if __name__ == "__main__":
    main()
