"""What a torch optimizer tells the engine when code calls it without Lightning's wrapper in between.

Manual optimization may take `self.optimizers(use_pl_optimizer=False)`, and any code may call zero_grad to drop
gradients. The engine holds both the gradients and the parameters' new values, so it has to hear of either.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from strategies.lightning.zero_strategy import ZeroStrategy


def follow(optimizer: Optimizer, strategy: ZeroStrategy) -> None:
    """Let `optimizer.zero_grad` empty the ledger, and a bare `optimizer.step()` be a whole update."""
    ref = weakref.ref(strategy)
    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def zero_grad_everywhere(*args: Any, **kwargs: Any) -> None:
        zero_grad(*args, **kwargs)
        strategy = ref()
        if strategy is not None:
            strategy.zero_grad()

    def before(_optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        strategy = ref()
        if strategy is None or strategy.is_stepping:
            return
        if (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            raise RuntimeError("optimizer.step(closure) on the bare optimizer: its closure would run after gradients "
                               "are final; fix: self.optimizers(), or call the closure and then step()")
        strategy.before_step()
        strategy.engine.withhold()  # this step cannot be called off, but it leaves alone what has no gradient

    def after(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        strategy = ref()
        if strategy is not None and not strategy.is_stepping:
            strategy.after_step()

    optimizer.zero_grad = zero_grad_everywhere  # type: ignore[method-assign]
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
