"""Which of the offered media types an `Accept` header likes best (RFC 9110, section 12.5.1)."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple


class MediaRange(NamedTuple):
    """One element of the header: `text/html`, `text/*` or `*/*`, and how welcome it is."""

    media_range: str
    quality: float

    @property
    def exactness(self) -> int:
        """2 for a type by its name, 1 for all of a kind, 0 for anything."""
        return 2 - self.media_range.count("*")

    def covers(self, media_type: str) -> bool:
        """Whether a type is meant."""
        kind = media_type.partition("/")[0]
        return self.media_range in (media_type, f"{kind}/*", "*/*")


def best(header: str, offers: Sequence[str], by_name_only: Collection[str] = ()) -> str | None:
    """The best of `offers`, or None if no one of them is accepted. No header is an empty one.

    The highest q wins; of equals the type that is named more exactly, then the one that the client
    names first, then the one that is offered first. Types `by_name_only` need their full name.
    """
    ranges = list(_parsed(header)) if header.strip() else [MediaRange("*/*", 1.0)]
    ranked = []
    for place, offer in enumerate(offers):
        # What is said of a type more exactly overrides what is said of its kind.
        said = [(x.exactness, x.quality, -i) for i, x in enumerate(ranges) if x.covers(offer)]
        exactness, quality, order = max(said, default=(0, 0.0, 0))
        if quality > 0 and (exactness == 2 or offer not in by_name_only):
            ranked.append((quality, exactness, order, -place, offer))
    return max(ranked)[-1] if ranked else None


def _parsed(header: str) -> Iterator[MediaRange]:
    """The elements that can be read. Parameters other than q are passed over."""
    unquoted = "".join(header.split('"')[::2])  # what is quoted may hold any separator
    for element in unquoted.lower().split(","):
        media_range, *parameters = (part.strip() for part in element.split(";"))
        media_range = "*/*" if media_range == "*" else media_range  # as old Java writes it
        pairs = (parameter.partition("=") for parameter in parameters)
        quality = next((value for name, _, value in pairs if name.strip() == "q"), "1")
        try:
            weight = float(quality)
        except ValueError:
            continue
        if "/" in media_range and 0 <= weight <= 1:  # not NaN either
            yield MediaRange(media_range, weight)
