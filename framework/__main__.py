"""`python -m framework`. Imports nothing before the path is settled: see framework/guard.py."""

import sys

if __name__ == "__main__":
    # `python -m` puts the current directory first; with -P or PYTHONSAFEPATH it puts nothing there.
    current_directory = None if sys.flags.safe_path else sys.path.pop(0)

    from framework.guard import settle_import_path

    settle_import_path(current_directory)

    from framework.cli import main

    sys.exit(main(sys.argv[1:]))
