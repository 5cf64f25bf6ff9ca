"""uint8 images on the tower's device -> normalised patches, packed.

On a GPU two kernels do it for a whole batch (`encoders.triton_pixels`); this file has their plain
twin, image by image. Both give Pillow's bytes and the same bits.

Shapes: P = patches of the batch, C = values of a patch (channel, row, column), V = values of a
byte, L = length of a side, N = all other values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from encoders.kernels import fused
from encoders.resampling import bands, passes
from encoders.staging import Staging
from encoders.transfer import upload


def resize(image_HW3: Tensor, height: int, width: int) -> Tensor:
    """Pillow's antialiased bicubic to the bit: uint8 [H, W, 3] -> uint8 [height, width, 3].

    In passes as Pillow does it, which rounds and clips to uint8 after each.
    """
    old_height, old_width, _ = image_HW3.shape
    for pass_height, pass_width in passes(old_height, old_width, height, width):
        if pass_width == image_HW3.shape[1]:
            image_HW3 = _resize_first_side(image_HW3, pass_height)
        else:
            image_HW3 = _resize_first_side(image_HW3.transpose(0, 1), pass_width).transpose(0, 1)
    return image_HW3


def _resize_first_side(image_LX3: Tensor, length: int) -> Tensor:
    lines_LN = image_LX3.reshape(image_LX3.shape[0], -1)
    made_LN = lines_LN.new_empty(length, lines_LN.shape[1])
    for band in bands(len(lines_LN), length):
        matrix = upload(torch.from_numpy(band.matrix), lines_LN.device)
        # Weights of 22 bits times bytes: fp64 holds each sum exactly, in whatever order it is made.
        sums = (matrix @ lines_LN[band.used].double()).add_(0.5)
        made_LN[band.made] = sums.clamp_(0, 255).to(torch.uint8)
    return made_LN.reshape(length, *image_LX3.shape[1:])


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
        dtype: torch.dtype,
        *,
        patch_size: int,
        merge_size: int = 1,
        frames: int = 1,
    ) -> None:
        """On a GPU, compiles what any batch will need."""
        self.staging = Staging(device)
        """Where the pixels of a batch come from."""
        # On the host: a GPU multiplies by 1 / 255 instead, and the last bits differ.
        mean_31, std_31 = (torch.tensor(values).reshape(3, 1) for values in (mean, std))
        levels_3V = (torch.arange(256) / 255 - mean_31) / std_31
        self._levels_3V = levels_3V.to(dtype).to(device)
        shape = {"patch_size": patch_size, "merge_size": merge_size, "frames": frames}
        self._shape: dict[str, Any] = shape
        if fused(self._levels_3V):
            side = patch_size * merge_size
            one = torch.zeros(3, dtype=torch.uint8, device=device)
            self(one, [(1, 1)], [(side, side)])  # which takes both passes, so both kernels

    def __call__(
        self, pixels: Tensor, sizes: Sequence[tuple[int, int]], targets: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Flat uint8 pixels of images of `sizes`, resized to `targets` -> [P, C] in the dtype."""
        if fused(pixels):
            from encoders.triton_pixels import patches_of  # absent beside torch for the CPU

            return patches_of(pixels, sizes, targets, self._levels_3V, **self._shape)
        images = torch.split(pixels, [h * w * 3 for h, w in sizes])
        return torch.cat(
            [
                self._patches(image.reshape(*size, 3), target)
                for image, size, target in zip(images, sizes, targets, strict=True)
            ]
        )

    def _patches(self, image_HW3: Tensor, target: tuple[int, int]) -> Tensor:
        planes_3N = resize(image_HW3, *target).permute(2, 0, 1).reshape(3, -1).int()
        normalised_3N = self._levels_3V.new_empty(planes_3N.shape)
        for channel in range(3):
            levels_V, out_N = self._levels_3V[channel], normalised_3N[channel]
            torch.index_select(levels_V, 0, planes_3N[channel], out=out_N)
        return patchify(normalised_3N.reshape(3, *target), **self._shape)
