"""Entry point for a Ray job: train a model as a recipe says.

    export RAY_AUTH_MODE=token      # Ray's token authentication; see `elastix doctor`
    ray job submit --working-dir . -- python jobs/train.py --recipe digits --store /shared/store

The same name and store go on where a stopped or killed job was.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from elastix.interrupts import importing

with importing("jobs/train.py"):
    import typer

    from jobs import recipes


def main(
    recipe: str = typer.Option(..., help="A recipe's name, or the path of its file."),
    store: str = typer.Option(
        "runs/store", envvar="ELASTIX_STORE", help="Where all nodes reach it."
    ),
    name: str = typer.Option("", help="Of the run; the recipe's by default."),
    seed: int = 0,
) -> None:
    """Run a recipe on the cluster of this job, or on a local one."""
    with recipes.told():  # what is wrong with them, or with the store, is told before Ray starts
        run = recipes.run_config(recipe, "train", name, store, seed)
        found = recipes.load(recipe, "trainer").trainer(run).fit()
    print(found.metrics, found.ref)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
