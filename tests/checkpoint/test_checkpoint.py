"""A checkpoint is complete or not there, comes back bit for bit, and never runs code."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.checkpoint import (
    check_resumable,
    latest_sound,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    read_manifest,
    remove_leftovers,
    save_checkpoint,
    verify_checkpoint,
)
from forge.checkpoint.folder import checkpoint_path, checkpoint_step
from forge.config import (
    AdamW,
    CheckpointConfig,
    DataConfig,
    DataPhase,
    DataSource,
    JobConfig,
    Lion,
    ModelConfig,
    Muon,
    ScheduleFree,
    TrainConfig,
)
from forge.errors import CheckpointError
from forge.pytree import tree_equal, tree_map
from forge.training.parts import build_parts, initial_state, template_state
from forge.training.runtime import build_runtime

MODEL = ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=11, max_seq_len=8)
CONFIG = JobConfig(model=MODEL, train=TrainConfig(seq_len=8, global_batch_size=2, micro_batch_size=2))


def _state(config=CONFIG, step=12, seed=0):
    parts = build_parts(config, build_runtime(config))
    state = initial_state(config, parts)
    generator = torch.Generator().manual_seed(seed)

    def noise(leaf):
        return torch.randn(leaf.shape, generator=generator).to(leaf.dtype) if leaf.is_floating_point() else leaf

    return evolve(tree_map(noise, state), step=torch.tensor(step), tokens=torch.tensor(7 * step)), parts


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        evolve(CONFIG, optimizer=Muon()),
        evolve(CONFIG, optimizer=Lion()),
        evolve(CONFIG, train=evolve(CONFIG.train, param_dtype="bf16")),
        evolve(CONFIG, model=evolve(MODEL, tied_embeddings=True)),
    ],
    ids=["adamw", "muon", "lion", "bf16 with masters", "tied"],
)
def test_a_state_comes_back_bit_for_bit(config, tmp_path):
    state, parts = _state(config)
    path = save_checkpoint(tmp_path, state, config=config, notes={"loss_ema": [1.5, 0.2]})
    assert path.name == "step_00000012"
    back = load_checkpoint(path, template_state(config, parts, 12))
    assert tree_equal(back, state)
    assert read_manifest(path)["notes"] == {"loss_ema": [1.5, 0.2]}


def test_schedule_free_averages_come_back(tmp_path):
    from forge.config import NoSchedule

    config = evolve(CONFIG, optimizer=ScheduleFree(), scheduler=NoSchedule())
    state, parts = _state(config)
    back = load_checkpoint(save_checkpoint(tmp_path, state, config=config), template_state(config, parts, 12))
    assert tree_equal(parts.optimizer.eval_params(back.params, back.opt_state),
                      parts.optimizer.eval_params(state.params, state.opt_state))  # fmt: skip


def test_tied_embeddings_are_one_tensor_in_the_file(tmp_path):
    from safetensors import safe_open

    config = evolve(CONFIG, model=evolve(MODEL, tied_embeddings=True))
    path = save_checkpoint(tmp_path, _state(config)[0], config=config)
    with safe_open(path / "params.safetensors", framework="pt") as file:
        assert "embed.weight" in file.keys() and "head.weight" not in file.keys()  # noqa: SIM118


def test_keys_are_clean_names_with_compile_or_activation_checkpointing_on(tmp_path):
    wrapped = evolve(CONFIG, train=evolve(CONFIG.train, compile=True, activation_checkpointing="full"))
    state, _ = _state(wrapped)
    path = save_checkpoint(tmp_path, state, config=wrapped)
    _, plain = _state()
    assert tree_equal(load_checkpoint(path, template_state(CONFIG, plain, 12)), state)


def test_views_of_one_storage_are_stored_apart(tmp_path):
    state, parts = _state()
    stacked = tree_map(lambda leaf: torch.stack([leaf, leaf]), state)
    view = tree_map(lambda leaf: leaf[1], stacked)
    path = save_checkpoint(tmp_path, view, config=CONFIG)
    assert tree_equal(load_checkpoint(path, template_state(CONFIG, parts, 12)), state)
    assert (path / "params.safetensors").stat().st_size < 1.2 * sum(p.nbytes for p in state.params.values()) + 4096


def test_a_checkpoint_of_another_shape_is_refused_with_the_names_that_differ(tmp_path):
    path = save_checkpoint(tmp_path, _state()[0], config=CONFIG)
    wider = evolve(CONFIG, model=evolve(MODEL, vocab_size=12))
    with pytest.raises(
        CheckpointError, match=r"params/embed.weight is \(11, 16\) float32, expected \(12, 16\) float32"
    ):
        load_checkpoint(path, template_state(wider, build_parts(wider, build_runtime(wider)), 12))
    other = evolve(CONFIG, optimizer=Lion())
    with pytest.raises(CheckpointError, match=r"opt_state/momentum/.* is missing"):
        load_checkpoint(path, template_state(other, build_parts(other, build_runtime(other)), 12))


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_damage_is_found_and_the_file_named(data, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    path = save_checkpoint(root, _state()[0], config=CONFIG, notes={"loss_ema": [1.5, 0.2], "jumps": [[3, 4]]})
    manifest = read_manifest(path)
    name = data.draw(st.sampled_from(sorted(p.name for p in path.iterdir())))
    file, content = path / name, (path / name).read_bytes()
    damage = data.draw(st.sampled_from(["flip", "truncate", "empty", "remove", "append"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if damage == "remove":
        file.unlink()
    else:
        flipped = content[:at] + bytes([content[at] ^ (1 << data.draw(st.integers(0, 7)))]) + content[at + 1 :]
        file.write_bytes({"flip": flipped, "truncate": content[:at], "empty": b"", "append": content + b"x"}[damage])
    if name == "manifest.json" and damage in ("flip", "append"):
        with contextlib.suppress(CheckpointError):  # passed over, or a space became another one
            assert verify_checkpoint(path) == manifest
        return
    with pytest.raises(CheckpointError, match=name):
        verify_checkpoint(path)


def test_the_newest_sound_checkpoint_is_used_and_the_damaged_one_named(tmp_path, caplog):
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, _state(step=step)[0], config=CONFIG)
    (tmp_path / "step_00000030" / "state.safetensors").write_bytes(b"")
    logger = logging.getLogger("forge.checkpoint.load")
    logger.addHandler(caplog.handler)
    try:
        assert latest_sound(tmp_path) == tmp_path / "step_00000020"
    finally:
        logger.removeHandler(caplog.handler)
    assert "step_00000030/state.safetensors" in caplog.text


def test_a_half_written_checkpoint_is_ignored_and_later_removed(tmp_path):
    save_checkpoint(tmp_path, _state(step=10)[0], config=CONFIG)
    half = tmp_path / ".step_00000020.writing"
    half.mkdir()
    (half / "params.safetensors").write_bytes(b"half")
    assert latest_sound(tmp_path) == tmp_path / "step_00000010"
    remove_leftovers(tmp_path)
    assert not half.exists() and (tmp_path / "step_00000010").exists()


@pytest.mark.parametrize("broken", ["save_file", "describe_file", "sync_folder"])
def test_a_failed_write_leaves_nothing_and_keeps_the_old(tmp_path, monkeypatch, broken):
    import forge.checkpoint.save as save

    old = save_checkpoint(tmp_path, _state(step=10)[0], config=CONFIG)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, broken, full)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left"):
        save_checkpoint(tmp_path, _state(step=20)[0], config=CONFIG)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == [old.name]
    verify_checkpoint(old)


def test_saving_a_step_again_replaces_it(tmp_path):
    save_checkpoint(tmp_path, _state(seed=1)[0], config=CONFIG)
    state, parts = _state(seed=2)
    path = save_checkpoint(tmp_path, state, config=CONFIG)
    assert tree_equal(load_checkpoint(path, template_state(CONFIG, parts, 12)), state)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@settings(deadline=None)
@given(
    steps=st.sets(st.integers(1, 400), min_size=1, max_size=12),
    keep_last_n=st.integers(1, 5),
    keep_every=st.sampled_from([0, 50, 100]),
    powers_of_two=st.sampled_from([0, 1, 31, 512]),
)
def test_pruning_keeps_the_newest_and_the_milestones(steps, keep_last_n, keep_every, powers_of_two, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    for step in steps:
        checkpoint_path(root, step).mkdir()
    config = CheckpointConfig(keep_every=keep_every, powers_of_two=powers_of_two)
    prune_checkpoints(root, keep_last_n, config.is_milestone)
    kept = {checkpoint_step(path) for path in list_checkpoints(root)}
    newest = set(sorted(steps)[-keep_last_n:])
    early = {2**n for n in range(10) if 2**n <= powers_of_two}
    assert kept == newest | {step for step in steps if (keep_every and step % keep_every == 0) or step in early}


def test_pruning_takes_no_later_step_into_account_than_that_of_the_run(tmp_path):
    for step in (5, 10, 15, 20, 30):  # 20 and 30 were damaged, and the run went on from 10
        checkpoint_path(tmp_path, step).mkdir()
    prune_checkpoints(tmp_path, 2, up_to=15)
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [10, 15, 20, 30]


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, caplog):
    for step in (1, 2, 3):
        checkpoint_path(tmp_path, step).mkdir()
    real = Path.rename

    def refuse(self, target):
        if self.name == "step_00000001":
            raise PermissionError(13, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    logger = logging.getLogger("forge.checkpoint.folder")
    logger.addHandler(caplog.handler)
    try:
        assert prune_checkpoints(tmp_path, 1) == [tmp_path / "step_00000002"]
    finally:
        logger.removeHandler(caplog.handler)
    assert "step_00000001: the old checkpoint cannot be removed (Permission denied)" in caplog.text
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [1, 3]


def test_a_kill_while_a_step_is_saved_again_leaves_both_on_disk(tmp_path, monkeypatch):
    """The old one is removed only after the new one has its name."""
    import forge.checkpoint.folder as folder

    final, removed = save_checkpoint(tmp_path, _state(seed=1)[0], config=CONFIG), []
    monkeypatch.setattr(folder.shutil, "rmtree", lambda path, **_: removed.append((path.name, final.exists())))
    save_checkpoint(tmp_path, _state(seed=2)[0], config=CONFIG)
    assert removed[-1] == (".step_00000012.removed", True) and verify_checkpoint(final)


def test_a_pickle_offered_as_a_checkpoint_does_not_run(tmp_path):
    path = save_checkpoint(tmp_path / "root", _state()[0], config=CONFIG)
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    (path / "params.safetensors").write_bytes(pickle.dumps(Evil()))
    _, parts = _state()
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_checkpoint(path, template_state(CONFIG, parts, 12))
    assert not marker.exists()


def test_a_config_that_contradicts_the_checkpoint_is_refused_with_the_keys(tmp_path):
    asked = evolve(CONFIG, model=evolve(MODEL, dim=32), optimizer=AdamW(lr=1e-3))
    with pytest.raises(
        CheckpointError, match=r"model.dim = 16 there, 32 asked, optimizer.lr = 0.0003 there, 0.001 asked"
    ):
        check_resumable(CONFIG, asked, tmp_path)


def test_what_does_not_change_an_update_may_change_on_resume(tmp_path):
    train = evolve(CONFIG.train, steps=2000, micro_batch_size=1, compile=True)
    check_resumable(
        CONFIG, evolve(CONFIG, run_dir="elsewhere", train=train, eval=evolve(CONFIG.eval, interval=5)), tmp_path
    )


def test_data_phases_may_change_on_resume_only_where_they_have_not_begun(tmp_path):
    sources = (DataSource("a", "here"), DataSource("b", "here"))
    phases = (DataPhase(5, {"a": 1.0}), DataPhase(9, {"b": 1.0}))
    saved = evolve(CONFIG, data=DataConfig(sources=sources, phases=phases))
    moved = tuple(evolve(source, path="elsewhere") for source in sources)
    later = DataConfig(sources=moved, phases=phases[:1], anneal_start_step=9, anneal_lr_scale=0.1)
    check_resumable(saved, evolve(saved, data=later), tmp_path, step=9)
    check_resumable(saved, evolve(saved, data=DataConfig(sources=sources)), tmp_path, step=5)
    for step, asked in ((10, later), (6, DataConfig(sources=sources))):
        with pytest.raises(CheckpointError, match=r"data\.phases"):
            check_resumable(saved, evolve(saved, data=asked), tmp_path, step=step)
    with pytest.raises(CheckpointError, match=r"data\.sources"):
        heavier = (sources[0], evolve(sources[1], weight=2.0))
        check_resumable(saved, evolve(saved, data=DataConfig(sources=heavier, phases=phases)), tmp_path, step=0)


def test_a_folder_that_is_not_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 99, "step": 1, "files": {}, "notes": {}}))
    with pytest.raises(CheckpointError, match="format 99"):
        read_manifest(tmp_path)
