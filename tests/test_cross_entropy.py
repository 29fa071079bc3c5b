"""kernels/cross_entropy.py: the chunked loss is the plain one, in less memory."""

import pytest
import torch
import torch.nn.functional as F

from kernels.cross_entropy import linear_cross_entropy_sum
from support.allocations import measure_allocations


def make_case(num_tokens, vocab_size, width, *, dtype=torch.float32, num_ignored=0):
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(num_tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab_size, width, generator=generator) * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    labels[torch.randperm(num_tokens, generator=generator)[:num_ignored]] = -100
    return hidden, weight, labels


def loss_and_grads(hidden, weight, labels, chunk_tokens, scale=1.0):
    loss = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)
    return (loss, *torch.autograd.grad(loss * scale, (hidden, weight)))


@pytest.mark.parametrize("num_ignored", [0, 9, 36])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 64])
def test_chunked_loss_and_gradients_equal_the_plain_ones(chunk_tokens, num_ignored):
    case = make_case(37, 101, 16, num_ignored=num_ignored)
    plain = loss_and_grads(*case, None, scale=0.25)
    chunked = loss_and_grads(*case, chunk_tokens, scale=0.25)
    for ours, expected in zip(chunked, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_plain_loss_is_the_sum_over_labelled_rows():
    hidden, weight, labels = make_case(20, 31, 8, num_ignored=5)
    rows = labels != -100
    expected = -torch.log_softmax(hidden[rows] @ weight.t(), dim=1)[torch.arange(15), labels[rows]].sum()
    torch.testing.assert_close(linear_cross_entropy_sum(hidden, weight, labels), expected)


def test_chunks_keep_peak_memory_below_a_quarter_at_a_large_vocabulary():
    case = make_case(256, 50_000, 32)
    plain = measure_allocations(lambda: loss_and_grads(*case, None))
    chunked = measure_allocations(lambda: loss_and_grads(*case, 24))  # 24 does not divide 256
    assert chunked.peak_bytes < plain.peak_bytes / 4
    for ours, expected in zip(chunked.result, plain.result, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_peak_memory_is_bounded_by_the_chunk_and_not_by_the_tokens():
    chunk_logits_bytes, weight_bytes = 16 * 20_000 * 4, 20_000 * 8 * 4
    case = make_case(512, 20_000, 8)
    peak = measure_allocations(lambda: loss_and_grads(*case, 16)).peak_bytes
    # The weight's gradient, one chunk of logits, and small change.
    assert peak < 1.2 * (chunk_logits_bytes + weight_bytes)


def test_between_forward_and_backward_no_logits_are_held():
    hidden, weight, labels = make_case(256, 20_000, 8)
    held = measure_allocations(lambda: linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=32)).held_bytes
    assert held < 8 * 256 + 4096  # one fp32 per token, the labels are the caller's


def test_ignored_rows_cost_nothing_in_chunks():
    few = make_case(512, 5_000, 8, num_ignored=510)
    peak = measure_allocations(lambda: linear_cross_entropy_sum(*few, chunk_tokens=512)).peak_bytes
    assert peak < 4 * 5_000 * 4 * 2  # logits of the two labelled rows, not of 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [None, 8])
def test_all_rows_ignored_gives_zero_loss_and_zero_gradients(chunk_tokens, dtype):
    hidden, weight, labels = make_case(12, 17, 8, dtype=dtype, num_ignored=12)
    loss, grad_hidden, grad_weight = loss_and_grads(hidden, weight, labels, chunk_tokens)
    assert loss.item() == 0.0
    assert torch.equal(grad_hidden, torch.zeros_like(hidden))
    assert torch.equal(grad_weight, torch.zeros_like(weight))


def test_no_rows_at_all_give_zero():
    hidden, weight, labels = make_case(0, 17, 8)
    for chunk_tokens in (None, 4):
        assert loss_and_grads(hidden, weight, labels, chunk_tokens)[0].item() == 0.0


def test_bf16_inputs_sum_in_fp32():
    hidden, weight, labels = make_case(2_000, 40, 16, dtype=torch.bfloat16)
    expected = F.cross_entropy((hidden @ weight.t()).double(), labels, reduction="sum")
    for chunk_tokens in (None, 16):
        loss, grad_hidden, grad_weight = loss_and_grads(hidden, weight, labels, chunk_tokens)
        assert (loss.dtype, grad_hidden.dtype, grad_weight.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)  # bf16 sums would be off by 1e-2


def test_many_chunks_do_not_lose_bf16_weight_gradient():
    hidden, weight, labels = make_case(1_024, 40, 16, dtype=torch.bfloat16)
    exact = loss_and_grads(hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(),
                           labels, None)[2]
    error = (loss_and_grads(hidden, weight, labels, 4)[2].double() - exact).abs().max()
    # Rounding once to bf16 (8 bits) at the end, beside bf16 rounding of the logits' gradient inside.
    assert error < exact.abs().max() * 2**-7


def test_large_logits_do_not_overflow():
    hidden, weight, labels = make_case(9, 11, 4)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    plain, chunked = (loss_and_grads(hidden, weight, labels, chunk) for chunk in (None, 4))
    for ours, expected in zip(chunked, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-3)


def test_frozen_head_or_hidden_is_left_without_gradient():
    hidden, weight, labels = make_case(9, 11, 4)
    plain = loss_and_grads(hidden, weight, labels, None)
    by_hidden, = torch.autograd.grad(linear_cross_entropy_sum(hidden, weight.detach(), labels, chunk_tokens=4), hidden)
    by_weight, = torch.autograd.grad(linear_cross_entropy_sum(hidden.detach(), weight, labels, chunk_tokens=4), weight)
    torch.testing.assert_close(by_hidden, plain[1])
    torch.testing.assert_close(by_weight, plain[2])


def test_strided_inputs_and_narrow_integer_labels_are_taken():
    hidden, weight, labels = make_case(14, 22, 8, num_ignored=3)
    strided = hidden.detach().t().contiguous().t().requires_grad_()
    for ours, expected in zip(loss_and_grads(strided, weight, labels.int(), 5),
                              loss_and_grads(hidden, weight, labels, None), strict=True):
        torch.testing.assert_close(ours, expected)


def test_autocast_is_honoured_like_in_a_linear_layer():
    hidden, weight, labels = make_case(14, 22, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, chunked = (loss_and_grads(hidden, weight, labels, chunk) for chunk in (None, 5))
    torch.testing.assert_close(chunked[0], plain[0], rtol=1e-5, atol=1e-5)
    for ours, expected in zip(chunked[1:], plain[1:], strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


def test_another_ignore_index_is_honoured():
    hidden, weight, labels = make_case(14, 22, 8)
    labels[:6] = 3
    plain = linear_cross_entropy_sum(hidden, weight, labels, ignore_index=3)
    torch.testing.assert_close(linear_cross_entropy_sum(hidden, weight, labels, ignore_index=3, chunk_tokens=4), plain)
    torch.testing.assert_close(linear_cross_entropy_sum(hidden[6:], weight, labels[6:], ignore_index=3), plain)


@pytest.mark.parametrize(
    ("hidden", "weight", "labels", "chunk", "said"),
    [
        ((2, 3, 4), (5, 4), (6,), None, "flatten batch and sequence"),
        ((6, 4), (5, 3), (6,), None, "one width"),
        ((6, 4), (5, 4), (7,), None, "one per row"),
        ((6, 4), (5, 4), (6,), 0, "chunk_tokens=0 must be at least 1"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(hidden, weight, labels, chunk, said):
    with pytest.raises(ValueError, match=said):
        linear_cross_entropy_sum(
            torch.zeros(hidden), torch.zeros(weight), torch.zeros(labels, dtype=torch.int64), chunk_tokens=chunk
        )


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_a_label_outside_the_vocabulary_is_an_error(chunk_tokens):
    hidden, weight, labels = make_case(9, 11, 4)
    labels[2] = 11
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)


def test_fp32_gradient_of_a_bf16_weight_arrives_unrounded():
    """With `grad_dtype` the sum over chunks reaches `.grad` as it is, which gradients summed in fp32 rely on."""
    hidden, weight, labels = make_case(64, 22, 8, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(weight.detach())
    weight.grad_dtype = torch.float32
    linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=4).backward()
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())
