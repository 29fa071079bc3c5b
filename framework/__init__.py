"""The command line, configuration, data and tasks around the engine of `strategies`."""
