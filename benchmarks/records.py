"""What a run leaves behind: JSON with everything needed to read it later, and where it was made."""

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("dpopt", "jax", "jaxlib", "optax", "flax", "dp-accounting", "numpy")
LOCAL = Path(__file__).parent / "results" / "local"  # not committed


def environment() -> dict[str, Any]:
    """Versions and device of this process."""
    device = jax.devices()[0]
    return {
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "device": f"{device.platform}: {device.device_kind}",
        "cores": os.cpu_count(),
    }


def write_json(path: Path, content: Any) -> None:
    """Writes JSON whole or not at all, so that a killed run leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)
