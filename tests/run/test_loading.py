"""Steps as a sequence, sources read by row, batches read ahead, and hosts that read only their own rows."""

import pickle
import threading
import time

import grain
import jax
import numpy as np
import pytest
from helpers import assert_identical
from runs import DATA, run, tiny_plan

import dpopt
from dpopt.run.loading import Steps, ahead, sharded_rows
from dpopt.run.sharding import along_rows, make_mesh, shard_batch

SAMPLER = dict(num_examples=64, expected_batch_size=8, seed=3, pad_to=4)


class Source:
    """A data set as for torch and Grain, which records the rows that are read, and by which thread."""

    def __init__(self):
        self.read, self.threads = [], set()

    def __len__(self):
        return len(DATA)

    def __getitem__(self, i):
        assert type(i) is int
        self.read.append(i)
        self.threads.add(threading.current_thread().name)
        return DATA[i]


class ManySource(Source):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


def test_steps_are_the_samplers_batches():
    steps, sampler = Steps(dpopt.PoissonSampler(**SAMPLER), 5, 12), dpopt.PoissonSampler(**SAMPLER)
    assert len(steps) == 7
    for t, batch in enumerate(steps):
        assert_identical(tuple(batch), tuple(sampler.batch(5 + t)))
    assert_identical(tuple(steps[-1]), tuple(sampler.batch(11)))
    assert [len(x.mask) for x in steps[1:3]] == [len(sampler.batch(t).mask) for t in (6, 7)]


def test_steps_count_as_drawn_wherever_they_are_read():
    sampler = dpopt.PoissonSampler(**SAMPLER)
    elsewhere = pickle.loads(pickle.dumps(Steps(sampler, 0, 10)))
    elsewhere[3]
    assert sampler.drawn_to == 10


@pytest.mark.parametrize("source", [Source, ManySource, lambda: DATA, lambda: lambda rows: DATA[rows]])
def test_steps_have_rows_where_there_is_data(source):
    rows, mask = Steps(dpopt.PoissonSampler(**SAMPLER), 0, 5, source())[2]
    batch = dpopt.PoissonSampler(**SAMPLER).batch(2)
    assert_identical((rows, mask), (DATA[batch.indices], batch.mask))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("source", [Source, ManySource])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_run_reads_a_source_and_gets_what_arrays_give(source, prefetch):
    data = source()
    found = run(tiny_plan(steps=6), data=data, prefetch=prefetch, replay=True, verify=False)
    assert_identical(found.params, run(tiny_plan(steps=6), data=DATA, replay=True, verify=False).params)
    plan = tiny_plan(steps=6)
    drawn = np.concatenate([plan.sampler.batch(t).indices for t in range(6)])
    assert data.read == drawn.tolist()  # these, in this order, and none beyond
    assert all(("dpopt-ahead" in name) == bool(prefetch) for name in data.threads)
    assert found.ledger.steps == 6


def test_reading_ahead_is_ahead_in_order_and_no_further_than_it_may():
    begun = []

    def slow(i):
        begun.append(i)
        time.sleep(0.01)
        return i

    items = ahead(slow, range(20), 3)
    assert next(items) == 0
    time.sleep(0.3)
    assert begun == [0, 1, 2, 3]
    assert list(items) == list(range(1, 20))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_while_reading_stops_the_run_at_its_step(prefetch):
    plan, calls = tiny_plan(steps=6), []

    def fetch(indices):
        calls.append(1)
        if len(calls) == 4:
            raise OSError("the disk is gone")
        return DATA[indices]

    with pytest.raises(OSError, match="the disk is gone"):
        run(plan, data=fetch, prefetch=prefetch, verify=False)
    assert plan.journal.ledger.steps == 3


