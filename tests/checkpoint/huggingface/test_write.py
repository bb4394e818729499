"""A model of forge, read by `transformers`, has the same logits and no key too many or too few."""

from __future__ import annotations

import json

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

from forge.checkpoint import save_checkpoint
from forge.checkpoint.huggingface import export_checkpoint, import_folder, parse_size
from forge.checkpoint.huggingface.write import split_by_size
from forge.config import AdamW, FreezeStage, JobConfig, NoSchedule, ScheduleFree, TrainConfig
from forge.errors import CheckpointError, ConfigError, DataError
from forge.pytree import tree_map
from forge.training.parts import build_parts, initial_state
from forge.training.reload import load_run
from forge.training.runtime import build_runtime
from tests.checkpoint.huggingface.peers import PEERS, peer_logits, run_logits, saved_peer
from tests.checkpoint.huggingface.shapes import NAMES, model

transformers = pytest.importorskip("transformers")

MODELS = {
    **{name: model(name) for name in NAMES},
    "tied": model("llama", tied_embeddings=True, rope_scaling_factor=8.0, rope_original_max_seq_len=16, rope_theta=5e5),
    "biases": model("llama", bias=True, mlp="geglu", norm_eps=1e-3),
    "a width that no head divides": model("llama", dim=18, head_dim=4),
    "windows of qwen": model("qwen2", sliding_window=5),
    "windows of experts": model("qwen2_moe", sliding_window=5),
    "windows of other experts": model("qwen3_moe", sliding_window=5),
    "tied gpt2": model("gpt2", tied_embeddings=True, mlp="relu2"),
    "mup": model("llama", mup_base_dim=8, tied_embeddings=True),
    "mup with wider heads": model("gpt2", mup_base_dim=4, head_dim=None),
    "mup with wider normed heads": model("qwen3", mup_base_dim=8, head_dim=None),
}


def _job(config, **train):
    return JobConfig(model=config, train=TrainConfig(seq_len=32, global_batch_size=2, micro_batch_size=2, **train))


def _checkpoint(job, run_dir):
    """A checkpoint whose every float is random, and its path."""
    parts = build_parts(job, build_runtime(job))
    generator = torch.Generator().manual_seed(0)

    def noise(leaf):
        return (0.3 * torch.randn(leaf.shape, generator=generator)).to(leaf.dtype) if leaf.is_floating_point() else leaf

    state = evolve(tree_map(noise, initial_state(job, parts)), step=torch.tensor(7))
    return save_checkpoint(run_dir / "checkpoints", state, config=job)


def _loaded(folder):
    found, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    return found.eval()


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_transformers_are_those_of_forge(name, tmp_path):
    path = _checkpoint(_job(MODELS[name]), tmp_path / "run")
    family = export_checkpoint(path, tmp_path / "hf", shard_bytes=10**9)
    found = _loaded(tmp_path / "hf")
    assert found.config.model_type == family
    ours = run_logits(tmp_path / "run")
    assert float(ours.std()) > 0.1
    torch.testing.assert_close(peer_logits(found), ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PEERS)
