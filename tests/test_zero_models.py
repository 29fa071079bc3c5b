"""Models people bring, Hugging Face and classic: losses and all gradients equal plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import strategies
from support.ranks import run_ranks

transformers = pytest.importorskip("transformers")

WORLD = 2


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def compare(engine, plain, plain_optimizer, inputs, rank):
    """One update on `inputs(rank)` of both, the plain one on all ranks' inputs; every loss and gradient is the same."""
    losses = [plain(**inputs(r)) for r in range(WORLD)]
    (sum(losses) / WORLD).backward()
    mine = engine(**inputs(rank))
    torch.testing.assert_close(mine, losses[rank], atol=1e-5, rtol=1e-5)
    engine.backward(mine)
    gradients = engine.gradients()
    for name, parameter in plain.named_parameters():
        assert (gradients[name] is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            expected = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            torch.testing.assert_close(gradients[name], expected, atol=1e-5, rtol=1e-4,
                                       msg=lambda m, n=name: f"{n}: {m}")
    engine.step()
    plain_optimizer.step()
    plain_optimizer.zero_grad()


def hugging_face(name: str) -> nn.Module:
    torch.manual_seed(0)
    match name:
        case "gpt2":
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(
                vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
        case "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(
                vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=32))
        case "t5":
            return transformers.T5ForConditionalGeneration(transformers.T5Config(
                vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
                decoder_start_token_id=0))
        case "bert":
            return transformers.BertForMaskedLM(transformers.BertConfig(
                vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
                max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
        case "vit":
            return transformers.ViTForImageClassification(transformers.ViTConfig(
                hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, image_size=8,
                patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5))
    raise AssertionError(name)


class LossOf(nn.Module):
    """A Hugging Face model that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).loss


def sentences(name: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
                "labels": torch.randint(0, 5, (2,), generator=generator)}
    ids = torch.randint(1, 50, (2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def train_hugging_face(rank, name, stage, checkpointing):
    plain, held = (LossOf(hugging_face(name)).train() for _ in range(2))
    for module in (plain, held):
        if checkpointing != "none":
            module.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
        if checkpointing == "reentrant" and name != "vit":
            module.model.enable_input_require_grads()
    engine, optimizer = strategies.Engine(held, optimizer=sgd, zero=stage), sgd(plain.parameters())
    for step in range(2):
        compare(engine, plain, optimizer, lambda r, s=step: sentences(name, 10 * s + r), rank)
        engine.eval(), plain.eval()
        with torch.inference_mode():
            torch.testing.assert_close(engine(**sentences(name, 99)), plain(**sentences(name, 99)),
                                       atol=1e-5, rtol=1e-5)
        engine.train(), plain.train()
    if name in ("gpt2", "llama", "t5"):
        engine.eval(), plain.eval()
        options = {"input_ids": sentences(name, 5)["input_ids"], "max_new_tokens": 4, "min_new_tokens": 4,
                   "do_sample": False, "pad_token_id": 0}
        with engine.forward_scope():
            written = held.model.generate(**options)
        assert torch.equal(written, plain.model.generate(**options))
    # Every block is a unit of its own; what is shared between units (tied embeddings) is the root's.
    assert len(engine.units) >= 4


# Stages 0-2 free no parameters: stage 2 stands for them where recomputation matters.
@pytest.mark.parametrize(("stage", "checkpointing"), [
    (0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "reentrant"), (3, "reentrant"), (3, "saved tensors")])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "vit"])
def test_hugging_face_models_train_evaluate_and_generate_like_plain_torch(name, stage, checkpointing):
    run_ranks(WORLD, train_hugging_face, name, stage, checkpointing)


class Recurrent(nn.Module):
    """Sparse embedding, two LSTMs as units, a GRU at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6, sparse=True)
        self.layers = nn.ModuleList(nn.LSTM(6, 6, batch_first=True) for _ in range(2))
        self.last = nn.GRU(6, 4, batch_first=True)

    def forward(self, *, seed: int) -> Tensor:
        x = self.words(torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(seed)))
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return self.last(x)[0].square().mean() + state[1].square().mean()


class Convolutional(nn.Module):
    """BatchNorm, in-place activations on what units return, a nested Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=0.0), nn.ReLU(inplace=True),
                          nn.Conv2d(4, 4, 1)) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, *, seed: int) -> Tensor:
        x = self.stem(torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(seed)))
        for stage in self.stages:
            x = F.relu_(stage(x))
        return self.head(x.mean((2, 3))).square().mean()


class Transformers(nn.Module):
    """torch's own encoder and decoder, whose fast path looks at weights from outside the layer."""

    def __init__(self) -> None:
        super().__init__()
        options = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), 2)

    def forward(self, *, seed: int) -> Tensor:
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed))
        return self.decoder(x, self.encoder(x)).pow(3).mean()


class Containers(nn.Module):
    """Modules in lists of lists and of dicts, parameters in a list and a dict, one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.grid = nn.ModuleList(nn.ModuleList([nn.Linear(6, 6), shared]) for _ in range(2))
        self.named = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(6, 9), "down": nn.Linear(9, 6)}) for _ in range(2))
        self.scales = nn.ParameterList(torch.full((6,), 1.0 + i) for i in range(2))
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.randn(6)), "b": nn.Parameter(torch.randn(1))})

    def forward(self, *, seed: int) -> Tensor:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        for row, scale in zip(self.grid, self.scales, strict=True):
            for module in row:
                x = torch.tanh(module(x)) * scale
        for pair in self.named:
            x = x + pair["down"](pair["up"](x).relu()) + self.shifts["a"] * self.shifts["b"]
        return x.square().mean()


class Reparametrised(nn.Module):
    """Weights computed in the forward, by a parametrization and by the older hook; recomputed or not."""

    def __init__(self, recompute: bool | None) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList([
            nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.utils.weight_norm(nn.Linear(6, 6)),
            nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh())])

    def forward(self, *, seed: int) -> Tensor:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for block in self.blocks:
            x = torch.tanh(block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute))
        return x.square().mean()


CLASSIC = {
    "recurrent": Recurrent, "convolutional": Convolutional, "transformers": Transformers, "containers": Containers,
    "reparametrised": lambda: Reparametrised(None), "reparametrised, reentrant": lambda: Reparametrised(True),
    "reparametrised, saved tensors": lambda: Reparametrised(False),
}


def train_classic(rank, name, stage):
    def make():
        torch.manual_seed(0)
        return CLASSIC[name]()

    plain = make()
    engine, optimizer = strategies.Engine(make(), optimizer=sgd, zero=stage), sgd(plain.parameters())
    for step in range(3):
        compare(engine, plain, optimizer, lambda r, s=step: {"seed": 10 * s + r}, rank)
        engine.eval(), plain.eval()
        with torch.inference_mode():
            torch.testing.assert_close(engine(seed=7), plain(seed=7), atol=1e-5, rtol=1e-4)
        engine.train(), plain.train()
    return [unit.name for unit in engine.units]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", list(CLASSIC))
def test_classic_modules_train_and_evaluate_like_plain_torch(name, stage):
    units = run_ranks(WORLD, train_classic, name, stage)[0]
    if name == "containers":  # whatever is called is a unit, however deep its list, and once
        assert units == ["grid.0.0", "grid.0.1", "grid.1.0", "named.0.up", "named.0.down", "named.1.up", "named.1.down",
                         "root"]
