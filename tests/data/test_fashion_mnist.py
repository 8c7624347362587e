from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from torchvision import datasets, transforms

from lit_parallel.data import FashionMNISTDataModule, GlobalBatchSampler, fashion_mnist
from lit_parallel.data.idx import FILES, read_split
from lit_parallel.testing import run_ranks
from tests.strategies.fits import QUIET

SMALL = Path(__file__).parents[2] / "recipes" / "data"
NAMES = [name for names in FILES.values() for name in names]


@pytest.fixture
def torchvision_root(tmp_path):
    """The small set as torchvision would have it after a download."""
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name in NAMES:
        (raw / name).write_bytes(gzip.decompress((SMALL / f"{name}.gz").read_bytes()))
    return tmp_path


@pytest.fixture
def nothing_found(monkeypatch, tmp_path):
    """Neither a system folder nor a way to download."""
    monkeypatch.setattr(fashion_mnist, "SYSTEM_FOLDER", tmp_path / "none")

    def refuse(*args, **kwargs):
        raise RuntimeError("no network")

    monkeypatch.setattr(fashion_mnist, "FashionMNIST", refuse)


def test_batches_equal_torchvisions_images(torchvision_root):
    data = FashionMNISTDataModule(batch_size=100, data_dir=torchvision_root)
    data.setup("test")
    reference = datasets.FashionMNIST(torchvision_root, train=False, transform=transforms.ToTensor())
    images, labels = next(iter(data.test_dataloader()))
    assert images.dtype == torch.float32
    for index in range(100):
        assert torch.equal(images[index], reference[index][0])
        assert labels[index] == reference[index][1]


def test_the_small_set_is_real_and_balanced():
    for split, count in (("train", 1000), ("test", 200)):
        images, labels = read_split(SMALL, split)
        assert images.shape == (10 * count, 1, 28, 28)
        assert labels.bincount().tolist() == [count] * 10
        assert 0.25 < images.float().mean() / 255 < 0.35  # the mean brightness of the whole set is 0.286


@given(
    num_ranks=st.integers(1, 9),
    extra=st.integers(0, 40),
    batch=st.integers(0, 20),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_sample_is_in_one_share_and_all_ranks_have_as_many_batches(num_ranks, extra, batch, shuffle, epoch):
    num_samples, batch_size = num_ranks + extra, num_ranks + batch
    shares = []
    for rank in range(num_ranks):
        sampler = GlobalBatchSampler(num_samples, batch_size, num_ranks=num_ranks, rank=rank, shuffle=shuffle)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler)
    assert len({len(share) for share in shares}) == 1
    assert all(len(batch) for share in shares for batch in share)
    seen = torch.cat([batch for share in shares for batch in share])
    assert seen.sort().values.tolist() == list(range(num_samples))
    for step in zip(*shares, strict=True):
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) <= batch_size + num_ranks - 1


def test_epochs_differ_and_repeat():
    sampler = GlobalBatchSampler(50, 50, shuffle=True, seed=1)
    (first,) = sampler
    sampler.set_epoch(1)
    (second,) = sampler
    sampler.set_epoch(0)
    assert not torch.equal(first, second)
    assert torch.equal(first, next(iter(sampler)))


def test_too_many_devices_are_refused():
    with pytest.raises(ValueError, match=r"The batch size \(2\) is smaller than the number of devices \(3\)"):
        GlobalBatchSampler(10, 2, num_ranks=3, shuffle=True)
    with pytest.raises(ValueError, match=r"The data set \(2\) is smaller"):
        GlobalBatchSampler(2, 4, num_ranks=3, shuffle=True)


class Counting(LightningModule):
    """Counts how often each image comes, by its index in the set."""

    def __init__(self, images):
        super().__init__()
        self.keys = {image.tobytes(): index for index, image in enumerate(images)}
        self.seen = {"fit": [], "test": []}
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def remember(self, stage, batch):
        for image in (batch[0] * 255).round().byte().numpy():
            self.seen[stage].append(self.keys.get(image.tobytes()))

    def training_step(self, batch, batch_idx):
        self.remember("fit", batch)
        return self.weight * 1

    def test_step(self, batch, batch_idx):
        self.remember("test", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def see_all(world_size):
    train, test = read_split(SMALL, "train")[0], read_split(SMALL, "test")[0]
    data = FashionMNISTDataModule(batch_size=1024, data_dir=SMALL)
    trainer = Trainer(**QUIET, strategy="ring", devices=world_size, max_epochs=1)
    module = Counting(train.numpy())
    trainer.fit(module, datamodule=data)
    module.keys = {image.tobytes(): index for index, image in enumerate(test.numpy())}
    trainer.test(module, datamodule=data, verbose=False)
    return module.seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_trainer_shows_each_image_exactly_once(world_size):
    results = run_ranks(see_all, world_size, world_size)
    for stage, split in (("fit", "train"), ("test", "test")):
        images = read_split(SMALL, split)[0].numpy()
        seen = sorted(index for result in results for index in result[stage])
        # Some images of the set are equal: compare as multisets of images.
        keys = {image.tobytes(): index for index, image in enumerate(images)}
        assert seen == sorted(keys[image.tobytes()] for image in images)


def test_the_first_place_that_has_the_files_is_used(monkeypatch, torchvision_root, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setattr(fashion_mnist, "SYSTEM_FOLDER", SMALL)
    assert FashionMNISTDataModule(data_dir=torchvision_root)._find() == torchvision_root / "FashionMNIST" / "raw"
    assert FashionMNISTDataModule(cache_dir=torchvision_root)._find() == torchvision_root / "FashionMNIST" / "raw"
    assert FashionMNISTDataModule(cache_dir=elsewhere)._find() == SMALL


def test_the_fallback_is_used_last_and_said(nothing_found, tmp_path, caplog):
    data = FashionMNISTDataModule(cache_dir=tmp_path, fallback_dir=SMALL)
    data.prepare_data()
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        data.setup("fit")
    assert "using the smaller set in" in caplog.text
    assert "10,000 training and 2,000 test images" in caplog.text


def test_without_any_files_the_error_says_what_to_do(nothing_found, tmp_path):
    with pytest.raises(FileNotFoundError, match="Install Debian's package dataset-fashion-mnist, or pass data_dir"):
        FashionMNISTDataModule(cache_dir=tmp_path).prepare_data()


def test_a_folder_without_the_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not hold Fashion-MNIST's four files"):
        FashionMNISTDataModule(data_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte.gz", b"\x1f\x8bnot gzip", "cannot be read"),
        ("train-images-idx3-ubyte.gz", (SMALL / "train-images-idx3-ubyte.gz").read_bytes()[:-100], "cannot be read"),
        ("train-images-idx3-ubyte", b"", "not a complete idx file"),
        ("train-images-idx3-ubyte", b"\x00\x00\x08\x03\x00\x00", "not a complete idx file"),
        ("train-images-idx3-ubyte", b"\x00\x00\x08\x01\x00\x00\x00\x02ab", "do not belong together"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    for path in SMALL.glob("*.gz"):
        shutil.copy(path, tmp_path)
    (tmp_path / name).write_bytes(content)
    data = FashionMNISTDataModule(data_dir=tmp_path)
    with pytest.raises(ValueError, match=message):
        data.setup("fit")
