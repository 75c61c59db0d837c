"""``python -m tests.fuzz``: one program by its seed, or many with a record."""

from __future__ import annotations

import argparse
import collections
import functools
import json
import multiprocessing
import os
import pathlib
import platform
import sys
import time
from typing import Any

# Before JAX starts, as the tests do: most programs are compiled for the check's sake.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

_TOGETHER = 25  # programs that a worker takes at a time


def _record(outcomes: list[Any], first: int, seconds: float) -> dict[str, Any]:
    import jax
    import jaxlib
    import numpy as np

    import dpopt

    from . import check

    failing = [o for o in outcomes if o.failures]
    return {
        "programs": len(outcomes),
        "first_seed": first,
        "exceeding": sum("moves the sum" in f for o in failing for f in o.failures[:1]),
        "worst": max(float(o.worst) for o in outcomes),
        "slack": check.SLACK,
        "outcomes": dict(collections.Counter(o.kind for o in outcomes)),
        "failing": [{"seed": o.seed, "failures": o.failures, "features": o.features} for o in failing],
        "optimized": sum(o.seed % check.OPTIMIZED == 0 for o in outcomes),
        "processor_seconds": round(sum(o.seconds for o in outcomes)),
        "seconds": round(seconds),
        "versions": {
            "dpopt": dpopt.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__,
            "numpy": np.__version__, "python": platform.python_version(),
        },
        "features": dict(sorted(collections.Counter(f for o in outcomes for f in o.features).items())),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this program alone and print what it is")
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--compared", type=int, default=1, help="compare one in so many with plain gradients")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="where to write the record, as it grows")
    given = parser.parse_args()
    from . import check, program  # workers import them from here, not from this file

    if given.seed is not None:
        hidden = ("batches", "params", "scale", "offset")
        print({k: v for k, v in vars(program.draw(given.seed)).items() if k not in hidden})
        outcome = check.several(range(given.seed, given.seed + 1))[0]
        print(outcome)
        return bool(outcome.failures)
    started, outcomes = time.time(), []
    end = given.start + given.programs
    parts = [range(s, min(s + _TOGETHER, end)) for s in range(given.start, end, _TOGETHER)]
    # Workers are renewed: compiled programs fill the memory.
    with multiprocessing.get_context("spawn").Pool(given.processes, maxtasksperchild=8) as pool:
        for part in pool.imap(functools.partial(check.several, compared=given.compared), parts):
            outcomes += part
            for o in part:
                if o.failures:
                    print(f"--seed {o.seed}: {o.failures[:2]} {o.features}", flush=True)
            record = _record(outcomes, given.start, time.time() - started)
            record["compared"] = sum(o.seed % given.compared == 0 for o in outcomes)
            if given.json:
                given.json.write_text(json.dumps(record, indent=1) + "\n")
    shown = ("programs", "exceeding", "worst", "outcomes", "processor_seconds", "seconds")
    print({k: record[k] for k in shown}, "failing:", len(record["failing"]))
    return bool(record["failing"])


if __name__ == "__main__":
    sys.exit(main())
