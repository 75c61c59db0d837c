"""The reader of CIFAR-10's official archives, on tiny archives of the same layout."""

import gzip
import io
import os
import pickle
import tarfile

import numpy as np
import pytest

pytest.importorskip("sklearn")

from benchmarks import data
from benchmarks.data import cifar10

NAMES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def batches(rows=3):
    """Labels and images ``(rows, 3072)`` of every batch."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.integers(0, 10, rows, dtype=np.uint8), rng.integers(0, 256, (rows, 3072), dtype=np.uint8))
        for name in NAMES
    }


def binary(content):
    """Files of the binary layout."""
    files = {
        f"{name}.bin": np.concatenate([labels[:, None], images], axis=1).tobytes()
        for name, (labels, images) in content.items()
    }
    return {f"cifar-10-batches-bin/{name}": raw for name, raw in {**files, "readme.html": b"<p>"}.items()}


def pickled(content, protocol=2):
    """Files of the Python layout, as Python 2 wrote them: text is bytes, arrays are from NumPy 1."""
    files = {
        f"cifar-10-batches-py/{name}": pickle.dumps(
            {b"batch_label": name.encode(), b"labels": labels.tolist(), b"data": images}, protocol=protocol
        ).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        for name, (labels, images) in content.items()
    }
    return {**files, "cifar-10-batches-py/batches.meta": pickle.dumps({b"label_names": [b"airplane"]})}


def pack(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, raw in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))


def unpack(path, files):
    for name, raw in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(raw)


MAKERS = {
    "binary archive": lambda path, content: pack(path / "cifar-10-binary.tar.gz", binary(content)),
    "binary folder": lambda path, content: unpack(path, binary(content)),
    "python archive": lambda path, content: pack(path / "cifar-10-python.tar.gz", pickled(content)),
    "python folder": lambda path, content: unpack(path, pickled(content)),
}


@pytest.mark.parametrize("layout", MAKERS)
def test_every_layout_is_read(layout, tmp_path):
    content = batches()
    MAKERS[layout](tmp_path, content)
    split = cifar10.load(tmp_path)
    assert split.train_x.shape == (15, 32, 32, 3) and split.test_x.shape == (3, 32, 32, 3)
    assert split.train_x.dtype == np.uint8 and split.train_y.dtype == np.int32
    labels = [content[name][0] for name in NAMES]
    np.testing.assert_array_equal(split.train_y, np.concatenate(labels[:5]))
    np.testing.assert_array_equal(split.test_y, labels[5])
    # Channel by channel, row by row: pixel (row 2, column 5) of green is byte 1024 + 2 * 32 + 5.
    assert split.train_x[4, 2, 5, 1] == content["data_batch_2"][1][1, 1024 + 2 * 32 + 5]
    assert split.test_x[2, 31, 0, 2] == content["test_batch"][1][2, 2048 + 31 * 32]


def test_missing_data_gives_the_address_and_the_place(tmp_path):
    with pytest.raises(data.MissingData, match=r"cifar-10-binary\.tar\.gz.*cs\.toronto\.edu") as error:
        cifar10.load(tmp_path)
    assert str(tmp_path) in str(error.value)


def changed(name, change):
    files = binary(batches())
    files[f"cifar-10-batches-bin/{name}.bin"] = change(files[f"cifar-10-batches-bin/{name}.bin"])
    return files


DAMAGED = {
    "cut within an image": (changed("data_batch_3", lambda raw: raw[:-1]), r"data_batch_3.bin has 9218 bytes"),
    "cut between images": (
        changed("data_batch_3", lambda raw: raw[:-3073]),
        r"same number of images.*'data_batch_3': 2",
    ),
    "empty": (changed("test_batch", lambda raw: b""), "test_batch.bin has 0 bytes"),
    "wrong label": (changed("data_batch_5", lambda raw: raw[:3073] + b"\x0a" + raw[3074:]), "image 1 has 10"),
    "missing": (
        {name: raw for name, raw in binary(batches()).items() if "data_batch_4" not in name},
        r"has no cifar-10-batches-bin/data_batch_4\.bin",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("packed", [True, False])
def test_damaged_batches_are_refused(damage, packed, tmp_path):
    files, why = DAMAGED[damage]
    pack(tmp_path / "cifar-10-binary.tar.gz", files) if packed else unpack(tmp_path, files)
    with pytest.raises(data.DamagedData, match=why):
        cifar10.load(tmp_path)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_an_archive_cut_short_is_refused(kept, tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    pack(path, binary(batches()))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(data.DamagedData, match="damaged"):
        cifar10.load(tmp_path)


def test_an_archive_of_something_else_is_refused(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(b"no archive" * 200))
    with pytest.raises(data.DamagedData, match="damaged"):
        cifar10.load(tmp_path)


def one_pickle(tmp_path, raw):
    unpack(tmp_path, {**pickled(batches()), "cifar-10-batches-py/data_batch_1": raw})


class Planted:
    def __reduce__(self):
        return os.mkdir, ("planted",)


def test_a_pickle_that_would_run_something_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one_pickle(tmp_path, pickle.dumps({b"data": Planted(), b"labels": [1]}))
    with pytest.raises(data.DamagedData, match=r"asks for \w+\.mkdir, and only NumPy arrays"):
        cifar10.load(tmp_path)
    assert not (tmp_path / "planted").exists()


ONE = np.zeros((1, 3072), np.uint8)


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {},
        {b"data": ONE},
        {b"data": ONE, b"labels": [1, 2]},
        {b"data": ONE, b"labels": ["one"]},
        {b"data": ONE.astype(np.float32), b"labels": [1]},
        {b"data": ONE[:, 1:], b"labels": [1]},
        {b"data": ONE[:0], b"labels": []},
    ],
)
def test_a_pickle_of_something_else_is_refused(content, tmp_path):
    one_pickle(tmp_path, pickle.dumps(content))
    with pytest.raises(data.DamagedData, match="must hold 'data'"):
        cifar10.load(tmp_path)


def test_a_pickle_cut_short_is_refused(tmp_path):
    raw = pickled(batches())["cifar-10-batches-py/data_batch_1"]
    one_pickle(tmp_path, raw[: len(raw) // 2])
    with pytest.raises(data.DamagedData, match="cannot be read"):
        cifar10.load(tmp_path)
    one_pickle(tmp_path, pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [-1]}))
    with pytest.raises(data.DamagedData, match="image 0 has -1"):
        cifar10.load(tmp_path)
