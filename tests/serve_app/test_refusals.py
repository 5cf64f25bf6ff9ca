"""Every error of the tree has a status, a body that clients can read, and survives a pickle."""

import json
import logging
import pickle
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from pydantic import BaseModel, ValidationError

from encoders import errors
from encoders.errors import EncoderError
from serve_app.refusals import STATUS, describe, refusal, reply, snake_case

EXPECTED = {
    errors.InvalidRequest: 400,
    errors.Unauthorized: 401,
    errors.UnknownModel: 404,
    errors.NotAcceptable: 406,
    errors.DeadlineExceeded: 408,
    errors.RequestTooLarge: 413,
    errors.UnsupportedImageType: 415,
    errors.InvalidImage: 422,
    errors.Overloaded: 503,
    errors.ReplicaLost: 503,
    errors.PeerUnreachable: 502,
    errors.PeerTimeout: 504,
}
OURS = {errors.ConfigError, errors.WeightsError, errors.BackendUnavailable}
"""What no client can mend: a plain 500."""


def tree(root: type[EncoderError]) -> Iterator[type[EncoderError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


ALL = tuple(tree(EncoderError))
LEAVES = tuple(kind for kind in ALL if not kind.__subclasses__())


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_every_leaf_of_the_tree_has_a_status_or_is_knowingly_ours(kind: type[EncoderError]) -> None:
    has_status = kind in STATUS

    assert has_status != (kind in OURS)


@pytest.mark.parametrize(
    "kind", tuple(tree(errors.RequestError))[1:], ids=lambda kind: kind.__name__
)
def test_every_mistake_of_a_caller_is_answered_by_a_4xx(kind: type[EncoderError]) -> None:
    response = refusal(kind("mine"))

    assert 400 <= response.status_code < 500


@pytest.mark.parametrize(("kind", "status"), EXPECTED.items())
def test_a_refusal_says_status_code_message_and_item(kind: type[EncoderError], status: int) -> None:
    response = refusal(kind("3 is over 2").named("input[3]"))

    assert response.status_code == status
    assert json.loads(response.body) == {
        "error": {
            "message": "input[3]: 3 is over 2",
            "type": "invalid_request_error" if status < 500 else "server_error",
            "param": "input[3]",
            "code": snake_case(kind.__name__),
        },
        "detail": "input[3]: 3 is over 2",
        "message": "input[3]: 3 is over 2",
    }


def test_the_table_has_these_statuses_and_no_others() -> None:
    table = {kind: int(status) for kind, status in STATUS.items()}

    assert table == EXPECTED


@pytest.mark.parametrize("kind", sorted(OURS, key=str), ids=lambda kind: kind.__name__)
def test_an_error_of_ours_is_a_plain_500_and_its_text_stays_in_the_log(
    kind: type[EncoderError], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)

    response = refusal(kind("/secret/weights").named("input[3]"))

    assert response.status_code == 500
    assert json.loads(response.body)["detail"] == "internal error"
    assert b"secret" not in response.body
    assert "/secret/weights" in caplog.text


@pytest.mark.parametrize(
    ("status", "header", "value"),
    [(401, "WWW-Authenticate", "Bearer"), (503, "Retry-After", "1")],
)
def test_a_status_that_wants_a_header_has_it(status: int, header: str, value: str) -> None:
    response = reply(status, "no")

    assert response.headers[header] == value


def test_other_statuses_promise_neither_header() -> None:
    response = reply(HTTPStatus.BAD_REQUEST, "no")

    assert not {"www-authenticate", "retry-after"} & set(response.headers)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_error_survives_a_pickle_with_its_item(kind: type[EncoderError]) -> None:
    error = kind("3 is over 2").named("input[3]")

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is kind
    assert (str(copy), copy.item) == ("input[3]: 3 is over 2", "input[3]")


def test_naming_makes_a_new_error_and_leaves_the_old_one_nameless() -> None:
    error = errors.InvalidImage("broken")

    named = error.named("input[3]")

    assert (str(error), error.item) == ("broken", None)
    assert (str(named), named.item) == ("input[3]: broken", "input[3]")


@pytest.mark.parametrize(
    ("name", "snake"),
    [("Overloaded", "overloaded"), ("UnsupportedImageType", "unsupported_image_type")],
)
def test_a_code_is_the_name_of_the_error_in_snake_case(name: str, snake: str) -> None:
    code = snake_case(name)

    assert code == snake


class Point(BaseModel):
    x: int
    y: list[int]


def test_a_description_has_every_place_and_nothing_of_the_input() -> None:
    with pytest.raises(ValidationError) as caught:
        Point.model_validate({"x": "SECRET", "y": [1, "SECRET"]})

    text = describe(caught.value.errors())

    assert text.startswith("x: Input should be a valid integer")
    assert "; y.1: Input should be a valid integer" in text
    assert "SECRET" not in text


def test_a_finding_without_a_place_has_no_colon_before_it() -> None:
    with pytest.raises(ValidationError) as caught:
        Point.model_validate_json("{")

    text = describe(caught.value.errors())

    assert text.startswith("Invalid JSON: EOF")
