"""Several uses of one weight whose factors are joined: a search over ways to use a matrix, filter, table or tensor.

Uses look alike where their factors have one shape, but may arrange the weight differently (`contacts.usage`). Sizes are
drawn so that norms come from Gram matrices, from gradients formed together, and from the loop for rare examples.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_check import check, flat_clip, leaf_clip, random_like
from helpers import preferring, slow_unless
from jax import lax

from dpopt import ghost

B, N = 5, 6


def matrix(rng, w):
    """A product with the matrix or its transpose, which einsum writes without transposing anything."""
    spec = str(rng.choice(["ti,io->to", "ti,oi->to", "io,ti->ot", "oi,ti->ot"]))
    swapped = spec.startswith(("io", "oi"))
    return lambda x: jnp.sum(jnp.tanh(jnp.einsum(spec, *((w(), x) if swapped else (x, w())))) ** 2)


def filters(rng, w):
    """A convolution that takes its channels in either order, with steps, holes and feature groups."""
    order = str(rng.choice(["WIO", "WOI"]))
    step, hole = (int(i) for i in rng.integers(1, 3, 2))

    def use(x):
        numbers = ("NWC", order, "NWC")
        y = lax.conv_general_dilated(x[None], w(), (step,), "SAME", rhs_dilation=(hole,), dimension_numbers=numbers)
        return jnp.sum(jnp.tanh(y) ** 2)

    return use


def table(rng, w):
    """Rows, columns, or single entries of a table."""
    how, count = str(rng.choice(["rows", "columns", "columns last", "entries"])), int(rng.integers(1, 4))
    ids, others = rng.integers(0, N, (2, count))
    weight = rng.normal(size=N)

    def use(x):
        t, i = w(), (ids + jnp.abs(x[0, 0] * 10).astype(int)) % N
        found = {
            "rows": lambda: t[i] * weight, "columns": lambda: t[:, i].T * weight,
            "columns last": lambda: t.T[i] * weight, "entries": lambda: t[i, others],
        }[how]()  # fmt: skip
        return jnp.sum(found * x[0, 1])

    return use


def tensor(rng, w):
    """A product over some axes of an array of three, which others may transpose, or a look-up along one or two."""
    how = str(rng.choice(["last", "first two", "first two", "swapped", "first", "row", "column", "entry", "entry"]))
    ids = rng.integers(0, 6, 2)

    def use(x):
        t, z = w(), x[:, : 2 * 3].reshape(-1, 2, 3)
        i, j = (ids + jnp.abs(x[0, 0] * 10).astype(int)) % np.array([2, 3])
        found = {
            "last": lambda: jnp.einsum("ti,abi->tab", x, t),
            "first two": lambda: jnp.einsum("tab,abi->ti", z, t),
            "swapped": lambda: jnp.einsum("tab,bai->ti", z, t.transpose(1, 0, 2)),
            "first": lambda: jnp.einsum("ta,abi->tbi", x[:, :2], t),
            "row": lambda: t[i] * x[0], "column": lambda: t[:, j] * x[0], "entry": lambda: t[i, j] * x[0],
        }[how]()  # fmt: skip
        return jnp.sum(jnp.tanh(found) ** 2)

    return use


def vector(rng, w):
    """A product with a vector, or entries of it."""
    ids, is_product = rng.integers(0, N, int(rng.integers(1, 4))), rng.random() < 0.3

    def use(x):
        i = (ids + jnp.abs(x[0, 0] * 10).astype(int)) % N
        return jnp.sum(jnp.tanh(x @ w() if is_product else w()[i] * x[0, 1]) ** 2)

    return use


KINDS = {
    "matrix": (matrix, (N, N)), "filters": (filters, (3, N, N)), "table": (table, (N, N)),
    "tensor": (tensor, (2, 3, N)), "vector": (vector, (N,)),
}  # fmt: skip
GAINS = {
    "plain": lambda p: p["w"],
    "gain": lambda p: p["w"] * p["g"],  # pulled back
    "low rank": lambda p: p["w"] + (p["g"][:, None] * p["h"] if p["w"].shape[-2:] == (N, N) else p["g"] * p["h"]),
}


def drawn(rng, kind, alike=False):
    """A loss with its parameters and batch; ``alike``: every use is of one way, and of the weight unchanged."""
    use, shape = KINDS[kind]
    gain = GAINS["plain" if alike else str(rng.choice(list(GAINS)))]
    state = int(rng.integers(2**31))
    spans = [(int(rng.integers(0, 4)), int(rng.integers(6, 9))) for _ in range(rng.integers(2, 5))]
    params = {"w": rng.normal(size=shape), "g": rng.normal(size=N), "h": rng.normal(size=N)}
    x = rng.normal(size=(B, 9, N))
    if alike or rng.random() < 0.5:  # a layer beside it, so that there are two passes
        params["beside"] = rng.normal(size=(N, 2))

    def loss(p, x):
        own, once = np.random.default_rng(state), gain(p)
        total = jnp.sum(jnp.tanh(x @ p["beside"])) if "beside" in p else 0.0
        for low, high in spans:
            own = np.random.default_rng(state) if alike else own
            again = own.random() < 0.3  # the same weight, computed anew
            total = total + use(own, lambda again=again: gain(p) if again else once)(x[low:high])
        return total

    return loss, params, x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", slow_unless(range(2), range(60)))
@pytest.mark.one_in(12)
def test_uses_of_one_weight_equal_plain_gradients(seed, kind, x64):
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    loss, params, x = drawn(rng, kind)
    scale = random_like(params, seed) if rng.random() < 0.5 else None
    clips = (leaf_clip if rng.random() < 0.5 else flat_clip,)
    two_passes, method = rng.random() < 0.5, "segments" if kind in ("table", "vector") else "pairs"
    with jax.numpy_rank_promotion("allow"), preferring(method if rng.random() < 0.7 else ""):
        check(loss, params, x, scale=scale, clips=clips, two_passes=two_passes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", slow_unless(range(2), range(60)))
@pytest.mark.one_in(10)
def test_kept_gradients_of_all_uses_equal_plain_ones(seed, kind, x64):
    rng = np.random.default_rng([seed, 6, list(KINDS).index(kind)])
    loss, params, x = drawn(rng, kind)
    scale = random_like(params, seed) if rng.random() < 0.5 else None
    clips = (leaf_clip if rng.random() < 0.5 else flat_clip,)
    with jax.numpy_rank_promotion("allow"), preferring("joined"):
        assert any(len(own.contacts) > 1 for own in ghost.plan_clipped_sum(loss, params, x, scale=scale).joined)
        check(loss, params, x, scale=scale, clips=clips)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.slow
def test_a_diagonal_of_uses_that_are_alike(seed, kind, x64):
    """In two passes the diagonal of a table stays one, which otherwise multiplies rows as they are recorded."""
    loss, params, x = drawn(np.random.default_rng([seed, 5, list(KINDS).index(kind)]), kind, alike=True)
    with jax.numpy_rank_promotion("allow"), preferring("segments" if kind in ("table", "vector") else "pairs"):
        check(loss, params, x, scale=random_like(params, seed), clips=(flat_clip,), two_passes=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("method", ["", "joined"])
@pytest.mark.one_in(150)
def test_norms_of_rare_examples(seed, kind, method):
    """Gradients whose squares float32 cannot hold have their norms computed one by one."""
    size = 1e-25
    loss, params, x = drawn(np.random.default_rng([seed, 3, list(KINDS).index(kind)]), kind)
    with jax.numpy_rank_promotion("allow"), preferring(method):
        plain = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, x)
        norms = jax.tree.map(lambda g: np.linalg.norm(np.float64(g).reshape(B, -1), axis=1), plain)
        clip = 1e-3 * size
        got = jax.jit(
            lambda p, x: (
                ghost.clipped_sum(lambda p, x: size * loss(p, x), p, x, coefficients=leaf_clip(clip)).leaf_norms
            )
        )(params, x)
    for name, want in norms.items():
        clipped = want > 1e-2
        np.testing.assert_allclose(np.float64(got[name])[clipped] / size, want[clipped], rtol=1e-3)
