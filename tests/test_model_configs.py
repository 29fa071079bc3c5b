"""conf/model: every file composes, gives every key, and has the size it is named after."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from framework.config import GptModel
from models.gpt2 import GPT2

FOLDER = Path(__file__).parent.parent / "conf" / "model"

# Exact where weights or code were released, otherwise the published round number and how far rounding may go.
PUBLISHED = {
    "gpt2": (124_439_808, 0),
    "gpt2_medium": (354_823_168, 0),
    "gpt2_large": (774_030_080, 0),
    "gpt2_xl": (1_557_611_200, 0),
    "gpt2_nano": (1_000_000, 0.1),
    "gpt2_10m": (10_500_000, 0.01),
    "gpt3_125m": (125e6, 0.01),
    "gpt3_350m": (350e6, 0.02),
    "gpt3_760m": (760e6, 0.01),
    "gpt3_1_3b": (1.3e9, 0.02),
    "gpt3_2_7b": (2.7e9, 0.02),
    "gpt3_6_7b": (6.7e9, 0.01),
    "gpt3_13b": (13e9, 0.02),
    "gpt3_175b": (175e9, 0.01),
    "turing_nlg_17b": (17.2e9, 0.01),
}


def load(name):
    with initialize_config_dir(str(FOLDER.parent), version_base="1.3"):
        return OmegaConf.to_container(compose(f"model/{name}"), resolve=True)["model"]


def test_every_file_is_known_here():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_has_its_published_size(name):
    config = load(name)
    assert set(config) == {field.name for field in dataclasses.fields(GptModel)}
    assert (config.pop("name"), config.pop("weights")) == ("gpt2", None)
    assert config["dropout"] == 0
    with torch.device("meta"):
        model = GPT2(**config)
    count, tolerance = PUBLISHED[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(count, rel=tolerance, abs=0)


def test_nano_is_deep_and_wide_enough_to_be_cut():
    config = load("gpt2_nano")
    assert min(config["num_layers"], config["num_heads"]) >= 4


@pytest.mark.parametrize("name", PUBLISHED)
def test_file_names_its_source_first_and_the_family(name):
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert "\nname: gpt2\n" in text
