"""What the tests of hot-load share: the builders beside them (`small_states.py` and others)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from store_servers import objects, s3_server, store_url

__all__ = ["objects", "s3_server", "store_url"]
