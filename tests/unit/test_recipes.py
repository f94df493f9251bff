"""Every recipe makes what jobs/train.py and jobs/search.py ask it for. Nothing is started."""

import pytest

import elastix
from elastix.errors import ConfigError
from jobs import recipes


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_makes_a_trainer_and_a_campaign(name, tmp_path):
    recipe = recipes.load(name, "trainer")
    assert recipes.load(name, "campaign") is recipe
    run = elastix.RunConfig(name="run", store=str(tmp_path / "store"))
    assert isinstance(recipe.trainer(run), elastix.ElasticTrainer)
    assert isinstance(recipe.campaign(run), elastix.Campaign)


def test_a_recipe_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="digits"):
        recipes.load("nope", "trainer")


def test_a_recipe_without_what_is_wanted_of_it_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def trainer(run): ...")
    recipes.load(str(tmp_path / "mine.py"), "trainer")
    with pytest.raises(ConfigError, match=r"mine.py' has no function campaign\(run\)"):
        recipes.load(str(tmp_path / "mine.py"), "campaign")
