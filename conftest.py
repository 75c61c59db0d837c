"""Set before JAX starts: tests compile thousands of tiny programs, and optimising them takes longer than running them.

``JAX_DISABLE_MOST_OPTIMIZATIONS=0 make test`` runs the same tests on fully optimised programs.
"""

import os

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
