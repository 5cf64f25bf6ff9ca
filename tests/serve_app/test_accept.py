"""`Accept` headers, as clients write them and as they should not."""

import time

import pytest

from serve_app.accept import best

A, B, C = "application/json", "application/x-npy", "application/vnd.safetensors"
OFFERS = [A, B, C]


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        ("", A),
        ("  ", A),
        ("*/*", A),
        ("*", A),
        ("application/*", A),
        (B, B),
        ("Application/X-NPY", B),
        (f"{B}, {A}", B),  # equals: the client's order
        (f"{A}, {B}", A),
        (f"{B}, */*", B),  # equals: what is named
        (f"*/*, {B}", B),
        (f"{B};q=0.5, {A}", A),
        (f"{A};q=0.5,{B}", B),
        (f"{A};q=0.5, {B};q=0.501", B),
        (f"{B}; q=0.2 , {C} ; Q=0.3", C),
        (f"{B};q=0.5, */*", A),
        (f"*/*, {A};q=0", B),  # what is named overrides what is not
        (f"application/*;q=0.9, {A};q=0.1, {B};q=0.2", C),
        (f"*/*;q=0, {C}", C),
        (f"{A};charset=utf-8;q=0.3, {B};q=0.4", B),
        (f'{A};note="a, {B};q=1, c", {C};q=0.5', A),
        (f",, ,{B},", B),
        (f"{A};q=2, {B}", B),  # what cannot be read says nothing
        (f"{A};q=nan, {B};q=0.1", B),
        (f"{A};q=, {B};q=0.1", B),
        ("text/html, application/xhtml+xml, */*;q=0.8", A),
        ("text/html", None),
        ("json", None),
        (f"{A};q=0", None),
        ("*/*;q=0", None),
        ("application/json-seq", None),
        ("text/*, image/*;q=0.5", None),
        ("é, \x00", None),
        ('"', None),
        (";q=1", None),
    ],
)
def test_the_best_of_the_offered_types_is_chosen(header: str, chosen: str | None) -> None:
    assert best(header, OFFERS) == chosen


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        ("", B),
        ("*/*", B),
        ("application/*", B),
        (A, A),
        (f"{A}, */*", A),
        (f"{A};q=0.5, */*", B),
        (f"*/*, {B};q=0, {C};q=0", None),
    ],
)
def test_a_type_by_name_only_is_not_meant_by_wildcards(header: str, chosen: str | None) -> None:
    assert best(header, OFFERS, {A}) == chosen


@pytest.mark.parametrize("piece", [",", ";", '"', '"\\', "a/b;q=", "*/*,", "=", " "])
def test_a_header_as_long_as_servers_allow_is_soon_read(piece: str) -> None:
    start = time.perf_counter()

    best(piece * (65536 // len(piece)), OFFERS)

    assert time.perf_counter() - start < 1
