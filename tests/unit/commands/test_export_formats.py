"""Stored models in the formats of others: each is run, and gives what the stored one gives."""

import json
import math

import pytest
import torch
from packaging.version import Version
from typer.testing import CliRunner

from elastix.cli import app
from elastix.commands.export_formats import _alike, _put_huggingface, _same
from elastix.errors import StoreError
from elastix.state import State
from elastix.store import Store
from tests.unit.test_state import HasMore

MODELS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

def sized(config):
    return nn.Linear(6, config["classes"])

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else -self.layer(x)

class Draws(Branches):
    def forward(self, x):
        return self.layer(x) + torch.rand_like(self.layer(x))

def gpt(**more):
    from transformers import GPT2Config, GPT2LMHeadModel
    small = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**small, **tokens))

def rounded(**more):
    return gpt(**more).bfloat16()

def broken():
    raise RuntimeError("no such layer")

def nothing():
    return 3
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


def models(folder):
    found = {}
    exec(compile(MODELS, "models.py", "exec"), found)
    return found


def stored(folder, model, **meta):
    torch.manual_seed(3)
    module = models(folder)[model](**meta)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.add_(0.5)  # statistics of a model that was trained
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with Store(folder / "store") as store:
        store.tag("model", store.put(State(tensors, meta)))
    return module.eval()


def export(folder, *words, code=0):
    done = CliRunner().invoke(
        app, ["store", "export", "model", *words, "--store", str(folder / "store")]
    )
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done


def onnx(folder, function, *words, code=0):
    target = ["--format", "onnx", "--model", f"{folder / 'models.py'}:{function}"]
    return export(folder, str(folder / "out"), *target, "--shape", "6", *words, code=code)


def run_onnx(path, *inputs):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return torch.from_numpy(session.run(None, dict(zip(names, inputs, strict=True)))[0])


def test_onnx_gives_what_the_stored_model_gives_for_any_batch(folder):
    pytest.importorskip("onnx")
    module = stored(folder, "build")
    told = json.loads(onnx(folder, "build", "--json").stdout)
    assert told["path"] == str(folder / "out" / "model.onnx")
    for batch in (1, 4, 33):
        x = torch.randn(batch, 6)
        assert torch.allclose(run_onnx(told["path"], x.numpy()), module(x), atol=1e-5)
    assert [entry.name for entry in (folder / "out").iterdir()] == ["model.onnx"]


def test_a_trial_is_built_with_the_config_that_it_was_stored_with(folder):
    pytest.importorskip("onnx")
    module = stored(folder, "sized", config={"classes": 5})
    onnx(folder, "sized")
    x = torch.randn(2, 6)
    assert torch.allclose(run_onnx(folder / "out" / "model.onnx", x.numpy()), module(x), atol=1e-5)


@pytest.mark.parametrize(
    ("function", "fact"),
    [("Branches", "branches on values"), ("Draws", "gives something else")],
)
def test_what_onnx_cannot_hold_is_not_written(folder, function, fact):
    pytest.importorskip("onnx")
    stored(folder, function)
    said = onnx(folder, function, code=1).stderr
    assert fact in said
    assert "Nothing was written" in said
    names = {entry.name for entry in folder.iterdir()}
    assert names - {"__pycache__"} == {"models.py", "store"}


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ([1000.0, 1.0], [1000.0, 1.09], True),  # of the largest
        ([1000.0, 1.0], [1000.2, 1.0], False),
        ([1e-5, 2e-5], [1e-5, 1e-5], False),  # all are small
        ([0.0, 0.0], [0.0, 0.0], True),
        ([math.inf, 1.0], [math.inf, 1.0], True),
        ([math.inf, 1.0], [math.inf, 2.0], False),
        ([math.nan, 1.0], [math.nan, 1.0], True),
        ([True, False], [True, True], False),
    ],
)
def test_what_an_exported_model_gives_is_compared_by_its_largest_value(ours, theirs, same):
    assert _alike(torch.tensor(ours), torch.tensor(theirs)) == same


