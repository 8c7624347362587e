"""Fashion-MNIST for Lightning, found wherever it already is."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torchvision.datasets import FashionMNIST

from lit_parallel.data.batches import BatchLoader, GlobalBatchSampler
from lit_parallel.data.idx import has_all_files, read_split

#: Where Debian's package `dataset-fashion-mnist` puts the files.
SYSTEM_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_CONNECT_SECONDS = 10


class FashionMNISTDataModule(LightningDataModule):
    """60,000 training and 10,000 test images of clothing, 28x28, 10 classes (Xiao et al. 2017).

    The files are taken from the first of: `data_dir`, torchvision's folder in `cache_dir`, the system's dataset
    folder, a download by torchvision into `cache_dir`, and `fallback_dir`. The test images also serve as validation,
    as the tutorial has it.

    In every epoch each training image is seen by exactly one rank; validation and test see each image exactly once,
    on any number of devices.

    Args:
        batch_size: Size of a global batch, split over all devices.
        data_dir: A folder with the four idx files, plain or compressed, or with torchvision's `FashionMNIST/raw`.
        cache_dir: Where torchvision's data sets are kept; by default `~/.cache/lit_parallel`.
        fallback_dir: A folder with a smaller set, used as the last resort.
        seed: Of the order of the training images.

    Attributes:
        folder: Where the files were found; None before `setup`.
    """

    def __init__(
        self,
        batch_size: int = 128,
        data_dir: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        fallback_dir: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size, self.seed = batch_size, seed
        self._data_dir = None if data_dir is None else Path(data_dir)
        self._cache_dir = Path("~/.cache/lit_parallel").expanduser() if cache_dir is None else Path(cache_dir)
        self._fallback_dir = None if fallback_dir is None else Path(fallback_dir)
        self.folder: Path | None = None
        self._splits: dict[str, tuple[Tensor, Tensor]] = {}
        if self._data_dir is not None and self._find_in(self._data_dir) is None:
            raise ValueError(
                f"data_dir={str(data_dir)!r} does not hold Fashion-MNIST's four files (train-images-idx3-ubyte,"
                " train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, plain or .gz)."
            )

    def prepare_data(self) -> None:
        """Downloads the files where none are found; runs on one rank per machine."""
        if self._find() is None:
            try:
                with _connect_timeout():
                    FashionMNIST(self._cache_dir, download=True)
            except (OSError, RuntimeError) as error:
                if self._fallback_dir is None:
                    raise FileNotFoundError(
                        f"Fashion-MNIST is neither in {self._torchvision_folder} nor in {SYSTEM_FOLDER}, and could not"
                        f" be downloaded ({error}). Install Debian's package dataset-fashion-mnist, or pass data_dir."
                    ) from error

    def setup(self, stage: str) -> None:
        """Reads the images into memory, once."""
        if self._splits:
            return
        # Without either, prepare_data has failed.
        self.folder = folder = self._find() or self._fallback_dir
        assert folder is not None
        self._splits = {split: read_split(folder, split) for split in ("train", "test")}
        num_train, num_test = (len(self._splits[split][1]) for split in ("train", "test"))
        if folder == self._fallback_dir:
            rank_zero_info(
                f"Fashion-MNIST was not found and could not be downloaded: using the smaller set in {folder}"
                f" ({num_train:,} training and {num_test:,} test images)."
            )
        else:
            rank_zero_info(f"Fashion-MNIST from {folder}: {num_train:,} training and {num_test:,} test images.")

    def split(self, name: str) -> tuple[Tensor, Tensor]:
        """All uint8 images (N, 1, 28, 28) and labels (N,) of "train" or "test"; after `setup`."""
        return self._splits[name]

    def train_dataloader(self) -> BatchLoader:
        """Shuffled training batches."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> BatchLoader:
        """The test images, in order."""
        return self._loader("test", shuffle=False)

    def test_dataloader(self) -> BatchLoader:
        """The test images, in order."""
        return self._loader("test", shuffle=False)

    def predict_dataloader(self) -> BatchLoader:
        """The test images, in order."""
        return self._loader("test", shuffle=False)

    def _loader(self, split: str, *, shuffle: bool) -> BatchLoader:
        images, labels = self.split(split)
        num_ranks, rank = (1, 0) if self.trainer is None else (self.trainer.world_size, self.trainer.global_rank)
        sampler = GlobalBatchSampler(
            len(labels), self.batch_size, num_ranks=num_ranks, rank=rank, shuffle=shuffle, seed=self.seed
        )
        return BatchLoader(images, labels, sampler)

    @property
    def _torchvision_folder(self) -> Path:
        return self._cache_dir / "FashionMNIST" / "raw"

    def _find(self) -> Path | None:
        """The first folder that holds the whole set."""
        if self._data_dir is not None:
            return self._find_in(self._data_dir)
        return self._find_in(self._torchvision_folder) or self._find_in(SYSTEM_FOLDER)

    @staticmethod
    def _find_in(folder: Path) -> Path | None:
        candidates = (folder, folder / "FashionMNIST" / "raw")
        return next((path for path in candidates if has_all_files(path)), None)


@contextmanager
def _connect_timeout() -> Iterator[None]:
    """Bounds how long a download may wait for a server: torchvision sets no limit."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_CONNECT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
