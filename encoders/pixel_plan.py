"""A batch's resizing as one table of whole numbers, for the kernels of `encoders.triton_pixels`.

Host data only. Each image has two records, one for either kernel; behind the records stand the
taps, those of each pair of old and new length once. A place is counted in values of uint8, which
are bytes, a place among the taps in int32 from the beginning of the table.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from encoders.resampling import PRECISION_BITS, Ints, Taps, passes, taps

Size = tuple[int, int]
"""Height and width in pixels."""

TILE = 1024
"""Values that a program of the first kernel makes."""


class Record(NamedTuple):
    """One pass over one image. A value is made of `taps` that lie `tap_step` apart."""

    first_program: int
    """The image's programs begin here; the next image's follow them."""
    source: int = 0
    """Place of the image that the pass reads."""
    row_step: int = 0
    """How much further a row's values begin than those of the row before, `starts` apart."""
    column_step: int = 0
    tap_step: int = 0
    by_row: int = 0
    """1 if taps differ from row to row."""
    by_column: int = 0
    taps: int = 0
    """Place of `starts`, `counts` and `weights`, one after another."""
    length: int = 0
    """How many starts and counts there are, and weights of one tap."""
    most_taps: int = 0
    pitch: int = 0
    """First kernel: values in a row that it writes. Second: blocks of patches in a row."""
    target: int = 0
    """First kernel: place of what it writes. Second: unused."""
    values: int = 0
    """First kernel: how many it writes. Second: unused."""
    after_first: int = 0
    """Second kernel: 1 if it reads what the first wrote, 0 if it reads the batch's pixels."""


class PixelPlan(NamedTuple):
    """All that the two kernels need to know of a batch, and how much there is to do."""

    table: Ints
    """Records of the first kernel, of the second, taps; an even number of int32."""
    tiles: int
    """Programs of the first kernel, none if no image needs two passes."""
    scratch: int
    """Values that it writes."""
    patches: int
    """Programs of the second."""


def plan_pixels(
    sizes: Sequence[Size], targets: Sequence[Size], patch_size: int, merge_size: int
) -> PixelPlan:
    """The plan of images of `sizes`, one after another, that become patches of `targets`."""
    shelf = _Shelf(2 * len(sizes) * len(Record._fields) * 2)
    first, last = [], []
    pixels = tiles = scratch = patches = 0
    for size, (height, width) in zip(sizes, targets, strict=True):
        *earlier, _ = steps = list(passes(*size, height, width)) or [size]
        place, between, after_first = pixels, size, 0
        first.append(Record(tiles))
        if earlier:
            between = steps[0]
            values = 3 * between[0] * between[1]
            record = shelf.record(tiles, pixels, size, between)
            first[-1] = record._replace(pitch=3 * between[1], target=scratch, values=values)
            place, after_first = scratch, 1
            scratch += values
            tiles += -(-values // TILE)
        record = shelf.record(patches, place, between, (height, width))
        pitch = width // (patch_size * merge_size)
        last.append(record._replace(pitch=pitch, after_first=after_first))
        pixels += 3 * size[0] * size[1]
        patches += height * width // patch_size**2
    records = np.array([*first, *last], dtype=np.int64).reshape(-1)
    return PixelPlan(shelf.after(records.view(np.int32)), tiles, scratch, patches)


class _Shelf:
    """The taps of a batch, one after another behind `place`."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._arrays: list[Ints] = []
        self._found: dict[Size, Record] = {}

    def record(self, first_program: int, source: int, old: Size, new: Size) -> Record:
        """A pass from size to size, in which one side changes at most."""
        where = {"first_program": first_program, "source": source}
        row = 3 * old[1]
        if old == new:
            named = self._named((1, 1), UNCHANGED)
            return named._replace(**where, row_step=row, column_step=3)
        if old[0] == new[0]:
            named = self._named((old[1], new[1]), taps(old[1], new[1]))
            return named._replace(**where, row_step=row, tap_step=3, by_column=1)
        named = self._named((old[0], new[0]), taps(old[0], new[0]))
        return named._replace(**where, column_step=3, tap_step=row, by_row=1)

    def after(self, records: Ints) -> Ints:
        """The whole table: these records, then the taps."""
        even = np.zeros(self._place % 2, np.int32)
        return np.concatenate([records, *self._arrays, even])

    def _named(self, lengths: Size, shelved: Taps) -> Record:
        if lengths not in self._found:
            self._found[lengths] = Record(
                0, taps=self._place, length=len(shelved.starts), most_taps=len(shelved.weights)
            )
            arrays = [array.reshape(-1) for array in shelved]
            self._place += sum(map(len, arrays))
            self._arrays += arrays
        return self._found[lengths]


UNCHANGED = Taps(
    *(np.array(values, dtype=np.int32) for values in ([0], [1], [[1 << PRECISION_BITS]]))
)
"""Each pixel is itself."""
