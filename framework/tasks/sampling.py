"""A continuation of a prompt from a sharded model."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from framework.memory import available_memory_bytes
from framework.tasks.session import Session
from models.generate import generate
from strategies.engine import Engine
from strategies.zero.gathered import gathered

PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Continuation:
    """Prompt and what the model wrote after it: text where the data has a tokenizer, else token ids."""

    prompt: str
    completion: str

    def text(self) -> str:
        """For the terminal."""
        return f"Sampled continuation\n  prompt: {self.prompt!r}\n  model:  {self.completion!r}"


def sample(session: Session, engine: Engine, *, prompt: str | None, max_new_tokens: int, temperature: float,
           top_k: int) -> Continuation:
    """Continue `prompt`, or the start of the held-out data. Collective over the world; every rank gets the same text.

    Raises:
        ValueError: a prompt was given but the data has no tokenizer.
    """
    tokenizer = session.source.tokenizer
    if prompt is None:
        split = session.source.validation if session.source.validation is not None else session.source.train
        ids = split[0][0][:PROMPT_TOKENS].tolist()
    elif tokenizer is None:
        raise ValueError(f"task.prompt={prompt!r}: dataset {session.config.dataset.name} has no tokenizer to read it "
                         "with; fix: task.prompt=null, which continues the held-out data")
    else:
        ids = tokenizer.encode(prompt)
        if not ids:
            raise ValueError("task.prompt='': allowed is a text of at least one token; fix: task.prompt=null")
    stop = tokenizer.end_of_text_id if tokenizer is not None else None
    with _held_whole(session, engine):
        (completion,) = generate(session.model, [ids], max_new_tokens=max_new_tokens, temperature=temperature,
                                 top_k=top_k, seed=session.config.seed, stop_token=stop, forward=session.model,
                                 device=session.mesh.device)
    engine.rest()

    def shown(tokens: list[int]) -> str:
        return tokenizer.decode(tokens) if tokenizer is not None else " ".join(map(str, tokens))

    return Continuation(prompt=prompt if prompt is not None else shown(ids), completion=shown(completion))


def _held_whole(session: Session, engine: Engine) -> contextlib.AbstractContextManager[None]:
    """Keep all parameters gathered while they are read for every token, if all ranks have room for them twice over."""
    needed = sum(parameter.numel() * parameter.element_size() for parameter in engine.module.parameters())
    fits = available_memory_bytes(session.mesh.device) > 2 * needed * session.local_ranks
    agreed = session.mesh.world.maximum(torch.tensor([int(not fits)]), what="room for the whole model")
    return gathered(engine.module, write=False) if not int(agreed[0]) else engine.forward_scope()
