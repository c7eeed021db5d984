"""The builders beside the tests of sketch sync."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
