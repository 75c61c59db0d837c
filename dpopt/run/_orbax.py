"""Numbered checkpoints in a folder, saved and loaded by orbax: trees of arrays and PRNG keys, each with a description.

Nothing but `dpopt.run.checkpoint` imports this module, which needs orbax.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpopt.common.types import PyTree
from dpopt.engines.batches import is_key

try:
    import orbax.checkpoint as ocp
    from etils import epath
except ImportError as error:
    raise ImportError("dpopt.run.checkpoint needs orbax: pip install 'dpopt[checkpoint]'.") from error


class Folder:
    """A folder of checkpoints, which orbax writes aside and renames when they are complete. It need not exist.

    `save`, `set_aside` and ``in`` open the folder, and orbax then removes incomplete checkpoints: no other process may
    be writing.
    """

    def __init__(self, path: Path, *, keep: int, asynchronous: bool):
        self.path = path
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=asynchronous, cleanup_tmp_directories=True
        )
        self._opened: ocp.CheckpointManager | None = None

    def open(self) -> ocp.CheckpointManager:
        """Opens the folder, unless it is open."""
        if self._opened is None:
            self._opened = ocp.CheckpointManager(self.path, options=self._options, item_names=("state", "run"))
        return self._opened

    def positions(self) -> list[int]:
        """The numbers of the checkpoints, ascending. Changes nothing."""
        names = [path.name for path in self.path.glob("*")]
        return sorted(int(name) for name in names if name.isdecimal())  # longer while orbax writes it

    def __contains__(self, position: int) -> bool:
        return position in self.open().all_steps()

    def save(self, position: int, leaves: Mapping[str, jax.Array], description: Mapping[str, Any]) -> None:
        """Saves the `leaves_of` a tree, and a description that JSON can hold."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(leaves), run=ocp.args.JsonSave(description))
        self.open().save(position, args=args, force=True)

    def load(self, position: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """The tree and its description; shapes, dtypes, keys and shardings are those of ``like``.

        A process waits for no other, which may find that its own part is damaged: orbax's manager would wait for it."""
        leaves, structure = jax.tree.flatten(like)
        raw = [_raw(leaf) for leaf in leaves]
        target = {str(i): jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for i, x in enumerate(raw)}
        path = epath.Path(self.path / str(position))
        described = ocp.JsonCheckpointHandler().restore(path / "run", args=ocp.args.JsonRestore())
        loaded = ocp.StandardCheckpointHandler().restore(path / "state", args=ocp.args.StandardRestore(target))
        values = [_restored(loaded[str(i)], leaf) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, values), dict(described)

    def set_aside(self, positions: list[int]) -> None:
        """Moves checkpoints to ``damaged-<position>`` beside the folder."""
        if jax.process_index() == 0:
            for position in positions:
                target = self.path.parent / f"damaged-{position}"
                number = 1
                while target.exists():
                    number += 1
                    target = self.path.parent / f"damaged-{position}-{number}"
                (self.path / str(position)).rename(target)
        if positions:
            self.open().reload()

    def wait(self) -> None:
        """Returns when all saves are on disk; raises what orbax raised in the background."""
        if self._opened is not None:
            self._opened.wait_until_finished()
            self._opened.check_for_errors()

    def close(self) -> None:
        manager, self._opened = self._opened, None
        if manager is not None:
            manager.close()


def leaves_of(tree: PyTree) -> dict[str, jax.Array]:
    """Copies of the leaves of a tree, by number; typed keys as their bits, which every version of orbax can store."""
    return {str(i): jnp.copy(_raw(leaf)) for i, leaf in enumerate(jax.tree.leaves(tree))}


def _raw(x: Any) -> jax.Array:
    return jax.random.key_data(x) if is_key(x) else jnp.asarray(x)


def _restored(raw: jax.Array, like: Any) -> jax.Array:
    """The array in place of ``like``. One that may be on any device stays so: others may be on a mesh."""
    if not getattr(like, "committed", False):
        raw = jnp.asarray(np.asarray(raw))
    return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(like)) if is_key(like) else raw
