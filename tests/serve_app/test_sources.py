"""Every dialect in which clients write an image, and what is refused instead."""

import base64
import random
from typing import Any

import pytest

from encoders.errors import InvalidRequest
from serve_app.sources import IMAGE_KEYS, image_bytes

DATA = bytes(range(256)) + b"\xfb\xff\xfe?"  # has "+" and "/" in base64, and needs padding
BASE64 = base64.b64encode(DATA).decode()
URL_SAFE = base64.urlsafe_b64encode(DATA).decode()
URI = f"data:image/png;base64,{BASE64}"


def lines(text: str, end: str) -> str:
    return end.join(text[i : i + 76] for i in range(0, len(text), 76))


@pytest.mark.parametrize(
    "uri",
    [
        URI,
        f"data:image/jpeg;charset=utf-8;name=a.png;base64,{BASE64}",
        f"data:image/png;BASE64,{BASE64}",
        f"DATA:IMAGE/PNG;Base64,{BASE64}",
        f"data:;base64,{BASE64}",
        f"data:image/png;base64 ,{BASE64}",
        f"data:image/png; base64,{BASE64}",
        f" {URI}",
        f"\n{URI}\n",
        f"data:image/png;base64, {BASE64} ",
        f"data:image/png;base64,{lines(BASE64, chr(10))}",
        f"data:image/png;base64,{lines(BASE64, chr(13) + chr(10))}\r\n",
        f"data:image/png;base64,{lines(BASE64, chr(9))}",
        f"data:image/png;base64,{BASE64.rstrip('=')}",
        f"data:image/png;base64,{BASE64}===",
        f"data:image/png;base64,{URL_SAFE}",
        f"data:image/png;base64,{URL_SAFE.rstrip('=')}",
        "data:image/png;base64," + BASE64.replace("+", "%2B").replace("/", "%2f"),
        "data:image/png;base64," + BASE64.replace("=", "%3D"),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in DATA),
        "data:," + "".join(f"%{byte:02X}" for byte in DATA),
    ],
    ids=lambda uri: ascii(uri[:48]),
)
def test_a_data_uri_in_any_dialect_gives_the_bytes(uri: str) -> None:
    data = image_bytes(uri)

    assert data == DATA


def test_a_data_uri_that_is_not_base64_keeps_plus_and_text_as_they_are() -> None:
    data = image_bytes("data:text/plain,a+b%20c;base64,d")

    assert data == b"a+b c;base64,d"


@pytest.mark.parametrize("key", IMAGE_KEYS)
@pytest.mark.parametrize("value", [URI, BASE64, URL_SAFE.rstrip("="), lines(BASE64, "\n")])
def test_an_object_carries_a_data_uri_or_bare_base64_under_each_key(key: str, value: str) -> None:
    data = image_bytes({key: value})

    assert data == DATA


@pytest.mark.parametrize("value", [URI, BASE64])
def test_an_image_url_may_be_an_object_with_a_url(value: str) -> None:
    data = image_bytes({"type": "image_url", "image_url": {"url": value, "detail": "low"}})

    assert data == DATA


def test_a_key_that_is_null_gives_way_to_the_next() -> None:
    data = image_bytes({"image": None, "text": None, "b64_json": BASE64})

    assert data == DATA


def test_bare_base64_passes_as_a_string_when_the_modality_is_image() -> None:
    data = image_bytes(BASE64, modality="image")

    assert data == DATA


def test_the_payload_of_these_tests_has_what_the_dialects_differ_in() -> None:
    differing = {"+", "/", "="}

    found = differing & set(BASE64)

    assert found == differing


@pytest.mark.parametrize("modality", [None, "text", "Image"])
def test_bare_base64_as_a_string_is_taken_for_text_otherwise(modality: str | None) -> None:
    with pytest.raises(InvalidRequest, match="text input is not supported"):
        image_bytes(BASE64, modality=modality)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"image": x}, lambda x: {"url": x}])
@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1/a.png",
        "https://example.org/a.png",
        "HTTPS://example.org/a.png",
        "file:///etc/passwd",
        "ftp://example.org/a.png",
        "s3://bucket/a.png",
        "gopher:x",
        "C:\\a.png",
    ],
)
def test_an_address_is_refused_by_its_scheme(address: str, wrap: Any) -> None:
    scheme = address.partition(":")[0].lower()

    with pytest.raises(InvalidRequest, match=f"^{scheme}: addresses are not fetched here"):
        image_bytes(wrap(address), modality="image")


@pytest.mark.parametrize(
    "text", ["a photo of a cat", "test", "", "/etc/passwd", "../a.png", "//example.org/a.png"]
)
def test_a_text_or_a_path_is_refused_and_the_message_says_what_to_send(text: str) -> None:
    with pytest.raises(InvalidRequest, match="send a data URI, or bare base64 with"):
        image_bytes(text)


