"""`python -m shardwise`: the program without its installed name."""

import sys

from shardwise.cli import start

sys.exit(start())
