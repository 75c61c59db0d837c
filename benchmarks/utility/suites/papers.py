"""The papers' own tables: their settings and published figures."""

import dataclasses
from typing import Any

from benchmarks.utility.runs import Row, Setting
from benchmarks.utility.suites import networks, synthetic

IMDB_STEPS = 39_000  # 100 epochs of 25,000 reviews at B = 64: 390 steps an epoch


def _imdb(
    label: str, method: str, clip: float, *, task_options: dict[str, Any] | None = None, **options: Any
) -> Setting:
    return Setting(
        label=label,
        task="imdb",
        task_options=task_options or {},
        method=method,
        options=options,
        l2_clip_norm=clip,
        noise_multiplier=1.0,
        delta=1e-5,
        expected_batch_size=64,
        steps=IMDB_STEPS,
    )


def _movielens(label: str, method: str, clip: float, *, task_options: dict[str, Any] | None = None, **options: Any):
    return Setting(
        label=label,
        task="movielens",
        # The paper does not state how factors are initialised.
        task_options={"positive": True} | (task_options or {}),
        method=method,
        options=options,
        l2_clip_norm=clip,
        noise_multiplier=0.5,
        delta=1e-6,
        expected_batch_size=64,
        steps=62_500,  # 50 epochs of 80,000 ratings
    )


PUBLIC = {"public_share": 0.01}
TWO_PHASES = {"learning_rate": 0.1, "adaptive_learning_rate": 3.0, "adaptive_l2_clip_norm": 5.0, "eps": 1e-7}


def dp2_imdb() -> list[Row]:
    """DP2's Table 1 on IMDB."""
    table = "DP2 Table 1, IMDB"
    return [
        Row(table, _imdb("DP-SGD", "DP-SGD", 0.5, learning_rate=5.0), 0.687),
        Row(table, _imdb("DP-RMSProp", "DP-RMSProp", 0.1, learning_rate=0.3, eps=1e-3), 0.713),
        Row(table, _imdb("PDA-DPMD, 1% public", "PDA-DPMD", 0.5, task_options=PUBLIC, learning_rate=5.0), 0.703),
        Row(table, _imdb("AdaDPS, 1% public", "AdaDPS", 5.0, task_options=PUBLIC, learning_rate=1.0, eps=1e-3), 0.826),
        Row(table, _imdb("DP2-RMSProp", "DP2", 0.5, delay=195, **TWO_PHASES), 0.815),
    ]


def dp2_movielens() -> list[Row]:
    """DP2's Table 1 on MovieLens: the mean squared error, not half of it."""
    table = "DP2 Table 1, MovieLens"
    two = {"adaptive_l2_clip_norm": 5.0, "adaptive_learning_rate": 0.03, "eps": 1e-3}
    public = {"learning_rate": 0.01, "eps": 1e-2}
    return [
        Row(table, _movielens("DP-SGD", "DP-SGD", 1.0, learning_rate=0.1), 3.02),
        Row(table, _movielens("DP-RMSProp", "DP-RMSProp", 0.5, learning_rate=0.001, eps=1e-3), 2.96),
        Row(table, _movielens("PDA-DPMD, 1% public", "PDA-DPMD", 1.0, task_options=PUBLIC, learning_rate=0.1), 3.74),
        Row(table, _movielens("AdaDPS, 1% public", "AdaDPS", 10.0, task_options=PUBLIC, **public), 2.86),
        Row(table, _movielens("DP2-RMSProp", "DP2", 1.0, learning_rate=0.1, delay=31_250, **two), 2.78),
    ]


def dp2_ablations() -> list[Row]:
    """DP2's two variants on IMDB: a second query per step (which costs privacy), and noise before the diagonal."""
    table = "DP2 ablations, IMDB"
    extra = {"learning_rate": 3.0, "adaptive_learning_rate": 0.1, "adaptive_l2_clip_norm": 2.0, "eps": 1e-7}
    first = {"learning_rate": 0.3, "adaptive_learning_rate": 0.3, "eps": 1e-3}
    return [
        Row(table, _imdb("DP2-RMSProp", "DP2", 0.5, delay=195, **TWO_PHASES), 0.815),
        Row(table, _imdb("extra query", "DP2, extra query", 0.5, delay=780, **extra), 0.799),
        Row(table, _imdb("noise first", "DP2, noise first", 0.25, delay=780, **first), 0.643),
    ]


def dp2_delay() -> list[Row]:
    """DP2's Figure 6: the delay before the diagonal is refreshed."""
    table = "DP2, delay, IMDB"
    delays = (20, 65, 195, 390, 780, 1_950, 3_900)
    return [Row(table, _imdb(f"delay {s}", "DP2", 0.5, delay=s, **TWO_PHASES), None) for s in delays]


