"""The pretrained Transformer: hidden states against the library that its weights were written for, and its training."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dpopt
import dpopt.flax
from benchmarks import data
from benchmarks.pretrained import bert, task, tokens, weights

st = pytest.importorskip("safetensors.numpy")
GOLDEN = pathlib.Path(__file__).parent / "golden"
TINY = GOLDEN / "bert_tiny"  # random weights, and the outputs of transformers 5.24's BertModel with them


@pytest.fixture
def copy(tmp_path):
    """A copy of the tiny model, and a function that changes its weights."""
    folder = tmp_path / weights.NAME
    shutil.copytree(TINY, folder)

    def change(edit):
        stored = st.load_file(folder / "model.safetensors")
        edit(stored)
        st.save_file(stored, folder / "model.safetensors")

    return folder, change


def test_hidden_states_are_those_of_transformers():
    expected = np.load(TINY / "hidden.npz")
    body, _ = weights.load(TINY)
    assert not expected["mask"].all()
    found = body(expected["ids"], expected["mask"])
    np.testing.assert_allclose(found, expected["hidden"], atol=5e-6)
    # The mask is used: what stands behind the end of a text changes nothing.
    other = np.where(expected["mask"], expected["ids"], 7)
    np.testing.assert_allclose(np.asarray(body(other, expected["mask"]))[expected["mask"]],
                               expected["hidden"][expected["mask"]], atol=5e-6)  # fmt: skip


def test_hidden_states_of_the_pretrained_model():
    try:
        folder = weights.folder()
    except data.MissingData as error:
        pytest.skip(str(error))
    expected = np.load(GOLDEN / "minilm_hidden.npz")
    texts = tokens.encode([str(text) for text in expected["texts"]], folder, expected["ids"].shape[1])
    np.testing.assert_array_equal(texts.ids, expected["ids"])
    np.testing.assert_array_equal(texts.mask, expected["mask"])
    body, _ = weights.load(folder)
    np.testing.assert_allclose(body(texts.ids, texts.mask), expected["hidden"], atol=1e-4)


def test_bfloat16_is_near():
    expected = np.load(TINY / "hidden.npz")
    body, _ = weights.load(TINY, dtype=jnp.bfloat16)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(nnx.state(body, nnx.Param)))
    found = body(expected["ids"], expected["mask"])
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), expected["hidden"], atol=0.1)


MISTAKES = {
    "missing": (lambda w: w.pop("encoder.layer.1.output.dense.bias"), "lacks encoder.layer.1.output.dense.bias"),
    "left over": (
        lambda w: w.update({"encoder.layer.2.output.dense.bias": np.zeros(16, np.float32)}),
        "no part of the model takes",
    ),
    "shape": (
        lambda w: w.update({"embeddings.word_embeddings.weight": np.zeros((61, 16), np.float32)}),
        r"the shape \(61, 16\); config.json says \(60, 16\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_weights_that_do_not_fit_are_refused(copy, mistake):
    folder, change = copy
    edit, message = MISTAKES[mistake]
    change(edit)
    with pytest.raises(data.DamagedData, match=message):
        weights.load(folder)


def test_weights_cut_short_are_refused(copy):
    folder, _ = copy
    (folder / "model.safetensors").write_bytes((TINY / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(data.DamagedData, match="cannot be read"):
        weights.load(folder)


def test_a_prefix_is_taken_off(copy):
    folder, change = copy

    def prefix(stored):
        for name in list(stored):
            stored["bert." + name] = stored.pop(name)

    change(prefix)
    expected = np.load(TINY / "hidden.npz")
    np.testing.assert_allclose(
        weights.load(folder)[0](expected["ids"], expected["mask"]), expected["hidden"], atol=5e-6
    )


@pytest.mark.parametrize("name, value", [("model_type", "roberta"), ("hidden_act", "relu")])
def test_another_kind_of_model_is_refused(copy, name, value):
    folder, _ = copy
    config = json.loads((folder / "config.json").read_text()) | {name: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{name} is '{value}'"):
        weights.load(folder)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(data.MissingData, match="huggingface.co"):
        weights.folder(tmp_path)
    (tmp_path / weights.NAME).mkdir()
    with pytest.raises(data.MissingData, match=r"config\.json"):
        weights.folder(tmp_path)


# --- What is trained


def classifier(what, rank=2):
    body, config = weights.load(TINY)
    model = bert.Classifier(body, config.hidden_size, 2, rngs=nnx.Rngs(0))
    if what == "lora":
        bert.adapt(model.body, rank, rngs=nnx.Rngs(1))
    return model


def batch(size=6):
    rng = np.random.default_rng(0)
    mask = np.arange(12) < rng.integers(1, 13, size)[:, None]
    return (rng.integers(0, 60, (size, 12)).astype(np.int32), mask), rng.integers(0, 2, size).astype(np.int32)


def test_adapters_change_nothing_at_first():
    inputs, _ = batch()
    np.testing.assert_array_equal(classifier("lora").body(*inputs), classifier("all").body(*inputs))


def test_the_filters_select_what_they_say():
    layer = (16 + 16) * 4 + (16 + 24) * 2  # thin matrices of rank 1: four of 16 x 16, two of 16 x 24
    head = 16 * 2 + 2
    sizes = {"head": head, "lora": head + 2 * 2 * layer}
    for what in ("head", "lora", "all"):
        state = nnx.state(classifier(what), bert.trained(what))
        sizes.setdefault(what, sum(x.size for x in jax.tree.leaves(nnx.state(classifier("all"), nnx.Param))))
        assert sum(x.size for x in jax.tree.leaves(state)) == sizes[what]
    with pytest.raises(ValueError, match="head, lora, all; got 'adapters'"):
        bert.trained("adapters")


@pytest.mark.parametrize("what", ["head", "lora", "all"])
@pytest.mark.parametrize("clip", ["flat", "layerwise"])
def test_clipped_gradients_are_those_formed_one_by_one(what, clip):
    model, examples = classifier(what), batch()
    model.head.kernel[...] = jax.random.normal(jax.random.key(2), (16, 2))  # from zero, nothing below would move
    loss_fn, params = dpopt.flax.nnx_loss(model, task.mean_loss, wrt=bert.trained(what))
    groups = max(1, len(jax.tree.leaves(params)))
    clip_norm = 0.05 if clip == "flat" else dpopt.LayerwiseClip(0.05 / groups**0.5)
    found = []
    for engine in ("ghost", "vmap"):
        core = dpopt.privatize(
            l2_clip_norm=clip_norm, noise_multiplier=0.0, expected_batch_size=6, key=jax.random.key(0)
        )
        promise = dpopt.per_example_grads(loss_fn, engine=engine)(params, examples, mask=None)
        found.append(core.update(promise, core.init(params), params)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-7), *found)
