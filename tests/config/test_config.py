"""Configs: what cannot work cannot be built, and the message names key, value and remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import (
    OPTIMIZERS,
    SCHEDULERS,
    WSD,
    AdamW,
    Constant,
    Cosine,
    DataConfig,
    DataPhase,
    DataSource,
    DistributedConfig,
    EvalConfig,
    EvalSource,
    FreezeStage,
    JobConfig,
    Lion,
    ModelConfig,
    MoEConfig,
    Muon,
    NoSchedule,
    ScheduleFree,
    TrainConfig,
    config_from_dict,
    config_to_toml,
    diff_configs,
    load_config,
    save_config,
)  # fmt: skip
from forge.errors import ConfigError

ROOT = Path(__file__).parents[2]
A, SET = DataSource("a", "x"), EvalSource("a", "x")
PRESETS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ModelConfig(dim=100, n_heads=3), "model.dim = 100 is not divisible by 3 heads"),
        (lambda: ModelConfig(n_heads=12, n_kv_heads=5), "n_heads = 12 is not divisible by model.n_kv_heads = 5"),
        (lambda: ModelConfig(dim=15, n_heads=5), "head_dim = 3 is odd"),
        (lambda: ModelConfig(dim=0), "model.dim must be an integer >= 1, got 0"),
        (lambda: ModelConfig(dim="4"), "model.dim must be an integer >= 1, got '4'"),
        (lambda: ModelConfig(norm="batchnorm"), "model.norm must be one of rmsnorm, layernorm, got 'batchnorm'"),
        (lambda: MoEConfig(n_experts=2, top_k=3), "top_k = 3 exceeds model.moe.n_experts = 2"),
        (
            lambda: ModelConfig(n_layers=2, moe=MoEConfig(n_experts=2, frequency=3)),
            "frequency = 3 exceeds model.n_layers = 2",
        ),
        (lambda: JobConfig(train=TrainConfig(seq_len=4096)), "seq_len = 4096 exceeds model.max_seq_len = 2048"),
        (lambda: JobConfig(train=TrainConfig(micro_batch_size=5)), "= 32 is not divisible by train.micro_batch_size = 5"),
        (lambda: JobConfig(scheduler=Cosine(warmup_steps=1000)), "warmup_steps = 1000 must be less than train.steps = 1000"),
        (lambda: JobConfig(scheduler=WSD(warmup_steps=10, stable_steps=990)), "stable_steps = 990 after 10"),
        (lambda: JobConfig(optimizer=ScheduleFree()), "scheduler.name = cosine decays"),
        (lambda: JobConfig(optimizer=ScheduleFree(warmup_steps=1000), scheduler=NoSchedule()), "optimizer.warmup_steps"),
        (lambda: AdamW(name="muon"), "optimizer.name must be one of adamw, got 'muon'"),
        (lambda: AdamW(lr=float("nan")), "optimizer.lr must be a number >= 0, got nan"),
        (lambda: DistributedConfig(dp_shard=0), "dp_shard must be -1"),
        (lambda: JobConfig().accumulation_steps(3), "micro_batch_size = 8 x 3 data-parallel ranks"),
        (lambda: TrainConfig(freeze=FreezeStage(patterns=("a",))), "train.freeze"),
        (lambda: DataSource("a/b", "x"), "data.sources.name must be letters, digits, _, - or ., got 'a/b'"),
        (lambda: DataConfig(sources=(A, A)), "data.sources: the name 'a' is given 2 times"),
        (lambda: DataConfig(sources=(evolve(A, weight=0.0),)), "data.sources: every weight is 0"),
        (lambda: DataConfig(sources=(A,), phases=(DataPhase(3, {"b": 1.0}),)), "from step 3 name 'b'; data.sources has a"),
        (lambda: DataConfig(phases=(DataPhase(3, {"web": 1.0}),)), "data.sources has none"),
        (lambda: DataConfig(sources=(A,), phases=(DataPhase(3, {"a": 0.0}),)), "from step 3 are all 0"),
        (lambda: DataConfig(phases=(DataPhase(3), DataPhase(3))), "start_step = 3 follows 3"),
        (lambda: DataConfig(phases=(DataPhase(9),), anneal_start_step=5), "start_step = 5 follows 9"),
        (lambda: DataConfig(anneal_lr_scale=0.5), "need data.anneal_start_step"),
        (lambda: DataPhase(3, {"a": -1.0}), "data.phases.weights.a must be a number >= 0, got -1.0"),
        (lambda: DataPhase(0), "data.phases.start_step must be an integer >= 1, got 0"),
        (lambda: EvalConfig(sets=(SET, SET)), "eval.sets: the name 'a' is given 2 times"),
        (lambda: JobConfig(data=DataConfig(sources=(A,)), eval=EvalConfig(sets=(SET,))), "eval.sets: 'a' is the name"),
        (lambda: JobConfig(model=ModelConfig(restart_positions=True), data=DataConfig(isolate_documents=False)), "needs data.isolate"),
        (lambda: JobConfig(train=TrainConfig(cuda_graphs=True)), "train.cuda_graphs = true replays what train.compile"),
        (lambda: TrainConfig(compile=1), "train.compile must be true or false, got 1"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_numbers(build, message):
    with pytest.raises(ConfigError) as error:
        build()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"dmi": 4}}, "unknown key model.dmi (did you mean 'dim'?)"),
        ({"modle": {}}, "unknown key modle (did you mean 'model'?)"),
        ({"model": {"moe": {"n_expert": 2}}}, "unknown key model.moe.n_expert (did you mean 'n_experts'?)"),
        ({"optimizer": {"name": "moun"}}, "must be one of adamw, muon, lion, schedule_free, sgd, got 'moun'"),
        ({"optimizer": {"name": "muon", "beta1": 0.9}}, "unknown key optimizer.beta1"),
        ({"scheduler": {"name": "wsd", "decay": "sine"}}, "scheduler.decay must be one of"),
        ({"train": {"steps": "ten"}}, "train.steps must be an integer, got 'ten'"),
        ({"train": {"steps": True}}, "train.steps must be an integer, got True"),
        ({"train": {"steps": 1.5}}, "train.steps must be an integer, got 1.5"),
        ({"train": {"freeze": [{"patterns": [3]}]}}, "train.freeze[0].patterns[0] must be a string, got 3"),
        ({"train": {"freeze": [{}]}}, "train.freeze[0]: the key 'patterns' is missing"),
        ({"train": {"precision": "fp64"}}, "train.precision must be one of auto, fp32, bf16, got 'fp64'"),
        ({"data": {"sources": [{"name": "a"}]}}, "data.sources[0]: the key 'path' is missing"),
        ({"data": {"sources": [{"name": "a", "path": "b", "weight": "c"}]}}, "data.sources[0].weight must be a number"),
        ({"data": {"phases": [{"start_step": 1, "weights": 3}]}}, "data.phases[0].weights must be a table"),
        ({"data": {"anneal_weights": {"a": "b"}}}, "data.anneal_weights.a must be a number, got 'b'"),
        ({"eval": {"sets": [{"name": "a", "path": "b", "split": "c"}]}}, "unknown key eval.sets[0].split"),
        ({"model": 3}, "model must be a table"),
        ({"optimizer": 3}, "optimizer must be a table, got 3"),
        ({"train": {"freeze": 3}}, "train.freeze must be a list"),
    ],
)
def test_a_mistake_in_toml_is_one_line_that_names_the_key(values, message):
    with pytest.raises(ConfigError) as error:
        config_from_dict(values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_integral_float_is_an_integer():
    assert config_from_dict({"train": {"steps": 1e4}}).train.steps == 10_000


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_load_and_survive_a_round_trip(path, tmp_path):
    config = load_config(path)
    save_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config


def test_a_preset_that_an_editor_began_with_a_byte_order_mark_loads(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf[train]\nsteps = 3\n")
    assert load_config(tmp_path / "x.toml").train.steps == 3


def test_the_presets_are_the_promised_ones():
    assert [path.stem for path in PRESETS] == ["gpt2_124m", "llama_1b", "llama_70b", "llama_8b", "moe_small", "tiny"]


@settings(deadline=None, max_examples=40)
@given(
    optimizer=st.sampled_from(list(OPTIMIZERS.values())),
    scheduler=st.sampled_from(list(SCHEDULERS.values())),
    clip=st.none() | st.floats(1e-3, 10),
    window=st.none() | st.integers(1, 100),
    seed=st.integers(0, 2**62),
    freeze=st.lists(st.builds(FreezeStage, st.tuples(st.text("ab*.", min_size=1)), st.booleans(), st.integers(0, 9))),
)
def test_any_config_survives_a_round_trip_through_toml(optimizer, scheduler, clip, window, seed, freeze):
    if optimizer is ScheduleFree and scheduler not in (Constant, NoSchedule):
        scheduler = NoSchedule
    config = JobConfig(
        optimizer=optimizer(),
        scheduler=scheduler(),
        model=ModelConfig(sliding_window=window),
        train=TrainConfig(grad_clip_norm=clip, seed=seed, freeze=tuple(freeze)),
    )
    import tomllib

    assert config_from_dict(tomllib.loads(config_to_toml(config))) == config


def test_each_optimizer_keeps_its_own_defaults():
    assert (Lion().beta1, Lion().beta2) == (0.9, 0.99)
    assert (AdamW().beta1, AdamW().beta2) == (0.9, 0.95)
    assert Muon().momentum == 0.95


def test_a_difference_is_listed_by_key():
    changed = attrs.evolve(JobConfig(), optimizer=Muon(), train=TrainConfig(seed=3))
    assert diff_configs(JobConfig(), changed)["train.seed"] == (0, 3)
    assert diff_configs(JobConfig(), JobConfig()) == {}


def test_configs_are_frozen():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        JobConfig().train.steps = 3


def test_importing_the_config_and_the_command_line_brings_no_torch():
    code = "import sys, forge.config.flags, cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_mixing_and_evaluation_sets_survive_a_round_trip(tmp_path):
    data = DataConfig(
        sources=(A, DataSource("b", "y", 0.25)), temperature=2.0, phases=(DataPhase(5, {"b": 1.0}, 0.5), DataPhase(7)),
        anneal_start_step=9, anneal_weights={"a": 1.0, "b": 3.0}, anneal_lr_scale=0.1,
    )  # fmt: skip
    config = JobConfig(data=data, eval=EvalConfig(sets=(EvalSource("far", "z"),)))
    save_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config
    assert [phase.start_step for phase in data.all_phases] == [5, 7, 9]
    assert data.weights_by_step() == ((0, (1.0, 0.25)), (5, (0.0, 1.0)), (9, (1.0, 3.0)))
