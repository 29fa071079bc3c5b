"""Weights that a run leaves: read by evaluation, generation, fine-tuning and Hugging Face transformers."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from framework import weights
from framework.config import EvaluateTask, GenerateTask, TextDataset
from framework.tasks.evaluate import perplexity
from models.gpt2 import GPT2
from support.run_jobs import changed, run_in_pool, training_config
from support.run_oracle import oracle_model, oracle_source, oracle_val_loss
from support.run_probes import run_watched

ROOT = Path(weights.__file__).resolve().parent.parent
TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 60


def trained(folder, **changes):
    config = training_config(**{"zero": {"stage": 3}, "batch": {"micro_size": 3}, "task": {"save_weights": True},
                                "trainer": {"max_steps": 6, "val_steps": 2}, **changes})
    return config, run_in_pool(config, folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(config, run) of a training run on 2 ranks at stage 3, weights saved."""
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """The same on text, with a tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "own.txt").write_text(TEXT)
    files = TextDataset(name="text", files=["own.txt"], seq_len=16, validation_fraction=0.2)
    return trained(folder, dataset=files, model={"vocab_size": 270})


def evaluating(config, run, *, steps=2, devices=2, stage=3, **changes):
    changes = {"task": EvaluateTask(name="evaluate", steps=steps), "model": {"weights": str(run.weights)},
               "zero": {"stage": stage}, "parallel": {"data": devices}, "trainer": {"devices": devices}, **changes}
    return changed(config, **changes)


def generating(config, run, *, prompt, devices=2, stage=3, max_new_tokens=20, temperature=0.0):
    task = GenerateTask(name="generate", prompt=prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=0)
    return changed(config, task=task, model={"weights": str(run.weights)}, zero={"stage": stage},
                   parallel={"data": devices}, trainer={"devices": devices})


@pytest.fixture(scope="module")
def transformers():
    os.environ["HF_HUB_OFFLINE"] = "1"
    return pytest.importorskip("transformers")


def hugging_face(transformers, run):
    return transformers.GPT2LMHeadModel.from_pretrained(run.weights, local_files_only=True).eval()


def own_model(config, run):
    model = oracle_model(config)
    weights.read_weights(model, run.weights)
    return model


# -- evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "stage"), [(2, 3), (1, 0), (4, 1)])
def test_evaluation_finds_the_last_validation_loss_again(tmp_path, run, devices, stage):
    config, training = run
    found = run_in_pool(evaluating(config, training, devices=devices, stage=stage), tmp_path)
    assert found.summary["val_loss"] == pytest.approx(training.summary["val_loss"], abs=1e-6)
    assert found.summary["status"] == "completed"
    assert (found.summary["steps"], found.metrics) == (0, [])
    assert set(found.summary) == set(training.summary)
    assert len(found.summary["peak_memory_bytes_per_rank"]) == devices
    assert "validation loss" in found.terminal


def test_evaluation_without_a_number_of_steps_takes_every_held_out_sample_once(tmp_path, run):
    config, training = run
    found = run_in_pool(evaluating(config, training, steps=None), tmp_path)
    source, model = oracle_source(config, tmp_path), own_model(config, training)
    assert found.summary["val_loss"] == pytest.approx(oracle_val_loss(model, source, config, steps=100), abs=1e-6)
    assert f"{20 * 16} tokens" in found.terminal, "20 samples in batches of 12: the last one is not padded with others"


def test_evaluation_in_bf16_is_close(tmp_path, run):
    config, training = run
    found = run_in_pool(evaluating(config, training, precision={"name": "bf16"}), tmp_path)
    assert found.summary["val_loss"] == pytest.approx(training.summary["val_loss"], abs=5e-3)
    assert found.summary["val_loss"] != training.summary["val_loss"]


def refused(rank, config, path):
    with pytest.raises(ValueError, match="fix") as caught:
        run_watched(rank, config, path)
    return str(caught.value)


def test_evaluation_without_held_out_data_is_refused(tmp_path, run):
    config = evaluating(*run, dataset={"num_validation_samples": 0})
    assert "holds nothing out" in run_in_pool(config, tmp_path, worker=refused).returned[0]


def test_the_perplexity_of_a_diverged_model_is_infinite():
    assert perplexity(1.0) == pytest.approx(2.718281828)
    assert perplexity(1e4) == float("inf")


# -- Hugging Face and generation ------------------------------------------------------------------------------------


@torch.no_grad()
def test_transformers_reads_the_folder_and_computes_the_same_logits(run, transformers):
    config, training = run
    theirs, ours = hugging_face(transformers, training), own_model(config, training)
    tokens_BT = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(tokens_BT).logits, ours(tokens_BT), atol=2e-6, rtol=1e-5)
    assert {name for name, _ in theirs.named_parameters()} == {name for name, _ in ours.named_parameters()}


@pytest.mark.parametrize(("devices", "stage"), [(2, 3), (1, 0), (3, 2)])
def test_greedy_generation_is_that_of_transformers(tmp_path, run, transformers, devices, stage):
    config, training = run
    config = generating(config, training, prompt=None, devices=devices, stage=stage)
    found = run_in_pool(changed(config, batch={"micro_size": 1}), tmp_path)
    prompt = [int(token) for token in found.summary["prompt"].split()]
    assert prompt == oracle_source(config, tmp_path).validation[0][0].tolist()
    completion = [int(token) for token in found.summary["completion"].split()]
    assert completion == greedy(hugging_face(transformers, training), prompt, 20, window=16)
    assert found.summary["completion"] in found.terminal


@torch.no_grad()
def greedy(model, prompt, count, *, window, stop=None):
    tokens = list(prompt)
    for _ in range(count):
        token = int(model(torch.tensor([tokens[-window:]])).logits[0, -1].argmax())
        if token == stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def test_a_prompt_is_read_and_answered_with_the_runs_own_tokenizer(tmp_path, text_run, transformers):
    config, training = text_run
    (tmp_path / "own.txt").write_text(TEXT)
    found = run_in_pool(generating(config, training, prompt="the quick", max_new_tokens=9), tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(training.weights / "tokenizer.json"))
    ids, stop = tokenizer("the quick")["input_ids"], tokenizer.convert_tokens_to_ids("<|endoftext|>")
    wanted = greedy(hugging_face(transformers, training), ids, 9, window=16, stop=stop)
    assert found.summary["prompt"] == "the quick"
    assert found.summary["completion"] == tokenizer.decode(wanted)


def test_the_tokenizer_beside_the_weights_reads_prompts_for_data_that_has_none(tmp_path, text_run):
    config, training = text_run
    (tmp_path / "own.txt").write_text(TEXT)
    said = {}
    for name, data in (("text", config.dataset), ("synthetic", training_config().dataset)):
        asked = replace(generating(config, training, prompt="pack my box", max_new_tokens=7), dataset=data)
        said[name] = run_in_pool(asked, tmp_path, timeout_s=60).summary["completion"]
    assert said["text"] == said["synthetic"]


def test_text_that_gives_another_tokenizer_than_the_weights_have_is_refused(tmp_path, text_run):
    config, training = text_run
    (tmp_path / "own.txt").write_text("other words give other merges, and ids would mean other things. " * 60)
    said = run_in_pool(evaluating(config, training), tmp_path, worker=refused).returned
    assert said[0] == said[1]
    assert "tokenizer.json beside them" in said[0]
    assert [path.name for path in tmp_path.glob("*.json")] == []


def without_room(rank, config, path):
    with mock.patch("framework.tasks.sampling.available_memory_bytes", return_value=0 if rank else 1 << 40):
        run_watched(rank, config, path)


def test_generation_without_room_for_the_whole_model_says_the_same(tmp_path, run):
    config = generating(*run, prompt=None)
    plain = run_in_pool(config, tmp_path / "plain")
    tight = run_in_pool(config, tmp_path / "tight", worker=without_room)
    assert tight.summary["completion"] == plain.summary["completion"]


def test_sampling_repeats_with_the_seed_on_any_number_of_ranks(tmp_path, run):
    config, training = run
    said = {}
    for name, devices, stage, seed in (("a", 2, 3, 0), ("b", 1, 0, 0), ("c", 2, 3, 1)):
        asked = changed(generating(config, training, prompt=None, devices=devices, stage=stage, temperature=1.0),
                        seed=seed, dataset={"seq_len": 8})
        said[name] = run_in_pool(asked, tmp_path / name).summary["completion"]
    assert said["a"] == said["b"]
    assert said["a"] != said["c"]


def test_a_prompt_for_data_without_a_tokenizer_is_refused(tmp_path, run):
    config = generating(*run, prompt="hello")
    assert "has no tokenizer" in run_in_pool(config, tmp_path, worker=refused).returned[1]


def test_a_training_run_ends_with_a_continuation(tmp_path):
    _, found = trained(tmp_path, task={"sample_tokens": 5, "temperature": 0.0})
    assert "Sampled continuation" in found.terminal
    assert found.terminal.index("Sampled continuation") < found.terminal.index("completed: 6 steps")


# -- starting from weights ------------------------------------------------------------------------------------------


def test_fine_tuning_starts_from_the_weights_of_the_folder(tmp_path, run):
    config, training = run
    tuned = run_in_pool(changed(config, model={"weights": str(training.weights)}), tmp_path, worker=run_watched)
    stored = load_file(training.weights / "model.safetensors")
    for seen in tuned.returned:
        assert seen.start.keys() == stored.keys()
        assert all(torch.equal(value, stored[name]) for name, value in seen.start.items())
    assert tuned.metrics[0]["loss"] < training.metrics[0]["loss"]


def test_every_stage_saves_the_weights_it_has_trained(tmp_path):
    saved = []
    for devices, stage, precision in ((1, 0, "fp32"), (2, 3, "fp32"), (2, 1, "bf16")):
        config = training_config(devices=devices, zero={"stage": stage}, precision={"name": precision},
                                 batch={"micro_size": 3}, task={"save_weights": True}, trainer={"max_steps": 3})
        path = tmp_path / f"{devices}{stage}{precision}"
        run = run_in_pool(config, path, worker=run_watched)
        saved.append(load_file(run.weights / "model.safetensors"))
        for name, value in run.returned[0].states[-1][0].items():
            assert torch.equal(saved[-1][name], value), name
            assert saved[-1][name].dtype == torch.float32, "the masters, not what computes"
    for name, value in saved[0].items():
        torch.testing.assert_close(saved[1][name], value, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("change", "names"), [
    ({"hidden_size": 32}, ["transformer.wte.weight has shape (64, 16)", "transformer.h.1.mlp.c_fc.bias has shape"]),
    ({"num_layers": 3}, ["transformer.h.2.ln_1.weight is missing", "transformer.h.2.mlp.c_proj.bias is missing"]),
    ({"num_layers": 1}, ["transformer.h.1.attn.c_attn.weight is not in the model"]),
])
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, run, change, names):
    config, training = run
    said = run_in_pool(evaluating(config, training, model={"weights": str(training.weights), **change}), tmp_path,
                       worker=refused).returned
    assert said[0] == said[1]
    assert all(name in said[0] for name in names)


def test_files_that_hold_no_weights_are_refused_by_path(tmp_path, run):
    _, training = run
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes((training.weights / "model.safetensors").read_bytes()[:5000])
    model = oracle_model(run[0])
    for path, said in ((torn, "no whole safetensors file"), (tmp_path, "allowed is a .safetensors file or a folder"),
                       (tmp_path / "none", "allowed is a .safetensors file or a folder")):
        with pytest.raises(ValueError, match=said):
            weights.read_weights(model, path)


def test_names_without_the_models_prefix_are_read_too(tmp_path, run):
    config, training = run
    stored = load_file(training.weights / "model.safetensors")
    bare, model = tmp_path / "bare.safetensors", oracle_model(config)
    save_file({name.removeprefix("transformer."): value for name, value in stored.items()}, bare)
    weights.read_weights(model, bare)
    assert torch.equal(model.transformer.h[1].mlp.c_fc.weight, stored["transformer.h.1.mlp.c_fc.weight"])


# -- saving whole ---------------------------------------------------------------------------------------------------

SAVE = """
import os, sys
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from framework import weights
from support.run_configs import run_config
from support.run_oracle import oracle_model
from unittest import mock

