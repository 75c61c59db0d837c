"""Arguments that several commands share, and the errors that the command line prints without a traceback."""

import argparse
from pathlib import Path
from typing import Any

from benchmarks import records


class UserError(Exception):
    """An error that the user can fix. The command line prints its message and exits with status 2."""


class UsageError(UserError):
    """Arguments that do not fit together; the usage is printed as well."""


class _Count(argparse.Action):
    """An int of at least 1."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if values < 1:
            raise UsageError(f"{self.option_strings[0]} must be at least 1; got {values}")
        setattr(namespace, self.dest, values)


def count(parser: argparse.ArgumentParser, flag: str, default: int, help: str) -> None:
    """Adds an option that takes an int of at least 1."""
    parser.add_argument(flag, type=int, action=_Count, default=default, help=help)


def data(parser: argparse.ArgumentParser) -> None:
    """Adds ``--data``, the folder with the data sets."""
    parser.add_argument("--data", type=Path, help="folder with the data sets (default: DPOPT_DATA, then ./data)")


def out(parser: argparse.ArgumentParser, help: str = "folder for the JSON") -> None:
    """Adds ``--out``, the folder that results are written to."""
    parser.add_argument("--out", type=Path, default=records.LOCAL, help=help)
