"""What each rank of these tests' jobs runs: it says where it is, and exits with its argument."""

import sys

import numpy as np

from tf_adasum import core

total = core.allreduce(np.full(3, core.rank() + 1.0), "sum")[0]
place = f"rank {core.rank()} of {core.size()}, local {core.local_rank()} of {core.local_size()}"
sys.stdout.write(f"{place}, sum {total:g}\n")
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
