"""models/generate.py: neither cache nor batching nor padding changes what a model says."""

import pytest
import torch

from models.generate import generate
from models.gpt2 import GPT2
from models.kv_cache import KVCache

GREEDY = {"temperature": 0.0, "top_k": 0, "seed": 0}
PROMPTS = [[5], [9, 2, 40], [1, 2, 3, 4, 5, 6, 7]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    model = GPT2(vocab_size=67, max_seq_len=16, hidden_size=32, num_layers=2, num_heads=4)
    with torch.no_grad():  # weights large enough that context decides the next token
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.4)
    return model


@pytest.mark.parametrize("max_new_tokens", [6, 20])  # 20 slides the window of 16 positions
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_batch_of_uneven_prompts_equals_one_by_one(model, use_cache, max_new_tokens):
    batched = generate(model, PROMPTS, max_new_tokens=max_new_tokens, use_cache=use_cache, **GREEDY)
    for prompt, continuation in zip(PROMPTS, batched, strict=True):
        alone = generate(model, [prompt], max_new_tokens=max_new_tokens, use_cache=False, **GREEDY)
        assert alone == [continuation]
        assert len(continuation) == max_new_tokens
    assert len({tuple(each) for each in batched}) == 3


def test_greedy_takes_the_most_likely_token_of_the_whole_context(model):
    row = list(PROMPTS[2])
    for token in generate(model, [row], max_new_tokens=12, **GREEDY)[0]:
        assert token == model(torch.tensor([row[-16:]]))[0, -1].argmax().item()
        row.append(token)


def test_a_prompt_longer_than_the_model_is_cropped_at_its_start(model):
    prompt = [index % 67 for index in range(30)]
    for use_cache in (True, False):
        assert generate(model, [prompt], max_new_tokens=5, use_cache=use_cache, **GREEDY) == generate(
            model, [prompt[-16:]], max_new_tokens=5, **GREEDY
        )


@pytest.mark.parametrize("stop_token", [0, None])  # 0 is also the token that stands for padding
def test_rows_end_before_the_stop_token_and_leave_the_others_alone(model, stop_token):
    free = generate(model, PROMPTS, max_new_tokens=8, **GREEDY)
    stop = free[1][3] if stop_token is None else stop_token
    stopped = generate(model, PROMPTS, max_new_tokens=8, stop_token=stop, **GREEDY)
    assert stopped == [row[: row.index(stop)] if stop in row else row for row in free]


def test_prompts_may_contain_the_padding_token(model):
    prompts = [[0, 0, 4], [0], [7, 0, 1, 0, 2]]
    batched = generate(model, prompts, max_new_tokens=6, **GREEDY)
    assert batched == [generate(model, [prompt], max_new_tokens=6, **GREEDY)[0] for prompt in prompts]


def test_sampling_follows_the_seed_and_leaves_the_global_generator_alone(model):
    options = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 0}
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first = generate(model, PROMPTS, seed=1, **options)
    assert torch.equal(torch.rand(1), expected)
    assert generate(model, PROMPTS, seed=1, use_cache=False, **options) == first
    assert generate(model, PROMPTS[:1], seed=1, **options) == first[:1]
    assert generate(model, PROMPTS, seed=2, **options) != first
    same_prompt = generate(model, [[5], [5]], seed=1, **options)
    assert same_prompt[0] != same_prompt[1]


def test_top_k_draws_among_the_k_most_likely(model):
    assert generate(model, PROMPTS, max_new_tokens=6, temperature=3.0, top_k=1, seed=8) == generate(
        model, PROMPTS, max_new_tokens=6, **GREEDY
    )
    row = list(PROMPTS[2])
    for token in generate(model, [row], max_new_tokens=8, temperature=50.0, top_k=3, seed=8)[0]:
        assert token in model(torch.tensor([row]))[0, -1].topk(3).indices.tolist()
        row.append(token)
    assert generate(model, [row], max_new_tokens=2, temperature=1.0, top_k=1000, seed=8)


def test_the_caller_may_pass_an_engine_and_modes_are_restored(model):
    calls = []

    def engine(*args, **kwargs):
        calls.append(model.training)
        assert not torch.is_grad_enabled()
        return model(*args, **kwargs)

    model.train()
    model.transformer.h[0].eval()
    continuation = generate(model, PROMPTS, max_new_tokens=4, forward=engine, **GREEDY)
    assert continuation == generate(model, PROMPTS, max_new_tokens=4, **GREEDY)
    assert calls == [False] * 4
    assert model.training
    assert not model.transformer.h[0].training
    assert model.transformer.h[1].training


def test_dropout_and_checkpointing_are_off_while_generating(model):
    noisy = GPT2(vocab_size=67, max_seq_len=16, hidden_size=32, num_layers=2, num_heads=4, dropout=0.5,
                 activation_checkpointing="full")
    noisy.load_state_dict(model.state_dict())
    assert generate(noisy, PROMPTS, max_new_tokens=6, **GREEDY) == generate(model, PROMPTS, max_new_tokens=6, **GREEDY)


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_padded_logits_equal_unpadded_ones(model, padding_side):
    longest = max(map(len, PROMPTS))
    padding = [longest - len(row) for row in PROMPTS]
    if padding_side == "left":
        tokens = torch.tensor([[66] * count + row for count, row in zip(padding, PROMPTS, strict=True)])
        logits = model(tokens, padding_B=torch.tensor(padding))
    else:  # causality alone hides what stands to the right
        logits = model(torch.tensor([row + [66] * count for count, row in zip(padding, PROMPTS, strict=True)]))
    assert torch.isfinite(logits).all()
    for index, row in enumerate(PROMPTS):
        start = padding[index] if padding_side == "left" else 0
        expected = model(torch.tensor([row]))[0]
        torch.testing.assert_close(logits[index, start : start + len(row)], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_cached_logits_equal_uncached_ones_in_pieces_of_any_length(model):
    tokens = torch.randint(0, 67, (2, 13), generator=torch.Generator().manual_seed(2))
    cache = KVCache(num_layers=2, capacity=13)
    pieces = [model(piece, cache=cache) for piece in tokens.split([5, 1, 4, 3], dim=1)]
    assert cache.length == 13
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="14 positions exceed the cache's capacity=13"):
        model(tokens[:, :1], cache=cache)


@pytest.mark.parametrize(
    ("prompts", "changes", "said"),
    [
        ([], {}, "prompts is empty"),
        ([[1], []], {}, r"prompts\[1\] is empty"),
        ([[1, 67]], {}, "token 67; the model's vocabulary is 0 to 66"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"top_k": -1}, "top_k=-1"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(model, prompts, changes, said):
    with pytest.raises(ValueError, match=said):
        generate(model, prompts, **{"max_new_tokens": 1, **GREEDY, **changes})
