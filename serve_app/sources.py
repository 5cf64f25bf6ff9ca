"""One item of an embeddings request -> compressed bytes. The dialects: data URIs and base64.

An item is a string, or an object with `image`, `image_url` (string or `{"url": ...}`), `url`,
`bytes` or `b64_json`. Addresses and paths are refused: this service opens nothing for a caller.
"""

import base64
import binascii
import re
from typing import Any
from urllib.parse import unquote_to_bytes

from encoders.errors import InvalidRequest

IMAGE_KEYS = ("image", "image_url", "url", "bytes", "b64_json")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}):")
BASE64_MARK = re.compile(r";\s*base64\s*$", re.IGNORECASE)
URL_SAFE = bytes.maketrans(b"-_", b"+/")


def image_bytes(item: Any, *, modality: str | None = None) -> bytes:
    """The compressed bytes that an item carries. Raises `InvalidRequest`."""
    bare_base64 = modality == "image"
    if isinstance(item, dict):
        item, bare_base64 = _image_value(item), True
    if not isinstance(item, str):
        raise InvalidRequest(f"an item is a string or an object, not {type(item).__name__}")
    item = item.strip()
    if scheme := SCHEME.match(item):
        if scheme[1].lower() == "data":
            return _data_uri(item)
        raise InvalidRequest(
            f"{scheme[1].lower()}: addresses are not fetched here; send the image as a data URI"
        )
    if not bare_base64:
        raise InvalidRequest(
            "text input is not supported by this model; send a data URI, or bare base64 with "
            '"modality": "image"'
        )
    return _base64(_utf8(item))


def _image_value(item: dict[str, Any]) -> Any:
    for key in IMAGE_KEYS:
        if (value := item.get(key)) is not None:
            return value.get("url") if isinstance(value, dict) else value
    # The caller's own words: they may be megabytes, and no valid Unicode.
    keys = ", ".join(sorted(item))[:200].encode("ascii", "backslashreplace").decode()
    keys = keys or "none at all"
    raise InvalidRequest(f"the object has no key of {', '.join(IMAGE_KEYS)}; it has {keys}")


def _data_uri(uri: str) -> bytes:
    """`data:[type][;parameter...][;base64],payload`, as lenient as browsers are (RFC 2397)."""
    head, comma, payload = uri.partition(",")
    if not comma:
        raise InvalidRequest(f"a data URI of {len(uri)} characters has no comma")
    raw = unquote_to_bytes(_utf8(payload))
    return _base64(raw) if BASE64_MARK.search(head) else raw


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate
        raise InvalidRequest(f"the item is not valid Unicode: {error.reason}") from error


def _base64(text: bytes) -> bytes:
    """Decode strictly, but for white space, missing padding and the URL-safe alphabet."""
    compact = text.translate(URL_SAFE, b" \t\r\n\f\v").rstrip(b"=")
    try:
        return base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    except binascii.Error as error:
        raise InvalidRequest(f"wrong base64 of {len(text)} characters: {error}") from error
