"""task=generate: continue a prompt with the given weights."""

from __future__ import annotations

from dataclasses import replace

from framework.build import build_engine
from framework.config import GenerateTask
from framework.report import Recorded, build_summary
from framework.tasks.sampling import sample
from framework.tasks.session import Session


def generate_text(session: Session, task: GenerateTask) -> None:
    """Print the continuation and leave it in the summary. Collective over the world."""
    engine = build_engine(session.config, session.model, session.mesh)
    continuation = sample(session, engine, prompt=task.prompt, max_new_tokens=task.max_new_tokens,
                          temperature=task.temperature, top_k=task.top_k)
    measured = replace(session.measured(engine), peak_memory_bytes_per_rank=session.peak_memory_bytes_per_rank())
    if session.is_first:
        session.progress.say(continuation.text())
        summary = build_summary(session.config, status="completed", recorded=Recorded(), measured=measured)
        summary |= {"prompt": continuation.prompt, "completion": continuation.completion}
        session.folder.write_json(session.folder.summary_path, summary)
        session.progress.say(f"results in {session.folder.path}")
