"""A run whose newest checkpoint is damaged, in any file and any way, goes on from the one before, and says which file."""

from __future__ import annotations

import json
import random
import shutil

import pytest

import forge.training.entry as entry
from forge.checkpoint import verify_checkpoint
from forge.pytree import tree_equal
from tests.cli_job import call, write_job

NEWEST, OLDER = "step_00000004", "step_00000002"


class _Begun(Exception):
    """Training would go on now, from this state and with these notes."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The preset of a run with checkpoints at steps 2 and 4, and what a resume from either begins with."""
    preset = write_job(tmp_path_factory.mktemp("damage"))
    assert call("--config", preset)[0] == 0
    root = preset.parent / "run" / "checkpoints"

    def begin(run, state, notes, interruption):
        raise _Begun(state, notes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "_train", begin)
        newest = _resume(preset)[0]
        (root / NEWEST).rename(root / "aside")
        older = _resume(preset)[0]
        (root / "aside").rename(root / NEWEST)
        yield preset, root, newest, older


def _resume(preset):
    """(state, notes) that training would begin with, and what was said; None where the run was refused."""
    try:
        status, _, err = call("--config", preset, "--train.steps", 6)
    except _Begun as begun:
        return begun.args, ""
    assert status == 2 and err.splitlines()[-1].startswith("error: ") and "Traceback" not in err
    return None, err


def _damaged(content, chance):
    """Every kind of damage: cut at several places, emptied, a bit flipped in head, middle and end, grown, overwritten."""
    size = len(content)
    for at in sorted({0, 1, 8, size // 3, size // 2, size - 1}):
        yield f"cut at {at}", content[:at]
    for at in sorted({0, 7, 9, size // 4, size // 2, size - 1, *chance.sample(range(size), 3)}):
        yield f"bit of {at}", content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]
    yield "grown", content + b"\0"
    yield "zeros", bytes(size)
    yield "noise", chance.randbytes(size)
    yield "removed", None


def _same(left, right):
    return left[1] == right[1] and tree_equal(left[0], right[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.toml", "manifest.json", "params.safetensors", "state.safetensors"])
def test_a_damaged_newest_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(trained, name):
    preset, root, newest, older = trained
    file = root / NEWEST / name
    content, found = file.read_bytes(), 0
    for what, bad in _damaged(content, random.Random(name)):
        file.unlink() if bad is None else file.write_bytes(bad)
        begun, said = _resume(preset)
        assert begun is not None, (what, said)
        if name == "manifest.json" and what.startswith("bit") and _same(begun, newest):
            verify_checkpoint(root / NEWEST)  # a space became another one: nothing else may pass
        else:
            assert _same(begun, older), what
            found += 1
        file.write_bytes(content)
    assert found >= 15


@pytest.mark.parametrize("change", [lambda x: x.update(step=3), lambda x: x["notes"]["loss_ema"].reverse()])
def test_a_manifest_that_says_something_else_of_the_run_is_damaged(trained, change):
    preset, root, _, older = trained
    file = root / NEWEST / "manifest.json"
    content = file.read_bytes()
    manifest = json.loads(content)
    change(manifest)
    file.write_text(json.dumps(manifest))
    begun, _ = _resume(preset)
    file.write_bytes(content)
    assert _same(begun, older)


@pytest.mark.slow
def test_where_every_checkpoint_is_damaged_the_run_is_refused_in_one_line_and_left_as_it_is(trained, tmp_path):
    preset, root, *_ = trained
    kept = shutil.copytree(root, tmp_path / "kept")
    for name in ("config.toml", "manifest.json", "params.safetensors", "state.safetensors"):
        for step in (NEWEST, OLDER):
            (root / step / name).write_bytes(b"")
        begun, said = _resume(preset)
        assert begun is None and "every checkpoint is damaged" in said
        assert f"{NEWEST}/{name}: damaged" in said and f"{OLDER}/{name}: damaged" in said
        shutil.rmtree(root)
        shutil.copytree(kept, root)
