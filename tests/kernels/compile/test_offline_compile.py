"""Every kernel configuration compiles for each target; on Hopper none spills and the table of usage does not grow.

The table, sm_90.json, is written anew by: KERNELS_COMPILE=1 python tests/kernels/compile/test_offline_compile.py
"""

import json
from pathlib import Path

import pytest
from offline import SHARED_MEMORY_BYTES, compile_all, usage

TABLE = Path(__file__).with_name("sm_90.json")


@pytest.fixture(scope="module")
def hopper():
    return {name: usage(kernel) for name, kernel in compile_all("sm_90").items()}


def test_hopper_spills_nothing_and_fits(hopper):
    for name, used in hopper.items():
        assert used.stack_bytes == 0 and used.local_memory == 0, (name, used)
        assert used.registers <= 255 and used.shared_bytes <= SHARED_MEMORY_BYTES["sm_90"], (name, used)


def test_hopper_uses_tensor_cores_and_tma(hopper):
    linear = {name: used for name, used in hopper.items() if name.startswith("linear_logprob")}
    assert len(linear) == 8
    for name, used in linear.items():
        assert used.tma_loads > 0, (name, used)
        assert used.wgmma > 0 or "float32" in name, (name, used)  # float32 stays exact, on the plain cores


def test_hopper_usage_is_the_committed_table(hopper):
    committed = json.loads(TABLE.read_text())
    assert set(committed) == set(hopper), "configurations changed: write the table anew (see above)"
    for name, used in hopper.items():
        row = committed[name]
        assert used.registers <= row["registers"] + 8, (name, used, row)
        assert used.shared_bytes <= row["shared_bytes"], (name, used, row)


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_other_targets_compile_and_fit(target):
    compiled = compile_all(target)
    assert len(compiled) == 19
    for name, kernel in compiled.items():
        assert str(kernel.metadata.target.arch) in target, name  # not another target's code out of a cache
        assert kernel.metadata.shared <= SHARED_MEMORY_BYTES[target], name
        assert kernel.asm["cubin" if target.startswith("sm_") else "hsaco"], name


if __name__ == "__main__":
    table = {name: usage(kernel)._asdict() for name, kernel in compile_all("sm_90").items()}
    TABLE.write_text("{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table.items()) + "\n}\n")
    print(TABLE.read_text())
