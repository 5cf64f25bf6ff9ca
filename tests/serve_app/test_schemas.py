"""Wire formats: what a request may say, and what a reply's numbers mean."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from serve_app.schemas import EmbeddingsReply, EmbeddingsRequest, shorten, to_base64
from serve_app.service import Embedding, Rows


def parse(**fields: Any) -> EmbeddingsRequest:
    return EmbeddingsRequest.model_validate_json(json.dumps({"input": "data:,a"} | fields))


def embedding(*values: float, num_patches: int = 1) -> Embedding:
    return Embedding(np.array(values, np.float32), (1, 1, num_patches))


def test_an_input_alone_is_a_request_for_floats_of_full_width() -> None:
    request = parse()

    assert (request.model, request.modality, request.dimensions) == (None, None, None)
    assert request.encoding_format == "float"


@pytest.mark.parametrize("name", ["dimensions", "output_dimension"])
def test_dimensions_go_by_two_names(name: str) -> None:
    request = parse(**{name: 7})

    assert request.dimensions == 7


def test_fields_of_other_dialects_are_ignored() -> None:
    request = parse(user="u", task="t", input_type="image", normalized=True, embedding_type="float")

    assert request == parse()


@pytest.mark.parametrize(
    "fields",
    [
        {"input": 7},
        {"input": None},
        {"encoding_format": "int8"},
        {"encoding_format": None},
        {"dimensions": 0},
        {"dimensions": -1},
        {"dimensions": 1.5},
        {"dimensions": "many"},
        {"output_dimension": 0},
        {"model": 7},
        {"modality": ["image"]},
    ],
    ids=repr,
)
def test_a_field_of_the_wrong_kind_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields)).removeprefix("output_")):
        parse(**fields)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8"])
def test_base64_is_of_little_endian_float32_whatever_the_array(dtype: str) -> None:
    values = np.array([1.5, -2.25, 3e-8], dtype)

    text = to_base64(values)

    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(text), "<f4"), values.astype(np.float32)
    )


def random_rows(seed: int, num_rows: int) -> Rows:
    return np.random.default_rng(seed).standard_normal((num_rows, 16)).astype(np.float32)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_a_reply_carries_every_float32_exactly_and_in_order(encoding: str) -> None:
    rows = random_rows(0, 5)
    embeddings = [Embedding(row, (1, 1, 1)) for row in rows]

    reply = json.loads(EmbeddingsReply.of(embeddings, "m", encoding).model_dump_json())

    values = [data["embedding"] for data in reply["data"]]
    if encoding == "base64":
        values = [np.frombuffer(base64.b64decode(value), "<f4") for value in values]
    np.testing.assert_array_equal(np.array(values, np.float32), rows)
    assert [data["index"] for data in reply["data"]] == list(range(5))


def test_a_reply_has_the_shape_of_openai_and_counts_patches_as_tokens() -> None:
    embeddings = [embedding(1, num_patches=4), embedding(2, num_patches=9)]

    reply = EmbeddingsReply.of(embeddings, "m", "float").model_dump()

    assert reply == {
        "object": "list",
        "model": "m",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0]},
            {"object": "embedding", "index": 1, "embedding": [2.0]},
        ],
        "usage": {"prompt_tokens": 13, "total_tokens": 13},
    }


def test_a_shortened_embedding_is_at_unit_length_again() -> None:
    long = embedding(3, 4, 12, num_patches=5)

    short = shorten(long, 2, normalize=True)

    np.testing.assert_allclose(short.values, [0.6, 0.8], rtol=1e-6)
    assert short.values.dtype == np.float32
    assert short.num_patches == 5


def test_a_shortened_embedding_keeps_its_values_where_the_whole_was_not_normalised() -> None:
    long = embedding(3, 4, 12)

    short = shorten(long, 2, normalize=False)

    np.testing.assert_array_equal(short.values, [3, 4])


def test_shortening_to_nothing_but_zeros_gives_zeros_and_no_nan() -> None:
    long = embedding(0, 0, 1)

    short = shorten(long, 2, normalize=True)

    np.testing.assert_array_equal(short.values, [0, 0])


def test_shortening_leaves_the_embedding_itself_as_it_was() -> None:
    long = embedding(3, 4, 12)

    shorten(long, 2, normalize=True)

    np.testing.assert_array_equal(long.values, [3, 4, 12])
