"""A model of `transformers`, read by forge, has the same logits; what is missing or damaged is one line."""

from __future__ import annotations

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge.checkpoint import has_parameters_only, parameters, read_manifest, verify_checkpoint
from forge.checkpoint.huggingface import import_folder, read
from forge.config import load_config
from forge.errors import CheckpointError, ConfigError
from tests.checkpoint.huggingface.peers import PEERS, peer_logits, run_logits, saved_peer

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", PEERS)
def test_logits_are_those_of_transformers(name, tmp_path):
    theirs = peer_logits(saved_peer(name, tmp_path / "hf"))
    family, _ = import_folder(tmp_path / "hf", tmp_path / "run")
    assert family == name.split()[0]
    assert float(theirs.std()) > 0.1
    torch.testing.assert_close(run_logits(tmp_path / "run"), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2"])
def test_a_model_in_many_files_is_read_and_written_in_many(name, tmp_path, monkeypatch):
    monkeypatch.setattr(read, "FILE_BYTES", 5000)
    theirs = peer_logits(saved_peer(name, tmp_path / "hf", max_shard_size="4KB"))
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 3
    import_folder(tmp_path / "hf", tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step_00000000"
    files = sorted(file.name for file in checkpoint.glob("params.*.safetensors"))
    assert len(files) > 3 and set(files) < verify_checkpoint(checkpoint)["files"].keys()
    torch.testing.assert_close(run_logits(tmp_path / "run"), theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Tests do not write to it."""
    folder = tmp_path_factory.mktemp("llama") / "hf"
    saved_peer("llama 3", folder)
    return folder


def test_the_run_folder_is_complete_and_says_where_it_is_from(llama, tmp_path):
    _, config = import_folder(llama, tmp_path / "run")
    assert load_config(tmp_path / "run/config.toml") == config
    assert config.run_dir == str(tmp_path / "run") and config.train.seq_len == config.model.max_seq_len == 32
    assert config.data.tokenizer == str(tmp_path / "run/tokenizer/tokenizer.json")
    assert sorted(file.name for file in (tmp_path / "run/tokenizer").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    checkpoint = tmp_path / "run/checkpoints/step_00000000"
    manifest = read_manifest(checkpoint)
    assert has_parameters_only(manifest) and manifest["notes"]["imported"] == str(llama)
    assert load_config(checkpoint / "config.toml") == config


@pytest.mark.parametrize(
    ("stored", "asked", "kept"),
    [("bfloat16", "keep", "bf16"), ("float16", "keep", "fp32"), ("float32", "keep", "fp32"), ("float32", "bf16", "bf16"),
     ("bfloat16", "fp32", "fp32")],
)  # fmt: skip
def test_the_dtype_is_kept_or_the_one_that_is_asked_for(llama, tmp_path, stored, asked, kept):
    shutil.copytree(llama, tmp_path / "hf")
    tensors = {
        name: tensor.to(getattr(torch, stored)) for name, tensor in load_file(llama / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    _, config = import_folder(tmp_path / "hf", tmp_path / "run", dtype=asked)
    assert config.train.param_dtype == kept
    params = load_file(tmp_path / "run/checkpoints/step_00000000/params.00000.safetensors")
    wanted = tensors["model.embed_tokens.weight"].to({"fp32": torch.float32, "bf16": torch.bfloat16}[kept])
    assert params["embed.weight"].dtype == wanted.dtype and torch.equal(params["embed.weight"], wanted)


def test_gpt2s_own_file_without_a_prefix_and_with_constants_is_read(tmp_path):
    theirs = peer_logits(saved_peer("gpt2", tmp_path / "hf"))
    file = tmp_path / "hf/model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
    save_file(tensors, file, metadata={"format": "pt"})
    import_folder(tmp_path / "hf", tmp_path / "run")
    torch.testing.assert_close(run_logits(tmp_path / "run"), theirs, rtol=1e-4, atol=1e-4)


def _edit(folder, **changes):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def _tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def _index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


MISTAKES = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights here: neither model.safetensors nor"),
    "a pickle": (_pickle, "pytorch_model.bin is a pickle, which can run code"),
    "cut": (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-7]), "not a readable safetensors file"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "not a readable safetensors file"),
    "an index of nothing": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "index.json: damaged"),
    "an index of another folder": (lambda f: _index(f, {"x": "../../secret"}), "is no file of its folder"),
    "a file of the index": (lambda f: _index(f, {"x": "model-1.safetensors"}), "model-1.safetensors: missing"),
    "a tensor": (lambda f: _tensors(f, lambda t: t.pop("model.norm.weight")), "model.norm.weight is missing"),
    "one too many": (lambda f: _tensors(f, lambda t: t.update(x=torch.ones(1))), "model.x is not in forge's model|x is not in forge's model"),
    "another shape": (lambda f: _edit(f, intermediate_size=25), r"is \(24, 16\), config.json says \(25, 16\)"),
    "integers": (
        lambda f: _tensors(f, lambda t: t.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)})),
        "model.norm.weight is of dtype I8, which forge does not train",
    ),
    "a head that is not tied": (
        lambda f: _tensors(f, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
        "lm_head.weight is no copy of the embedding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_missing_or_damaged_is_one_line_and_makes_no_run(llama, tmp_path, mistake):
    damage, message = MISTAKES[mistake]
    shutil.copytree(llama, tmp_path / "hf")
    damage(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=message) as error:
        import_folder(tmp_path / "hf", tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_copy_of_the_embedding_beside_it_is_no_mistake(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "hf")
    _tensors(tmp_path / "hf", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    import_folder(tmp_path / "hf", tmp_path / "run")


def test_what_forge_cannot_express_names_file_and_key(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "hf")
    _edit(tmp_path / "hf", attention_bias=True)
    with pytest.raises(ConfigError, match=r"hf/config.json: attention_bias = true, mlp_bias = false"):
        import_folder(tmp_path / "hf", tmp_path / "run")


def test_a_folder_that_holds_a_run_is_left_alone(llama, tmp_path):
    import_folder(llama, tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds a run already"):
        import_folder(llama, tmp_path / "run")


def test_a_full_disk_leaves_no_checkpoint(llama, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parameters, "write_tensors", full)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left"):
        import_folder(llama, tmp_path / "run")
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
