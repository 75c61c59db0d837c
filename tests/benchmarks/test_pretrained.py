"""The pretrained Transformer: hidden states against the library of its weights, and its training."""

import dataclasses
import importlib.util
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dpopt
import dpopt.flax
from benchmarks import data, records
from benchmarks.pretrained import bert, head, record, task, tokens, weights
from benchmarks.utility import runs
from benchmarks.utility.suites import pretrained
from dpopt.run import entropy

st = pytest.importorskip("safetensors.numpy")
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
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


@pytest.mark.slow
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
    whole = tokens.encode([str(text) for text in expected["texts"]], folder, 64)
    assert whole.mask.sum(1).max() < 64
    cut = expected["ids"].shape[1] - 1  # `transformers` keeps the start of a long text, and its last token
    np.testing.assert_array_equal(whole.ids[:, :cut], expected["ids"][:, :cut])
    np.testing.assert_array_equal(whole.mask[:, :cut], expected["mask"][:, :cut])
    body, _ = weights.load(folder)
    np.testing.assert_allclose(body(expected["ids"], expected["mask"]), expected["hidden"], atol=1e-4)


@pytest.mark.slow
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
        "weights that the model does not have",
    ),
    "shape": (
        lambda w: w.update({"embeddings.word_embeddings.weight": np.zeros((61, 16), np.float32)}),
        r"shape \(61, 16\); by config.json it should be \(60, 16\)",
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


@pytest.mark.slow
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
    with pytest.raises(data.MissingData, match=r"huggingface\.co"):
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


@pytest.mark.slow
def test_adapters_change_nothing_at_first():
    inputs, _ = batch()
    np.testing.assert_array_equal(classifier("lora").body(*inputs), classifier("all").body(*inputs))


def test_the_filters_select_what_they_say():
    rank, head = 2, 16 * 2 + 2
    adapters = rank * (16 + 24)  # of the upper block; the trained side of a value's and of a wide layer's adapter
    vectors = 4 * 16 + 24 + 16 + 2 * 2 * 16  # biases of attention and of two dense layers, two normalisations
    everything = sum(x.size for x in jax.tree.leaves(nnx.state(classifier("all"), nnx.Param)))
    sizes = {"head": head, "bias": head + vectors, "lora": head + adapters, "all": everything}
    for what, size in sizes.items():
        state = nnx.state(classifier(what, rank), bert.trained(what, bert.first_trained(2)))
        assert sum(x.size for x in jax.tree.leaves(state)) == size
    with pytest.raises(ValueError, match="head, bias, lora, all; got 'adapters'"):
        bert.trained("adapters", 1)


def deep(what, blocks=3, reads="every"):
    """A classifier with more blocks than the stored one, and a head that is not zero."""
    body, config = weights.load(TINY)
    body.layers = nnx.List([nnx.clone(body.layers[i % 2]) for i in range(blocks)])
    model = bert.Classifier(body, config.hidden_size, 2, reads=reads, rngs=nnx.Rngs(0))
    if what == "lora":
        bert.adapt(model.body, 2, rngs=nnx.Rngs(1))
    fill_head(model)
    return model


def fill_head(model):
    """Puts random numbers into a head: from zero, nothing below would move."""
    for number, leaf in enumerate((model.head.mean, model.head.linear.kernel)):
        leaf[...] = jax.random.normal(jax.random.key(2 + number), leaf.shape)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("blocks, first", [(1, 0), (2, 1), (3, 2), (6, 4), (12, 8)])
@pytest.mark.parametrize("what", ["bias", "lora"])
def test_the_first_two_thirds_of_the_blocks_stay_as_they_were(what, blocks, first):
    paths = nnx.to_flat_state(nnx.state(deep(what, blocks), bert.trained(what, bert.first_trained(blocks)))).paths
    assert {path[2] for path in paths if path[0] == "body"} == set(range(first, blocks))


@pytest.mark.slow
@pytest.mark.parametrize(
    "reads, what",
    [
        ("every", "lora"),
        ("last", "bias"),
        ("last", "lora"),
        ("every", "bias"),
    ],
)
def test_training_the_upper_blocks_on_stored_outputs_trains_the_classifier(what, reads):
    model, (inputs, labels) = deep(what, reads=reads), batch()
    upper = bert.Upper(model)
    below = head.in_groups(bert.below, model.body, inputs)
    stored = (*below, inputs[1])
    np.testing.assert_allclose(upper(*stored), model(*inputs), rtol=1e-5, atol=1e-6)
    found = []
    for module, examples, first in ((model, inputs, bert.first_trained(3)), (upper, stored, 0)):
        loss_fn, params = dpopt.flax.nnx_loss(module, head.mean_loss, wrt=bert.trained(what, first))
        promise = dpopt.per_example_grads(loss_fn)(params, (examples, labels), mask=None)
        leaves = jax.tree.leaves_with_path(promise.materialize())
        found.append(
            {jax.tree_util.keystr(path).removeprefix("['body']").replace("[2]", "[0]"): x for path, x in leaves}
        )
    assert found[0].keys() == found[1].keys() and all(np.abs(x).max() > 0 for x in found[0].values())
    for name, x in found[0].items():
        np.testing.assert_allclose(x, found[1][name], rtol=1e-3, atol=1e-6, err_msg=name)
    # They share parameters: what is put into the upper blocks is in the classifier.
    nnx.update(upper, jax.tree.map(lambda x: x + 0.1, params))
    np.testing.assert_allclose(upper(*stored), model(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "clip, what",
    [
        ("flat", "bias"),
        ("layerwise", "head"),
        *(("flat", what) for what in ("head", "lora", "all")),
        *(("layerwise", what) for what in ("bias", "lora", "all")),
    ],
)
def test_clipped_gradients_are_those_formed_one_by_one(what, clip):
    model, examples = classifier(what), batch()
    fill_head(model)
    loss_fn, params = dpopt.flax.nnx_loss(model, task.mean_loss, wrt=bert.trained(what, 1))
    groups = max(1, len(jax.tree.leaves(params)))
    clip_norm = 0.05 if clip == "flat" else dpopt.LayerwiseClip(0.05 / groups**0.5)
    found = []
    for engine in ("ghost", "vmap"):
        core = dpopt.privatize(
            l2_clip_norm=clip_norm, noise_multiplier=0.0, expected_batch_size=6, key=jax.random.key(0)
        )

        @jax.jit
        def update(params, examples, core=core, engine=engine):
            promise = dpopt.per_example_grads(loss_fn, engine=engine)(params, examples, mask=None)
            return core.update(promise, core.init(params), params)[0]

        found.append(update(params, examples))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-7), *found)


