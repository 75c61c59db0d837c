"""What a run leaves behind: JSON with everything needed to read it later, and where it was made."""

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("dpopt", "jax", "jaxlib", "optax", "flax", "dp-accounting", "numpy")
ROOT = Path(__file__).parent.parent  # where `python -m benchmarks` runs
RESULTS = Path(__file__).parent / "results"
LOCAL = RESULTS / "local"  # not committed


def environment(packages: Sequence[str] = PACKAGES, device: str | None = None) -> dict[str, Any]:
    """Versions and device of this process: the one that JAX uses, unless another is named."""
    if device is None:
        import jax  # here, since a comparison with torch runs without it

        first = jax.devices()[0]
        device = f"{first.platform}: {first.device_kind}"
    return {
        "versions": {name: metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "device": device,
        "cores": os.cpu_count(),
    }


def load(folder: Path, name: str) -> Any:
    """What a command left in ``NAME.json``, or None if it never ran."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def write_json(path: Path, content: Any) -> None:
    """Writes JSON whole or not at all, so that a killed run leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)
