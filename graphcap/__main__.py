"""`python -m graphcap` is the command `graphcap`, also without installing."""

import sys

from graphcap.cli import main

sys.exit(main())
