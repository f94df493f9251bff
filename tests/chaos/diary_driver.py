"""The demo, on a store whose index a server owns, as it would be on several hosts.

python tests/chaos/diary_driver.py STORE
"""

import runpy
from pathlib import Path

from elastix.search.executors import pool
from elastix.store.server import StoreServer

if __name__ == "__main__":
    pool.reach = StoreServer.start
    demo = Path(__file__).parents[2] / "examples" / "search_then_train.py"
    runpy.run_path(str(demo), run_name="__main__")
