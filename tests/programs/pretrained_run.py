"""Private fine-tuning of the tiny pretrained model on meshes, with kills; reads cases as JSON and prints JSON.

A case is one call of `dpopt.train`, as in a separate process. The fresh bits of a resumed run are seeded by the case's
``life``, so that runs on different meshes can be compared draw by draw.
"""

import contextlib
import json
import os
import pathlib
import sys

import jax
import numpy as np
import optax
from flax import nnx

import dpopt
import dpopt.flax
from benchmarks.pretrained import bert, task, weights
from dpopt.run import entropy, meshes, sharding
from dpopt.run.checkpoint import Checkpointer

TINY = pathlib.Path(__file__).parents[1] / "golden" / "bert_tiny"
EXAMPLES, LENGTH = 128, 12
SPENT = dict(delta=1e-4, accountant="rdp")
BUDGET = 4.0


def problem(train):
    """The loss and parameters of the golden model, and synthetic texts and labels."""
    body, config = weights.load(TINY)
    model = bert.Classifier(body, config.hidden_size, 2, rngs=nnx.Rngs(0))
    model.body.layers = nnx.List(model.body.layers[:1])  # half the time to compile
    if train == "lora":
        bert.adapt(model.body, 2, rngs=nnx.Rngs(1))
    rng = np.random.default_rng(0)
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, EXAMPLES)[:, None]
    texts = rng.integers(0, 60, (EXAMPLES, LENGTH)).astype(np.int32), mask
    loss_fn, params = dpopt.flax.nnx_loss(model, task.mean_loss, wrt=bert.trained(train, 0))
    return loss_fn, params, (texts, rng.integers(0, 2, EXAMPLES).astype(np.int32))


def make_plan(clip, steps):
    clip = 1.0 if clip == "flat" else dpopt.LayerwiseClip(0.2)
    builder = dpopt.Builder(
        num_examples=EXAMPLES, expected_batch_size=24, steps=steps, key=jax.random.key(0), pad_to=48
    )
    return builder.clip(clip).budget(epsilon=BUDGET, **SPENT).then(optax.adam(0.01)).build()


class _Stopped(Exception):
    pass


def run(train="lora", clip="flat", steps=3, mesh=None, directory=None, dies=None, exits=False, life=0, replay=True,
        microbatch_size=None, verify=False, planned=None):  # fmt: skip
    """The result of a run.

    ``dies``: the step after which it stops; ``exits``: whether the process ends then, or an exception is raised.
    ``planned``: the number of steps that the budget is for.
    """
    entropy._runs.clear()  # as in a separate process
    entropy.draw = lambda: np.random.default_rng(life).integers(0, 2**32, 10, np.uint32)
    loss_fn, params, data = problem(train)
    plan = make_plan(clip, planned or steps)
    before = _flat(params)
    with contextlib.ExitStack() as stack:
        checkpointer = None if directory is None else stack.enter_context(Checkpointer(directory, every=2))

        def on_step(t, params):
            if t != dies:
                return
            checkpointer.wait()
            if exits:
                print(json.dumps([{"died": t, "journal": plan.journal.ledger.steps}]), flush=True)
                os._exit(0)
            raise _Stopped

        options = dict(on_step=on_step, replay=replay, checkpointer=checkpointer, microbatch_size=microbatch_size)
        options |= dict(verify=verify, progress=False, steps=steps)
        try:
            if mesh is None:
                result = plan.run(loss_fn, params, data, **options)
            else:
                result = meshes.train_on(meshes.mesh_of(mesh), plan, loss_fn, params, data, **options)
        except _Stopped:
            return {"died": dies, "journal": plan.journal.ledger.steps}
    after = _flat(sharding.whole(result.params))
    parts = {str(x.sharding.spec) for x in jax.tree.leaves(result.params) if hasattr(x.sharding, "spec")}
    return {
        "params": after.tolist(),
        "moved": float(np.abs(after - before).max()),
        "parts": sorted(parts),
        "update": result.state.update,
        "steps": result.ledger.steps,
        "lost": result.lost,
        "epsilon": result.epsilon(**SPENT),
        "segments": sum(not entry.is_step for entry in plan.journal.entries),
    }


def _flat(params):
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(params)])


def main(cases, *processes):
    if processes:
        meshes.start("data=1", processes)
    print(json.dumps([run(**case) for case in json.loads(cases)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
