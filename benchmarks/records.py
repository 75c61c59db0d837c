"""Records of runs: JSON files, and the versions and device that they came from."""

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
    """Versions and device of this process; the device is JAX's, unless one is given."""
    if device is None:
        import jax  # here, since the comparison with Opacus runs without JAX

        first = jax.devices()[0]
        device = f"{first.platform}: {first.device_kind}"
    return {
        "versions": {name: metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "device": device,
        "cores": os.cpu_count(),
    }


def load(folder: Path, name: str) -> Any:
    """The content of ``NAME.json``, or None if there is no such record."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def write_json(path: Path, content: Any) -> None:
    """Writes JSON whole or not at all, so that a killed run leaves no partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)