def test_in_and_out_again_changes_no_bit(name, tmp_path):
    saved_peer(name, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run")
    export_checkpoint(tmp_path / "run/checkpoints/step_00000000", tmp_path / "out", shard_bytes=10**9)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_a_large_model_goes_into_several_files_with_an_index(tmp_path):
    path = _checkpoint(_job(MODELS["mixtral"]), tmp_path / "run")
    export_checkpoint(path, tmp_path / "one", shard_bytes=10**9)
    export_checkpoint(path, tmp_path / "many", shard_bytes=8000)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    held = {file.name: load_file(file) for file in files}
    whole = load_file(tmp_path / "one/model.safetensors")
    assert index["weight_map"] == {name: file for file, tensors in held.items() for name in tensors}
    assert index["weight_map"].keys() == whole.keys()
    assert all(torch.equal(held[index["weight_map"][name]][name], whole[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert all(sum(tensor.nbytes for tensor in tensors.values()) <= 8000 for tensors in held.values())
    torch.testing.assert_close(
        peer_logits(_loaded(tmp_path / "many")), run_logits(tmp_path / "run"), rtol=1e-4, atol=1e-4
    )


def test_config_names_the_end_of_a_document_and_the_tokenizer_loads(tmp_path):
    path = _checkpoint(_job(model("llama", vocab_size=257)), tmp_path / "run")
    export_checkpoint(path, tmp_path / "hf", shard_bytes=10**9)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / "hf" / name).read_text())
        assert (values["bos_token_id"], values["eos_token_id"]) == (None, 256)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "def f(x):\n\treturn 'é😀'  # ok"
    assert tokenizer(text).input_ids == list(text.encode()) and tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == 256
    prompt = torch.tensor([list(b"def ")])
    generated = _loaded(tmp_path / "hf").generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=256)
    assert generated.shape[1] > 4


def test_what_schedule_free_exports_is_the_average(tmp_path):
    frozen = (FreezeStage(("blocks.0.*",)),)
    job = evolve(_job(MODELS["llama"], freeze=frozen), optimizer=ScheduleFree(), scheduler=NoSchedule())
    path = _checkpoint(job, tmp_path / "run")
    export_checkpoint(path, tmp_path / "hf", shard_bytes=4000)
    average = load_run(tmp_path / "run", device="cpu").params()
    import_folder(tmp_path / "hf", tmp_path / "back")
    back = load_run(tmp_path / "back", device="cpu").params()
    assert all(torch.equal(back[name], average[name]) for name in average)
    assert not torch.equal(average["head.weight"], load_run(tmp_path / "run", device="cpu").state.params["head.weight"])


def test_what_a_run_with_an_average_exports_is_the_average(tmp_path):
    path = _checkpoint(_job(MODELS["llama"], ema_decay=0.9), tmp_path / "run")
    export_checkpoint(path, tmp_path / "hf", shard_bytes=4000)
    trained = load_run(tmp_path / "run", device="cpu")
    import_folder(tmp_path / "hf", tmp_path / "back")
    back, average = load_run(tmp_path / "back", device="cpu").params(), trained.params()
    assert all(torch.equal(back[name], average[name]) for name in average)
    assert not torch.equal(average["head.weight"], trained.state.params["head.weight"])


@pytest.mark.parametrize(
    ("param_dtype", "asked", "written"),
    [("bf16", "keep", "bfloat16"), ("bf16", "fp32", "float32"), ("fp32", "bf16", "bfloat16")],
)
def test_the_dtype_is_kept_or_the_one_that_is_asked_for(tmp_path, param_dtype, asked, written):
    path = _checkpoint(_job(MODELS["llama"], param_dtype=param_dtype), tmp_path / "run")
    export_checkpoint(path, tmp_path / "hf", shard_bytes=10**9, dtype=asked)
    assert {tensor.dtype for tensor in load_file(tmp_path / "hf/model.safetensors").values()} == {
        getattr(torch, written)
    }
    assert transformers.AutoConfig.from_pretrained(tmp_path / "hf").dtype == getattr(torch, written)


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_the_older_keys_of_the_rotary_embedding_are_there_too(tmp_path, name):
    export_checkpoint(_checkpoint(_job(MODELS[name]), tmp_path / "run"), tmp_path / "hf", shard_bytes=10**9)
    values = json.loads((tmp_path / "hf/config.json").read_text())
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == MODELS[name].rope_theta
    assert ("rope_scaling" in values) == (name == "tied")


def test_mistakes_are_one_line_and_leave_no_folder(tmp_path):
    path = _checkpoint(_job(model("llama", logit_softcap=9.0)), tmp_path / "capped")
    with pytest.raises(ConfigError, match=r"model.logit_softcap = none, not 9.0"):
        export_checkpoint(path, tmp_path / "hf", shard_bytes=1)
    job = _job(MODELS["llama"])
    path = _checkpoint(evolve(job, data=evolve(job.data, tokenizer="/no/tokenizer.json")), tmp_path / "without")
    with pytest.raises(DataError, match=r"/no/tokenizer\.json: no such file"):
        export_checkpoint(path, tmp_path / "hf", shard_bytes=1)
    path = _checkpoint(evolve(job, optimizer=AdamW()), tmp_path / "run")
    (path / "params.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"params\.safetensors: damaged"):
        export_checkpoint(path, tmp_path / "hf", shard_bytes=1)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["capped", "run", "without"]
    with pytest.raises(CheckpointError, match="exists already"):
        export_checkpoint(path, tmp_path / "run", shard_bytes=1)


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("512MiB", 2**29), ("1.5 kb", 1500), ("77", 77)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", "0", "nan", "1e3GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="shard_size must be a size such as 5GB"):
        parse_size(text)


def test_groups_stay_together_and_in_order():
    groups = [(["a"], 3), (["b", "c"], 3), (["d"], 9), (["e"], 1)]
    assert split_by_size(groups, 6) == [[["a"], ["b", "c"]], [["d"]], [["e"]]]
