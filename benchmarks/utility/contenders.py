"""A user's own optimizer as a contender: loaded by the path of its function, checked, and built like the others."""

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpopt
from benchmarks.arguments import UserError
from dpopt import events
from dpopt.privacy import Privacy

SIGNATURE = "(learning_rate, *, l2_clip_norm, noise_multiplier, expected_batch_size, key)"
# Optional arguments that it may have besides: the number of steps, and a strategy of `dpopt.correlated`.
OPTIONAL = ("steps", "noise")
METHOD = "module"  # the method of its settings
LEAST = 0.97  # of the target epsilon: with less, the budget would differ from the others'


class ContenderError(UserError, ValueError):
    """An optimizer cannot be a contender; the message tells its author why."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A function that returns an optimizer, with its attributes (``rates``, ``decay_to``)."""

    source: str  # path/to/module.py:function, or package.module:function
    make: Callable[..., Any]
    sha256: str  # of the source of its module, and of the file that defines it

    @property
    def label(self) -> str:
        """Its line in the tables."""
        return self.source.rpartition(":")[2]

    def takes(self, argument: str) -> bool:
        """Whether the function has a parameter of this name. ``**kwargs`` does not count."""
        return argument in inspect.signature(self.make).parameters

    def options(self, learning_rate: float) -> dict[str, Any]:
        """The options of a `Setting`."""
        decay_to = getattr(self.make, "decay_to", 0.0)
        return {
            "learning_rate": learning_rate,
            "decay_to": decay_to,
            "function": self.label,
            "sha256": self.sha256,
        }

    def build(self, options: Mapping[str, Any], *, steps: int, privacy_four: dict[str, Any]) -> dpopt.PrivateOptimizer:
        """The optimizer of one run, with the learning rate schedule of the shipped contenders."""
        rate, decay_to = options["learning_rate"], options["decay_to"]
        if decay_to is not None:
            rate = optax.linear_schedule(rate, rate * decay_to, steps)
        more = {"steps": steps} if self.takes("steps") else {}
        try:
            optimizer = self.make(rate, **privacy_four, **more)
        except Exception as error:
            raise ContenderError(f"{self.source} raised {_said(error)}{self._line(error)}.") from error
        if not isinstance(optimizer, dpopt.PrivateOptimizer):
            raise ContenderError(
                f"{self.source} must return a dpopt.PrivateOptimizer, which states its privacy; it returned "
                f"{_kind(optimizer)}. Put a rule after the noise with dpopt.chain(dpopt.privatize(...), rule)."
            )
        return optimizer

    def _line(self, error: Exception) -> str:
        """The line of its own module where the error arose."""
        file = inspect.getsourcefile(inspect.unwrap(self.make)) if inspect.isfunction(self.make) else None
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return f" (line {lines[-1]} of {Path(file).name})" if file and lines else ""

    def start(self, title: str, given: Sequence[str]) -> float:
        """The first of its candidate learning rates on a task.

        Args:
            title: of the table.
            given: ``["0.1"]``, or ``["imdb=15", "digits=0.25"]`` by part of a title. Otherwise the function's
                attribute ``rates`` applies, a number or a dictionary.
        """
        own = getattr(self.make, "rates", {})
        own = own if isinstance(own, Mapping) else {"": own}
        for rates in (_parsed(given), {str(k): v for k, v in own.items()}):
            for part, rate in sorted(rates.items(), key=lambda item: -len(item[0])):  # the most specific first
                if part.lower() in title.lower():
                    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
                        raise ContenderError(f"a learning rate must be a positive number; got {rate!r} for {title}.")
                    return float(rate)
        raise ContenderError(
            f"at which learning rate should {self.label} start on {title}? Pass --rates 0.1, or --rates imdb=15 "
            f"digits=0.25, or set {self.label}.rates: the candidates are that number times 1, 2, 4, ..."
        )

    def check(self) -> None:
        """Builds it once and rejects it if it cannot be compared with the others.

        Raises:
            ContenderError: if its signature, its privacy or its use of the key is wrong.
        """
        four = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 100}
        decay_to = getattr(self.make, "decay_to", 0.0)
        if decay_to is not None and not (isinstance(decay_to, int | float) and 0 <= decay_to < math.inf):
            raise ContenderError(
                f"{self.label}.decay_to must be the final share of the learning rate, or None for a constant rate; "
                f"got {decay_to!r}."
            )
        try:
            inspect.signature(self.make).bind(0.1, **four, key=0, **({"steps": 10} if self.takes("steps") else {}))
        except TypeError as error:
            raise ContenderError(
                f"{self.source} cannot be called as {self.label}{SIGNATURE}: {error}. It is "
                f"{self.label}{inspect.signature(self.make)}; other arguments than these need defaults, except steps."
            ) from error
        first, second = (
            self.build(self.options(0.1), steps=10, privacy_four=four | {"key": jax.random.key(seed)})
            for seed in (0, 1)
        )
        if not all(isinstance(getattr(tx, "privacy", None), Privacy) for tx in (first, second)):
            raise ContenderError(f"what {self.source} returns does not state its privacy: it has been taken apart.")
        if first.privacy.unit != "example":
            raise ContenderError(
                f"{self.source} states its privacy for one {first.privacy.unit}: it must be for one example."
            )
        try:
            dpopt.privacy_event(first, sampling=dpopt.PoissonSampler(1_000, 100, seed=0), steps=10)
        except Exception as error:
            raise ContenderError(
                f"the privacy of what {self.source} returns cannot be accounted for: {_said(error)}."
            ) from error
        params = {"w": jnp.zeros((2, 2))}
        try:
            # It is trained with a rate that JAX traces.
            jax.eval_shape(
                lambda rate: self.build(self.options(rate), steps=10, privacy_four=four | {"key": jax.random.key(0)})
                .init(params), 0.1
            )  # fmt: skip
            none = {"w": jnp.zeros((1, 2, 2))}
            drawn = [jax.tree.leaves(tx.update(none, tx.init(params), params)[0]) for tx in (first, second)]
        except ContenderError:
            raise
        except Exception as error:
            raise ContenderError(f"a step of {self.source} raised {_said(error)}.") from error
        if all(bool(jnp.all(a == b)) for a, b in zip(*drawn, strict=True)):
            raise ContenderError(f"{self.source} does not use its key: every seed would draw the same noise.")


