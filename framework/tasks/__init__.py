"""What a run does, one file per `task=` option."""
