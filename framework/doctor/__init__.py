"""What `task=doctor` looks at, one topic a file."""
