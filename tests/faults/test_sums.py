"""Sums in float32 of many clipped gradients in an adverse order: one example moves them by C and the stated rounding.

Scripts: sumorder, sumorder2, autosum, shuffled. The rows (Casacuberta et al. 2022) are ones up to a power of two, then
numbers a little above half a unit in the last place of that sum. Added one after another each is rounded up to a whole
unit, and down to zero once a row is left out.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import paid, slow_unless
from hypothesis import given, settings
from hypothesis import strategies as st

import dpopt
from dpopt.engines import rounding, sums
from dpopt.ghost import large_sums, memory, streamed

CLIP = dpopt.FlatClip(1.0)
LIMIT = 1 + rounding.ROUNDING


def rows(levels, k0=12):
    """``(B,)`` float32, none above 1."""
    out = [1.0] * 2**k0
    for k in range(k0, k0 + levels):
        place, moved = 2.0 ** (k - 23), 2 ** (k - k0)
        out += [0.51 * place] * int(2 * moved / place)
        if k + 1 < k0 + levels:
            out += [1.0] * (2**k - 2 * moved)
    return np.array(out, np.float32)


def exact(found):
    """A clipped sum in float64, with its remainder."""
    leaves = [np.float64(x) for x in jax.tree.leaves(found.sum)]
    lost = [np.float64(x) for x in jax.tree.leaves(found.remainder)] or [0.0] * len(leaves)
    return np.concatenate([(x + r).ravel() for x, r in zip(leaves, lost, strict=True)])


def moved(loss, params, batch, left_out=0, scale=None, offset=None, read=exact, **options):
    """How far leaving one example out moves the clipped sum."""

    def clipped(batch, mask):
        grads = dpopt.per_example_grads(loss, **options)(params, batch, mask=mask)
        grads = grads if scale is None else grads.scale(scale)
        found = (grads if offset is None else grads.shift(offset)).clipped_sum(CLIP)
        return found._replace(sensitive=None)

    run, everyone = jax.jit(clipped), np.ones(len(jax.tree.leaves(batch)[0]), bool)
    return np.linalg.norm(
        read(run(batch, everyone)) - read(run(batch, everyone & (np.arange(len(everyone)) != left_out)))
    )


def value(found):
    return np.float64(jax.tree.leaves(found.sum)[0]).ravel()


def first_of(numbers, *shape):
    """Rows of this shape, zero except for the first entry."""
    x = np.zeros((len(numbers), *shape), np.float32)
    x.reshape(len(numbers), -1)[:, 0] = numbers
    return x


@pytest.mark.one_in(4)
@pytest.mark.parametrize("microbatch_size", [None, 1, 64])
def test_sumorder(microbatch_size):
    """5 levels move the sum of 86,000 rows by 32 C when it is added up one by one."""
    options = dict(engine="vmap", microbatch_size=microbatch_size)
    x = rows(5)[:, None]
    assert moved(lambda w, e: jnp.sum(w * e), jnp.zeros(1), x, **options) <= LIMIT
    assert moved(lambda w, e: jnp.sum(w * e), jnp.zeros(1), x, read=value, **options) <= 1.001


@pytest.mark.parametrize("engine", ["vmap", "ghost"])
@pytest.mark.parametrize("shape", [(1,), (64,), (16, 4)], ids=str)
@pytest.mark.parametrize("microbatch_size", slow_unless({None, 1000}, [None, 1, 1000]))
@pytest.mark.one_in(15)
def test_sumorder2(engine, shape, microbatch_size):
    options = dict(engine=engine, microbatch_size=microbatch_size)
    loss = (lambda w, e: w @ e) if len(shape) == 1 else (lambda w, e: jnp.sum(w * e))
    assert moved(loss, jnp.zeros(shape), first_of(rows(2), *shape), **options) <= LIMIT


@pytest.mark.slow
def test_autosum():
    """The default engine through ``dp_sgd``: the release moves by C (the noise is the same, and cancels)."""
    x = first_of(rows(3), 64)
    params, everyone = jnp.zeros(64), np.ones(len(x), bool)
    options = dict(noise_multiplier=8.0, expected_batch_size=1, key=jax.random.key(0))
    opt = dpopt.dp_sgd(1.0, l2_clip_norm=1.0, **options)
    step = jax.jit(dpopt.make_train_step(lambda w, e: w @ e, opt))
    a, b = (np.float64(step(params, opt.init(params), x, m)[0]) for m in (everyone, everyone & (np.arange(len(x)) > 0)))
    assert np.linalg.norm(a - b) <= 1.001


@pytest.mark.slow
def test_shuffled():
    """The same rows in the order of the sampler."""
    numbers = rows(3)
    for seed in range(2):
        order = dpopt.PoissonSampler(len(numbers), len(numbers), seed=seed).drawn(0)
        left_out = int(np.argmax(order == 0))
        assert moved(lambda w, e: w @ e, jnp.zeros(64), first_of(numbers[order], 64), left_out) <= LIMIT


def dense(params, e):
    """A matrix at one position, and a bias."""
    return jnp.sum(e @ params["w"]) + jnp.sum(e[:1] * params["b"])


def look_up(table, e):
    return jnp.sum(table[e[0].astype(jnp.int32)] * e[1])


def sequence(w, e):
    """A dense layer at four positions, whose gradients add up without cancelling."""
    return jnp.sum(e @ w)


def low_rank(params, e):
    return jnp.sum(e @ (params["a"] @ params["b"]))


N = rows(5)
CASES = {
    "matrix and bias": (dense, {"w": jnp.zeros((4, 3)), "b": jnp.zeros(1)}, first_of(N / 4, 4)),
    "table": (look_up, jnp.zeros((3, 2)), np.stack([np.ones_like(N), N / 2], 1)),
    "positions": (sequence, jnp.zeros((3, 2)), np.stack([first_of(N / 8, 3)] * 4, 1)),
    "pulled back": (low_rank, {"a": jnp.ones((4, 1)) / 4, "b": jnp.ones((1, 2)) / 2}, first_of(N / 4, 4)),
}


@pytest.mark.parametrize("microbatch_size", [None, 64])
@pytest.mark.parametrize("engine", ["ghost", "vmap"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_every_kind_of_contact(case, engine, microbatch_size):
    loss, params, batch = CASES[case]
    found = moved(loss, params, batch, engine=engine, microbatch_size=microbatch_size)
    assert 0.2 < found <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("case", ["matrix and bias", "table"])
def test_large_parameters(case, monkeypatch):
    """Which are added up on their own."""
    used = []
    for name in ("_of_rows", "_of_matrix"):
        run = getattr(large_sums, name)
        monkeypatch.setattr(large_sums, name, lambda *a, name=name, run=run: used.append(name) or run(*a))
    monkeypatch.setattr(large_sums, "_LARGE_BYTES", 16)
    monkeypatch.setattr(large_sums, "_PART_BYTES", 16)
    loss, params, batch = CASES[case]
    params = jnp.zeros((300, 2)) if case == "table" else params
    assert 0.2 < moved(loss, params, batch, engine="ghost") <= LIMIT
    assert set(used) == {"_of_rows" if case == "table" else "_of_matrix"}


@pytest.mark.parametrize("diagonal", slow_unless({True}, [False, True]))
def test_two_passes_on_many_devices(diagonal, monkeypatch):
    """Devices with 64 rows each add up at the contact, all together, unless there is a diagonal."""
    whole = []
    passes = streamed._two_passes
    monkeypatch.setattr(streamed, "_two_passes", lambda *a, **k: whole.append("whole" in k) or passes(*a, **k))
    monkeypatch.setattr(jax, "device_count", lambda: 256)
    monkeypatch.setattr(memory, "_SMALL_BYTES", 0)
    monkeypatch.setattr(memory, "_recorded", lambda *_: None)
    # 2^13 C, and then devices with a little more than the last place of that.
    batch = first_of(np.r_[np.ones(2**13), np.full(2**13, 1.02 * 2.0**-10 / 64)] / 4, 3)
    scale = jnp.full((3, 1), 0.7).at[0, 0].set(1) if diagonal else None
    batch = np.stack([batch] * 4, 1)
    assert 1 - 1e-6 <= moved(sequence, jnp.zeros((3, 1)), batch, engine="ghost", memory=1.0, scale=scale) <= LIMIT
    assert whole == [not diagonal]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_diagonals_and_offsets(engine):
    batch = first_of(N, 8)
    options = dict(engine=engine, scale=jnp.linspace(0.5, 2.0, 8), offset=jnp.full(8, 0.01))
    assert moved(lambda w, e: w @ e, jnp.zeros(8), batch, **options) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_size", [None, 100])
def test_one_gradient_that_is_not_finite(microbatch_size):
    """The ghost engine then computes the norms of the whole (micro)batch one example at a time."""
    batch = first_of(rows(1), 8)
    batch[17] = np.nan
    assert moved(lambda w, e: w @ e, jnp.zeros(8), batch, engine="ghost", microbatch_size=microbatch_size) <= LIMIT


def test_gradients_that_exist():
    x = first_of(N, 2)
    run = jax.jit(lambda g, m: dpopt.gradients.stacked_grads(g, mask=m).clipped_sum(CLIP)._replace(sensitive=None))
    everyone = np.ones(len(x), bool)
    a, b = (exact(run(x, m)) for m in (everyone, everyone & (np.arange(len(x)) > 0)))
    assert np.linalg.norm(a - b) <= LIMIT


def test_federated_rounds():
    numbers = rows(2)
    deltas = dpopt.federated.client_deltas(
        lambda w, x: w @ x, local_steps=1, local_learning_rate=1.0, microbatch_size=1000
    )
    run = jax.jit(lambda m: deltas(jnp.zeros(2), first_of(numbers, 2)[:, None], mask=m).clipped_sum(CLIP).sum)
    everyone = np.ones(len(numbers), bool)
    a, b = (np.float64(run(m)) for m in (everyone, everyone & (np.arange(len(numbers)) > 0)))
    assert np.linalg.norm(a - b) <= 1.001


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
@pytest.mark.parametrize(
    ("batch", "microbatch_size"), [(86, None), (87, None), (300, None), (512, 128), (640, None), (700, 100), (1000, 7)]
)
@pytest.mark.one_in(18)
def test_the_sum_is_the_sum(engine, batch, microbatch_size):
    """Blocks, groups, tails and microbatches against NumPy in float64."""
    rng = np.random.default_rng(batch)
    x = rng.normal(size=(batch, 5)).astype(np.float32)
    mask = rng.random(batch) < 0.9
    clipped = np.float64(x) * np.minimum(1, 1 / np.linalg.norm(np.float64(x), axis=1))[:, None]
    found = jax.jit(
        lambda x: dpopt.per_example_grads(lambda w, e: w @ e, engine=engine, microbatch_size=microbatch_size)(
            jnp.zeros(5), x, mask=mask
        ).clipped_sum(CLIP)
    )(x)
    np.testing.assert_allclose(exact(found), clipped[mask].sum(0), atol=2e-6 * np.sqrt(batch))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_the_rows_are_adverse(monkeypatch, microbatch_size):
    """Added up one after another they move the sum by more than C."""
    monkeypatch.setattr(rounding, "ROWS", 2**30)
    monkeypatch.setattr(rounding, "lost", lambda rows, *counts: 0)
    options = dict(engine="ghost", microbatch_size=microbatch_size)
    assert moved(lambda w, e: w @ e, jnp.zeros(8), first_of(rows(2), 8), **options) > 1.5


def test_an_infinite_sum_stays_infinite():
    a = sums.Sum(jnp.array([jnp.inf, 3e38, 1.0]), jnp.zeros(3))
    found = sums.add(a, sums.Sum(jnp.array([1.0, 3e38, 2.0**-30])))
    assert found.value.tolist() == [jnp.inf, jnp.inf, 1.0] and found.remainder.tolist() == [0.0, 0.0, 2.0**-30]


def test_pairs_of_floats_lose_next_to_nothing():
    """Against float64, in a compiled loop: fails if the compiler simplifies the remainder to zero."""
    numbers = rows(3)
    run = jax.jit(
        lambda x: jax.lax.scan(
            lambda t, v: (sums.add(t, sums.Sum(v)), None), sums.Sum(jnp.zeros(()), jnp.zeros(())), x
        )[0]
    )
    total = run(numbers)
    assert abs(np.float64(total.value) + np.float64(total.remainder) - np.float64(numbers).sum()) < 1e-6
    naive = jax.jit(lambda x: jax.lax.scan(lambda t, v: (t + v, None), jnp.zeros(()), x)[0])
    assert abs(np.float64(naive(numbers)) - np.float64(numbers).sum()) > 1, "these rows are adverse"


def test_what_is_lost_reaches_the_noise():
    """``hi + (lo + noise)``: noise that cancels the sum leaves its remainder."""
    noise = dpopt.add_gaussian_noise(1.0, jax.random.key(0))
    total, state = jnp.zeros(3), noise.init(jnp.zeros(3))
    z, _ = noise.update(total, state)
    noisy, _ = noise.update(sums.Sum(-z, jnp.full(3, 2.0**-20)), state)
    np.testing.assert_allclose(noisy, 2.0**-20, rtol=0.1)


def test_rounding_is_paid_for():
    opt = dpopt.privatize(l2_clip_norm=0.7, noise_multiplier=1.3, expected_batch_size=4, key=jax.random.key(0))
    assert opt.privacy.step_event().noise_multiplier == pytest.approx(paid(1.3), rel=1e-15)
    assert rounding.ROUNDING == 2.4375 * 2.0**-12


@pytest.mark.slow
def test_floats_are_used_where_the_bound_holds():
    """Neighbours differ in a row of one block, and in every sum of blocks after it; both may be rounded either way."""
    paid_for = rounding.ROUNDING * 2**24 - 1024 - 188
    floats = [
        (rows, blocks)
        for rows in range(1, 120)
        for blocks in range(1, 120)
        if sums.zero(jnp.zeros(()), rows, blocks).remainder is None
    ]
    assert (rounding.ROWS, rounding.BLOCKS) in floats
    for rows, blocks in floats:
        in_a_block = sum(range(2, rows + 1)) + sum(range(2, rows))  # a partial sum of k rows rounds by u k C
        over_blocks = 2 * sum(k * rows for k in range(2, blocks + 1))
        behind_a_diagonal = 2 * blocks * rows
        assert in_a_block + over_blocks + behind_a_diagonal <= paid_for, (rows, blocks)


@pytest.mark.parametrize("devices", [1, 2, 8, 64])
@pytest.mark.slow
def test_floats_add_up_groups_where_the_bound_holds(devices, monkeypatch):
    """Of a batch, or of each of several parts of one, which are added up after it, and of each device's share."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    paid_for, in_floats = rounding.ROUNDING * 2**24 - 1024 - 188, 0
    for size in [*range(1, 700), *range(700, 1300, 50)]:
        share = size // sums.shares(size)
        if devices == 1:
            assert sums.needs_remainder(size) == (rounding.levels(size) is None)
        for parts in range(1, 20):
            if sums.zero_for_parts(jnp.zeros(()), size, parts).remainder is not None:
                continue
            rows, blocks, groups = rounding.levels(share)
            length = -(-share // groups)
            assert rows <= rounding.ROWS and rows * blocks >= length
            in_a_block = sum(range(2, rows + 1)) + sum(range(2, rows))
            # Sums of this many, of this many rows each.
            behind = [(blocks, rows), (groups, length), (size // share, share), (parts, size)]
            over_sums = 2 * sum(k * own for count, own in behind for k in range(2, count + 1))
            assert in_a_block + over_sums + 2 * parts * size <= paid_for, (size, parts)
            in_floats += parts > 1
    assert in_floats > 100
    assert rounding.lost(*rounding.levels(512)) == 4096 + 256 + 2304 + 1024, "the example of `ROUNDING`"


@pytest.mark.parametrize("size", [87, 172, 259, 300, 512, 640, 648, 700])
def test_blocks_are_added_up_group_by_group(size):
    """Blocks of whole numbers are exact; what the sums of them lose is that of NumPy's floats, in the same order."""
    rng = np.random.default_rng(size)
    rows, _, groups = rounding.levels(size)
    length = -(-size // groups)
    starts = np.minimum(np.arange(groups) * length, size - length)
    x, c = np.zeros((size, 50), np.float32), np.ones(size, np.float32)
    total = np.float32(0)
    for i, start in enumerate(starts):
        own = slice(max(start, i * length), start + length)
        ends = np.arange(start + length, start, -rows)[::-1]
        group = np.float32(0)
        for first, end in zip([own.start, *ends], ends, strict=False):
            x[first:end] = rng.integers(1, 100, (end - first, 50)) * np.float32(2.0 ** rng.integers(-30, 1))
            group = group + x[first:end].sum(0)
        total = total + group
    added = jax.jit(lambda x, c: sums.over_examples(lambda x, c: sums.in_blocks(lambda x, c: c @ x, x, c), x, c))
    np.testing.assert_array_equal(added(x, c).value, total)
    assert size < 259 or np.any(total != x.astype(np.float64).sum(0)), "these rows are adverse"


@pytest.mark.parametrize("seed", range(4))
def test_parts_are_added_up_as_wholes(seed):
    """JAX 0.10 added a product to the sum of the parts before it row by row, which rounds at every row."""
    rng = np.random.default_rng(seed)
    x = (rng.integers(1, 100, (8, 64, 50)) * 2.0 ** rng.integers(-20, 1, (8, 1, 1))).astype(np.float32)
    parts = jax.jit(
        lambda x, c: jax.lax.scan(lambda t, x: (sums.add(t, sums.Sum(c @ x)), None), sums.Sum(jnp.zeros(50)), x)[0]
    )
    total = np.float32(0)
    for part in x:
        total = total + part.sum(0)
    np.testing.assert_array_equal(parts(x, np.ones(64, np.float32)).value, total)
    assert np.any(total != x.astype(np.float64).sum((0, 1))), "these rows are adverse"


@pytest.mark.slow
@given(size=st.integers(1, 1300))
@settings(max_examples=30, deadline=None)
def test_every_row_is_added_once(size):
    """Groups of blocks have equal lengths, so the last one may begin among rows that have been added."""
    rng = np.random.default_rng(size)
    x, c = (rng.integers(1, 100, shape).astype(np.float32) for shape in ((size, 3), (size, 3)))  # c: for three layers

    def added(x, c):
        return sums.over_examples(lambda x, c: sums.in_blocks(lambda x, c: jnp.sum(c * x, axis=0), x, c), x, c)

    np.testing.assert_array_equal(jax.jit(added)(x, c).value, np.sum(c.astype(np.float64) * x, axis=0))


def test_devices_share_rows_as_the_bound_allows(monkeypatch):
    """One share per device if floats can add them up; otherwise few shares, whose sums are sent to all devices."""
    for devices in (1, 2, 3, 8, 64, 256):
        monkeypatch.setattr(jax, "device_count", lambda n=devices: n)
        for size in [*range(1, 1100, 7), 64, 86, 128, 176, 512, 704, 4096]:
            count, common = sums.shares(size), np.gcd(size, devices)
            assert common % count == 0, (size, devices)
            assert size // count <= rounding.ROWS or count == common
            if count not in (1, common):
                assert sums.zero(jnp.zeros(()), size // common, common).remainder is not None
                assert all(size // n > rounding.ROWS for n in range(1, count) if common % n == 0)
    assert sums.shares(512) == 8  # two rows on each of 256 devices


def test_pages_state_what_is_lost():
    root = pathlib.Path(__file__).parents[2]
    pages = "SECURITY.md", "CHANGELOG.md", "docs/privacy_argument.md", "docs/concepts.md", "dpopt/clipping.py"
    for page in pages:
        text = (root / page).read_text()
        assert f"{rounding.ROUNDING:.1e}".replace("e-0", "e-") in text, page
    assert f"per block of {rounding.ROWS}" in (root / "SECURITY.md").read_text()
    most = next(n for n in range(1, 2000) if rounding.levels(n + 1) is None)
    assert f"Sums of up to {most} examples" in (root / "CHANGELOG.md").read_text()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("precision", ["default", "tensorfloat32"])
def test_the_weighted_sum_is_taken_at_full_precision_on_accelerators(precision):
    """The model's own products may have any precision: here two forward, and one back to the hidden layer."""

    def loss(params, e):
        hidden = jax.lax.conv_general_dilated(e[None], params["k"], (1, 1), "SAME")
        return jnp.sum(jnp.tanh(hidden.reshape(4, -1) @ params["w"]) ** 2)

    def clipped(params, batch):
        return dpopt.per_example_grads(loss, engine="ghost")(params, batch, mask=None).clipped_sum(CLIP).sum

    params, batch = {"k": jnp.ones((4, 2, 3, 3)), "w": jnp.ones((64, 5))}, jnp.ones((70, 2, 8, 8))
    with jax.default_matmul_precision(precision):
        program = jax.export.export(jax.jit(clipped), platforms=["cuda"])(params, batch).mlir_module()
    products = [x for x in program.splitlines() if "stablehlo.dot_general" in x or "stablehlo.convolution" in x]
    assert sum("HIGHEST" not in x for x in products) == 3 and len(products) >= 7