@pytest.mark.parametrize(
    ("words", "code", "fact"),
    [
        (["--format", "gguf"], 2, "--format is one of"),
        (["--format", "onnx"], 2, "a store has tensors and no code"),
        (["--format", "onnx", "--model", "{}:build"], 2, "needs the --shape of one sample"),
        (["--format", "onnx", "--model", "{}:build", "--shape", "six"], 2, "numbers with commas"),
        (["--format", "onnx", "--model", "{}:build", "--shape", "5"], 2, "does not take a batch"),
        (["--format", "onnx", "--model", "{}:none", "--shape", "6"], 2, "has no function"),
        (["--format", "onnx", "--model", "{}:broken", "--shape", "6"], 2, "no such layer"),
        (["--format", "onnx", "--model", "{}:nothing", "--shape", "6"], 2, "no torch.nn.Module"),
        (["--format", "onnx", "--model", "{}:Branches", "--shape", "6"], 1, "another model than"),
        (["--format", "huggingface", "--model", "{}:build"], 2, "no model of transformers"),
        (["--format", "huggingface", "--model", "none.json"], 2, "does not say which model"),
        (["--format", "huggingface", "--model", "{}", "--shape", "6"], 2, "no other format"),
        (["--format", "huggingface", "--model", "{}", "--whole"], 2, "has no place for"),
        (["--format", "huggingface", "--model", "{}", "--input-dtype", "int64"], 2, "needs none"),
        (["--model", "{}"], 2, "safetensors needs none"),
        (["--config", "{{}}"], 2, "safetensors needs none"),
    ],
)
def test_what_cannot_be_exported_says_what_to_do(folder, words, code, fact):
    pytest.importorskip("transformers")
    pytest.importorskip("onnx")
    stored(folder, "build")
    words = [word.format(folder / "models.py") for word in words]
    said = export(folder, str(folder / "out"), *words, code=code).output
    assert fact in said
    assert not (folder / "out").exists()
    assert not list(folder.glob(".out*"))


@pytest.mark.parametrize(
    ("name", "kind", "fact"),
    [
        ("model.pt", "safetensors", "a file in the format safetensors"),
        ("model.onnx", "onnx", "a directory"),
    ],
)
def test_a_name_that_promises_another_format_is_refused(folder, name, kind, fact):
    stored(folder, "build")
    said = export(folder, str(folder / name), "--format", kind, code=2).stderr
    assert f"{name} would be {fact}" in said.replace("\n", " ")
    assert not (folder / name).exists()


def test_an_existing_file_is_replaced_by_force_alone(folder):
    pytest.importorskip("onnx")
    stored(folder, "build")
    (folder / "out").mkdir()
    (folder / "out" / "mine.txt").write_text("mine")
    (folder / "out" / "model.onnx").write_text("old")
    assert "exists" in onnx(folder, "build", code=2).output
    onnx(folder, "build", "--force")
    assert (folder / "out" / "mine.txt").read_text() == "mine"
    assert (folder / "out" / "model.onnx").stat().st_size > 100


def test_into_the_directory_that_one_is_in(folder, monkeypatch):
    pytest.importorskip("onnx")
    stored(folder, "build")
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")
    target = ["--format", "onnx", "--model", str(folder / "models.py"), "--shape", "6"]
    export(folder, ".", *target)
    assert [entry.name for entry in (folder / "here").iterdir()] == ["model.onnx"]


def test_the_list_of_all_models_has_one_format(folder):
    stored(folder, "build")
    words = ["store", "export", "all", str(folder / "x.parquet"), "--store", str(folder / "store")]
    done = CliRunner().invoke(app, [*words, "--format", "onnx"])
    assert (done.exit_code, "as Parquet" in done.output) == (2, True)
    assert not (folder / "x.parquet").exists()


