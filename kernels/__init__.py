"""Fused operations, each beside its PyTorch reference. This file stays a docstring."""
