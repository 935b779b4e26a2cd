"""How often the adoption gate rolls back a stage that is truly worse, by simulation.

    python -m benchmarks.gate

Every task has its own chance of success, drawn so that the mean is ``before``; the worse stage has ``drop`` less on average.
Attempts are independent draws, as at temperature 1.
"""

from __future__ import annotations

import argparse

import numpy as np

from megatron_rsi.gate import decide


def rolled_back(before: float, drop: float, tasks: int, samples: int, share: float, trials: int, seed: int = 0) -> float:
    """Share of ``trials`` in which a stage ``drop`` worse than ``before`` (mean strict success) is rolled back."""
    rng, count = np.random.default_rng(seed), 0
    for _ in range(trials):
        chance = rng.beta(2 * before, 2 * (1 - before), tasks)
        lower = np.clip(chance * (1 - drop / before), 0, 1)
        rates = [rng.binomial(samples, p) / samples for p in (chance, lower)]
        earlier, after = ({f"t{n}": float(r) for n, r in enumerate(side)} for side in rates)
        count += not decide(earlier, after, share).adopted
    return count / trials


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--tasks", type=int, default=128)
    arguments = parser.parse_args()
    share = 0.05 / 4
    print(f"% of {arguments.trials} worse stages rolled back: {arguments.tasks} tasks, success .80 before, alpha .05 / 4")
    print("attempts a task  comparisons  " + "  ".join(f"drop {d:>2}" for d in (0, 5, 10, 15, 20)))
    for samples in (1, 2, 4):
        for comparisons in (1, 4):
            cells = [
                rolled_back(0.8, drop / 100, arguments.tasks, samples, share / comparisons, arguments.trials)
                for drop in (0, 5, 10, 15, 20)
            ]
            print(f"{samples:>15}  {comparisons:>11}  " + "  ".join(f"{100 * c:7.0f}" for c in cells))


if __name__ == "__main__":
    main()