def adadps_imdb() -> list[Row]:
    """AdaDPS's table on IMDB, at a quarter of the epochs: epsilon (RDP) is near the paper's 1.5.

    The paper clips means of four reviews; here every review is clipped, since epsilon is for one review.
    """
    table = "AdaDPS, IMDB"
    short = {"steps": IMDB_STEPS // 4}
    public = {"public_share": 0.01}
    frequency = public | {"frequency": "public"}
    fixed = {"scale": "side information", "learning_rate": 1.0}
    released = {"frequency": {"release": 100.0}}
    rows = [
        (_imdb("DP-SGD", "DP-SGD", 0.5, learning_rate=5.0), 0.63),
        (_imdb("DP-Adam", "DP-Adam", 0.5, learning_rate=0.02), 0.69),
        (_imdb("DP-RMSProp", "DP-RMSProp", 0.1, learning_rate=0.3, eps=1e-3), 0.67),
        (_imdb("AdaDPS, 1% public", "AdaDPS", 5.0, task_options=public, learning_rate=1.0, eps=1e-3), 0.80),
        (_imdb("AdaDPS, frequency in 1% public", "AdaDPS", 5.0, task_options=frequency, **fixed), 0.75),
        (_imdb("AdaDPS, frequency released privately", "AdaDPS", 5.0, task_options=released, **fixed), None),
        (
            _imdb(
                "AdaDPS, frequency not covered by epsilon", "AdaDPS", 5.0, task_options={"frequency": "train"}, **fixed
            ),
            0.75,
        ),
        (
            _imdb("AdaDPS, TF-IDF, 1% public", "AdaDPS", 5.0, task_options=frequency | {"kind": "tf-idf"}, **fixed),
            0.80,
        ),
    ]
    return [Row(table, dataclasses.replace(s, **short), published) for s, published in rows]


def adam_bc() -> list[Row]:
    """DP-AdamBC against DP-Adam: the correction, its floor gamma, and a wrong Phi (its Figure 5)."""
    table = "DP-AdamBC, IMDB"
    adam = _imdb("DP-Adam", "DP-Adam", 0.5, learning_rate=0.02)
    rows = [Row(table, adam, None)]
    for gamma in (1e-9, 1e-8, 1e-7, 1e-6):
        label = f"DP-AdamBC, gamma {gamma:g}"
        rows.append(Row(table, _imdb(label, "DP-AdamBC", 0.5, learning_rate=0.002, gamma=gamma), None))
    for factor in (0.0, 0.5, 1.5):
        # Phi = factor (sigma C / B)^2, instead of factor 1.
        after = {"kind": "adam_bc", "gamma": 1e-7, "noise_stddev": factor**0.5 * 0.5 / 64}
        options = {"before": {}, "after": after, "learning_rate": 0.002}
        rows.append(Row(table, _imdb(f"Phi times {factor:g}, gamma 1e-07", "combination", 0.5, **options), None))
    return rows


def micro_adam() -> list[Row]:
    """DP-MicroAdam against the others at several noise multipliers, and at several densities."""
    table = "DP-MicroAdam, IMDB"
    rows = []
    for sigma in (0.7, 1.0, 2.0):
        for base in (
            _imdb("DP-SGD", "DP-SGD", 0.5, learning_rate=5.0),
            _imdb("DP-Adam", "DP-Adam", 0.5, learning_rate=0.02),
            _imdb("DP-AdamBC", "DP-AdamBC", 0.5, learning_rate=0.002, gamma=1e-7),
            _imdb("scale-then-privatise", "scale-then-privatise", 0.5, learning_rate=0.02),
            _imdb("DP-MicroAdam", "DP-MicroAdam", 0.5, learning_rate=0.01),
        ):
            label = f"sigma {sigma:g}, {base.label}"
            rows.append(Row(table, dataclasses.replace(base, label=label, noise_multiplier=sigma), None))
    for density in (0.001, 0.1):
        options = {"learning_rate": 0.01, "density": density}
        rows.append(
            Row(table, _imdb(f"sigma 1, DP-MicroAdam, density {density:g}", "DP-MicroAdam", 0.5, **options), None)
        )
    return rows


def micro_adam_density() -> list[Row]:
    """DP-MicroAdam's accuracy against the size of its state: the share of a gradient kept, and for how many steps.

    DP-Adam, with two numbers for every coordinate, is the reference.
    """
    table = "DP-MicroAdam, density and memory, IMDB"
    rows = [Row(table, _imdb("DP-Adam", "DP-Adam", 0.5, learning_rate=0.02), None)]
    for density in (0.001, 0.01, 0.1):
        options = {} if density == 0.01 else {"density": density}  # the default: the same run as in other tables
        setting = _imdb(f"density {density:g}, 10 rows", "DP-MicroAdam", 0.5, learning_rate=0.01, **options)
        rows.append(Row(table, setting, None))
    for memory in (5, 20):
        setting = _imdb(f"density 0.01, {memory} rows", "DP-MicroAdam", 0.5, learning_rate=0.01, memory_size=memory)
        rows.append(Row(table, setting, None))
    return rows


def rows() -> list[Row]:
    """The runs of all tables of the suite."""
    tables = (dp2_imdb, dp2_movielens, dp2_ablations, dp2_delay, adadps_imdb, adam_bc, micro_adam, micro_adam_density)
    own = [row for table in tables for row in table()]
    return own + networks.rows() + synthetic.rows()
