"""`python -m paged_attn serve ...`: the command line, where its script is not on the path."""

import sys

from paged_attn.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