# --- The suite, on a few reviews of the official layout

WORDS = ["[PAD]", "[UNK]", "good", "bad", "film", "the", "a", "was"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data folder: the tiny model with a tokenizer, and 48 reviews."""
    tokenizers = pytest.importorskip("tokenizers")
    where = tmp_path_factory.mktemp("data")
    shutil.copytree(TINY, where / weights.NAME)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(where / weights.NAME / "tokenizer.json"))
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for sentiment, word in (("pos", "good"), ("neg", "bad")):
            reviews = where / "aclImdb" / part / sentiment
            reviews.mkdir(parents=True)
            for i in range(24):
                text = " ".join(rng.choice([word, *WORDS[4:], "unheard"], rng.integers(2, 9)))
                (reviews / f"{i}_{9 if word == 'good' else 2}.txt").write_text(text + "<br /><br />" + word)
    (where / "aclImdb" / "imdb.vocab").write_text("\n".join(WORDS[2:]))
    return where


def test_reviews_become_tokens_in_the_order_of_their_names(folder):
    split = tokens.reviews(folder, folder / weights.NAME, 6)
    assert split.train.ids.shape == (48, 6) and sorted(np.bincount(split.train_labels)) == [24, 24]
    assert (split.train.ids[~split.train.mask] == 0).all() and split.train.mask[:, 0].all()
    for label, word in ((1, "good"), (0, "bad")):
        said = split.test.ids[split.test_labels == label]
        assert not (said == WORDS.index("bad" if word == "good" else "good")).any()
    again = tokens.reviews(folder, folder / weights.NAME, 6)  # from the cache
    np.testing.assert_array_equal(again.train.ids, split.train.ids)


def test_of_a_long_review_the_start_and_the_end_are_kept(folder):
    words = "good film the a was bad film the a good".split()
    numbers = [WORDS.index(word) for word in words]
    found = tokens.encode([" ".join(words), " ".join(words[:8]), "bad"], folder / weights.NAME, 8)
    np.testing.assert_array_equal(found.ids[0], numbers[:2] + numbers[-6:])
    np.testing.assert_array_equal(found.ids[1], numbers[:8])
    assert found.mask.sum(1).tolist() == [8, 8, 1] and found.ids[2, 0] == WORDS.index("bad")


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["last", "every"])
def test_the_head_learns_from_what_the_classifier_shows_it(reads):
    (ids, mask), _ = batch()
    body, config = weights.load(TINY)
    model = bert.Classifier(body, config.hidden_size, 2, reads=reads, rngs=nnx.Rngs(0))
    fill_head(model)
    found = head.in_groups(bert.Classifier.features, model, (ids, mask))
    np.testing.assert_allclose(model.head(found), model(ids, mask), rtol=1e-5, atol=1e-6)
    outputs = [np.asarray(x, np.float64) for x in body.every(ids, mask)]
    means = [(x * mask[..., None]).sum(1) / mask.sum(1)[:, None] for x in outputs]
    np.testing.assert_allclose(found, np.concatenate(means[-1:] if reads == "last" else means, 1), atol=1e-5)
    with pytest.raises(ValueError, match="'last' or 'every'; got 'first'"):
        bert.Classifier(body, config.hidden_size, 2, reads="first", rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_the_mean_of_the_features_is_released_and_clipped():
    rng = np.random.default_rng(0)
    features = rng.normal(3.0, 0.1, (4_000, 8)).astype(np.float32)
    features[:2] *= 1e4  # two texts do not move the mean far
    plan = head.mean_plan(*features.shape, epsilon=400.0, delta=1e-6, key=jax.random.key(0))
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    expected = (features * np.minimum(1, head.longest(8) / norms)).mean(0)
    found = task._mean(plan, jnp.asarray(features))
    deviation = plan.noise_multiplier * head.longest(8) / 4_000
    np.testing.assert_allclose(found, expected, atol=5 * deviation)
    assert np.abs(found - expected).max() > 0.1 * deviation
    assert dpopt.epsilon_of_event(plan.event, delta=1e-6) <= 20.0


@pytest.mark.slow
def test_what_the_heads_cost_is_part_of_the_release(folder):
    """There is none with a budget of 0; if only the head is trained, its mean is."""
    paid = task.PretrainedReviews(folder, trained="bias", length=6, epsilon=8.0, delta=1e-3)
    alone = task.PretrainedReviews(folder, trained="head", length=6, epsilon=8.0, delta=1e-3)
    free = task.PretrainedReviews(folder, trained="bias", length=6, epsilon=0.0)
    spent = [dpopt.epsilon_of_event(made.release, delta=1e-3) for made in (paid, alone)]
    assert 8 * head.LAST_SHARE < spent[0] < 8 * (head.LAST_SHARE + head.FIRST_SHARE)
    assert 0.9 * 8 * head.MEAN_SHARE < spent[1] <= 8 * head.MEAN_SHARE
    assert all(np.abs(x).max() > 0.01 for x in jax.tree.leaves(nnx.state(paid._model(0).head)))
    assert np.abs(alone._model(0).mean[...]).max() > 0.01 and free.release is None
    assert not any(np.abs(x).max() for x in jax.tree.leaves((free.init(0)["head"], alone.init(0))))


@pytest.mark.slow
def test_the_score_is_that_of_a_new_head(folder):
    """Whatever the head was: the one that is scored is trained on what the encoder gives."""
    made = task.PretrainedReviews(folder, trained="bias", length=6, epsilon=1e4, delta=1e-3)
    params = made.init(0)
    wrong = {**params, "head": jax.tree.map(lambda x: -10 * x, params["head"])}
    assert float(made.score(wrong)) == float(made.score(params)) > 0.9


def small(contest):
    """The contest in a few steps on a few tokens of a few reviews."""

    def make(epsilon, rate):
        fields = contest.make(epsilon, rate)
        own = {"length": 6, "test": 8} | ({"public_share": 0.25} if "public_share" in fields["task_options"] else {})
        options = fields["task_options"] | own
        return fields | {"steps": 8, "expected_batch_size": 8.0, "delta": 1e-3, "task_options": options}

    return dataclasses.replace(contest, make=make, rates=contest.rates[:1])


CONTESTS = {f"{c.table}, {c.label}": c for c in pretrained.contests()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTESTS)
def test_every_row_of_the_suite_runs_at_its_epsilon(folder, name):
    with jax.numpy_rank_promotion("allow"):
        (setting,) = small(CONTESTS[name]).candidates(8.0, validate=True)
        monkey = pytest.MonkeyPatch()
        monkey.setattr(task, "TOGETHER", 4)
        try:
            (record,) = runs.Program(setting, where=folder).train([0])
        finally:
            monkey.undo()
    assert 7.5 < record["epsilon"]["pld"] <= 8.0 and 0 <= record["score"] <= 1
    assert record["not_covered_by_epsilon"] == ()


@pytest.mark.slow
def test_only_what_is_trained_moves_and_stays_in_float32(folder):
    made = task.PretrainedReviews(folder, trained="all", length=6, dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(made.init(0))} == {np.dtype("float32")}
    adapters = task.PretrainedReviews(folder, trained="lora", length=6, dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(adapters.init(0))} == {np.dtype("float32")}
    body = nnx.filter_state(adapters._frozen["body"], nnx.Not(nnx.LoRAParam))
    frozen = [x for x in jax.tree.leaves(body) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {str(x.dtype) for x in frozen} == {"bfloat16"}
    grads = made.grads(made.init(0), (jnp.arange(4), jnp.ones(4, bool))).materialize()
    assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype("float32")}


@pytest.mark.slow
def test_public_reviews_leave_the_private_set(folder):
    made = task.PretrainedReviews(folder, trained="head", length=6, public_share=0.25)
    assert made.num_examples == 36 and made.has_public_data
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(task, "TOGETHER", 6)
        grads = made.public_grads(made.init(0))
    own = jax.grad(lambda p: task.mean_loss(nnx.merge(made._graph, p, made._frozen), made._public))(made.init(0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads, own)


# --- The example


def example(folder, *options):
    spec = importlib.util.spec_from_file_location(
        "fine_tune", GOLDEN.parents[1] / "examples" / "fine_tune_transformer.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tiny = "--seed 0 --epsilon 8 --steps 8 --batch-size 8 --length 6 --test-reviews 8".split()
    with jax.numpy_rank_promotion("allow"), pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(module, "TOGETHER", 4)
        monkey.setattr(head, "TOGETHER", 4)
        module.main([*tiny, "--data", str(folder), *options])


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    ("--optimizer", "adam", "--rank", "2"),
    ("--train", "bias"),
    ("--optimizer", "adam_bc", "--train", "all", "--dtype", "bfloat16"),
    ("--optimizer", "sgd", "--noise", "correlated", "--clip", "layerwise"),
    ("--optimizer", "dp2"),
    ("--train", "head", "--reads", "last"),
])  # fmt: skip
def test_the_example_keeps_to_its_budget(folder, tmp_path, capsys, options):
    example(folder, *options, "--out", str(tmp_path))
    printed = capsys.readouterr().out
    spent, accuracy = re.search(r"epsilon ([\d.]+) at delta 1e-05, test accuracy ([\d.]+)", printed).groups()
    assert 7.5 < float(spent) <= 8.0 and 0 <= float(accuracy) <= 1
    (line,) = record.markdown(records.load(tmp_path, record.NAME)).splitlines()[4:]
    assert f"| **{accuracy}** | {spent} |" in line


# Of the example's 130 steps: a mean takes one, a head 60, and the encoder 8.
STOPS = np.random.default_rng(0).choice(np.arange(1, 130), 4, replace=False).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("last", [1 + 6, 1 + 60 + 6, 1 + 60 + 8 + 1 + 6, *STOPS])
def test_the_example_resumes_where_it_was_stopped(folder, tmp_path, capsys, caplog, monkeypatch, last):
    """Wherever it was stopped, it resumes, pays for all steps and stays in budget.

    After a stage's sixth step it does so from the checkpoint at five.
    """
    from dpopt.run import loop

    real, steps = loop._Run._compute, []

    def stops(self, *args):
        if len(steps) == last:
            raise KeyboardInterrupt
        steps.append(real(self, *args))
        return steps[-1]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop._Run, "_compute", stops)
        example(folder, "--directory", str(tmp_path))
    entropy._runs.clear()  # as in a new process
    capsys.readouterr()
    example(folder, "--directory", str(tmp_path))
    printed = capsys.readouterr().out
    assert 6 < float(re.search(r"epsilon ([\d.]+) at delta", printed).group(1)) <= 8.0
    assert last in STOPS or "1 steps are spent and not in the parameters" in caplog.text


def test_the_example_says_what_is_missing(tmp_path, capsys):
    with pytest.raises(SystemExit):
        example(tmp_path)
    assert "huggingface.co" in capsys.readouterr().err
