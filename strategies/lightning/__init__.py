"""The only place that imports Lightning."""
