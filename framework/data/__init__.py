"""Text to optimizer steps: corpus, tokenizer, token files, and the loader that yields one update's micro-batches."""
