"""Baselines and ablations from the papers, for comparisons; for training use the optimizers of `dpopt`.

* `dp_r_pub`, `dp_adam_pub`, `pda_dpmd`: public gradients without AdaDPS's preconditioner;
* `dp2_noise_first`, `dp2_extra_query`: DP2 with the noise before the preconditioner, or with a second query;
* `precondition_after_noise`, `scale_by_public_adam`, `blend_public_gradients`, `extra_query`: the parts.
"""

from dpopt.optimizers.baselines.after_noise import precondition_after_noise
from dpopt.optimizers.baselines.noise_first import dp2_noise_first
from dpopt.optimizers.baselines.public import (
    blend_public_gradients,
    dp_adam_pub,
    dp_r_pub,
    pda_dpmd,
    scale_by_public_adam,
)
from dpopt.optimizers.baselines.two_queries import dp2_extra_query, extra_query

__all__ = [
    "blend_public_gradients",
    "dp2_extra_query",
    "dp2_noise_first",
    "dp_adam_pub",
    "dp_r_pub",
    "extra_query",
    "pda_dpmd",
    "precondition_after_noise",
    "scale_by_public_adam",
]