@pytest.mark.parametrize(
    "item",
    [
        "/etc/passwd!",
        "/tmp/a.png",
        "//example.org/a.png",
        "\\\\host\\a.png",
        "a photo of a cat!",
        "AAAAA",  # five characters are no whole number of bytes
        "AA=A",
        "=AAA",
        "AAAA*",
        "käse",
        "AAAA\0",
    ],
)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"image": x}])
def test_wrong_base64_is_refused_with_its_length(item: str, wrap: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"wrong base64 of {len(item.encode())} characters"):
        image_bytes(wrap(item), modality="image")


@pytest.mark.parametrize("payload", ["AAAAA", "AA=A", "%00", "AAAA%", "é", "AAAA,AAAA"])
def test_wrong_base64_in_a_data_uri_is_refused(payload: str) -> None:
    with pytest.raises(InvalidRequest, match="wrong base64 of"):
        image_bytes(f"data:image/png;base64,{payload}")


@pytest.mark.parametrize("uri", ["data:", "data:image/png", f"data:image/png;base64;{BASE64}"])
def test_a_data_uri_without_a_comma_is_refused_with_its_length(uri: str) -> None:
    with pytest.raises(InvalidRequest, match=f"a data URI of {len(uri)} characters has no comma"):
        image_bytes(uri)


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (1, "int"),
        (1.5, "float"),
        (True, "bool"),
        (None, "NoneType"),
        ([URI], "list"),
        (DATA, "bytes"),
        ({"image": 7}, "int"),
        ({"image": [URI]}, "list"),
        ({"image_url": {"url": 7}}, "int"),
        ({"image_url": {}}, "NoneType"),
        ({"image_url": {"url": {"url": URI}}}, "dict"),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_type(item: Any, kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"a string or an object, not {kind}$"):
        image_bytes(item)


@pytest.mark.parametrize(
    ("item", "has"),
    [({}, "none at all"), ({"text": "a", "foo": 1}, "foo, text"), ({"image": None}, "image")],
)
def test_an_object_without_an_image_is_refused_with_the_keys_that_it_has(
    item: dict[str, Any], has: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"no key of image, .*b64_json; it has {has}$"):
        image_bytes(item)


@pytest.mark.parametrize("item", ["\ud800", "data:,\ud800", "data:;base64,\ud800"], ids=ascii)
def test_a_lone_surrogate_is_refused(item: str) -> None:
    with pytest.raises(InvalidRequest, match="the item is not valid Unicode"):
        image_bytes({"image": item})


def test_a_key_that_is_a_lone_surrogate_is_named_in_a_message_that_can_be_sent() -> None:
    with pytest.raises(InvalidRequest) as caught:
        image_bytes({"\ud800": 1})

    assert str(caught.value).encode().endswith(b"it has \\ud800")


def test_the_message_about_wrong_base64_does_not_repeat_the_payload() -> None:
    payload = "A" * 100_000 + "*"

    with pytest.raises(InvalidRequest) as caught:
        image_bytes({"image": payload})

    assert len(str(caught.value)) < 200


ALPHABET = 'aZ09+/=-_ ,;:%\n\0{}"\\é☃\U0001f600\x7f\u2028'
STARTS = ("", "data:", "data:,", "data:;base64,", "data:image/png;base64,", "http://", "file:", "%")


def random_text(choose: random.Random) -> str:
    return "".join(choose.choices(ALPHABET, k=choose.randrange(12)))


def random_value(choose: random.Random, depth: int = 0) -> Any:
    """Any JSON value; strings and keys often begin as the dialects do."""
    kinds = ("text", "text", "text", "number", "constant") + ("object", "list") * (depth < 6)
    match choose.choice(kinds):
        case "text":
            return choose.choice(STARTS) + random_text(choose)
        case "number":
            return choose.choice((0, -1, 1.5, -0.0, 1e308, 10**4000, -(10**40)))
        case "constant":
            return choose.choice((None, True, False, float("nan"), float("inf")))
        case "list":
            return [random_value(choose, depth + 1) for _ in range(choose.randrange(3))]
        case _:
            keys = [choose.choice((*IMAGE_KEYS, random_text(choose))) for _ in range(3)]
            return {key: random_value(choose, depth + 1) for key in keys}


@pytest.mark.parametrize("seed", range(4))
def test_nothing_but_an_invalid_request_leaves_for_any_json_value(seed: int) -> None:
    choose, outcomes = random.Random(seed), set[type]()
    for _ in range(3000):
        value, modality = random_value(choose), choose.choice((None, "image", "text"))

        try:
            outcome = image_bytes(value, modality=modality)
        except InvalidRequest as error:
            outcome = error

        assert isinstance(outcome, bytes | InvalidRequest), repr(value)
        outcomes.add(type(outcome))
    assert outcomes == {bytes, InvalidRequest}


def test_nothing_but_an_invalid_request_leaves_for_deep_nesting() -> None:
    deep: Any = URI
    for _ in range(100_000):
        deep = {"image": {"url": deep}}

    with pytest.raises(InvalidRequest, match=r"not dict$"):
        image_bytes(deep)