def load(source: str) -> Contender:
    """The function at ``path/to/module.py:function`` or ``package.module:function``.

    Raises:
        ContenderError: if there is no such file, module or function.
    """
    place, colon, name = source.rpartition(":")
    if not (place and colon and name.isidentifier()):
        raise ContenderError(
            f"an optimizer is named path/to/module.py:function or package.module:function; got {source!r}."
        )
    module = _from_file(Path(place)) if place.endswith(".py") or "/" in place else _from_path(place)
    if not hasattr(module, name):
        own = [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise ContenderError(f"{place} has no {name}; its functions are: {', '.join(own) or 'none'}.")
    make = getattr(module, name)
    if not callable(make):
        raise ContenderError(f"{source} must be a function {SIGNATURE}; it is {_kind(make)}.")
    return Contender(source, make, _text(module, make))


@functools.lru_cache(maxsize=8)
def same(source: str, sha256: str) -> Contender:
    """The function that another process has loaded and checked; cached, since every run needs it.

    Raises:
        ContenderError: if its source has changed since; see also `load`.
    """
    found = load(source)
    if sha256 != found.sha256:
        raise ContenderError(f"{source} has changed since these runs began: start them again.")
    return found


def check_noise(label: str, event_at: Callable[[float], Any]) -> None:
    """Rejects an optimizer whose event does not depend on the noise multiplier: no noise would meet the target.

    Raises:
        ContenderError: if so.
    """
    if events.to_json(event_at(7.0)) == events.to_json(event_at(14.0)):
        raise ContenderError(
            f"{label} spends the same at noise multipliers of 7 and 14: its noise must follow noise_multiplier, so "
            "that any epsilon can be met."
        )


def noise_of(privacy: Privacy, steps: int) -> list[tuple[str | None, list[float]]]:
    """The strategy of every query, and its noise multiplier at some steps of a run."""
    at = 0, steps // 2, steps - 1
    return [(q.strategy.name if q.strategy else None, [q.multiplier(t) for t in at]) for q in privacy.queries]


def check_trained(label: str, trained: Privacy, stated: list[tuple[str | None, list[float]]], steps: int) -> None:
    """Rejects an optimizer that has other noise when it is trained, with a traced rate, than when it is accounted for.

    Raises:
        ContenderError: if so.
    """
    if (found := noise_of(trained, steps)) != stated:
        raise ContenderError(
            f"{label} has noise multipliers of {found} in training, and states {stated}: its noise may depend on "
            "nothing but its arguments."
        )


def check_spent(label: str, spent: float, asked: float, noise_multiplier: float) -> None:
    """Rejects an optimizer that spends more than the target, or so much less that the comparison would not be fair.

    Its noise is calibrated with its event at one learning rate.

    Raises:
        ContenderError: if so.
    """
    if not LEAST * asked <= spent <= asked * (1 + 1e-6):
        raise ContenderError(
            f"{label} spends epsilon {spent:.4g} at a noise multiplier of {noise_multiplier:.4g}; the target is "
            f"{asked:g}. What it spends must fall with noise_multiplier and depend on nothing else that varies here, "
            "such as the learning rate."
        )


def _from_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise ContenderError(f"there is no file {path}.")
    name = f"_contender_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # since the path ends with .py
    if str(path.parent) not in sys.path:  # so that it can import its neighbours, as under `python module.py`
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ContenderError(f"{path} cannot be imported: {_said(error)}.") from error
    return module


def _from_path(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ContenderError(
            f"{name} cannot be imported: {_said(error)}. A file is named by its path, with .py at the end."
        ) from error


def _text(*objects: Any) -> str:
    """A hash of the files that define these objects."""
    files = []
    for found in objects:
        while isinstance(found, functools.partial):
            found = found.func
        try:
            files.append(inspect.getsourcefile(inspect.unwrap(found)))
        except TypeError:  # it has no source file
            continue
    digest = hashlib.sha256()
    for file in dict.fromkeys(f for f in files if f is not None):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]


def _parsed(given: Sequence[str]) -> dict[str, float]:
    rates = {}
    for text in given:
        part, _, number = text.rpartition("=")
        try:
            rates[part] = float(number)
        except ValueError as error:
            raise ContenderError(f"--rates takes numbers, or imdb=15 for a task of its own; got {text!r}.") from error
    return rates


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}" if str(error) else type(error).__name__


def _kind(found: Any) -> str:
    if isinstance(found, optax.GradientTransformation):
        return "an Optax transformation, which does not"
    return f"a {type(found).__name__}" if found is not None else "None"
