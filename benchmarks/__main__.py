"""The command line of the benchmarks: a list of commands, each of which brings its own arguments."""

import argparse
import importlib
import sys

from benchmarks.arguments import UsageError, UserError

# Module and help of each command. A module has `add_arguments(parser)` and `run(options)`.
COMMANDS = {
    "quickstart": ("quickstart", "digits, small CNN, with and without privacy (minutes)"),
    "speed": ("cost.speed", "the clipped gradient against the ordinary one (minutes)"),
    "zoo": ("zoo.command", "a clipped gradient's time and memory on models of all kinds (an hour)"),
    "large-batches": ("zoo.large_batches", "the same with as many examples as private training takes (minutes)"),
    "noise": ("cost.noise", "a draw of noise against JAX's own normals (a minute)"),
    "memory": ("cost.memory", "its peak memory against the ordinary one's (minutes)"),
    "accelerator": ("cost.accelerator", "a clipped gradient on a GPU or TPU, with large batches (minutes)"),
    "mesh": ("cost.mesh", "a clipped gradient of a batch sharded over simulated devices (minutes)"),
    "opacus": ("cost.opacus_speed", "Opacus against torch's ordinary gradient, where both are installed"),
    "imdb-speed": ("cost.imdb_speed", "a full private run on IMDB, and other engines beside it (minutes)"),
    "utility": ("utility.command", "the papers' tables on real data, and what beats them (hours)"),
    "tuning": ("utility.tuning", "what tuning costs on IMDB, unpaid and paid for (minutes)"),
    "lstm": ("utility.lstm", "DP-SGD on IMDB with an LSTM: what was tried (half an hour)"),
    "scaling": ("cost.scaling", "time and memory of a step as batch, model and sequence grow (minutes)"),
    "audit": ("audit.command", "lower bounds on epsilon by attack, of sound and broken builds (minutes)"),
    "users": ("utility.by_user", "MovieLens with privacy for a user and for a rating (minutes)"),
    "report": ("report.command", "writes RESULTS.md, its plots, and the figures of README and docs"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of dpopt.")
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {name: commands.add_parser(name, help=text) for name, (_, text) in COMMANDS.items()}
    name = next((argument for argument in sys.argv[1:2] if argument in COMMANDS), None)
    if name is None:
        parser.parse_args()  # prints the help, or what is wrong, and exits
        return
    # Only the module of the command that is called: together they take seconds to import.
    command = importlib.import_module(f"benchmarks.{COMMANDS[name][0]}")
    command.add_arguments(parsers[name])
    try:
        command.run(parser.parse_args())
    except UsageError as error:
        parser.error(str(error))
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
