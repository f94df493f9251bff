"""The demo, on a store whose index a server owns, as it would be on several hosts.

python tests/chaos/diary_driver.py STORE
"""

import runpy
from pathlib import Path

from elastix.search.executors import store_access

if __name__ == "__main__":
    store_access.several_hosts = lambda: True
    demo = Path(__file__).parents[2] / "examples" / "search_then_train.py"
    runpy.run_path(str(demo), run_name="__main__")
