"""Entry point for a Ray job: the demo, search and final training under fire.

    export RAY_AUTH_MODE=token      # Ray's token authentication; see `elastix doctor`
    ray job submit --working-dir . -- python jobs/demo.py [STORE]

The same store goes on where a stopped or killed job was.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.search_then_train import main
from jobs import recipes

if __name__ == "__main__":
    with recipes.told():
        sys.exit(main())
