"""What the documents promise to a reader: links lead somewhere, no public name is missing."""

import ast
import inspect
import itertools
import re
import tomllib
from pathlib import Path

import ConfigSpace
import pytest
import yaml

import elastix
from elastix import errors

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(path):
    """As GitHub and mkdocs make them of headings without markup."""
    plain = (re.sub(r"[^\w\- ]", "", text.lower()) for text in _HEADING.findall(path.read_text()))
    return {text.strip().replace(" ", "-") for text in plain}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_within_the_repository_leads_somewhere(path):
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    for target, anchor in _LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        found = path.parent / target if target else path
        assert found.exists(), f"{path.name} links to {target}"
        if anchor:
            assert anchor in {re.sub("-+", "-", one) for one in anchors(found)}, f"#{anchor}"


def test_documents_that_the_code_points_to_exist():
    """In error texts, docstrings and comments, of whatever language."""
    pointed = {
        name
        for folder in ("elastix", "jobs", "examples", "benchmarks", "search_spaces")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".yaml", ".sh", ".sbatch", ".html", ".ipynb"}
        for name in re.findall(r"\bdocs/[\w-]+\.\w+", path.read_text(encoding="utf-8"))
    }
    assert "docs/jobs.md" in pointed  # the manifests do
    assert [name for name in pointed if not (ROOT / name).exists()] == []


def test_files_that_the_design_and_docstrings_point_to_exist():
    """`a/b.py` as the end of a path; in "Not here: what (module)" a module or package."""
    paths = [path for folder in ("elastix", "tests", "benchmarks", "jobs", "search_spaces")
             for path in (ROOT / folder).rglob("*.py")]  # fmt: skip
    files = {f"/{path.relative_to(ROOT).as_posix()}" for path in paths}
    modules = {part for name in files for part in name.removesuffix(".py").split("/")}
    texts = {name: (ROOT / name).read_text() for name in ("DESIGN.md", "CONTRIBUTING.md")}
    for path in (ROOT / "elastix").rglob("*.py"):
        texts[str(path)] = ast.get_docstring(ast.parse(path.read_text())) or ""
    gone = []
    for where, text in texts.items():
        pointed = re.findall(r"(?<![\w./])([a-z_][\w/]*\.py)\b", text)
        gone += [(where, f) for f in pointed if not any(n.endswith(f"/{f}") for n in files)]
        for clause in re.findall(r"^Not here:.*?(?:\n\n|\Z)", text, re.S | re.M):
            names = re.findall(r"\(([a-z_., \n]+)\)", clause)
            named = [n.strip() for one in names for n in re.split(r",| and ", one) if n.strip()]
            plain = [n for n in named if " " not in n]
            gone += [
                (where, n) for n in plain if n.removesuffix(".py").split(".")[-1] not in modules
            ]
    assert sorted(gone) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_names_that_a_page_mentions_exist(path):
    """Those on the context, at the top level, and the arguments of settings."""
    text = path.read_text(encoding="utf-8")
    if path.name == "coming-from.md":  # the left column is in others' words
        text = "\n".join(line.rstrip(" |").rpartition(" | ")[2] for line in text.splitlines())
    for name in set(re.findall(r"\bctx\.([a-z_]+)\b", text)) - {"config"}:  # that is an attribute
        assert hasattr(elastix.Context, name), f"ctx.{name}"
    for name in re.findall(r"\belastix\.([A-Z]\w*)", text):
        assert hasattr(elastix, name), f"elastix.{name}"
    text = re.sub(r"\btrain\.\w+Config\(", "(", text)  # those are Ray Train's own
    for settings, arguments in re.findall(r"\b([A-Z]\w*Config|Budget|Guard)\(([^()]*)", text):
        known = inspect.signature(getattr(elastix, settings)).parameters
        for name in re.findall(r"\b(\w+)=", arguments):
            assert name in known, f"{settings}({name}=...)"


def test_every_cause_of_a_loss_is_explained():
    code = (ROOT / "elastix" / "train" / "control" / "conductor.py").read_text(encoding="utf-8")
    causes = set(re.findall(r'_lose\([\w.]+, "([\w ]+)"', code))
    causes |= set(re.findall(r'WorkerLost\([^)]*cause="([\w ]+)"', code))
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert {"died", "stuck", "died unseen"} <= causes
    assert [cause for cause in sorted(causes) if f"\n- `{cause}`: " not in page] == []


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    named = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith("::: ")}
    elsewhere = {name for name in elastix.__all__ if hasattr(errors, name)}
    elsewhere |= set(ConfigSpace.__all__)  # the page says that these are ConfigSpace's
    assert set(elastix.__all__) - elsewhere <= named
    assert "::: elastix.errors" in page


def test_the_api_page_has_every_module_that_a_page_imports_from():
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    imported = set()
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        imported |= set(re.findall(r"^from (elastix\.[\w.]+) import", text, re.M))
        imported |= set(re.findall(r"python -m (elastix\.[\w.]+\w)", " ".join(text.split())))
    assert {"elastix.events", "elastix.testing.replay"} <= imported
    assert [name for name in sorted(imported) if f"`{name}`" not in api] == []


def test_the_readme_names_every_page_that_a_reader_looks_for():
    readme = (ROOT / "README.md").read_text()
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    behind = {"index.md", "changelog.md", "api.md", "store-format.md"}
    pages = set(re.findall(r"'([\w-]+\.md)'", str(site)))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} == pages
    assert all(f"docs/{page}" in readme for page in pages - behind)


def test_every_example_is_listed_and_every_listed_one_exists():
    listed = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "examples.md").read_text(), re.M)
    there = {
        path.name for path in (ROOT / "examples").iterdir() if path.suffix in {".py", ".ipynb"}
    }
    assert {name.rstrip("/") for name in listed} == there | {"plain_torch"}


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == project["version"]
    assert cited["license"] == project["license"]
    assert f"## {project['version']}\n" in (ROOT / "CHANGELOG.md").read_text()
    wheel = f"elastix-{project['version']}-py3-none-any.whl"
    assert wheel in (ROOT / "README.md").read_text()
    assert f"-t elastix:{project['version']} " in (ROOT / "Dockerfile").read_text()


def test_every_dependency_has_a_reason_and_a_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *itertools.chain.from_iterable(extras)]
    names = {re.match(r"[\w.-]+", text)[0].lower() for text in asked}
    reasons = (ROOT / "DESIGN.md").read_text().partition("## Dependencies")[2].lower()
    short = {name: name.replace("pytest-", "+").removesuffix("-bin") for name in names}
    assert [name for name in sorted(names) if short[name] not in reasons] == []
    pins = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    assert [name for name in sorted(names) if f"\n{name.replace('_', '-')}==" not in pins] == []


def test_readmes_first_program_is_whole():
    """It runs as printed: nothing hidden comes before it."""
    readme = (ROOT / "README.md").read_text()
    before, _, _ = readme.partition("```python")
    assert "invisible-code-block" not in before
