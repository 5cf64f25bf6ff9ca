"""The images of one part, as SGLang passes them on from its users: data URIs and base64."""

import re
from typing import Any

from encoders.errors import EncoderError, InvalidRequest, RequestTooLarge
from serve_app.service import ImageItem
from serve_app.sglang.wire import Part
from serve_app.sources import image_bytes

WITHOUT_EFFECT = {"url", "content_hash", "detail"}
"""Keys of an item that change nothing in how its image is encoded; any other might."""
# The base64 of a JPEG begins like an absolute path; that of other formats has no such signs.
PATH = re.compile(r"(?!/9j/)([./~\\]|[^,:\s]{0,4096}\.[A-Za-z]\w{0,4}$)")


def images(part: Part, max_images: int) -> list[ImageItem]:
    """The compressed images of a part, in order. Raises a `RequestError` that names the item."""
    if part.modality != "IMAGE":
        raise InvalidRequest(f"modality is {part.modality}, only IMAGE is encoded here")
    if not part.mm_items:
        raise InvalidRequest("the part has 0 images, at least 1 is needed")
    if len(part.mm_items) > max_images:
        raise RequestTooLarge(
            f"the part has {len(part.mm_items)} images, the limit is {max_images}"
        )
    items = []
    for index, item in enumerate(part.mm_items):
        name = f"mm_items[{index}]"
        try:
            items.append(ImageItem(name, image_bytes(_address(item), modality="image")))
        except EncoderError as error:
            raise error.named(name) from error
    return items


def _address(item: Any) -> str:
    if isinstance(item, dict):
        for key in sorted(item.keys() - WITHOUT_EFFECT):
            if item[key] is not None:
                raise InvalidRequest(f"the option {key[:40]!r} of an image is not supported here")
        item = item.get("url")
    if not isinstance(item, str):
        raise InvalidRequest(f"an item is a string or has a `url`, not {type(item).__name__}")
    if PATH.match(item.strip()):
        raise InvalidRequest("files are not opened here; send the image as a data URI")
    return item
