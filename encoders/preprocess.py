"""uint8 images on the tower's device -> normalised patches, packed.

Shapes: P = patches of the batch, C = values of a patch (channel, row, column).
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from encoders.staging import Staging


def resize(image_HW3: Tensor, height: int, width: int) -> Tensor:
    """Antialiased bicubic, uint8 [H, W, 3] -> float32 [3, height, width] of whole values 0-255.

    In two passes as Pillow does it, which rounds and clips to uint8 after each: one pass in
    floats differs by up to 8 levels at sharp edges, and by one level in every sixth value. In
    fp64, since Pillow's taps have 22 bits: fp32 tips some values over the edge of rounding.
    """
    image_13HW = image_HW3.permute(2, 0, 1).unsqueeze(0).double()
    for size in passes(image_HW3.shape[0], image_HW3.shape[1], height, width):
        image_13HW = F.interpolate(
            image_13HW, size=size, mode="bicubic", antialias=True, align_corners=False
        )
        image_13HW = image_13HW.round().clamp(0, 255)
    return image_13HW.squeeze(0).float()


def passes(old_height: int, old_width: int, height: int, width: int) -> Iterator[tuple[int, int]]:
    """Sizes after each pass that changes one. Horizontal first, with Pillow 13's exception.

    The exception, found by trying sizes: rows shrink, and by more than twice what columns do.
    """
    between = (old_height, width)
    if height < old_height and old_height - height > 2 * (old_width - width):
        between = (height, old_width)
    if between != (old_height, old_width):
        yield between
    if between != (height, width):
        yield height, width


def patchify(image_3HW: Tensor, patch_size: int, merge_size: int, frames: int) -> Tensor:
    """[3, H, W] -> [P, C]: blocks of merge_size^2 patches row by row, each block row by row.

    A patch holds channel, frame, row, column; a still repeats itself in every frame.
    """
    channels, height, width = image_3HW.shape
    block = patch_size * merge_size
    grid = image_3HW.reshape(
        channels, height // block, merge_size, patch_size, width // block, merge_size, patch_size
    )
    patches = grid.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
    num_patches = height * width // patch_size**2
    return patches.expand(-1, -1, -1, -1, -1, frames, -1, -1).reshape(num_patches, -1)


class Preprocessor:
    """Resize, normalise and patchify a batch's images; constants live on one device."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        *,
        patch_size: int,
        merge_size: int = 1,
        frames: int = 1,
    ) -> None:
        self.staging = Staging(device)
        """Where the pixels of a batch come from."""
        self._mean_311 = torch.tensor(mean, device=device).reshape(3, 1, 1)
        self._std_311 = torch.tensor(std, device=device).reshape(3, 1, 1)
        self._patchify = partial(
            patchify, patch_size=patch_size, merge_size=merge_size, frames=frames
        )

    def __call__(
        self, pixels: Tensor, sizes: Sequence[tuple[int, int]], targets: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Flat uint8 pixels of images of `sizes`, resized to `targets` -> float32 [P, C]."""
        images = torch.split(pixels, [h * w * 3 for h, w in sizes])
        return torch.cat(
            [
                self._patches(image.reshape(*size, 3), target)
                for image, size, target in zip(images, sizes, targets, strict=True)
            ]
        )

    def _patches(self, image_HW3: Tensor, target: tuple[int, int]) -> Tensor:
        unit_3HW = resize(image_HW3, *target) / 255
        return self._patchify((unit_3HW - self._mean_311) / self._std_311)
