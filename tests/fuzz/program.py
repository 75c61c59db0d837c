"""A program drawn from a seed: a loss, parameters, batches of examples tame and wild, a diagonal, a clip, an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpopt

from . import layouts, losses, special, weights
from .losses import KINDS, D, T, V
from .weights import MULTIPLES, PAIRS, PRODUCTS, PROLOGUES

BATCH = 4
HALVES = ["bfloat16", "float16"]
# What a table looked up out of range and read out needs lies in two kinds at a time: they are drawn more often.
_HEADS: dict[str, Callable] = {
    "sum": lambda h, e: jnp.sum(h * e["u"]),
    "tanh": lambda h, e: jnp.sum(jnp.tanh(h) * e["u"]),
    "square": lambda h, e: jnp.sum((h - e["u"]) ** 2),
    "softmax": lambda h, e: jnp.sum(jax.nn.logsumexp(h + e["u"], axis=1)),
}
PENALIZED = 0.05  # the share of programs whose loss has a term of the parameters alone
MULTIPLIED = 0.05  # the share of weights without a prologue that are multiplied by a number
PAIRED = 0.05  # of those left, the share whose entries are sums or differences of two
MADE_OF_PRODUCTS = 0.05  # and the share of those left that are products of matrices
STOPPED = 0.05  # the share of layers whose output, besides, is used again as a constant
CROSSED = 0.05  # the share of programs that use a square matrix or filter in several ways more
COMPLEX = 0.05  # the share of programs that compute with complex numbers, too
EXPERTS = 0.05  # the share whose rows are sorted by expert and multiplied by `ragged_dot`
REORDERED = (
    0.05  # the share that reads its examples in another order, and uses its weights, or their statistics, in one
)
_ROWS = ["tame", "tiny", "huge", "spread", "beyond", "cancelling", "nan", "inf", "zero"]


@dataclass
class Program:
    """What is run, and which features it has."""

    seed: int
    loss: Callable
    params: dict[str, np.ndarray]
    batches: list[dict[str, np.ndarray]]
    tame: list[np.ndarray]  # rows of each batch whose arithmetic stays in range, [B] bool
    scale: Any
    offset: Any
    clip: Any
    engine: str
    microbatch_size: int | None
    is_jitted: bool
    is_precise: bool  # nothing is rounded to half precision on the way
    has_float64: bool  # needs `jax.enable_x64`
    features: list[str]


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = np.random.default_rng(seed)
    uses, params, features = [], {}, []
    for _ in range(rng.choice([1, 2, 3], p=[0.4, 0.4, 0.2])):
        kind = str(rng.choice(list(KINDS)))
        features.append(kind)
        names = []
        for shape in KINDS[kind][0]:
            same = [k for k, w in params.items() if w.shape == shape]
            if same and rng.random() < 0.5:
                names.append(str(rng.choice(same)))
                features.append("tied")
            else:
                names.append(f"w{len(params)}")
                params[names[-1]] = (rng.normal(size=shape) * 0.5).astype(np.float32)
        prologues = [str(rng.choice(list(PROLOGUES))) if rng.random() < 0.4 else "plain" for _ in names]
        features += [p for p in prologues if p != "plain"]
        prologues = _drawn(seed, [4, len(uses)], prologues, MULTIPLES, MULTIPLIED)
        prologues = _drawn(seed, [7, len(uses)], prologues, PRODUCTS, MADE_OF_PRODUCTS)
        prologues = _drawn(seed, [12, len(uses)], prologues, PAIRS, PAIRED)
        features += [p for p in prologues if p in MULTIPLES | PRODUCTS | PAIRS]
        uses.append((_stopped(seed, len(uses), KINDS[kind][1], features), list(zip(names, prologues, strict=True))))
    uses = special.of_complex(seed, COMPLEX, uses + _crossings(seed, params, features), params, features)
    uses = special.of_experts(seed, EXPERTS, uses, params, features)
    read, arranged = _orders(seed, features)
    head = str(rng.choice(list(_HEADS)))
    regularized = rng.random() < PENALIZED
    params, computed_in, casts_first = _dtypes(seed, params, features)

    def used_as(w, prologue):
        w = w.astype(computed_in) if casts_first else w
        return arranged((PROLOGUES | MULTIPLES | PRODUCTS | PAIRS)[prologue](w).astype(computed_in))

    def loss(params, e):
        e = {k: x.astype(computed_in) if jnp.issubdtype(x.dtype, jnp.floating) else x for k, x in e.items()}
        e = read(e)
        h = e["x"]
        for function, sources in uses:
            h = function(h, [used_as(params[name], p) for name, p in sources], e)
        value = e["m"] * _HEADS[head](h, e)
        return value + sum(jnp.sum(jnp.sin(w)) for w in params.values()) if regularized else value

    if rng.random() < 0.05:
        loss = jax.checkpoint(loss)
        features.append("remat_all")
    if rng.random() < 0.05:
        params["unused"] = np.ones(2, np.float32)
    scale, offset = _uneven(seed, _scale(rng, params, features), features), None
    if rng.random() < 0.25:
        features.append("offset")
        offset = {k: (rng.normal(size=w.shape) * 10.0 ** rng.choice([-6, -1, 0, 3])).astype(np.float32)
                  for k, w in params.items()}  # fmt: skip
    engine = str(rng.choice(["ghost", "auto", "vmap"], p=[0.8, 0.05, 0.15]))
    microbatch = 2 if rng.random() < 0.15 else None
    clip = _clip(rng, params)
    features += [head, type(clip).__name__, engine] + ["microbatch"] * (microbatch is not None)
    batches, tame = zip(*[_batch(rng, wild, features) for wild in (False, True, True)], strict=True)
    used = {*features}
    # Entries that are roundings and nothing else may be the largest under an uneven diagonal.
    precise = (
        "scale_uneven" not in used
        and used.isdisjoint({*HALVES, *KINDS, "complex"} - losses.PRECISE)
        and used.isdisjoint(set(PROLOGUES) - weights.PRECISE)
    )
    return Program(
        seed, loss, params, list(batches), list(tame), scale, offset, clip, engine, microbatch,
        rng.random() > 0.02, precise, "float64" in used, sorted(used),
    )  # fmt: skip


def _drawn(seed, stream, prologues, others, share):
    """Some of the weights that have no prologue with one of ``others``."""
    rng = np.random.default_rng([seed, *stream])  # like `_uneven`
    chosen = [str(rng.choice(list(others))) if rng.random() < share else "plain" for _ in prologues]
    return [own if p == "plain" else p for p, own in zip(prologues, chosen, strict=True)]


def _stopped(seed, layer, function, features):
    """A layer, or one whose output is used again behind ``stop_gradient``, as it is or in a loop."""
    rng = np.random.default_rng([seed, 6, layer])  # like `_uneven`
    if rng.random() >= STOPPED:
        return function
    features.append("stopped")

    def flat(h, w, e):
        return jax.lax.stop_gradient(function(h, w, e))

    if rng.random() < 0.5:
        return lambda h, w, e: function(flat(h, w, e), w, e) * flat(h, w, e)
    return lambda h, w, e: jax.lax.scan(lambda c, _: (c + flat(c, w, e), None), function(h, w, e), length=2)[0]


def _crossings(seed, params, features):
    """Uses of one weight of the program, or of one of its own, in two or three ways, as it is or through a prologue."""
    rng = np.random.default_rng([seed, 5])  # like `_uneven`
    if rng.random() >= CROSSED:
        return []
    name = str(rng.choice([*(k for k, w in params.items() if w.shape in losses.CROSSINGS), "crossed"]))
    if name == "crossed":
        shape = list(losses.CROSSINGS)[rng.integers(2)]
        params[name] = (rng.normal(size=shape) * 0.5).astype(np.float32)
    ways = losses.CROSSINGS[params[name].shape]
    chosen = rng.choice(len(ways), size=rng.integers(2, 4), replace=False)
    prologues = (
        ["plain"] * 2
        if rng.random() < 0.5
        else [str(p) for p in rng.choice([*PROLOGUES, *MULTIPLES, *PRODUCTS], size=2)]
    )
    features += ["crossed", *(p for p in prologues if p != "plain")]
    return [(ways[i], [(name, str(rng.choice(prologues)))]) for i in chosen]


def _orders(seed, features):
    """How a program reads its examples, and how it arranges its weights."""
    rng = np.random.default_rng([seed, 9])  # like `_uneven`
    if rng.random() >= REORDERED:
        return (lambda e: e), (lambda w: w)
    features.append("reordered")
    orders = {name: layouts.of_example(rng) for name in ("x", "u", "v", "ids") if name == "x" or rng.random() < 0.5}
    arranged = layouts.of_weight(rng) if rng.random() < 0.7 else lambda w: w
    return (lambda e: e | {name: order(e[name]) for name, order in orders.items()}), arranged


def _dtypes(seed, params, features):
    """The parameters, in one program of four each in a dtype of its own; the dtype that the loss computes in; and
    whether parameters are cast to it first of all."""
    rng = np.random.default_rng([seed, 3])  # like `_uneven`
    if rng.random() < 0.75:
        return params, "float32", False
    computed_in = str(rng.choice(["float32", "float32", "float64"]))
    drawn = {k: str(rng.choice(["float32", "float64", *HALVES])) for k in params}
    features += [f for f in (computed_in, *drawn.values()) if f != "float32"]
    return {k: w.astype(jnp.dtype(drawn[k])) for k, w in params.items()}, computed_in, rng.random() < 0.5


def _scale(rng, params, features):
    how = str(rng.choice(["none", "diagonal", "number", "large"], p=[0.5, 0.25, 0.15, 0.1]))
    if how == "none":
        return None
    features.append(f"scale_{how}")
    if how == "number":
        return {k: np.float32(rng.choice([-2, 0.5, 1e7, 1e25, 1e-20])) for k in params}
    size = 1.0 if how == "diagonal" else 10.0 ** rng.choice([-20, -7, 7, 21])
    return {k: (rng.uniform(0.5, 2, size=w.shape) * size).astype(np.float32) for k, w in params.items()}


def _uneven(seed, scale, features):
    """Some rows, columns or entries of a diagonal larger than others by far: where terms cancel, they may be these."""
    rng = np.random.default_rng([seed, 2])  # draws of its own: seeds whose diagonal stays give the program they gave
    if scale is None or not {"scale_diagonal", "scale_large"} & {*features} or rng.random() < 0.5:
        return scale
    features.append("scale_uneven")

    def uneven(w):
        axes = w.shape if rng.random() < 0.3 else [n if rng.random() < 0.5 else 1 for n in w.shape]
        larger = 10.0 ** (rng.uniform(0, 10) * (rng.random(axes) < 0.5))
        return np.minimum(w * larger, 1e25).astype(np.float32)

    return {k: uneven(w) for k, w in scale.items()}


def _clip(rng, params):
    how = rng.random()
    if how < 0.65:
        return dpopt.FlatClip(float(10.0 ** rng.choice([0, 0, 0, -3, 3, -9, -25])))
    if how < 0.85:
        return dpopt.clipping.NormalizedClip(
            float(rng.choice([1.0, 1e-6])), gamma=float(rng.choice([0.01, 1e-10, 1e-20]))
        )
    return dpopt.GroupClip({k: float(rng.choice([1.0, 0.1, 1e-12])) for k in params})


def _batch(rng, wild, features):
    """Examples of all sizes; one row is wild in one way, several in many."""
    rows, tame = [], []
    for _ in range(BATCH):
        kind = str(rng.choice(_ROWS)) if wild else "tame"
        row: dict[str, Any] = {
            "x": rng.normal(size=(T, D)), "u": rng.normal(size=(T, D)), "v": rng.normal(size=(T, V)), "m": 1.0,
            "ids": rng.integers(-1 if rng.random() < 0.3 else 0, V, size=T),
        }  # fmt: skip
        _make_wild(rng, kind, row, features)
        if wild:
            features.append(kind)
        rows.append(row)
        tame.append(kind in ("tame", "beyond", "zero"))
    stacked = {k: np.stack([np.asarray(r[k]) for r in rows]) for k in rows[0]}
    with np.errstate(over="ignore"):
        cast = {k: x.astype(np.int32 if k == "ids" else np.float32) for k, x in stacked.items()}
    return cast, np.array(tame)


def _make_wild(rng, kind, row, features):
    sizes = {"tiny": [-25, -22, -20, -19, -15, -8], "huge": [4, 8, 15, 19, 25, 30]}
    if kind in sizes:
        for name in ("x", "u", "v", "m"):
            if rng.random() < 0.5:
                row[name] = row[name] * 10.0 ** rng.choice(sizes[kind])
    elif kind == "spread":  # entries of all sizes
        for name in ("x", "u", "v"):
            row[name] = row[name] * 10.0 ** rng.integers(-22, 20, size=row[name].shape)
    elif kind == "beyond":
        row["ids"] = rng.choice([-V - 2, -V, -1, 0, V - 1, V, V + 3, 2**31 - 1, -(2**31)], size=T)
        large = 10.0 ** rng.choice([0, 3, 6])
        row["u"], row["v"] = row["u"] * large, row["v"] * large
    elif kind == "cancelling":  # positions whose gradients are large and cancel
        row["x"][1], row["ids"][1] = row["x"][0], row["ids"][0]
        row["u"][0] = row["u"][0] * 10.0 ** rng.choice([3, 6, 8])
        # In all columns, or in some: there roundings are left that an uneven diagonal may enlarge.
        equal = (row["u"][1] > 0) & (row["u"][1, 0] > 0) & ("scale_uneven" in features)
        row["u"][1] = np.where(equal, row["u"][0], -row["u"][0])
    elif kind in ("nan", "inf"):
        name = str(rng.choice(["x", "u", "v"]))
        row[name].reshape(-1)[rng.integers(row[name].size)] = {"nan": np.nan, "inf": np.inf}[kind]
    elif kind == "zero":
        row["m"] = 0.0
