"""Tables on synthetic data, as their names state."""

from typing import Any

from benchmarks.utility.runs import Row, Setting

STEPS = 200  # of 256 posts: 1.3 epochs of 40,000


def adadps_toy() -> list[Row]:
    """AdaDPS's Figure 3, with the noise, clip norm, batch and steps of its authors' run: (4.13, 1e-3) by Renyi.

    The paper shows curves without figures. Each method has the rate with the lowest training loss, from one run each of
    four rates (0.1 to 1 for DP-SGD, 0.05 to 0.5 for AdaDPS; 0.01 and 0.03 for DP-Adam). As in the paper, epsilon does
    not cover this choice.
    """

    def run(label: str, method: str, **options: Any) -> Setting:
        return Setting(
            label=label,
            task="synthetic-regression",
            method=method,
            options=options,
            l2_clip_norm=0.5,
            noise_multiplier=0.7,
            delta=1e-3,
            expected_batch_size=8,
            steps=2_250,
        )

    settings = [
        run("DP-SGD", "DP-SGD", learning_rate=0.1),
        run("DP-Adam", "DP-Adam", learning_rate=0.01),
        run("AdaDPS, frequencies known", "AdaDPS", learning_rate=0.2, scale="side information"),
    ]
    return [Row("AdaDPS, toy regression (synthetic)", setting, None) for setting in settings]


def tags() -> list[Row]:
    """SYNTHETIC posts of the size of StackOverflow's tags: 10,000 words, 500 tags, 5,000,500 parameters.

    There is no published figure for these. Word frequencies come from the 1% of the posts that are public, or from a
    release of noisy counts that epsilon covers.

    Rates were chosen on held-out training posts, from single runs of half as many steps: among three for DP-SGD (200 to
    2,000), DP-Adam (0.3 to 1), DP-AdamBC (0.05 to 0.2) and AdaDPS (30 to 200). DP-MicroAdam's was tried once. DP2's
    first phase has DP-SGD's rate; the second phase's was not tried.
    """

    def run(label: str, method: str, clip: float, task_options: dict[str, Any] | None = None, **options: Any):
        return Setting(
            label=label,
            task="synthetic-tags",
            task_options=task_options or {},
            method=method,
            options=options,
            l2_clip_norm=clip,
            noise_multiplier=0.95,  # AdaDPS's for StackOverflow
            delta=2e-5,
            expected_batch_size=256,
            steps=STEPS,
        )

    public = {"public_share": 0.01, "frequency": "public"}
    released = {"frequency": {"release": 20.0}}
    fixed = {"scale": "side information", "learning_rate": 200.0}
    two = {"adaptive_learning_rate": 10.0, "adaptive_l2_clip_norm": 1.0, "eps": 1e-4}
    settings = [
        run("DP-SGD", "DP-SGD", 0.1, learning_rate=200.0),
        run("DP-Adam", "DP-Adam", 0.1, learning_rate=0.5),
        run("AdaDPS, frequency in 1% public", "AdaDPS", 1.0, public, **fixed),
        run("AdaDPS, frequency released privately", "AdaDPS", 1.0, released, **fixed),
        run("DP2-RMSProp", "DP2", 0.1, learning_rate=200.0, delay=25, **two),
        run("DP-AdamBC", "DP-AdamBC", 0.1, learning_rate=0.1, gamma=1e-8),
        run("DP-MicroAdam", "DP-MicroAdam", 0.1, learning_rate=0.3),
    ]
    return [Row("Synthetic tags (no StackOverflow data)", setting, None) for setting in settings]


def rows() -> list[Row]:
    """The runs of all tables of this module."""
    return adadps_toy() + tags()
