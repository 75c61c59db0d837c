"""Command line of the accountant: ``python -m dpopt epsilon``, ``calibrate`` and ``statement``."""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpopt import accounting
from dpopt.common import validate
from dpopt.events import compose, following, from_json
from dpopt.privacy import Privacy, Query, Relation
from dpopt.run import journal, statement
from dpopt.sampling import Poisson, WithoutReplacement


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 on success, or 2 after printing an error."""
    given = _parser().parse_args(arguments)
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            given.run(given)
        except (ValueError, TypeError, OSError, journal.JournalError) as raised:
            error = raised
    texts = [f"warning: {text}" for text in dict.fromkeys(str(w.message) for w in caught)]
    for text in [*texts, *([] if error is None else [str(error)])]:
        print(f"dpopt {given.command}: {text}", file=sys.stderr)
    return 0 if error is None else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dpopt", description="Privacy accounting for differentially private training."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--examples", type=int, required=True, help="number of training examples")
    run.add_argument("--batch-size", type=float, required=True, help="expected number of examples in a batch")
    length = run.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--epochs", type=float, help="instead of --steps: expected number of draws of each example")
    run.add_argument(
        "--sampling", choices=("poisson", "fixed"), default="poisson",
        help="Poisson samples (default), or batches of a fixed size, drawn without replacement",
    )  # fmt: skip
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--delta", type=float, help="default: 0.1 / (number of examples)")
    common.add_argument("--accountant", choices=("pld", "rdp"), help="default: pld, but rdp for --sampling fixed")
    common.add_argument("--json", action="store_true", help="print JSON")

    epsilon = commands.add_parser("epsilon", parents=[run, common], help="epsilon of a run")
    epsilon.add_argument("--noise-multiplier", type=float, required=True, help="noise stddev over clip norm")
    epsilon.set_defaults(run=_epsilon)
    calibrate = commands.add_parser("calibrate", parents=[run, common], help="smallest noise multiplier for a budget")
    calibrate.add_argument("--epsilon", type=float, required=True)
    calibrate.set_defaults(run=_calibrate)
    stated = commands.add_parser(
        "statement", parents=[common], help="a paragraph and a table on the privacy of a run, from its ledger.jsonl"
    )
    stated.add_argument("ledger", type=Path, help="ledger.jsonl, or the checkpoint directory of the run")
    stated.set_defaults(run=_statement)
    return parser


def _scheme(given: argparse.Namespace) -> Poisson | WithoutReplacement:
    validate.positive(batch_size=given.batch_size)
    validate.positive_int(examples=given.examples)
    if given.sampling == "poisson":
        return Poisson(given.batch_size / given.examples)
    if given.batch_size != int(given.batch_size):
        raise ValueError(f"--sampling fixed needs an integer --batch-size; got {given.batch_size}.")
    return WithoutReplacement(given.examples, int(given.batch_size))


def _steps(given: argparse.Namespace) -> int:
    if given.steps is None:
        validate.positive(epochs=given.epochs)
        return math.ceil(given.epochs * given.examples / given.batch_size)
    validate.positive_int(steps=given.steps)
    return given.steps


def _options(given: argparse.Namespace) -> dict[str, Any]:
    delta = _delta(given, given.examples)
    return {"delta": delta, "accountant": given.accountant or ("rdp" if given.sampling == "fixed" else "pld")}


def _delta(given: argparse.Namespace, num_examples: int) -> float:
    if given.delta is None:
        return 0.1 / num_examples
    validate.small_delta(given.delta, num_examples)
    return given.delta


def _epsilon(given: argparse.Namespace) -> None:
    validate.non_negative(noise_multiplier=given.noise_multiplier)
    event = compose(Privacy((Query(given.noise_multiplier),)), _scheme(given), _steps(given))
    found = statement.state(event, **_options(given))
    print(json.dumps(found.to_json(), indent=1) if given.json else found)


def _calibrate(given: argparse.Namespace) -> None:
    scheme, steps, options = _scheme(given), _steps(given), _options(given)
    sigma = accounting.calibrate_event(
        lambda sigma: compose(Privacy((Query(sigma),)), scheme, steps), epsilon=given.epsilon, **options
    )
    if given.json:
        print(json.dumps({"noise_multiplier": sigma, "epsilon": given.epsilon, "steps": steps, **options}, indent=1))
        return
    relation = "replacing" if scheme.relation is Relation.REPLACE_ONE else "adding or removing"
    budget = f"epsilon {given.epsilon:g} at delta {options['delta']!r}"
    print(f"noise multiplier {sigma!r}: {budget} after {steps} steps, for {relation} one example")


def _statement(given: argparse.Namespace) -> None:
    path = given.ledger / "ledger.jsonl" if given.ledger.is_dir() else given.ledger
    identity, ledger = journal.read(path)
    delta = _delta(given, identity["num_examples"])
    own = dict(unit=identity["unit"], correlation=identity.get("correlation"))
    earlier = from_json(identity["earlier"]) if "earlier" in identity else None
    found = statement.state(following(earlier, ledger.event), delta=delta, accountant=given.accountant, **own)
    print(json.dumps(found.to_json(), indent=1) if given.json else found)


if __name__ == "__main__":
    sys.exit(main())
