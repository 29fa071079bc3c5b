"""ZeRO (arXiv:1910.02054) on flat zero-copy buffers: stages as data, units, one gradient ledger. Plain torch."""
