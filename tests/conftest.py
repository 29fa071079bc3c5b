"""Session-wide settings: one torch thread, as in the pool of ranks, so that sums are taken in the same order."""

import torch

torch.set_num_threads(1)
