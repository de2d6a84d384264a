"""Sequential MNIST: images as sequences of single pixels, and the three corruptions of the paper's Figure 1.

Choices [paper, section 4, says no more than the ranges]: pixels are floats in [0, 1] without further normalisation,
read row by row; a corruption changes these numbers and nothing is clipped afterwards, so that a scale of 10 really is
ten times the input and noise may be negative. `normalise` and `clip` (scripts.smnist) change both choices.

The random fields behind dropout and noise are drawn once per image, whatever the level: a higher level drops a superset
of the pixels, or stretches the same noise. All models see the same corrupted images.
"""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from efla_data.errors import DataError

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training pixels
LEVELS: dict[str, tuple[float, ...]] = {
    "dropout": tuple(round(0.1 * n, 1) for n in range(11)),  # probability that a pixel is set to 0
    "intensity": tuple(float(n) for n in range(1, 11)),  # factor on every pixel
    "noise": tuple(round(0.1 * n, 1) for n in range(11)),  # standard deviation of Gaussian noise added to every pixel
}
SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Digits:
    """Train and test images [N, side, side] uint8 and labels [N] int64; `source` is where they are from."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    source: str


def load_digits(source: str) -> Digits:
    """MNIST from a .npz file, a folder of idx files (.gz or not), `synthetic` digits, or a data set name on the hub.

    A .npz holds train_images, train_labels, test_images, test_labels (or x_train, y_train, x_test, y_test).

    Raises:
        DataError: nothing there, or other shapes than images [N, side, side] with one label each.
    """
    path = Path(source).expanduser()
    if source == SYNTHETIC:
        arrays: list[np.ndarray] = [*synthetic_digits(4000, seed=0), *synthetic_digits(1000, seed=1)]
    elif path.is_file():
        arrays = _from_npz(path)
    elif path.is_dir():
        arrays = _from_idx(path)
    elif path.suffix or source.startswith(("/", ".", "~")):
        raise DataError(f"{source}: no such file or folder; expected a .npz, a folder of idx files, or a hub name")
    else:
        arrays = _from_hub(source)
    for images, labels, name in ((arrays[0], arrays[1], "train"), (arrays[2], arrays[3], "test")):
        if images.ndim != 3 or images.shape[1] != images.shape[2] or labels.shape != images.shape[:1]:
            raise DataError(
                f"{source}, {name}: expected images [N, side, side] and labels [N], "
                f"got {list(images.shape)} and {list(labels.shape)}"
            )
    images, labels, test_images, test_labels = arrays
    return Digits(
        images.astype(np.uint8), labels.astype(np.int64), test_images.astype(np.uint8), test_labels.astype(np.int64),
        source,
    )  # fmt: skip


def _from_npz(path: Path) -> list[np.ndarray]:
    spellings = (
        ("train_images", "train_labels", "test_images", "test_labels"),
        ("x_train", "y_train", "x_test", "y_test"),
    )
    try:
        content = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as .npz: {error}") from error
    for names in spellings:
        if all(name in content for name in names):
            return [content[name] for name in names]
    raise DataError(f"{path}: expected arrays {', '.join(spellings[0])}, got {', '.join(content)}")


def _from_idx(folder: Path) -> list[np.ndarray]:
    stems = ("train-images", "train-labels", "t10k-images", "t10k-labels")
    return [_read_idx(folder, stem) for stem in stems]


def _read_idx(folder: Path, stem: str) -> np.ndarray:
    """One idx file of unsigned bytes: 0, 0, type 8, number of dimensions, the sizes in big-endian, then the bytes."""
    found = sorted(p for p in folder.iterdir() if p.name.replace(".idx", "-idx").startswith(f"{stem}-idx"))
    if not found:
        raise DataError(f"{folder}: expected an idx file {stem}-idx?-ubyte (or .gz), found none")
    data = gzip.decompress(found[0].read_bytes()) if found[0].suffix == ".gz" else found[0].read_bytes()
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DataError(f"{found[0]}: expected an idx file of unsigned bytes, got the header {data[:4].hex()}")
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    content = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if content.size != int(np.prod(shape)):
        raise DataError(f"{found[0]}: the header says {list(shape)}, the file holds {content.size} bytes")
    return content.reshape(shape)


def _from_hub(name: str) -> list[np.ndarray]:
    from datasets import load_dataset

    try:
        content = load_dataset(name)
    except Exception as error:  # every failure of a download means the same to the user
        raise DataError(f"{name}: not a file here, and the hub gave: {str(error).splitlines()[0]}") from error
    arrays = []
    for split in ("train", "test"):
        rows = content[split].with_format("numpy")
        arrays += [np.stack(list(rows["image"])), np.asarray(rows["label"])]
    return arrays


def pool(images: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Mean over blocks of factor x factor pixels: [N, side, side] -> [N, side / factor, side / factor].

    Factor 2 gives 14 x 14 images of 196 tokens, which is not the paper's setting.
    """
    count, side = images.shape[:2]
    if factor < 1 or side % factor:
        raise DataError(f"pooling by {factor}: expected a divisor of the image side {side}")
    blocks = images.reshape(count, side // factor, factor, side // factor, factor)
    return np.rint(blocks.mean(axis=(2, 4), dtype=np.float32)).astype(np.uint8)


def as_pixels(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[N, side, side] bytes -> sequences [N, side * side] in [0, 1], row by row."""
    return images.reshape(len(images), -1).astype(np.float32) / np.float32(255)


class Corruptions:
    """The corruptions of a fixed set of images [N, T] on a device; the random fields depend on the seed alone.

    They are drawn by numpy, once, and what a level does to them rounds alike on every device: so do the images.
    """

    def __init__(self, pixels: NDArray[np.float32], seed: int, device: torch.device | str = "cpu") -> None:
        generator = np.random.default_rng(seed)
        fields = (
            pixels,
            generator.random(pixels.shape, dtype=np.float32),
            generator.standard_normal(pixels.shape, dtype=np.float32),
        )
        self.pixels, self._uniform, self._normal = (torch.from_numpy(field).to(device) for field in fields)

    def apply(self, kind: str, level: float) -> Tensor:
        """[N, T]: dropout sets a pixel to 0 with probability `level`, intensity multiplies, noise adds level * N(0, 1).

        Raises:
            ValueError: for a level outside the paper's range or an unknown kind.
        """
        if kind not in LEVELS or not LEVELS[kind][0] <= level <= LEVELS[kind][-1]:
            raise ValueError(f"corruption: expected one of {', '.join(LEVELS)} within its range, got {kind} {level}")
        if kind == "dropout":
            return self.pixels.masked_fill(self._uniform < level, 0.0)
        if kind == "intensity":
            return self.pixels * level
        return self.pixels + level * self._normal


# Strokes of the figures 0 to 9 on a 3 x 5 grid, for tests without data.
_GLYPHS = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75711")


def synthetic_digits(count: int, seed: int, side: int = 28) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Stand-ins for MNIST, easy to learn: blocky figures, shifted a little, of random strength over faint noise."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, count)
    images = generator.integers(0, 30, (count, side, side)).astype(np.uint8)
    cell = side // 7
    for image, label in zip(images, labels):
        bits = np.array([[int(row) >> shift & 1 for shift in (2, 1, 0)] for row in _GLYPHS[label]])
        stroke = np.kron(bits, np.ones((cell, cell), np.int64))
        top, left = ((side - size) // 2 + generator.integers(-1, 2) for size in stroke.shape)
        patch = image[top : top + stroke.shape[0], left : left + stroke.shape[1]]
        patch[stroke > 0] = generator.integers(150, 256)
    return images, labels
