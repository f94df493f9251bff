"""Every recipe makes what jobs/train.py and jobs/search.py ask it for. Nothing is started."""

import pytest

import elastix
from elastix.errors import ConfigError
from jobs import recipes


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_makes_a_trainer_and_a_campaign(name, tmp_path):
    recipe = recipes.load(name)
    run = elastix.RunConfig(name="run", store=str(tmp_path / "store"))
    assert isinstance(recipe.trainer(run), elastix.ElasticTrainer)
    assert isinstance(recipe.campaign(run), elastix.Campaign)


def test_a_recipe_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="digits"):
        recipes.load("nope")
