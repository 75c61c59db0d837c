"""The command line of the benchmarks."""

import argparse
from pathlib import Path

from benchmarks import records


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of dpopt.")
    commands = parser.add_subparsers(dest="command", required=True)
    quickstart = commands.add_parser("quickstart", help="digits, small CNN, with and without privacy (minutes)")
    quickstart.add_argument("--seeds", type=int, default=3, help="runs per setting (default 3)")
    quickstart.add_argument("--out", type=Path, default=records.LOCAL, help="folder for JSON and plot")
    speed = commands.add_parser("speed", help="the clipped gradient against the ordinary one (minutes)")
    speed.add_argument("--only", help="part of a family's name")
    speed.add_argument("--others", action="store_true", help="also time optax.contrib and jax_privacy, if installed")
    speed.add_argument("--seconds", type=float, default=20.0, help="time to spend on each family (default 20)")
    speed.add_argument("--out", type=Path, default=records.LOCAL, help="folder for the JSON")
    options = parser.parse_args()
    if options.command == "speed":
        from benchmarks.speed import main as measure

        measure(options.out, options.only, options.others, options.seconds)
    if options.command == "quickstart":
        if options.seeds < 1:
            parser.error(f"--seeds must be at least 1; got {options.seeds}")
        from benchmarks.quickstart import main as run

        run(options.out, options.seeds)


if __name__ == "__main__":
    main()