config = run_config()
state = dict(oracle_model(config).named_parameters())
with mock.patch.object(weights, {victim!r}, lambda *_, **__: os.kill(os.getpid(), 9)):
    weights.write_weights(Path({folder!r}), state, config=config.model, tokenizer=None)
"""


@pytest.mark.parametrize("victim", ["save_file", "_exchange", "_to_disk"])
def test_a_save_that_is_killed_leaves_the_old_folder_whole(tmp_path, victim):
    folder, config, model = tmp_path / "final", training_config(), GPT2(
        vocab_size=64, max_seq_len=16, hidden_size=16, num_layers=2, num_heads=2)
    weights.write_weights(folder, dict(model.named_parameters()), config=config.model, tokenizer=None)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    script = SAVE.format(tests=str(ROOT / "tests"), folder=str(folder), victim=victim)
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    other = oracle_model(config)
    weights.write_weights(folder, dict(other.named_parameters()), config=config.model, tokenizer=None)
    assert [path.name for path in tmp_path.iterdir()] == ["final"], "what the killed save left is gone"
    assert torch.equal(load_file(folder / "model.safetensors")["transformer.wte.weight"], other.transformer.wte.weight)


def test_a_file_system_that_cannot_exchange_names_gets_two_renames(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "RENAME_EXCHANGE", 1 << 30)  # a flag that no kernel knows: EINVAL
    folder, config = tmp_path / "final", training_config()
    for seed in (1, 2):
        model = oracle_model(replace(config, seed=seed))
        weights.write_weights(folder, dict(model.named_parameters()), config=config.model, tokenizer=None)
    assert torch.equal(load_file(folder / "model.safetensors")["transformer.wpe.weight"], model.transformer.wpe.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_the_folder_holds_a_config_that_transformers_knows(run):
    config = json.loads((run[1].weights / "config.json").read_text())
    assert (config["model_type"], config["n_layer"], config["n_head"], config["n_embd"]) == ("gpt2", 2, 2, 16)
    assert config["tie_word_embeddings"] is True
