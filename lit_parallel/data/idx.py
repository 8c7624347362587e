"""Reading Fashion-MNIST's files."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def find_file(folder: Path, name: str) -> Path | None:
    """The file of that name in a folder, plain or compressed."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def has_all_files(folder: Path) -> bool:
    """Whether a folder holds images and labels of both splits."""
    return all(find_file(folder, name) for names in FILES.values() for name in names)


def read_split(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Reads the images and labels of a split.

    Args:
        folder: A folder for which `has_all_files` holds.
        split: "train" or "test".

    Returns:
        uint8 images (N, 1, rows, columns) and int64 labels (N,).

    Raises:
        ValueError: A file is damaged, or the two do not belong together.
    """
    images, labels = (_read(folder, name) for name in FILES[split])
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        raise ValueError(
            f"{folder}: images of shape {tuple(images.shape)} and labels of shape {tuple(labels.shape)} do not belong"
            " together. Fetch the files again."
        )
    return images.unsqueeze(1), labels.long()


def _read(folder: Path, name: str) -> Tensor:
    """Reads an idx file of bytes: two zeros, type 8, the number of dimensions, their lengths, then the values."""
    path = find_file(folder, name)
    assert path is not None
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}). Fetch the file again.") from error
    num_dims = content[3] if content[:3] == b"\x00\x00\x08" else 0
    header = 4 + 4 * num_dims
    complete = num_dims > 0 and len(content) >= header
    shape = np.frombuffer(content[4:header], dtype=">i4").tolist() if complete else []
    if not complete or len(content) - header != np.prod(shape):
        raise ValueError(f"{path} is not a complete idx file of bytes. Fetch the file again.")
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy())
