"""Settings are strict, frozen, and found by name or path."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from encoders import EncoderConfig
from encoders.config import CONFIG_DIRS, find_config
from encoders.errors import ConfigError


def test_a_shipped_encoder_is_found_by_name() -> None:
    assert find_config("dinov2-demo") == CONFIG_DIRS[0] / "dinov2-demo.yaml"


def test_a_path_is_taken_as_it_is(tmp_path: Path, demo_config: EncoderConfig) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(CONFIG_DIRS[0].joinpath("dinov2-demo.yaml").read_text())

    assert EncoderConfig.load(str(path)) == demo_config


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"'dinov9'.*dinov2-demo"):
        EncoderConfig.load("dinov9")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [", "while parsing"),
        ("name: x", "Field required"),
        ("- 1", "valid dictionary"),
        ("", "valid dictionary"),
    ],
    ids=["not yaml", "incomplete", "a list", "empty"],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=said) as caught:
        EncoderConfig.load(str(path))
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        EncoderConfig.load(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize("place", ["", "limits", "resize", "weights"])
def test_a_key_with_a_typo_is_refused_at_every_level(
    demo_config: EncoderConfig, place: str
) -> None:
    raw = demo_config.model_dump()
    (raw[place] if place else raw)["pathc_size"] = 14

    with pytest.raises(ValidationError, match="pathc_size"):
        EncoderConfig.model_validate(raw)


def test_settings_cannot_be_changed(demo_config: EncoderConfig) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        demo_config.patch_size = 16
