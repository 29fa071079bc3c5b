"""Weights in and out: safetensors in the layout of Hugging Face's GPT2LMHeadModel."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from framework.config import GptModel
from framework.data.tokenizer import TextTokenizer
from models.gpt2 import GPT2

FILE = "model.safetensors"
TOKENIZER = "tokenizer.json"
HEAD = "lm_head.weight"
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def write_weights(folder: Path, state: Mapping[str, Tensor], *, config: GptModel,
                  tokenizer: TextTokenizer | None) -> None:
    """Write `folder` whole or not at all: weights, config.json, tokenizer.json. One process only.

    `state` has the plain model's names; the tied head is left out, as Hugging Face does. An earlier folder of that
    name is replaced only once the new one is complete.
    """
    aside = folder.with_name(f".{folder.name}.new")  # one name: what a killed run left here is overwritten
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    tensors = {name: value.contiguous() for name, value in state.items() if name != HEAD}
    save_file(tensors, aside / FILE, metadata={"format": "pt"})
    (aside / "config.json").write_text(json.dumps(_hf_config(config), indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save(aside / TOKENIZER)
    for path in (*aside.iterdir(), aside):
        _to_disk(path)
    if folder.exists():
        _exchange(aside, folder)
        shutil.rmtree(aside)
    else:
        aside.rename(folder)
    _to_disk(folder.parent)


def _to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(new: Path, old: Path) -> None:
    """Let two folders swap names in one step, so that at no time there is none (renameat2, Linux 3.15).

    File systems without it (some network disks) get two renames: a process killed between them leaves the old folder
    as `<name>.replaced`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise OSError(number, os.strerror(number), str(old))
    replaced = old.with_name(f"{old.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    old.rename(replaced)
    new.rename(old)
    replaced.rename(new)  # the caller removes it


def read_weights(model: GPT2, path: Path) -> None:
    """Fill `model` (on the CPU) from a safetensors file, or a folder that holds `model.safetensors`.

    Takes GPT2LMHeadModel's names, and GPT2Model's without the `transformer.` prefix. Each rank reads for itself.

    Raises:
        ValueError: the file is missing or its tensors do not fit the model; all names that do not are listed.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"model.weights={path}: allowed is a .safetensors file or a folder holding {FILE}; "
                         "fix: the checkpoints/final folder of a run")
    wanted = dict(model.named_parameters())  # tied parameters once: the head is the embedding
    with _opened(file) as archive, torch.no_grad():
        stored = {_own_name(name): name for name in archive.keys()}  # noqa: SIM118 (an archive is no dict)
        problems = [f"{name} is missing" for name in wanted if name not in stored]
        for name in stored.keys() - wanted.keys() - {HEAD}:
            if not name.endswith((".attn.bias", ".attn.masked_bias")):  # causal masks that old files carry
                problems.append(f"{stored[name]} is not in the model")
        for name in wanted.keys() & stored.keys():
            shape = tuple(archive.get_slice(stored[name]).get_shape())
            if shape != tuple(wanted[name].shape):
                problems.append(f"{stored[name]} has shape {shape}, the model has {tuple(wanted[name].shape)}")
        if problems:
            raise ValueError(f"model.weights={path} does not fit the model: {'; '.join(sorted(problems))}; "
                             "fix: the model=... and model.* settings the weights were made with")
        for name, parameter in wanted.items():
            parameter.copy_(archive.get_tensor(stored[name]))


def tokenizer_beside(path: Path) -> TextTokenizer | None:
    """The tokenizer that weights were trained with, where they are in a folder that holds one."""
    file = path / TOKENIZER
    return TextTokenizer.load(file) if file.is_file() else None


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"model.weights={file}: no whole safetensors file ({error}); "
                         "fix: the checkpoints/final folder of a run that completed") from error


def _own_name(name: str) -> str:
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _hf_config(config: GptModel) -> dict[str, object]:
    """What transformers.GPT2Config needs to rebuild the model."""
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len, "n_embd": config.hidden_size, "n_layer": config.num_layers,
        "n_head": config.num_heads, "resid_pdrop": config.dropout, "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout, "activation_function": "gelu_new", "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None,
    }
