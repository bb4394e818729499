from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks/ is no installed package

from benchmarks import data, floors, gpu, kernels, layouts, presets, scaling, sides, step
from benchmarks.__main__ import main, run
from benchmarks.layout_runs import Measured, Turns
from benchmarks.memory import peak_memory
from benchmarks.peers import Runner, build_transformers, initial_weights, transformers_runner
from benchmarks.profiling import profile_step
from benchmarks.regimes import Regime, job_config, regimes_for
from benchmarks.report import Result, to_markdown, verdicts, write_report
from benchmarks.step import Timings, alternate, check_agreement
from benchmarks.trainer import trainer_runner
from forge.config import load_config
from forge.errors import ConfigError, RunError
from forge.metrics.flops import matmul_weights_per_token

MINUSCULE = Regime("minuscule", 61, 32, 2, 2, 8, 2, 2, 2, speed_target=1.0, memory_target=1.0, gemm_target=0.5)
HOST = {"kind": "cpu-0-cores", "device": "none"}


def _result() -> Result:
    """forge 2x as fast as its peer at the median, in half the memory."""
    seconds = {"transformers": (3.0, 2.0, 4.0), "hand-written": (1.0, 2.0, 1.25), "forge": (1.0, 2.0, 1.5)}
    timings = Timings(seconds, (1e9, 1e9, 1e9), dict.fromkeys(seconds, 4.2))
    sizes = {"transformers": 4 * 2**20, "hand-written": 2**20, "forge": 2 * 2**20}
    return Result(MINUSCULE, timings, sizes)


