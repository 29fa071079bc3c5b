"""models/gpt2.py: Hugging Face's GPT-2 in every digit, whichever way activations are kept."""

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from models.gpt2 import GPT2
from support.allocations import measure_allocations

SIZES = {"vocab_size": 67, "max_seq_len": 24, "hidden_size": 32, "num_layers": 3, "num_heads": 4}
MODES = ("none", "full", "selective")


def make_model(**changes):
    torch.manual_seed(3)
    return GPT2(**{**SIZES, **changes})


def make_batch(model, batch_size=2, seq_len=16, num_ignored=3):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, model.vocab_size, (batch_size, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :num_ignored] = -100
    return tokens[:, :-1], labels


def make_hugging_face_model():
    config = transformers.GPT2Config(
        vocab_size=67, n_positions=24, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )
    torch.manual_seed(11)
    model = transformers.GPT2LMHeadModel(config)
    for parameter in model.parameters():  # biases and norms too, which start at constants that hide mistakes
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def gradients(model, tokens, labels):
    model.zero_grad()
    loss = model(tokens, labels)
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("loss_chunk_tokens", [None, 5])
def test_hugging_face_weights_give_the_same_logits_loss_and_gradients(loss_chunk_tokens):
    theirs = make_hugging_face_model()
    ours = make_model(loss_chunk_tokens=loss_chunk_tokens)
    ours.load_state_dict(theirs.state_dict())
    tokens, labels = make_batch(ours)
    their_logits = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), their_logits, rtol=1e-5, atol=1e-5)

    their_loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), labels.flatten(), reduction="sum")
    their_loss.backward()
    loss, grads = gradients(ours, tokens, labels)
    torch.testing.assert_close(loss, their_loss.detach(), rtol=1e-6, atol=0)
    their_grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert list(grads) == list(their_grads)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, their_grads[name], rtol=1e-4, atol=1e-4)


def test_state_dict_has_the_names_and_shapes_of_hugging_face():
    theirs = make_hugging_face_model().state_dict()
    assert {name: value.shape for name, value in make_model().state_dict().items()} == {
        name: value.shape for name, value in theirs.items()
    }


def test_head_is_the_embeddings_very_parameter_and_stays_so():
    model = make_model()
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.device("meta"):
        model = make_model()
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    assert model.lm_head.weight is model.transformer.wte.weight
    model.to(torch.bfloat16)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("loss_chunk_tokens", [None, 5])
def test_batch_without_labels_gives_zero_loss_and_zero_gradients(loss_chunk_tokens):
    model = make_model(loss_chunk_tokens=loss_chunk_tokens)
    tokens, labels = make_batch(model)
    loss, grads = gradients(model, tokens, torch.full_like(labels, -100))
    assert loss.item() == 0.0
    assert loss.dtype == torch.float32
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads.values())


def test_bf16_loss_is_fp32_and_close_to_the_fp32_models():
    model = make_model()
    tokens, labels = make_batch(model)
    expected = model(tokens, labels).detach()
    loss = model.to(torch.bfloat16)(tokens, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_changes_neither_loss_nor_gradients(mode, dropout):
    results = []
    for each in ("none", mode):
        model = make_model(dropout=dropout, activation_checkpointing=each).train()
        torch.manual_seed(17)
        results.append((*gradients(model, *make_batch(model)), torch.rand(1)))
    (loss, grads, after), (expected_loss, expected_grads, expected_after) = results
    assert torch.equal(loss, expected_loss)
    assert torch.equal(after, expected_after)  # recomputing leaves the global generator where it was
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-6, atol=1e-6)


def test_dropout_is_on_in_training_and_off_in_evaluation():
    model = make_model(dropout=0.3)
    tokens, _ = make_batch(model)
    assert not torch.equal(model.train()(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), make_model().eval()(tokens))


def test_checkpointing_holds_less_between_forward_and_backward():
    held = {}
    for mode in MODES:
        model = make_model(hidden_size=64, max_seq_len=128, activation_checkpointing=mode, loss_chunk_tokens=16)
        batch = make_batch(model, batch_size=4, seq_len=128)
        held[mode] = measure_allocations(lambda model=model, batch=batch: model(*batch)).held_bytes
    assert held["full"] < held["selective"] / 2
    assert held["selective"] < held["none"] * 0.8
    # Full keeps the input of each of 3 blocks; the rest is embeddings, the last norm and the loss.
    assert held["full"] < 8 * (4 * 128 * 64 * 4)


def test_selective_checkpointing_repeats_no_matrix_product_or_attention():
    flops = {}
    for mode in MODES:
        model = make_model(activation_checkpointing=mode)
        with FlopCounterMode(display=False) as counter:
            gradients(model, *make_batch(model))
        flops[mode] = counter.get_total_flops()
    assert flops["selective"] == flops["none"] < flops["full"]


@pytest.mark.parametrize(("mode", "calls"), [("none", 1), ("full", 2), ("selective", 2)])
def test_checkpointing_calls_blocks_through_their_hooks_and_not_at_all_without_gradients(mode, calls):
    model = make_model(activation_checkpointing=mode)
    seen = []
    for name, block in model.zero_units():
        block.register_forward_pre_hook(lambda module, args, name=name: seen.append(name))
    names = [name for name, _ in model.zero_units()]
    tokens, labels = make_batch(model)
    with torch.no_grad():
        model(tokens, labels)
    assert seen == names
    seen.clear()
    model(tokens, labels).backward()
    assert seen == names + names[::-1] * (calls - 1)


@pytest.mark.parametrize("loss_chunk_tokens", [None, 5])
@pytest.mark.parametrize("mode", MODES)
def test_block_parameters_are_read_in_their_blocks_turn_only(mode, loss_chunk_tokens):
    """What ZeRO-3 relies on: outside a block's forward and backward its weights may be anything."""
    model = make_model(activation_checkpointing=mode, loss_chunk_tokens=loss_chunk_tokens)
    batch = make_batch(model)
    expected_loss, expected_grads = gradients(model, *batch)
    for _, block in model.zero_units():
        weights = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}

        def gather(module, *_, weights=weights):
            for name, parameter in module.named_parameters():
                parameter.data.copy_(weights[name])

        def free(module, *_):
            for parameter in module.parameters():
                parameter.data.fill_(float("nan"))

        block.register_forward_pre_hook(gather)
        block.register_forward_hook(free)
        block.register_full_backward_pre_hook(gather)
        block.register_full_backward_hook(free)
        free(block)
    loss, grads = gradients(model, *batch)
    assert torch.equal(loss, expected_loss)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-6, atol=1e-6)


def test_units_are_the_blocks_in_forward_order():
    model = make_model()
    units = model.zero_units()
    assert [name for name, _ in units] == ["transformer.h.0", "transformer.h.1", "transformer.h.2"]
    assert all(model.get_submodule(name) is block for name, block in units)


def test_flops_per_token_count_matrix_products_three_times():
    model = make_model()
    per_block = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128) + 2 * 2 * 16 * 32
    assert model.num_flops_per_token(16) == 3 * (3 * per_block + 2 * 67 * 32)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_heads": 5}, "num_heads=5 must divide hidden_size=32; nearest that does: 4"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        ({"activation_checkpointing": "some"}, "'some' must be one of none, full, selective"),
        ({"loss_chunk_tokens": 0}, "loss_chunk_tokens=0 must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        make_model(**changes)


def test_sequences_beyond_the_models_positions_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match="25 positions exceed max_seq_len=24"):
        model(torch.zeros(1, 25, dtype=torch.int64))
    with pytest.raises(ValueError, match="must be shaped as tokens"):
        model(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))
