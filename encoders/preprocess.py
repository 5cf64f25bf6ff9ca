"""uint8 images on the tower's device -> normalised patches, packed.

Shapes: P = patches of the batch, C = values of a patch (channel, row, column).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def resize(image_HW3: Tensor, height: int, width: int) -> Tensor:
    """Antialiased bicubic, uint8 [H, W, 3] -> float32 [3, height, width] of whole values 0-255.

    In two passes as Pillow does it, which rounds and clips to uint8 after each: one pass in
    floats differs by up to 8 levels at sharp edges, and by one level in every sixth value.
    """
    image_13HW = image_HW3.permute(2, 0, 1).unsqueeze(0).float()
    old_height, old_width = image_13HW.shape[2:]
    first = (old_height, width)
    if height < old_height and width > old_width:
        first = (height, old_width)  # Pillow's exception to horizontal first
    for size in (first, (height, width)):
        if image_13HW.shape[2:] != size:
            image_13HW = F.interpolate(
                image_13HW, size=size, mode="bicubic", antialias=True, align_corners=False
            )
            image_13HW = image_13HW.round().clamp(0, 255)
    return image_13HW.squeeze(0)


def patchify(image_3HW: Tensor, patch_size: int) -> Tensor:
    """[3, H, W] -> [P, C], patches row by row."""
    channels, height, width = image_3HW.shape
    rows, columns = height // patch_size, width // patch_size
    grid = image_3HW.reshape(channels, rows, patch_size, columns, patch_size)
    return grid.permute(1, 3, 0, 2, 4).reshape(rows * columns, -1)


class Preprocessor:
    """Resize, normalise and patchify a batch's images; constants live on one device."""

    def __init__(
        self,
        patch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
    ) -> None:
        self.patch_size = patch_size
        self._mean_311 = torch.tensor(mean, device=device).reshape(3, 1, 1)
        self._std_311 = torch.tensor(std, device=device).reshape(3, 1, 1)

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
        return patchify((unit_3HW - self._mean_311) / self._std_311, self.patch_size)
