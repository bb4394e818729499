"""A checkpoint of any layout loads into any other, and training goes on as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import forge.checkpoint.save
from forge.checkpoint import (
    AsyncSaver,
    consolidate,
    latest_sound,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from forge.checkpoint.save import describe_file, write_manifest
from forge.config import DistributedConfig, Muon, NoSchedule, ScheduleFree
from forge.distributed.shards import local_slices
from forge.errors import CheckpointError
from forge.pytree import tree_equal, tree_map
from forge.training.parts import adopt, build_parts, initial_state, step_for, template_state
from forge.training.runtime import open_runtime
from forge.training.state import TrainState, init_state
from tests.distributed.ranks import run_ranks
from tests.distributed.training import AVERAGED, JOB, MODEL, MOE, global_batch, local_batch, whole

SMALL, HALF = evolve(MODEL, n_layers=2, vocab_size=37), 3  # 37 rows are not cut evenly
JOBS = {
    "adamw": evolve(JOB, model=SMALL),
    "muon, tied": evolve(JOB, model=evolve(MODEL, n_layers=2, tied_embeddings=True), optimizer=Muon(adam_lr=1e-2)),
    "schedule_free": evolve(JOB, model=SMALL, optimizer=ScheduleFree(lr=1e-2), scheduler=NoSchedule()),
    "averaged": evolve(AVERAGED, model=SMALL),
    "router biases": evolve(JOB, model=evolve(MOE, n_layers=2)),
}
FSDP, HSDP = {}, {"dp_replicate": 2}
MIXED = {  # on four ranks, dp_shard being what is left
    "hsdp 2x2": ("averaged", HSDP),
    "tp2 x fsdp2": ("muon, tied", {"tp": 2}),
    "pp2 x fsdp2": ("muon, tied", {"pp": 2}),
    "ep2 x fsdp2": ("router biases", {"ep": 2}),
}


def _go_on(job, parts, state, until):
    """Train from the state's step to `until`."""
    runtime, step_at, losses = parts.runtime, step_for(job, parts), []
    for n in range(int(state.step), until):
        step, state = step_at(n, state)
        batch = local_batch(global_batch(n), runtime.data_rank, runtime.data_ranks, job.train.micro_batch_size)
        state, result = step(state, batch)
        losses.append(float(result.loss))
    return state, losses


def _uninterrupted(job, layout, root):
    """Six steps, saved after three in the foreground and the background."""
    job = evolve(job, distributed=DistributedConfig(**layout))
    with open_runtime(job) as runtime:
        parts = build_parts(job, runtime)
        state, losses = _go_on(job, parts, initial_state(job, parts), HALF)
        save_checkpoint(root / "foreground", state, config=job, notes={"from": dist.get_world_size()})
        saver = AsyncSaver()
        saver.save(root / "background", state, config=job, notes={"from": dist.get_world_size()})
        state, more = _go_on(job, parts, state, job.train.steps)
        saver.close()
        return losses + more, {name: whole(p) for name, p in state.params.items()}


def _resumed(job, layout, path, again=None):
    """From the checkpoint to the last step; saved again, before training, where asked."""
    job = evolve(job, distributed=DistributedConfig(**layout))
    with open_runtime(job) as runtime:
        parts = build_parts(job, runtime)
        template = template_state(job, parts, HALF)
        assert all(leaf.device.type == "meta" for leaf in template.params.values())
        state = adopt(parts, load_checkpoint(path, template))
        if again is not None:
            save_checkpoint(again, state, config=job)
        state, losses = _go_on(job, parts, state, job.train.steps)
        return losses, {name: whole(p) for name, p in state.params.items()}


def _four_ranks(root):
    results = {}
    for name, job in JOBS.items():
        results[name, "fsdp4"] = _uninterrupted(job, FSDP, root / name)
        path = root / name / "foreground" / "step_00000003"
        results[name, "fsdp4 again"] = _resumed(job, FSDP, path)
    for label, (name, layout) in MIXED.items():
        path = root / name / "foreground" / "step_00000003"
        results[name, label] = _resumed(JOBS[name], layout, path, root / name / label)
    return results, _placed(root / "placed"), _failing(root / "failing"), _agreed(root / "agreed")


