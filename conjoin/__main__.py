"""`python -m conjoin`."""

import sys

from conjoin.cli import main

sys.exit(main())
