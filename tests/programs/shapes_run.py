"""Clipped sums with every stated shape checked by beartype: run by tests/engines/test_shapes.py."""

from jaxtyping import install_import_hook

MODULES = [f"dpopt.engines.{name}" for name in ("blocks", "norms", "stacked", "sums")]
MODULES += [f"dpopt.ghost.{name}" for name in ("large_sums", "leaf_norms", "norms", "weighted_sum")]

with install_import_hook(MODULES, "beartype.beartype"):
    import jax
    import jax.numpy as jnp
    import numpy as np

    import dpopt
    from dpopt import ghost
    from dpopt.engines import norms, sums

RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def dense(params, example):
    x, y = example
    return jnp.sum((jnp.tanh(x @ params["w"]) + params["b"]) * y)


def convolution(params, example):
    x, y = example
    out = jax.lax.conv_general_dilated(x[None], params["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.sum((out[0] + params["b"][None, None]) * y)


def embedding(params, example):
    ids, y = example
    return jnp.sum(params["w"][ids] * y) + jnp.sum(params["b"] * y[0])


def layers(params, example):
    x, y = example
    return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x + params["b"][None], params["w"])[0] * y)


B = 5
CASES = [
    (dense, {"w": normal(4, 3), "b": normal(3)}, (normal(B, 4), normal(B, 3))),
    (dense, {"w": normal(4, 3), "b": normal(1, 3)}, (normal(B, 7, 4), normal(B, 7, 3))),
    (convolution, {"w": normal(3, 3, 2, 4), "b": normal(4)}, (normal(B, 6, 6, 2), normal(B, 6, 6, 4))),
    (embedding, {"w": normal(9, 3), "b": normal(3)}, (jnp.asarray(RNG.integers(0, 9, (B, 7))), normal(B, 7, 3))),
    (layers, {"w": normal(2, 3, 3), "b": normal(3)}, (normal(B, 4, 3), normal(B, 4, 3))),
]


def streamed(loss, params, batch, scale):
    """Traces the sum in two passes, and in one."""
    for limits in ([], [0.5, 0.5]):
        plan = ghost.plan_clipped_sum(loss, params, batch, scale=scale)
        plan = plan.streaming(ghost.single_parameters(plan, limits, []))
        ghost.clipped_sum(
            loss,
            params,
            batch,
            coefficients=lambda leaf_norms: jax.tree.map(lambda n: norms.shrink_to(0.5, n), leaf_norms),
            scale=scale,
            plan=plan,
            limits=limits,
        )


def main():
    jax.config.update("jax_numpy_rank_promotion", "allow")
    for loss, params, batch in CASES:
        clips = [dpopt.FlatClip(0.5), dpopt.GroupClip({"w": 0.5, "b": 0.5})]
        if loss is layers:
            clips.append(dpopt.LayerwiseClip(0.5, scanned={"w": True, "b": False}))
        diagonal = jax.tree.map(lambda p: 0.5 + jnp.abs(p), params)
        for scale in (None, diagonal, jax.tree.map(lambda p: jnp.float32(2), params)):
            for shift in (None, params):
                for engine in ("vmap", "ghost"):
                    for clip in clips:
                        grads = dpopt.per_example_grads(loss, engine=engine)(params, batch, mask=jnp.arange(B) != 2)
                        grads = grads if scale is None else grads.scale(scale)
                        grads = grads if shift is None else grads.shift(shift)
                        jax.eval_shape(lambda grads=grads, clip=clip: grads.clipped_sum(clip).sum)
            jax.eval_shape(lambda *args, loss=loss: streamed(loss, *args), params, batch, scale)

    # More rows than floats add up, in microbatches of which the last is padded, with a bad row.
    loss, params, _ = CASES[0]
    for rows, engine in [(300, "vmap"), (300, "ghost"), (90, "ghost")]:
        batch = (normal(rows, 4).at[3, 0].set(jnp.nan), normal(rows, 3))
        for microbatch_size in (None, 40):
            grads = dpopt.per_example_grads(loss, engine=engine, microbatch_size=microbatch_size)
            jax.eval_shape(lambda b, g=grads: g(params, b, mask=None).clipped_sum(dpopt.FlatClip(0.5)).sum, batch)

    try:
        sums._add(jnp.ones(2), jnp.ones(2), jnp.ones(3), jnp.ones(2))
    except Exception as error:  # beartype names the class
        assert "TypeCheck" in type(error).__name__, error
        print("checked")


if __name__ == "__main__":
    main()
