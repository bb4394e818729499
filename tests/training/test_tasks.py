"""Tasks of lm-evaluation-harness: the adapter's numbers by direct calculation, and a task of local files."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch.func import functional_call

from forge.data import build_tokenizer
from forge.errors import ConfigError
from forge.model import build_model
from forge.training.reload import load_run
from forge.training.tasks import Scorer, evaluate_tasks, split_continuation, windows
from tests.cli_job import call, refused, write_job

BYTES = build_tokenizer("bytes")
EOD = BYTES.eod_id


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    preset = write_job(tmp_path_factory.mktemp("tasks"))
    assert call("--config", preset)[0] == 0
    return preset.parent / "run"


@pytest.fixture(scope="module")
def scorer(run_dir):
    return Scorer(load_run(run_dir, device="cpu"), BYTES)


def _chances(scorer, ids):
    """log p of what follows each place, (S, V)."""
    model = build_model(scorer.trained.config.model)
    with torch.no_grad():
        return functional_call(model, scorer.trained.params(), (torch.tensor([ids]),))[0].log_softmax(-1)


def test_the_spaces_before_a_continuation_belong_to_it_and_nothing_is_the_end_of_a_document():
    assert split_continuation(BYTES, "a b ", "c") == ([*b"a b"], [*b" c"])
    assert split_continuation(BYTES, "", "c") == ([EOD], [*b"c"])


def test_windows_are_those_of_lm_evals_own_example():
    found = [(window.inputs, window.targets) for window in windows(0, [EOD], range(10), 4)]
    assert found == [((EOD, 0, 1, 2), (0, 1, 2, 3)), ((3, 4, 5, 6), (4, 5, 6, 7)), ((5, 6, 7, 8), (8, 9))]
    assert [window.inputs for window in windows(0, range(9), [9], 4)] == [(5, 6, 7, 8)]


def test_likelihoods_are_those_of_each_text_alone(scorer):
    pairs = [([*b"3 tim"], [*b"es 4"]), ([*b"7"], [*b" "]), ([*b"1 times 2 is"], [*b"!"])]
    for (context, continuation), (total, greedy) in zip(pairs, scorer.score(pairs), strict=True):
        chances = _chances(scorer, context + continuation)[len(context) - 1 : -1]
        expected = sum(float(row[token]) for row, token in zip(chances, continuation, strict=True))
        assert total == pytest.approx(expected, rel=1e-5)
        assert greedy == (chances.argmax(-1).tolist() == continuation)


def test_the_likeliest_token_is_greedy_and_any_other_is_not(scorer):
    order = _chances(scorer, [*b"3 tim"])[-1].argsort().tolist()
    assert [greedy for _, greedy in scorer.score([([*b"3 tim"], [order[-1]]), ([*b"3 tim"], [order[0]])])] == [
        True,
        False,
    ]


def test_a_text_longer_than_the_model_is_scored_in_windows(scorer):
    text = [*b"3 times 4 is 12; 3 times 5 is 15"]  # 32 tokens, twice what the model looks at
    ((total, _),) = scorer.score([([EOD], text)])
    first, second = _chances(scorer, [EOD, *text[:15]]), _chances(scorer, text[15:31])
    chances = torch.cat((first, second)).gather(-1, torch.tensor(text)[:, None])
    assert total == pytest.approx(float(chances.sum()), rel=1e-5)


def test_a_continuation_is_the_greedy_one_and_ends_before_a_stop_string(scorer):
    (whole, other) = scorer.continue_texts(["3 tim", "7"], {"max_gen_toks": 6})
    ids = [*b"3 tim"]
    for _ in range(6):
        ids.append(int(_chances(scorer, ids)[-1].argmax()))
    assert whole == BYTES.decode(ids[5:]) and other
    stop = whole[2:4]
    cut = scorer.continue_texts(["3 tim"], {"max_gen_toks": 6, "until": [stop]})
    assert cut == [whole[: whole.index(stop)]]


def test_without_lm_eval_the_remedy_is_one_line(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install lm-eval"):
        evaluate_tasks(str(run_dir), ["arc_easy"])
    line = refused("eval", "--run-dir", run_dir, "--tasks", "arc_easy")
    assert "needs lm-evaluation-harness" in line


def test_under_torchrun_tasks_are_refused_in_one_line_whether_or_not_lm_eval_is_there(monkeypatch):
    names = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    status, printed, said = call("eval", "--run-dir", "runs/absent", "--tasks", "arc_easy")
    assert (status, printed) == (2, "")
    assert said.splitlines() == ["error (rank 1): --tasks is for one process: leave out torchrun"]


def test_flags_that_contradict_each_other_are_refused():
    assert "one of them at a time" in refused("eval", "--tasks", "a", "--path", "b")
    assert "name the tasks too" in refused("eval", "--tasks-path", "b")


def _write_tasks(folder):
    data = [{"q": f"3 times {k} is", "right": k % 2, "text": f"3 times {k} is {3 * k};"} for k in range(4)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "data.jsonl"}}}}}
test_split: test
"""
    (folder / "choice.yaml").write_text(f"""task: local_choice{common}output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: [" 1", " 22"]
doc_to_target: right
metric_list: [{{metric: acc}}]
""")
    (folder / "rolling.yaml").write_text(f"""task: local_rolling{common}output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
""")
    (folder / "made.yaml").write_text(f"""task: local_made{common}output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{right}}}}"
generation_kwargs: {{until: [";"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
""")
    return data


def test_tasks_of_local_files_have_the_results_of_direct_calculation(run_dir, scorer, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = _write_tasks(tmp_path)
    names = ["local_choice", "local_rolling", "local_made"]
    found = evaluate_tasks(str(run_dir), names, folder=str(tmp_path), device="cpu")
    assert found.step == 4 and found.samples == dict.fromkeys(names, 4)
    right = 0
    for row in data:
        likely = scorer.score([([*row["q"].encode()], [*choice]) for choice in (b" 1", b" 22")])
        right += int(likely[1][0] > likely[0][0]) == row["right"]
    assert found.metrics["local_choice"]["acc"] == right / 4
    texts = [row["text"].encode() for row in data]
    nats = sum(total for total, _ in scorer.score([([EOD], [*text]) for text in texts]))
    bits = -nats / sum(map(len, texts)) / torch.log(torch.tensor(2.0)).item()
    assert found.metrics["local_rolling"]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert 0 <= found.metrics["local_made"]["exact_match"] <= 1
    assert "no such task (did you mean 'local_choice'?)" in refused(
        "eval", "--run-dir", run_dir, "--tasks", "local_choise", "--tasks-path", tmp_path
    )
