"""The pairs of benchmarks.kernels under pytest-benchmark, for its history and comparison of one machine over time.

    pip install -e '.[bench]'
    pytest benchmarks/bench_kernels.py --benchmark-autosave --benchmark-compare

The ratio against a peer is measured by ``python -m benchmarks.kernels``, which alternates the two; here each stands alone.
"""

import time

import pytest
import torch

from benchmarks.kernels import all_pairs

torch.set_num_threads(1)
torch.manual_seed(0)
PAIRS = all_pairs(small=True)


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize("who", ["ours", "peer"])
@pytest.mark.parametrize("pair", PAIRS, ids=[f"{pair.name} vs {pair.peer}" for pair in PAIRS])
def test_pair(benchmark, pair, who):
    benchmark.group = f"{pair.name} vs {pair.peer}"
    benchmark(pair.ours_run if who == "ours" else pair.peer_run)
