"""Single-device model code; how a model is cut into ZeRO units stands beside it."""
