"""``python -m tests.fuzz``: one program by its seed, or many with a record."""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import platform
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this program alone and print what it is")
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the record")
    parser.add_argument(
        "--optimized", type=float, default=0.1, help="share of programs compiled with all optimisations"
    )
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    given = parser.parse_args()
    import jax
    import jaxlib
    import numpy as np

    import dpopt

    from . import check, program

    if given.seed is not None:
        drawn, outcome = program.draw(given.seed), check.run(given.seed)
        print({k: v for k, v in vars(drawn).items() if k not in ("batches", "params", "scale", "offset")})
        print(outcome)
        return bool(outcome.failures)
    started, failures, worst = time.time(), [], 0.0
    kinds, features = collections.Counter(), collections.Counter()
    for seed in range(given.start, given.start + given.programs):
        outcome = check.run(seed, fast=seed % 100 >= 100 * given.optimized)
        kinds[outcome.kind] += 1
        features.update(outcome.features)
        worst = max(worst, outcome.worst)
        if outcome.failures:
            failures.append({"seed": seed, "features": outcome.features, "failures": outcome.failures})
            print(
                f"seed {seed} after {time.time() - started:.0f} s:", outcome.features, outcome.failures[:3], flush=True
            )
            if given.stop:
                break
        if seed % 200 == 0:
            jax.clear_caches()  # compiled programs would fill the memory
    record = {
        "programs": sum(kinds.values()), "first_seed": given.start, "outcomes": dict(kinds), "failures": failures,
        "worst": float(worst), "slack": check.SLACK, "seconds": round(time.time() - started),
        "versions": {"dpopt": dpopt.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__,
                     "numpy": np.__version__, "python": platform.python_version()},
        "features": dict(sorted(features.items())),
    }  # fmt: skip
    print({k: v for k, v in record.items() if k not in ("features", "failures")}, "failing:", len(failures))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
