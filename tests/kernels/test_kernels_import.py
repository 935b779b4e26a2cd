"""The package works without triton, and imports nothing of ours."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # import triton now raises ImportError
import torch
from megatron_rsi.kernels import linear_logprob, logprob, ppo_loss, tb_gae
out, _ = logprob(torch.zeros(1, 4), torch.tensor([1]))
assert abs(out.item() + 1.3862944) < 1e-6
try:
    logprob(torch.zeros(1, 4), torch.tensor([1]), impl="triton")
except ValueError as error:
    assert "triton is not installed" in str(error)
else:
    raise AssertionError("impl='triton' must be refused")
ours = {name.split(".")[1] for name in sys.modules if name.startswith("megatron_rsi.")}
assert ours == {"kernels"}, ours
"""


def test_import_and_run_without_triton():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
