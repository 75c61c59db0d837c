"""The benchmarks' loaders read the official layouts and report missing and damaged files."""

import gzip
import io
import struct
import tarfile

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks import data
from benchmarks.data import idx, imdb, ratings, synthetic

REVIEWS = {
    "train/pos/0_9.txt": "A good film.<br /><br />Good!",
    "train/pos/1_8.txt": "good, good; wasn't it",
    "train/neg/0_2.txt": "bad film",
    "train/neg/1_1.txt": "Bad bad BAD \u00e9t\u00e9",
    "test/pos/0_10.txt": "good",
    "test/neg/0_1.txt": "worst film",
}
VOCAB = "film\ngood\nnowhere\nbad\n"


def archive(path, mode):
    with tarfile.open(path, mode) as tar:
        for name, text in {**REVIEWS, "imdb.vocab": VOCAB, "train/unsup/0_0.txt": "ignored"}.items():
            member = tarfile.TarInfo(f"aclImdb/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))


def folder(path):
    for name, text in {**REVIEWS, "imdb.vocab": VOCAB, "train/unsup/0_0.txt": "ignored"}.items():
        file = path / "aclImdb" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


MAKERS = {
    "folder": folder,
    "gz": lambda path: archive(path / "aclImdb_v1.tar.gz", "w:gz"),
    "xz": lambda path: archive(path / "aclImdb_v1.tar.xz", "w:xz"),
}


@pytest.mark.parametrize("layout", MAKERS)
def test_imdb_is_read_from_folder_and_archives(layout, tmp_path):
    MAKERS[layout](tmp_path)
    for _ in range(2):  # parsed, then from the cache
        found = imdb.load(tmp_path)
        assert set(found.words) >= {"a", "good", "film", "wasn't", "it", "bad", "worst"}
        assert "br" not in found.words and list(found.words) == sorted(found.words)
        assert len(found.train) == 4 and len(found.test) == 2
        assert sorted(found.train.labels) == [0, 0, 1, 1]
        assert [str(found.words[i]) for i in found.shipped] == ["film", "good", "bad"]
    assert (tmp_path / "imdb-words.npz").exists()


def test_a_review_does_not_depend_on_the_layout(tmp_path):
    read = []
    for name, make in MAKERS.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name)
        read.append(imdb.load(tmp_path / name))
    for other in read[1:]:
        for mine, theirs in zip(read[0].train, other.train, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_words_are_counted_where_it_is_said_and_nowhere_else(tmp_path):
    folder(tmp_path)
    found = imdb.load(tmp_path)
    n = len(found.words)
    word = {str(w): i for i, w in enumerate(found.words)}
    assert imdb.most_frequent(found.train, n, 1).tolist() in ([word["good"]], [word["bad"]])
    assert word["worst"] not in imdb.most_frequent(found.train, n, 100)  # in a test review only
    only = found.train.take(np.flatnonzero(found.train.labels == 1))
    assert len(only) == 2 and imdb.most_frequent(only, n, 1).tolist() == [word["good"]]

    chosen = np.array([word["good"], word["film"]])
    count = imdb.counts(only, n)[:, chosen].tocsr()
    assert sorted(map(tuple, count.toarray().tolist())) == [(2, 0), (2, 1)]
    tf = imdb.features(count, "tf").toarray()
    np.testing.assert_allclose(tf.sum(1), 1)
    for kind in ("binary", "log", "binary-idf", "log-idf"):
        x = imdb.features(count, kind, np.array([0.5, 0.1])).toarray()
        np.testing.assert_allclose((x**2).sum(1), 1, rtol=1e-6)
    weighed = imdb.features(count, "tf-idf", np.array([0.5, 0.1])).toarray()
    np.testing.assert_allclose(weighed, tf * np.log([2, 10]), rtol=1e-6)
    with pytest.raises(ValueError, match="kind must be"):
        imdb.features(count, "idf")

    tokens = imdb.sequences(only, chosen, 5, n)
    # "a good film good" and "good good wasn't it": 0 pads in front, 1 is a word not in the list
    assert sorted(tokens.tolist()) == [[0, 1, 2, 3, 2], [0, 2, 2, 1, 1]]


def test_missing_data_gives_the_address_and_the_place(tmp_path, monkeypatch):
    for load, address, expected in (
        (imdb.load, "ai.stanford.edu", "aclImdb_v1.tar.gz"),
        (ratings.load, "grouplens.org", "ml-100k/u.data"),
        (idx.load, "yann.lecun", "train-images-idx3-ubyte"),
    ):
        with pytest.raises(data.MissingData) as error:
            load(tmp_path)
        assert address in str(error.value) and expected in str(error.value) and str(tmp_path) in str(error.value)
    monkeypatch.setenv("DPOPT_DATA", str(tmp_path))
    assert data.folder() == tmp_path and str(data.folder("elsewhere")) == "elsewhere"


def test_damaged_archive_and_folder_without_reviews_are_refused(tmp_path):
    archive(tmp_path / "aclImdb_v1.tar.xz", "w:xz")
    whole = (tmp_path / "aclImdb_v1.tar.xz").read_bytes()
    (tmp_path / "aclImdb_v1.tar.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(data.DamagedData, match="damaged"):
        imdb.load(tmp_path)
    (tmp_path / "aclImdb" / "train" / "pos").mkdir(parents=True)
    with pytest.raises(data.DamagedData, match="holds 0 reviews"):
        imdb.load(tmp_path)


def test_a_damaged_cache_is_made_again(tmp_path):
    folder(tmp_path)
    first = imdb.load(tmp_path)
    (tmp_path / "imdb-words.npz").write_bytes(b"PK\x03\x04 cut short")
    np.testing.assert_array_equal(imdb.load(tmp_path).words, first.words)


def test_the_cache_goes_to_the_user_where_the_data_cannot_be_written(tmp_path, monkeypatch):
    there, cache = tmp_path / "there", tmp_path / "cache"
    there.mkdir()
    folder(there)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    real = data.tempfile.mkstemp

    def refuse(dir, **rest):
        if dir == there:
            raise PermissionError("read-only")
        return real(dir=dir, **rest)

    monkeypatch.setattr(data.tempfile, "mkstemp", refuse)
    imdb.load(there)
    assert (cache / "dpopt" / "imdb-words.npz").exists() and not list(there.glob("*.npz"))


def ratings_file(path, lines):
    (path / "ml-100k").mkdir()
    (path / "ml-100k" / "u.data").write_text("".join(lines))


def test_movielens_is_read_and_split(tmp_path):
    ratings_file(tmp_path, [f"{1 + i % 943}\t{1 + i % 1682}\t{1 + i % 5}\t88125{i}\n" for i in range(50)])
    split = ratings.load(tmp_path)
    assert split.train_x.shape == (40, 2) and split.test_x.shape == (10, 2) and split.train_x.dtype == np.int32
    seen = np.concatenate([split.train_x, split.test_x])
    assert len(np.unique(seen, axis=0)) == 50 and seen.min() == 0
    assert set(np.concatenate([split.train_y, split.test_y])) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("lines", "why"),
    [(["1\t2\t3\n"], "expected user"), (["1\tx\t3\t4\n"], "damaged"), (["1\t2\t9\t4\n"], "rating"), ([], "expected")],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_damaged_ratings_are_refused(lines, why, tmp_path):
    ratings_file(tmp_path, lines)
    with pytest.raises(data.DamagedData, match=why):
        ratings.load(tmp_path)


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def mnist_files(path, train=7, test=3, zipped=True):
    (path / "mnist").mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for part, n in (("train", train), ("t10k", test)):
        for kind, shape in (("images-idx3", (n, 28, 28)), ("labels-idx1", (n,))):
            content = idx_bytes(rng.integers(0, 10, shape))
            name = f"{part}-{kind}-ubyte"
            if zipped:
                (path / "mnist" / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (path / "mnist" / name).write_bytes(content)


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_of_any_length_is_read(zipped, tmp_path):
    mnist_files(tmp_path, zipped=zipped)
    split = idx.load(tmp_path)
    assert split.train_x.shape == (7, 28, 28, 1) and split.test_x.shape == (3, 28, 28, 1)
    assert split.train_x.dtype == np.float32 and 0 < split.train_x.max() <= 9 / 255
    assert split.train_y.dtype == np.int32


def test_damaged_idx_files_are_refused(tmp_path):
    good = idx_bytes(np.zeros((2, 3)))
    for content, why in (
        (b"no idx file", "is not an idx file"),
        (good[:-1], "by its header"),
        (good + b"x", "by its header"),
        (good[:6], "by its header"),
    ):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(data.DamagedData, match=why):
            idx.read(tmp_path / "x")
    (tmp_path / "x.gz").write_bytes(gzip.compress(good)[:-5])
    with pytest.raises(data.DamagedData, match="damaged"):
        idx.read(tmp_path / "x.gz")
    mnist_files(tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.zeros(2))))
    with pytest.raises(data.DamagedData, match="3 images and 2 labels"):
        idx.load(tmp_path)


def test_synthetic_sets_have_the_shapes_they_promise():
    toy = synthetic.adadps_toy()
    assert toy.x.shape == (1_000, 500) and set(np.unique(toy.x)) == {0, 1}
    assert 0.88 < toy.x[:, :50].mean() < 0.92 and 0.008 < toy.x[:, 50:].mean() < 0.012
    assert np.abs(toy.y - toy.x @ toy.weights).std() < 0.11
    x, y = synthetic.stackoverflow_like_tags(2_000)
    assert x.shape == (2_000, 10_000) and y.min() >= 0 and y.max() < 500
    often = np.sort(np.asarray((x > 0).sum(0)))[::-1]
    assert often[0] > 100 * max(1, often[2_000])  # heavy-tailed
    split = synthetic.split_tags(1_000)
    assert split.train_x.shape[0] == 800 and len(split.test_y) == 200