def test_a_hugging_face_folder_is_read_by_transformers(folder):
    transformers = pytest.importorskip("transformers")
    module = stored(folder, "gpt")
    words = ["--format", "huggingface", "--model"]
    export(folder, str(folder / "out"), *words, f"{folder / 'models.py'}:gpt")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
    tokens = torch.randint(16, (2, 8))
    assert torch.equal(again(tokens).logits, module(tokens).logits)
    # Its config alone says how to build it.
    export(folder, str(folder / "second"), *words, str(folder / "out" / "config.json"))
    names = {entry.name for entry in (folder / "second").iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    first, second = (folder / name / "model.safetensors" for name in ("out", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_mode & 0o777 == (folder / "models.py").stat().st_mode & 0o777


def test_a_model_of_another_type_rounds_no_weights_unseen(folder):
    pytest.importorskip("transformers")
    stored(folder, "gpt")
    words = ["--format", "huggingface", "--model", f"{folder / 'models.py'}:rounded"]
    done = export(folder, str(folder / "out"), *words, code=1)
    assert "stored in float32, and the model is built in bfloat16" in " ".join(done.output.split())
    assert not (folder / "out").exists()


def test_a_model_may_be_built_in_a_type_that_holds_more(folder):
    pytest.importorskip("transformers")
    stored(folder, "rounded")
    words = ["--format", "huggingface", "--model", f"{folder / 'models.py'}:gpt"]
    export(folder, str(folder / "out"), *words)


def test_other_files_of_a_directory_are_replaced_by_force_alone(folder):
    pytest.importorskip("transformers")
    stored(folder, "gpt")
    (folder / "out").mkdir()
    (folder / "out" / "config.json").write_text("mine")
    words = ["--format", "huggingface", "--model", f"{folder / 'models.py'}:gpt"]
    assert "has config.json already" in export(folder, str(folder / "out"), *words, code=2).output
    assert [entry.name for entry in (folder / "out").iterdir()] == ["config.json"]
    assert (folder / "out" / "config.json").read_text() == "mine"
    export(folder, str(folder / "out"), *words, "--force")
    assert "GPT2" in (folder / "out" / "config.json").read_text()


def test_a_hugging_face_folder_has_its_weights_in_one_file(folder, monkeypatch):
    transformers = pytest.importorskip("transformers")
    plain = transformers.PreTrainedModel.save_pretrained

    def save(self, where, max_shard_size="1KB", **more):
        plain(self, where, max_shard_size=max_shard_size, **more)

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", save)
    stored(folder, "gpt")
    words = ["--format", "huggingface", "--model", f"{folder / 'models.py'}:gpt"]
    export(folder, str(folder / "out"), *words)
    assert [entry.name for entry in (folder / "out").glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["AutoModel", "Trainer", "pipeline", "logging", "GPT3"])
def test_a_config_that_names_no_model_is_refused(folder, name):
    pytest.importorskip("transformers")
    stored(folder, "gpt")
    config = {"model_type": "gpt2", "architectures": [name]}
    (folder / "config.json").write_text(json.dumps(config))
    words = ["--format", "huggingface", "--model", str(folder / "config.json")]
    said = export(folder, str(folder / "out"), *words, code=2).output
    assert "does not say which model of transformers" in said
    assert not (folder / "out").exists()


def test_a_language_model_as_onnx(folder):
    if Version(torch.__version__).release < (2, 10):
        pytest.skip("torch 2.9 does not export it, and elastix says so")
    pytest.importorskip("transformers")
    pytest.importorskip("onnx")
    module = stored(folder, "gpt")
    onnx(folder, "gpt", "--input-dtype", "int64")
    tokens = torch.randint(16, (5, 6))
    found = run_onnx(folder / "out" / "model.onnx", tokens.numpy())
    assert torch.allclose(found, module(tokens).logits, atol=1e-5)


def test_without_onnx_it_says_what_to_install(folder, monkeypatch):
    stored(folder, "build")
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    assert "pip install 'elastix[onnx]'" in onnx(folder, "build", code=2).output


def test_a_folder_of_hugging_face_has_no_place_for_what_is_no_tensor(tmp_path):
    with pytest.raises(StoreError, match=r"keeps '_extra_state', which is no tensor"):
        _put_huggingface(HasMore({"seen": 7}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_with_nan_is_the_same_one_and_one_of_another_type_is_not():
    one = torch.tensor([1.0, math.nan])
    assert _same(one, one.clone())
    assert not _same(one, one.double())
    assert not _same(torch.tensor([0.0]), torch.tensor([-0.0]))