def _two_ranks(root):
    results = {}
    for name, job in JOBS.items():
        path = root / name / "foreground" / "step_00000003"
        results[name, "fsdp2"] = _resumed(job, FSDP, path, root / name / "fsdp2")
    path = root / "router biases" / "alone" / "step_00000003"
    results["router biases", "1 -> fsdp2"] = _resumed(JOBS["router biases"], FSDP, path)
    return results


# Placements over a (2, 2) mesh of a (7, 6) leaf, as FSDP, HSDP, TP, FSDP over TP and EP make them.
PLACEMENTS = {
    "fsdp": (Shard(0), Replicate()),
    "tp columns": (Replicate(), Shard(1)),
    "fsdp x tp columns": (Shard(0), Shard(1)),
    "fsdp x tp rows": (_StridedShard(0, split_factor=2), Shard(0)),
    "replicated": (Replicate(), Replicate()),
    "ep then fsdp": (Shard(0), Shard(0)),
}
SHAPE = (8, 6)


def _whole_leaf(name, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPE, generator=generator).to(dtype)


def _placed_state(mesh, turn, meta=False):
    """Leaves of many layouts, and as pipeline stages do, names that only some ranks have; `tied` is on all stages."""
    rank = dist.get_rank()
    names, shifted = list(PLACEMENTS), list(PLACEMENTS.values())[turn:] + list(PLACEMENTS.values())[:turn]
    params = {}
    for name, placements in zip(names, shifted, strict=True):
        leaf = distribute_tensor(
            _whole_leaf(name, torch.bfloat16 if name == "fsdp" else torch.float32), mesh, placements
        )
        part = leaf.to_local()
        assert torch.equal(part, _whole_leaf(name, part.dtype)[local_slices(leaf)]), placements
        if meta:
            leaf = DTensor.from_local(
                part.to("meta"), mesh, placements, run_check=False, shape=SHAPE, stride=leaf.stride()
            )
        params[name] = leaf
    stage = (rank // 2 + turn) % 2
    params |= {f"stage{stage}.weight": _whole_leaf(f"stage{stage}"), "tied": _whole_leaf("tied")}
    state = evolve(init_state(params, {"count": {"tied": torch.tensor(5.0)}}), step=torch.tensor(1))
    return tree_map(lambda leaf: leaf if isinstance(leaf, DTensor) else leaf.to("meta"), state) if meta else state


def _placed(root):
    """Save mixed layouts, load each leaf in another one; returns whether all values came back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    path = save_checkpoint(root, _placed_state(mesh, 0), config=JOB)
    right = []
    for turn in range(len(PLACEMENTS)):
        back = load_checkpoint(path, _placed_state(mesh, turn, meta=True))
        expected = _placed_state(mesh, turn)
        local = [
            tree_map(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, s) for s in (back, expected)
        ]
        right.append(tree_equal(*local) and all(a.placements == b.placements for a, b in _dtensors(back, expected)))
    return all(right)


def _dtensors(left, right):
    return [(left.params[name], right.params[name]) for name in PLACEMENTS]


def _failing(root):
    """Rank 1's disk is full: what each rank raises, in the foreground and in the background; and what is left."""
    mesh = init_device_mesh("cpu", (4,))
    leaf = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    state = init_state({"w": leaf}, {})
    save_checkpoint(root, evolve(state, step=torch.tensor(1)), config=JOB)
    original = forge.checkpoint.save.save_file

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    messages, saver = [], AsyncSaver()
    if dist.get_rank() == 1:
        forge.checkpoint.save.save_file = full
    for save in (save_checkpoint, saver.save):
        try:
            save(root, evolve(state, step=torch.tensor(2)), config=JOB)
            saver.wait()
        except CheckpointError as error:
            messages.append(str(error))
    forge.checkpoint.save.save_file = original
    dist.barrier()
    left = sorted(path.name for path in root.iterdir())
    saver.save(root, evolve(state, step=torch.tensor(3)), config=JOB)
    saver.close()
    return messages, left, sorted(path.name for path in list_checkpoints(root))


def _agreed(root):
    """A file damaged on disk, and a leaf that only rank 3 asks for: the same verdict everywhere."""
    mesh = init_device_mesh("cpu", (4,))
    state = init_state({"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}, {})
    first, second = (save_checkpoint(root, evolve(state, step=torch.tensor(n)), config=JOB) for n in (1, 2))
    if dist.get_rank() == 0:
        (second / "params.00002.safetensors").write_bytes(b"")
    dist.barrier()
    asked = evolve(state, params=state.params | ({"extra": torch.zeros(2)} if dist.get_rank() == 3 else {}))
    messages = []
    for attempt in (lambda: verify_checkpoint(second), lambda: load_checkpoint(first, asked)):
        try:
            attempt()
        except CheckpointError as error:
            messages.append(str(error))
    return latest_sound(root) == first, messages


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def four(root):
    return run_ranks(_four_ranks, 4, root)


@pytest.fixture(scope="module")
def curves(four, root):
    """Losses and final parameters by (job, layout); all ranks saw the same."""
    foreground = {name: root / name / "foreground" / "step_00000003" for name in JOBS}
    alone = {(name, "1"): _resumed(job, FSDP, foreground[name], root / name / "alone") for name, job in JOBS.items()}
    two = run_ranks(_two_ranks, 2, root)
    for results, ranks in ((four[0][0], [r[0] for r in four]), (two[0], two)):
        assert all(rank[case][0] == results[case][0] for rank in ranks for case in results)
    return four[0][0] | two[0] | alone


def _expected(curves, name):
    losses, params = curves[name, "fsdp4"]
    return losses[HALF:], params


@pytest.mark.parametrize("name", JOBS)
def test_resuming_in_the_same_layout_repeats_the_curve_bit_for_bit(name, curves):
    losses, params = curves[name, "fsdp4 again"]
    assert losses == _expected(curves, name)[0]
    assert tree_equal(params, _expected(curves, name)[1])


@pytest.mark.parametrize(("name", "layout"), [*product(JOBS, ["1", "fsdp2"]), *((n, label) for label, (n, _) in MIXED.items()), ("router biases", "1 -> fsdp2")])  # fmt: skip
def test_resuming_in_another_layout_goes_on_with_the_curve(name, layout, curves):
    losses, params = curves[name, layout]
    expected, weights = _expected(curves, name)
    assert losses == pytest.approx(expected, rel=1e-5)
    for key in params:  # of a pipeline, those of one stage
        torch.testing.assert_close(params[key], weights[key], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("name", JOBS)
def test_every_layout_writes_the_same_state(name, curves, root):
    mixed = [label for label, (job, _) in MIXED.items() if job == name]
    paths = [root / name / kind / "step_00000003" for kind in ("foreground", "background", "alone", "fsdp2", *mixed)]
    merged = [consolidate(path, root / name / f"merged {i}" / path.name) for i, path in enumerate(paths)]
    first = [load_file(merged[0] / file) for file in ("params.safetensors", "state.safetensors")]
    for path in merged[1:]:
        for expected, file in zip(first, ("params.safetensors", "state.safetensors"), strict=True):
            assert tree_equal(load_file(path / file), expected)
    assert verify_checkpoint(merged[1])["notes"] == {"from": 4}


def test_training_in_place_after_the_call_does_not_change_what_the_background_writes(curves, root):
    foreground, background = (root / "adamw" / kind / "step_00000003" for kind in ("foreground", "background"))
    names = sorted(path.name for path in foreground.glob("*.safetensors"))
    assert names == [f"{kind}.0000{rank}.safetensors" for kind in ("params", "state") for rank in range(4)]
    for name in names:
        assert tree_equal(load_file(foreground / name), load_file(background / name))


def test_copies_are_written_once(curves, root):
    def size(kind):
        files = (root / "muon, tied" / kind / "step_00000003").glob("*.safetensors")
        tensors = [tensor for file in files for tensor in load_file(file).values()]
        return sum(tensor.nbytes for tensor in tensors)

    assert size("foreground") == size("fsdp2") == size("tp2 x fsdp2") == size("pp2 x fsdp2")
    with safe_open(root / "placed" / "step_00000001" / "params.00002.safetensors", framework="pt") as file:
        assert "stage1.weight" in file.keys() and "tied" not in file.keys()  # noqa: SIM118


def test_leaves_of_any_placement_load_into_any_other(four):
    assert all(placed for _, placed, _, _ in four)


def test_a_failure_on_one_rank_fails_the_save_on_all_and_keeps_the_old(four):
    for _, _, (messages, left, after), _ in four:
        assert len(messages) == 2 and left == ["step_00000001"]
        assert all("rank 1: " in m and "cannot be written" in m and "No space left" in m for m in messages)
        assert after == ["step_00000001", "step_00000003"]


def test_all_ranks_come_to_one_verdict(four):
    for _, _, _, (fell_back, (damage, asked)) in four:
        assert fell_back
        assert "params.00002.safetensors: damaged" in damage
        assert "params/extra is missing" in asked


@pytest.fixture
def sharded(four, root, tmp_path):
    """A copy to damage, and a template for one process."""
    path = Path(shutil.copytree(root / "adamw" / "foreground" / "step_00000003", tmp_path / "step_00000003"))
    with open_runtime(JOBS["adamw"]) as runtime:
        return path, template_state(JOBS["adamw"], build_parts(JOBS["adamw"], runtime), HALF)


FILES = ["config.toml", "layout.json", "manifest.json"] + [f"{k}.0000{r}.safetensors" for k in ("params", "state") for r in range(4)]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_any_damage_of_a_sharded_checkpoint_is_found_and_the_file_named(name, damage, sharded):
    path, _ = sharded
    verify_checkpoint(path)
    content = (path / name).read_bytes()
    middle = len(content) // 2
    if damage == "remove":
        (path / name).unlink()
    elif damage == "flip":  # of a manifest, a digit of a hash or the name of a file
        (path / name).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        (path / name).write_bytes(content[:middle] if damage == "truncate" else b"")
    with pytest.raises(CheckpointError, match="damaged|missing" if name == "manifest.json" else name):
        verify_checkpoint(path)


LEAF = "params/blocks.0.attn.wq.weight"


def _edit(path, change):
    layout = json.loads((path / "layout.json").read_text())
    change(layout)
    (path / "layout.json").write_text(json.dumps(layout))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["layout.json"] = describe_file(path / "layout.json")
    write_manifest(path, manifest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[LEAF]["chunks"].pop(1), f"{LEAF}: .*leave a gap"),
        (lambda x: x[LEAF]["chunks"].append(x[LEAF]["chunks"][1]), f"{LEAF}: .*overlap"),
        (lambda x: x[LEAF]["chunks"][1][1].__setitem__(0, 0), f"{LEAF}: "),
        (lambda x: x[LEAF]["chunks"][1].__setitem__(0, "../other.safetensors"), "none of its files"),
        (lambda x: x[LEAF]["chunks"][1][2].__setitem__(0, -8), "layout.json: damaged"),
        (lambda x: x[LEAF].pop("shape"), "layout.json: damaged"),
        (lambda x: x.pop(LEAF), f"{LEAF} is missing"),
        (lambda x: x[LEAF].update(dtype="bfloat16"), f"{LEAF} is .* bfloat16, expected .* float32"),
    ],
)
def test_a_layout_that_does_not_cover_every_part_exactly_once_is_refused_with_the_leaf(change, message, sharded):
    path, template = sharded
    _edit(path, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, template)


def test_a_layout_that_was_changed_is_not_read(sharded):
    path, template = sharded
    text = (path / "layout.json").read_text()
    (path / "layout.json").write_text(
        text.replace("params.00001", "params.00009")
        .replace("params.00002", "params.00001")
        .replace("params.00009", "params.00002")
    )
    with pytest.raises(CheckpointError, match=r"layout\.json: damaged"):
        load_checkpoint(path, template)


def test_a_chunk_of_another_shape_or_a_missing_one_is_refused_with_the_leaf(sharded):
    from safetensors.torch import save_file

    path, template = sharded
    file = path / "params.00001.safetensors"
    tensors = load_file(file)
    key = LEAF.removeprefix("params/")
    save_file({**tensors, key: tensors[key][:1].clone()}, file)
    with pytest.raises(CheckpointError, match=LEAF):
        load_checkpoint(path, template)
    save_file({name: tensor for name, tensor in tensors.items() if name != key}, file)
    with pytest.raises(CheckpointError, match=key):
        load_checkpoint(path, template)


def test_a_consolidated_checkpoint_is_two_files_that_load_alone(sharded, tmp_path):
    path, template = sharded
    out = consolidate(path, tmp_path / "out" / path.name)
    assert sorted(p.name for p in out.iterdir()) == [
        "config.toml",
        "manifest.json",
        "params.safetensors",
        "state.safetensors",
    ]
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    assert isinstance(template, TrainState)
    assert tree_equal(load_checkpoint(out, template), load_checkpoint(path, template))
    assert verify_checkpoint(out)["step"] == HALF
    with pytest.raises(CheckpointError, match="exists already"):
        consolidate(path, out)
