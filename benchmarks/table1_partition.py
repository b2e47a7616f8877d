"""The parallelised update (the paper's section 4.3 and Table 1): memory and time of a model update.

Four ranks hold a set of layers with BERT's shapes, each gets a gradient for all of them, and the
update of the weights by Adam is timed, from when all ranks begin until the slowest is done: the
reduction of gradients or changes, the optimizer, the sync. Once with `partition_state`, and once
without, where each rank updates all layers by itself and the changes are combined with
`algorithm="hierarchical"`; in turns, in the same processes, with local_steps=1. The ranks are one
host, or two pretended ones of two ranks each (`TF_ADASUM_RANKS_PER_HOST`), with memory for messages
within a host and MPI between them.

The paper's Table 1: BERT-Large in PyTorch on 4 V100 of 16 GB. The update took 1.82 s and 0.97 s
partitioned (1.87 times faster); the memory that it freed let the microbatch grow from 22 to 36, and
the throughput from 154.7 to 168.5 samples a second.

Scaled down: processors instead of GPUs, and where four ranks of BERT-Large (340 million weights) do
not fit into memory, BERT-Base (110 million). With fewer cores than ranks, ranks take turns.

Takes 7 minutes on 2 cores with BERT-Base, with --quick (a small model) half a minute. Run
`make build` before.

    python benchmarks/table1_partition.py
    python benchmarks/table1_partition.py --model large --optimizer lamb
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import jobs
import report
from table1_partition_training import MODELS, shapes_of, weights_of

from tf_adasum import launch

TRAINING = Path(__file__).with_name("table1_partition_training.py")
RANKS = 4
PAPER = {"update seconds": (1.82, 0.97), "microbatch": (22, 36), "samples/s": (154.7, 168.5)}
# Weights, gradients, start and two moments, of each rank; buffers beside that.
COPIES = RANKS * 6


def fitting_model() -> str:
    """The largest one of which four whole replicas fit into most of the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "large" if 4 * weights_of("large") * COPIES < 0.9 * memory else "base"


def measure(model: str, optimizer: str, ranks_per_host: int, rounds: int) -> dict[str, Any]:
    command = [*launch.mpirun_command(RANKS), sys.executable, str(TRAINING)]
    results = jobs.run(
        [*command, "--model", model, "--optimizer", optimizer, "--rounds", str(rounds)],
        900,
        environ={"TF_ADASUM_RANKS_PER_HOST": str(ranks_per_host)},
    )
    memory = {r["partition_state"]: r["state_bytes"] for r in results if "state_bytes" in r}
    seconds = {False: [], True: []}
    for result in results:
        if "seconds" in result:
            seconds[result["partition_state"]].append(result["seconds"])
    ratios = [whole / part for whole, part in zip(seconds[False], seconds[True], strict=True)]
    return {
        "ranks_per_host": ranks_per_host,
        "seconds": {
            "whole": statistics.median(seconds[False]),
            "partitioned": statistics.median(seconds[True]),
            "all": {"whole": seconds[False], "partitioned": seconds[True]},
        },
        "speedup": statistics.median(ratios),
        "state_bytes": {"whole": memory[False], "partitioned": memory[True]},
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, help="default: the largest that fits")
    parser.add_argument("--optimizer", choices=["adam", "lamb"], default="adam")
    parser.add_argument("--rounds", type=int, default=9, help="updates of each kind (9)")
    options = parser.parse_args()
    model = "tiny" if options.quick else options.model or fitting_model()
    rounds = 3 if options.quick else options.rounds
    weights = weights_of(model)
    largest = 4 * max(map(math.prod, shapes_of(model)))
    print(report.describe())
    print(f"{weights / 1e6:.0f} million weights ({model}), {options.optimizer}, {RANKS} ranks")
    progress = report.Progress(2)
    placements = []
    for ranks_per_host in (4, 2):
        placements.append(measure(model, options.optimizer, ranks_per_host, rounds))
        progress.advance(_name(ranks_per_host))
    progress.close()
    print(
        report.format_table(
            ["", "update, s", "partitioned, s", "faster", "state, MB a rank", "partitioned, MB"],
            [
                [
                    _name(p["ranks_per_host"]),
                    report.number(p["seconds"]["whole"]),
                    report.number(p["seconds"]["partitioned"]),
                    f"{p['speedup']:.2f}x",
                    f"{max(p['state_bytes']['whole']) / 1e6:.0f}",
                    f"{max(p['state_bytes']['partitioned']) / 1e6:.0f}",
                ]
                for p in placements
            ]
            + [["paper, 4 V100", "1.82", "0.97", "1.87x", "-", "-"]],
        )
    )
    print(
        "State: the optimizer's moments and the start of the window. Largest layer: "
        f"{largest / 1e6:.0f} MB of weights."
    )
    figures = {
        "model": model,
        "weights": weights,
        "largest_layer_bytes": largest,
        "optimizer": options.optimizer,
        "ranks": RANKS,
        "placements": placements,
        "paper": PAPER,
    }
    print(report.write("table1_partition", options.output, figures))


def _name(ranks_per_host: int) -> str:
    return " + ".join([str(ranks_per_host)] * (RANKS // ranks_per_host)) + " ranks"


if __name__ == "__main__":
    main()
