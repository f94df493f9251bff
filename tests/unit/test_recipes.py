"""Every recipe makes what jobs/train.py and jobs/search.py ask it for. Nothing is started."""

import pytest
import ray
import typer
from typer.testing import CliRunner

import elastix
from elastix.errors import ConfigError, StoreError
from jobs import recipes, search, train


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


@pytest.mark.parametrize("job", [train, search])
def test_a_store_that_cannot_be_made_is_told_in_a_line_before_ray_starts(
    tmp_path, monkeypatch, capsys, job
):
    (tmp_path / "file").write_text("in its way")
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))
    with pytest.raises(SystemExit) as ended:
        job.main("digits", str(tmp_path / "file" / "store"), "", 0)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Not a directory" in line


def test_so_is_one_of_which_only_a_part_can_be_made(tmp_path, monkeypatch):
    (tmp_path / "index.sqlite").mkdir()
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))
    run = elastix.RunConfig(name="run", store=str(tmp_path))
    with pytest.raises(StoreError):
        recipes.load("digits", "trainer").trainer(run).fit()


@pytest.mark.parametrize("job", [train, search])
def test_the_store_of_a_job_is_that_of_the_commands(monkeypatch, job):
    asked = []
    monkeypatch.setattr(recipes, "run_config", lambda *given: asked.append(given[3]))
    app = typer.Typer()
    app.command()(job.main)
    CliRunner().invoke(app, ["--recipe", "none"], env={"ELASTIX_STORE": "/shared"})
    assert asked == ["/shared"]
