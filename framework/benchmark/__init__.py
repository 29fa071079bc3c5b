"""One model trained under several systems, measured in turn: the parts of task=benchmark."""
