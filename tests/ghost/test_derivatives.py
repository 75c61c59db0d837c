"""Uses of weights through which a loss has no derivative: a search over ways to put them behind ``stop_gradient``.

They must have no contacts: as many as if these uses read weights of another model, which count as constant.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ghost_check import check, flat_clip, leaf_clip
from jax import lax

import dpopt
from dpopt.ghost.trace import trace_loss

B, T, N = 5, 3, 4
FLAT = {"stop_gradient": lax.stop_gradient, "floor": lambda x: jnp.floor(4 * x) / 4, "sign": jnp.sign}
INSIDE = {
    "as it is": lambda f, w, h: f(w, h),
    "jit": lambda f, w, h: jax.jit(f)(w, h),
    "remat": lambda f, w, h: jax.checkpoint(f)(w, h),
    "scan": lambda f, w, h: lax.scan(lambda h, _: (f(w, h), None), h, length=2)[0],
    "outputs of a scan": lambda f, w, h: jnp.mean(lax.scan(lambda c, x: (c + f(w, x), f(w, x)), 0 * h, h[None])[1], 0),
    "vmap": lambda f, w, h: jax.vmap(lambda row: f(w, row[None])[0])(h),
    "cond": lambda f, w, h: lax.cond(h[0, 0] > 0, f, lambda w, h: 2 * f(w, h), w, h),
}


def _use(w, h):
    return jnp.tanh(h @ w)


def drawn(rng):
    """A loss of weights that are used, and of weights that flat uses read; they may be the same."""
    steps = []
    for _ in range(rng.integers(2, 5)):
        name, way = f"w{rng.integers(2)}", INSIDE[str(rng.choice(list(INSIDE)))]
        flat = FLAT[str(rng.choice(list(FLAT)))] if rng.random() < 0.6 else None
        steps.append((name, way, flat, rng.random() < 0.5))

    def model(used, read, x):
        h = x
        for name, way, flat, is_around in steps:
            if flat is None:
                h = h + way(_use, used[name], h)
            elif is_around:  # the whole loop
                h = h + flat(way(_use, read[name], h))
            else:  # within it
                h = h + way(lambda w, h, flat=flat: flat(_use(w, h)), read[name], h)
        return h

    def loss(used, read, x):
        return jnp.sum(model(used, read, x) ** 2) + jnp.vdot(used["w0"], used["w1"])

    params = {f"w{i}": jnp.asarray(rng.normal(size=(N, N))) for i in range(2)}
    return loss, params, jnp.asarray(rng.normal(size=(B, T, N)))


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.one_in(80)
def test_flat_uses_have_no_contacts_and_change_no_gradient(seed, x64):
    rng = np.random.default_rng(seed)
    loss, params, x = drawn(rng)
    found = trace_loss(lambda p, x: loss(p, p, x), params, x[0])
    wanted = trace_loss(lambda p, x: loss(p, params, x), params, x[0])
    assert [c.weight.leaves for c in found.contacts] == [c.weight.leaves for c in wanted.contacts]
    check(lambda p, x: loss(p, p, x), params, x, clips=(leaf_clip if rng.random() < 0.5 else flat_clip,))


def test_a_loop_carries_derivatives_from_one_step_to_the_next(x64):
    """Only the last step's carry is read, and the state reaches it after as many steps as there are carries."""

    def loss(w, x):
        def step(carry, _):
            a, b, _ = carry
            return (jnp.tanh(x @ w), a, b), None

        return jnp.sum(lax.scan(step, (x, x, x), length=4)[0][2])

    w, x = jnp.eye(N), jnp.ones((T, N))
    assert len(trace_loss(loss, w, x).contacts) == 1
    check(loss, w, jnp.asarray(np.random.default_rng(0).normal(size=(B, T, N))))


def test_auxiliary_outputs_need_no_contacts():
    def loss(p, x):
        return jnp.sum(x @ p["used"]), jnp.sum(x @ p["used"] @ p["reported"])

    params = {"used": jnp.ones((N, N)), "reported": jnp.ones((N, N))}
    assert len(trace_loss(loss, params, jnp.ones((T, N)), has_aux=True).contacts) == 1


def test_a_search_that_is_not_differentiated_may_be_a_while_loop(x64):
    """A fixed point found by iteration, then one step that is differentiated."""

    def loss(w, x):
        step = lambda z: 0.5 * jnp.tanh(z @ w) + x  # noqa: E731
        z = lax.while_loop(lambda s: s[1] < 20, lambda s: (step(s[0]), s[1] + 1), (x, 0))[0]
        return jnp.sum(step(lax.stop_gradient(z)) ** 2)

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s)) for s in ((N, N), (B, T, N)))
    check(loss, w, x)
    assert "ghost" in str(dpopt.explain(loss, w, x[0], batch_size=64))