def _rows(markdown: str, first_heading: str) -> list[list[str]]:
    """Cells of the table whose first two headings begin so."""
    lines = markdown.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(first_heading))
    rows = []
    for line in lines[at:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_every_regime_is_a_config_that_forge_accepts():
    for device in ("cpu", "cuda"):
        for regime in regimes_for(device):
            config = job_config(regime, device, "fp32")
            assert config.accumulation_steps() == 1
            assert config.train.grad_clip_norm == 1.0


def test_the_ratio_is_that_of_medians_and_the_pairs_are_those_of_one_round():
    result = _result()
    assert result.speed_ratio("transformers") == pytest.approx(3.0 / 1.5)
    assert result.paired_ratios("transformers") == pytest.approx([3.0, 1.0, 4.0 / 1.5])
    assert result.tokens_per_sec("forge") == pytest.approx(2 * 8 / 1.5)
    assert result.gemm_share(100.0) == pytest.approx(100.0 * result.flops_per_token / 1e9)


def test_every_target_is_stated_as_met_or_not_met():
    speed, memory, overhead, gemm = verdicts(_result())
    assert (speed.met, memory.met, overhead.met, gemm.met) == (True, True, True, False)
    rows = _rows(to_markdown([_result()], HOST), "| regime | target")
    assert [row[3] for row in rows[2:]] == ["met", "met", "met", "**not met**"]


def test_every_row_of_every_table_has_as_many_cells_as_its_head():
    markdown = to_markdown([_result()], HOST)
    for heading in ("| regime | side", "| regime | target", "| regime | vocabulary"):
        rows = _rows(markdown, heading)
        assert len(rows) > 2
        assert {len(row) for row in rows} == {len(rows[0])}


def test_without_matplotlib_the_plot_is_skipped_with_a_note(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    notes = write_report([_result()], HOST, tmp_path, "cpu")
    assert "matplotlib is not installed" in notes[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu.json", "cpu.md"]


def test_the_sides_take_turns_in_one_order_after_a_warm_up_each():
    taken: list[str] = []
    turns = {name: (lambda name=name: taken.append(name)) for name in ("peer", "forge", "gemm")}
    seconds = alternate(turns, 3, "cpu", lambda line: None)
    assert taken == ["peer", "forge", "gemm"] * 4
    assert {name: len(times) for name, times in seconds.items()} == {"peer": 3, "forge": 3, "gemm": 3}


@pytest.mark.parametrize("theirs", [4.2 * (1 + 2e-4), float("nan")])
def test_sides_whose_losses_differ_are_not_timed(theirs):
    peer, forge = (Runner(name, lambda loss=loss: torch.tensor(loss)) for name, loss in (("p", theirs), ("f", 4.2)))
    with pytest.raises(RunError, match=r"minuscule: at update 1 .* nothing was timed"):
        check_agreement("minuscule", [peer, forge])


def test_a_difference_that_only_an_update_shows_is_found():
    losses = iter([4.2, 4.0])
    peer = Runner("p", lambda: torch.tensor(next(losses)))
    with pytest.raises(RunError, match="at update 2"):
        check_agreement("minuscule", [peer, Runner("f", lambda: torch.tensor(4.2))])


def test_a_flag_that_cannot_work_is_one_line_and_status_2(capsys):
    assert main(["--repeats", "0"]) == 2
    assert main(["--regime", "foo"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)


def test_the_profile_names_the_matrix_products_of_a_forge_step():
    assert "aten::mm" in profile_step(MINUSCULE, "cpu")


def test_without_transformers_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RunError, match="pip install"):
        transformers_runner(MINUSCULE, "cpu", "fp32")


def test_llama_with_forge_weights_gives_the_logits_of_forge():
    pytest.importorskip("transformers")
    from torch.func import functional_call

    from forge.model import build_model

    config, weights = job_config(MINUSCULE, "cpu", "fp32"), initial_weights(MINUSCULE)
    weights = {name: 10 * weight for name, weight in weights.items()}  # so that attention is far from uniform
    llama = build_transformers(config.model, weights)
    ids = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = functional_call(build_model(config.model), weights, (ids,))
        torch.testing.assert_close(llama(ids).logits, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [{}, {"experts": 4}, {"optimizer": "muon"}], ids=["dense", "experts", "muon"])
def test_all_sides_follow_the_same_losses_over_ten_updates(kind, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(step, "AGREEMENT_STEPS", 10)
    regime = evolve(MINUSCULE, **kind)
    names, _ = sides.choose("all", regime)
    weights = initial_weights(regime)
    runners = [sides.TIMED[name](regime, "cpu", "fp32", weights) for name in names]
    losses = check_agreement("minuscule", runners, step.MUON_TOLERANCE if regime.optimizer == "muon" else None)
    assert list(losses) == names
    assert losses["forge"][-1] < losses["forge"][1]


def test_the_trainer_on_a_thread_and_in_a_process_take_the_same_updates():
    pytest.importorskip("accelerate")
    thread, process = (
        build(MINUSCULE, "cpu", "fp32", initial_weights(MINUSCULE))
        for build in (trainer_runner, sides.TIMED["trainer"])
    )
    first = [float(thread.step()) for _ in range(3)]
    assert [float(process.step()), float(process.steps(2))] == [first[0], first[2]]


def test_a_trainer_that_fails_in_its_process_is_one_line():
    process = sides.TIMED["trainer"](evolve(MINUSCULE, n_heads=3), "cpu", "fp32", None)
    with pytest.raises(RunError, match=r"trainer failed: .*n_heads"):
        process.step()


def test_a_side_that_cannot_run_is_left_out_with_its_reason(monkeypatch):
    names, lines = sides.choose("trainer,transformers", evolve(MINUSCULE, optimizer="muon"))
    assert names == ["transformers", "forge"]
    assert len(lines) == 1 and "trainer is left out: it takes one optimizer" in lines[0]
    monkeypatch.setattr(sides, "find_spec", lambda name: None)
    assert "accelerate is not installed" in sides.choose("trainer", MINUSCULE)[1][0]
    with pytest.raises(ConfigError, match=r"peers must be all or some of .* got 'nemo'"):
        sides.choose("nemo", MINUSCULE)


@pytest.mark.slow
def test_a_whole_run_writes_table_numbers_and_plot(tmp_path, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    (result,) = run([MINUSCULE], "cpu", None, tmp_path / "new", peers="transformers,hand-written")
    names = {path.suffix: path for path in (tmp_path / "new").iterdir()}
    assert set(names) == {".md", ".json", ".png"}
    printed = capsys.readouterr()
    rows = _rows(names[".md"].read_text(), "| regime | side")
    assert rows[2][:2] == ["minuscule", "forge"]
    assert names[".md"].read_text() in printed.out
    assert "round 2 of 2" in printed.err
    (found,) = json.loads(names[".json"].read_text())["results"]
    seconds = found["timings"]["seconds"]
    assert {len(taken) for taken in seconds.values()} == {MINUSCULE.repeats} and len(seconds) == 3
    assert min(seconds["forge"]) > 0
    assert found["speed_ratio"]["transformers"] == pytest.approx(result.speed_ratio("transformers"))
    assert found["flops_per_token"] == result.flops_per_token > 0


@pytest.mark.slow
def test_peak_memory_grows_by_at_least_what_more_parameters_and_moments_take():
    small, large = (evolve(MINUSCULE, vocab_size=v, dim=64) for v in (64, 64 + 2**17))
    grown = peak_memory(large, "forge", "cpu") - peak_memory(small, "forge", "cpu")
    weights = 2 * 2**17 * 64 * 4  # embedding and head in fp32
    assert grown > 4 * weights  # the weights, their gradient and two moments
    assert grown < 7 * weights


@pytest.mark.slow
def test_a_side_that_fails_in_its_process_is_one_line():
    with pytest.raises(RunError, match=r"minuscule: the memory of forge could not be measured: .*n_heads"):
        peak_memory(evolve(MINUSCULE, dim=33), "forge", "cpu")


@pytest.mark.parametrize("name", ["tiny", "llama_8b"])
def test_the_table_of_presets_is_what_the_calculation_gives(name):
    page = presets.TABLE.read_text()
    lines = presets.rows(name, load_config(presets.ROOT / "configs" / f"{name}.toml"))
    assert len(lines) == len(presets.GPUS)
    assert "\n".join(lines) in page
    assert page.startswith(presets.table([]))


def test_both_sides_of_the_data_benchmark_read_whole_batches_of_the_same_file(tmp_path):
    options = data.Options(tokens=100_000, seq_len=64, batch_size=8, batches=2, repeats=1)
    data.write_tokens(tmp_path / "tokens.bin", options.tokens)
    for name, make in data.sides(tmp_path / "tokens.bin", options).items():
        batch = next(iter(make()))
        inputs, labels = (batch.input_ids[0], batch.labels[0]) if "forge" in name else batch
        assert inputs.shape == labels.shape == (8, 64) and inputs.dtype == torch.int64, name
        kept = labels[:, :-1] >= 0
        assert torch.equal(inputs[:, 1:][kept], labels[:, :-1][kept]), name
    found = data.rates(tmp_path / "tokens.bin", options)
    assert set(found) == set(data.sides(tmp_path / "tokens.bin", options)) and min(found.values()) > 0


def test_the_pages_of_layouts_put_what_was_measured_beside_the_plan():
    case = layouts.CASES[1]
    plan = layouts.plan_ranks(layouts._job(case), case.ranks, tflops=1.0)
    ranks = [Measured(0, plan.traffic[0], 2**20, plan.bytes_a_rank // 2, 3 * 2**20)] * 2
    page = layouts.sizes_page([(case, ranks)], [(layouts.SHARDED[1], ranks)], HOST)
    sent = _rows(page, "| layout | kind")[2:]
    assert {row[1] for row in sent} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert all(row[4] == "1" for row in sent)
    assert _rows(page, "| layout | measured")[2][3] == "2.00"
    assert _rows(page, "| layout | parameters here")[2][2::2] == ["1.0", "3.0"]


def test_the_overhead_is_the_ratio_of_medians_and_needs_the_same_losses():
    page = layouts.overhead_page(Turns([2.0, 2.1, 2.2], [2.0, 2.0, 2.0], [(4.2, 4.2)]), HOST)
    (row,) = _rows(page, "| forge | by hand")[2:]
    assert row[2] == "1.050x" and row[4] == "**not met**"
    with pytest.raises(RunError, match="do not compute the same"):
        layouts.overhead_page(Turns([1.0], [1.0], [(4.2, 4.3)]), HOST)


def test_a_wrong_flag_of_the_layouts_is_one_line_and_status_2(capsys):
    assert layouts.main(["--repeats", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: repeats must be")


def test_both_adamw_of_the_floor_take_the_same_step():
    before, grads = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = before.clone(), before.clone()
    turns = floors.adamw_sides(list(ours), theirs_list := list(theirs), list(grads))
    for _ in range(3):
        for turn in turns.values():
            turn()
    assert not torch.equal(ours, before)
    torch.testing.assert_close(ours, torch.stack([param.detach() for param in theirs_list]))


def test_the_page_of_floors_says_what_is_met():
    rates = {"forge": 9e9, "torch": 10e9, "copy": 8e9, "add": 10e9}
    starts = {"nothing": 0.0, "import torch": 1.0, "import torch, forge": 1.25, "cli.py --help": 0.6}
    found = {"small": kernels.Floor(step=0.02, products=0.004, attention=0.001, optimizer=0.003, flops=0.002)}
    page = floors.to_markdown(rates, starts, found, {**HOST, "versions": "none", "load": "0"})
    assert [row[2] for row in _rows(page, "| target")[2:]] == ["**not met**", "met", "**not met**"]
    assert _rows(page, "| regime")[2][5:] == ["8.00", "20.00", "25%", "10%"]


def test_the_recorded_kernels_are_all_that_a_step_multiplies_and_can_be_made_again():
    calls = kernels.record_step(MINUSCULE, "cpu")
    flops = sum(2 * math.prod(args[-2].shape) * args[-1].shape[-1] for _, args, _ in calls["products"])
    weights = sum(matmul_weights_per_token(job_config(MINUSCULE, "cpu", "fp32").model).values())
    assert flops == 6 * weights * MINUSCULE.tokens
    assert len(calls["attention"]) == 2 * MINUSCULE.n_layers
    _, args, kwargs = calls["products"][0]
    kwargs["out"].zero_()
    kernels.again(calls["products"])()
    torch.testing.assert_close(kwargs["out"], args[0] @ args[1])


def test_the_fitted_exponent_is_that_of_the_power_law():
    assert scaling.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2.0)
    assert scaling.exponent([16, 32], [5, 5]) == pytest.approx(0.0)


def test_a_scaling_run_writes_exponents_beside_the_calculated_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "peak_memory", lambda regime, side, device, give_back: 2.0**20 * regime.batch)
    axes = {"accumulation": (1, 2, 4), "n_layers": (1, 2)}
    pytest.importorskip("matplotlib")
    assert scaling.main(["--repeats", "1", "--out", str(tmp_path)], MINUSCULE, axes) == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json", ".png"}
    (page,) = tmp_path.glob("*.scaling.md")
    rows = _rows(page.read_text(), "| axis | seconds")[2:]
    assert [row[0] for row in rows] == list(axes)
    assert rows[0][2:4] == ["1.00", "1.00"] and float(rows[1][3]) == 0.0
    assert len(_rows(page.read_text(), "| axis | size")[2:]) == 5
    assert scaling.main(["--repeats", "0"]) == 2


@pytest.mark.slow
def test_accumulation_adds_no_more_memory_than_one_set_of_gradients():
    base = evolve(scaling.BASE, vocab_size=8192)
    regimes = [scaling.regime_of(base, "accumulation", size) for size in (1, 4)]
    one, four = (peak_memory(regime, "forge", "cpu", give_back=True) for regime in regimes)
    gradients = 4 * sum(weight.numel() for weight in initial_weights(base).values())
    assert four - one < 1.1 * gradients


@pytest.mark.parametrize("command", [scaling.main, layouts.main, floors.main, data.main], ids=lambda f: f.__module__)
def test_an_unwritable_folder_is_one_line_before_anything_is_measured(command, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert command(["--out", str(tmp_path / "file" / "results")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert "cannot be written to: Not a directory; choose another --out" in said.err


def test_the_gpu_benchmark_runs_every_side_on_the_cpu_and_the_first_losses_are_near_a_guess(tmp_path, capsys):
    pytest.importorskip("transformers")
    words = ["--device", "cpu", "--tiny", "--no-compile", "--steps", "1", "--out", str(tmp_path)]
    assert gpu.main(words) == 0
    (page,) = tmp_path.glob("*.mfu.md")
    rows = _rows(page.read_text(), "| preset | side")[2:]
    assert [row[1] for row in rows] == list(gpu.SIDES)
    (found,) = tmp_path.glob("*.mfu.json")
    for row in json.loads(found.read_text())["rows"]:
        assert row["first_loss"] == pytest.approx(math.log(gpu.TINY.vocab_size), abs=0.2)
        assert row["tokens_per_sec"] == pytest.approx(gpu.MOST_SEQUENCES * 16 / row["seconds"])


def test_the_gpu_benchmark_recomputes_and_then_shrinks_what_it_stores_where_memory_asks_for_it():
    def chosen(room):
        return gpu.choose_job("tiny", gpu.candidates(gpu.TINY, 16, "cpu", False), room).train

    jobs = [job for kind in gpu.candidates(gpu.TINY, 16, "cpu", False) for job in kind]
    sizes = [sum(gpu.plan_run(job, tflops=1.0).memory.values()) for job in jobs]
    assert chosen(max(sizes)) == jobs[4].train and jobs[4].train.micro_batch_size == gpu.MOST_SEQUENCES
    assert chosen(sizes[0] - 1).activation_checkpointing != "none"  # not even one sequence fits without
    with pytest.raises(RunError, match="tiny does not fit"):
        chosen(min(sizes) - 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no CUDA")
def test_the_gpu_benchmark_says_in_one_line_what_it_needs(capsys):
    assert gpu.main([]) == 2
    assert gpu.main(["--device", "cpu"]) == 2
    assert gpu.main(["--device", "cpu", "--tiny", "--cuda-graphs"]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "torch finds no CUDA device" in first and "--tiny only" in second and "--cuda-graphs" in third
