"""Headers against the rules of SGLang's unpickler: names on its list, and plain values."""

import ast
import http
import pickle
import pickletools
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from serve_app.service import Embedding
from serve_app.sglang.wire import Part, failure, parse, success
from tests.sglang.receiver import ALLOWED, loads

ROOT = Path(__file__).parent.parent.parent
# Those that push plain values, look a name up, and build the one object.
OPCODES = {
    "PROTO", "GLOBAL", "EMPTY_TUPLE", "NEWOBJ", "EMPTY_DICT", "MARK", "BINUNICODE", "BININT",
    "NONE", "EMPTY_LIST", "APPENDS", "TUPLE1", "REDUCE", "SETITEMS", "BUILD", "STOP",
}  # fmt: skip
FIELDS = {
    "req_id", "num_parts", "part_idx", "grid_dim", "modality", "embedding", "shape", "dtype",
    "send_time", "error_msg", "error_code",
}  # fmt: skip


def part(**changes: object) -> Part:
    values = {
        "req_id": "r_local_part_1",
        "num_parts": 3,
        "part_idx": 1,
        "modality": "IMAGE",
        "mm_items": [],
        "prefill_host": "127.0.0.1",
        "embedding_port": 1,
    }
    return Part.model_validate(values | changes)


def embeddings() -> list[Embedding]:
    first = np.arange(2 * 24, dtype=np.uint16).reshape(2, 24)
    second = np.arange(100, 100 + 3 * 24, dtype=np.uint16).reshape(3, 24)
    return [Embedding(first, (1, 2, 4)), Embedding(second, (1, 6, 2))]


HEADERS = {
    "rows": success(part(), embeddings(), "bfloat16").header,
    "a lone image": success(part(num_parts=1, part_idx=0), embeddings()[:1], "bfloat16").header,
    "an error": failure(part(), "mm_items[0]: no image", 415).header,
    "an error of a video": failure(
        part(modality="VIDEO"), "no", http.HTTPStatus.BAD_REQUEST
    ).header,
    "words of any alphabet": failure(part(req_id="ü\n猫"), "Käse\ud800\n" * 9, 400).header,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_a_header_uses_few_opcodes_and_names_that_are_allowed(header: bytes) -> None:
    opcodes = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(header)]

    assert {name for name, _ in opcodes} <= OPCODES
    named = [tuple(argument.split(" ")) for name, argument in opcodes if name == "GLOBAL"]
    assert set(named) <= ALLOWED.keys()
    called = [before for before, (name, _) in pairwise(opcodes) if name == "REDUCE"]
    assert [name for name, _ in called] == ["TUPLE1"]  # the enumeration, with its value


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_a_header_has_every_field_that_receivers_read(header: bytes) -> None:
    data = loads(header)

    assert vars(data).keys() == FIELDS


def test_the_bytes_of_a_header_are_these() -> None:
    header = failure(part(), "bad", 400).header

    assert header == (
        b"\x80\x02csglang.srt.disaggregation.encoder.receiver\nEmbeddingData\n)\x81}("
        b"X\x06\0\0\0req_idX\x0e\0\0\0r_local_part_1X\x09\0\0\0num_partsJ\x03\0\0\0"
        b"X\x08\0\0\0part_idxJ\x01\0\0\0X\x08\0\0\0grid_dimNX\x08\0\0\0modality"
        b"csglang.srt.multimodal.modality\nModality\nJ\x01\0\0\0\x85R"
        b"X\x09\0\0\0embeddingNX\x05\0\0\0shapeNX\x05\0\0\0dtypeNX\x09\0\0\0send_timeN"
        b"X\x09\0\0\0error_msgX\x03\0\0\0badX\x0a\0\0\0error_codeJ\x90\x01\0\0ub."
    )


def test_rows_are_joined_in_order_and_need_no_copy_if_alone() -> None:
    two = embeddings()

    joined = success(part(), two, "bfloat16").rows
    alone = success(part(), two[:1], "bfloat16").rows

    assert joined is not None
    assert joined.tobytes() == two[0].values.tobytes() + two[1].values.tobytes()
    assert alone is not None
    assert np.shares_memory(alone, two[0].values)


def test_an_unpickler_with_these_rules_blocks_what_sglang_blocks() -> None:
    for value in (http.HTTPStatus.OK, np.float32(1), getattr):
        with pytest.raises(RuntimeError, match="blocked"):
            loads(pickle.dumps(value))


def test_a_message_may_not_fill_memory() -> None:
    data = loads(failure(part(), "x" * 100_000, 400).header)

    assert len(data.error_msg) == 2000  # type: ignore[attr-defined]


def test_the_service_imports_neither_sglang_nor_a_pickle_reader() -> None:
    names = set()
    for file in (ROOT / "serve_app").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                names.add(str(node.module).split(".")[0])

    assert names.isdisjoint({"sglang", "pickle", "cloudpickle", "dill", "marshal", "shelve"})


def test_the_endpoints_need_no_torch_and_no_sglang() -> None:
    script = "import serve_app.sglang.routers, sys; print({'torch', 'sglang'} & set(sys.modules))"

    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert result.stdout == "set()\n"


def test_a_lone_surrogate_in_json_is_refused_by_the_parser() -> None:
    from encoders.errors import InvalidRequest

    text = part().model_dump_json().replace("r_local_part_1", "\\ud800")

    with pytest.raises(InvalidRequest):
        parse(Part, text.encode())