def test_grain_reads_steps_ahead_and_its_sources_are_sources():
    sampler = dpopt.PoissonSampler(**SAMPLER)
    steps = Steps(sampler, 0, 6, grain.MapDataset.source(DATA).map(lambda x: {"x": x, "twice": 2 * x}))
    loader = grain.MapDataset.source(steps).to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    seen = list(loader)
    assert len(seen) == 6
    for t, (rows, mask) in enumerate(seen):
        batch = sampler.batch(t)
        expected = DATA[batch.indices]
        assert_identical((rows, mask), ({"x": expected, "twice": 2 * expected}, batch.mask))
    found = run(tiny_plan(steps=3), data=grain.MapDataset.source(DATA), prefetch=1, replay=True)
    assert_identical(found.params, run(tiny_plan(steps=3), data=DATA, replay=True).params)


def test_torch_reads_steps_ahead():
    data = pytest.importorskip("torch.utils.data")
    steps = Steps(dpopt.PoissonSampler(**SAMPLER), 0, 4, DATA)
    loader = data.DataLoader(steps, batch_size=None, collate_fn=lambda item: item)
    for got, want in zip(loader, steps, strict=True):
        assert_identical(got, want)
    batches = list(Steps(dpopt.PoissonSampler(**SAMPLER), 0, 4))
    loader = data.DataLoader(DATA, batch_sampler=[b.indices.tolist() for b in batches], collate_fn=np.stack)
    for rows, batch in zip(loader, batches, strict=True):
        assert_identical(rows, DATA[batch.indices])


def test_hugging_face_data_is_a_source():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": DATA.tolist(), "y": list(range(64))}).with_format("numpy")
    rows, _ = Steps(dpopt.PoissonSampler(**SAMPLER), 0, 4, table)[1]
    batch = dpopt.PoissonSampler(**SAMPLER).batch(1)
    np.testing.assert_allclose(rows["x"], DATA[batch.indices], rtol=1e-6)
    assert rows["y"].tolist() == batch.indices.tolist()


@pytest.mark.slow
def test_rows_are_split_over_devices_and_stay_so():
    mesh, data = make_mesh(1), {"x": DATA, "y": np.arange(64)}
    fetch, indices = sharded_rows(data, 64, mesh), np.array([5, 1, 60, 7])
    found = fetch(indices)
    assert_identical(found, shard_batch(jax.tree.map(lambda x: x[indices], data), mesh))
    assert shard_batch(found, mesh)["x"] is found["x"]
    result = run(tiny_plan(steps=3), data=sharded_rows(DATA, 64, mesh), place_batch=lambda r: shard_batch(r, mesh))
    assert result.ledger.steps == 3


def test_keys_of_examples_are_split_beside_them():
    """For a loss with dropout or augmentations; NumPy, which splits other arrays, cannot hold keys."""
    mesh, keys = make_mesh(1), dpopt.example_keys(jax.random.key(5), 0, np.arange(4))
    x, placed = shard_batch((np.ones((4, 2)), keys), mesh)
    assert_identical(placed, keys)
    assert x.shape == (4, 2) and placed.sharding.is_equivalent_to(along_rows(4, mesh), 1)
    assert shard_batch(placed, mesh) is placed


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Steps(dpopt.PoissonSampler(**SAMPLER), 4, 4), ValueError, "stop must exceed start"),
        (lambda: Steps(dpopt.PoissonSampler(**SAMPLER), 0, 4)[4], IndexError, "there are 4 steps; got 4"),
        (lambda: Steps(dpopt.PoissonSampler(**SAMPLER), 0, 4, "data.csv"), TypeError, "data is a str"),
        (lambda: Steps(dpopt.PoissonSampler(32, 4, seed=0), 0, 4, Source()), ValueError, "64 examples, .* from 32"),
        (
            lambda: Steps(dpopt.PoissonSampler(3, 3, seed=0), 0, 4, Ragged())[0],
            ValueError,
            "do not stack .*every one needs the same arrays in the same shapes",
        ),
        (lambda: run(tiny_plan(steps=2), prefetch=-1), ValueError, "prefetch must be at least 0"),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


class Ragged:
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return np.zeros(i + 1)
