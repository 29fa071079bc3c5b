"""models/initialise.py: weights follow from seed and name alone."""

import pytest
import torch

from models.gpt2 import GPT2
from models.initialise import initialise, initialise_parameter

SIZES = {"vocab_size": 300, "max_seq_len": 32, "hidden_size": 64, "num_layers": 3, "num_heads": 4}


def make_initialised(seed=1, **changes):
    with torch.device("meta"):
        model = GPT2(**{**SIZES, **changes})
    model.to_empty(device="cpu")
    initialise(model, seed=seed)
    return model


def test_rules_of_gpt2_hold():
    weights = make_initialised().state_dict()
    for name, weight in weights.items():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif ".ln_" in name:
            assert (weight == 1).all(), name
        else:
            std = 0.02 / 6**0.5 if "c_proj" in name else 0.02
            assert weight.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(weight.mean().item()) < std * 0.05, name
    assert torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])


def test_equal_seeds_give_equal_weights_and_other_seeds_others():
    first, again, other = make_initialised(1), make_initialised(1), make_initialised(2)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    blocks = [block.mlp.c_fc.weight for _, block in first.zero_units()]
    assert not torch.equal(blocks[0], blocks[1])


def test_a_parameter_filled_alone_holds_what_it_holds_in_the_whole_model():
    model = make_initialised(4)
    for name, parameter in reversed(list(model.named_parameters())):
        alone = torch.empty(parameter.shape)
        initialise_parameter(name, alone, seed=4, num_layers=3)
        assert torch.equal(alone, parameter), name


def test_precision_and_strides_do_not_change_the_draw():
    name = "transformer.h.1.attn.c_attn.weight"
    expected = torch.empty(64, 192)
    initialise_parameter(name, expected, seed=4, num_layers=3)
    rounded = torch.empty(64, 192, dtype=torch.bfloat16)
    for tensor in (rounded, torch.empty(192, 64).t(), torch.empty(64, 384)[:, ::2]):
        initialise_parameter(name, tensor, seed=4, num_layers=3)
        assert torch.equal(tensor, expected.to(tensor.dtype))


def test_the_draw_is_the_same_in_every_process_and_version():
    """Checkpoint-free restarts and comparisons between machines rest on it; the value is the one first released."""
    tensor = torch.empty(64, 192)
    initialise_parameter("transformer.h.1.attn.c_attn.weight", tensor, seed=4, num_layers=3)
    assert tensor[0, :3].tolist() == pytest.approx([-0.028954029, -0.015382529, 0.010107918], rel=1e-5)


def test_the_global_generator_stays_untouched():
    torch.manual_seed(0)
    expected = torch.rand(1)
    model = GPT2(**SIZES)
    torch.manual_seed(0)
    initialise(model, seed=1)
    assert torch.equal(torch.rand(1), expected)


def test_parameters_without_storage_or_rule_are_refused():
    with torch.device("meta"):
        model = GPT2(**SIZES)
    with pytest.raises(ValueError, match=r"transformer.wte.weight is on the meta device.*to_empty"):
        initialise(model, seed=1)
    with pytest.raises(ValueError, match=r"no rule for parameter 'x\.scale'"):
        initialise_parameter("x.scale", torch.empty(2), seed=1, num_layers=1)
