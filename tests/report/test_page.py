"""The page: right without a script, drawn by its own script in a real browser, and nothing in it can run or load."""

from __future__ import annotations

import json
import re
from html import escape, unescape
from html.parser import HTMLParser

import pytest

from forge.errors import RunError
from forge.report import read_run, write_report
from forge.report.page import render
from tests.browser import open_page
from tests.report.runs import losses, write_run

EVIL = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)> & \" ' {{script}} é"


class _Elements(HTMLParser):
    """Every element, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts.append(data)


def _two_runs(tmp_path):
    a = write_run(tmp_path / "a", [*losses(range(1, 31), lambda s: 3 / s), {"step": 30, "eval/loss": 0.5}],
                  config="[optimizer]\nlr = 0.1\nname = 'adamw'\n[train]\nsteps = 30\n", samples=[(30, "def a(): pass")])  # fmt: skip
    b = write_run(
        tmp_path / "b", losses(range(1, 11), float), config="[optimizer]\nlr = 0.2\nname = 'adamw'\n[train]\n"
    )
    return [read_run(a), read_run(b)]


def _charts(page):
    """Title of a chart -> its lines as the script gets them."""
    titles = [unescape(title) for title in re.findall(r"<figure[^>]*><figcaption><h3>(.*?)</h3>", page)]
    numbers = [int(number) for number in re.findall(r'<figure data-chart="(\d+)"', page)]
    data = json.loads(_Elements(page).scripts[0])
    return {title: data["charts"][number] for title, number in zip(titles, numbers, strict=True)}


def test_runs_share_a_chart_and_every_value_is_in_it(tmp_path):
    charts = _charts(render(_two_runs(tmp_path)))
    assert list(charts) == ["Training loss", "Held-out loss", "Learning rate"]
    a, b = charts["Training loss"]
    assert (a["run"], a["steps"]) == (0, list(range(1, 31)))
    assert a["values"] == pytest.approx([3 / s for s in range(1, 31)], rel=1e-5)
    assert (b["run"], b["steps"], b["values"]) == (1, list(range(1, 11)), list(range(1, 11)))


def test_the_numbers_stand_in_a_table_without_a_script(tmp_path):
    page = render(_two_runs(tmp_path))
    row = re.search(rf'<th scope="row">{re.escape(str(tmp_path / "a"))}</th>(.*?)</tr>', page).group(1)
    assert re.findall("<td>(.*?)</td>", row) == ["3 at 1", "0.1 at 30", "0.1 at 30", "3 at 1", "30", "0"]


def test_of_the_config_only_what_differs_is_shown(tmp_path):
    page = render(_two_runs(tmp_path)).partition("<h2>Config</h2>")[2].partition("</section>")[0]
    assert "2 keys differ" in page
    assert '<th scope="row">optimizer.lr</th><td>0.1</td><td>0.2</td>' in page
    assert '<th scope="row">train.steps</th><td>30</td><td>not set</td>' in page
    assert "adamw" not in page
    alone = render(_two_runs(tmp_path / "again")[:1])
    assert "All 3 keys" in alone and "<td>adamw</td>" in alone


def test_sources_and_sets_are_lines_of_one_chart(tmp_path):
    line = {
        "step": 1,
        "train/loss": 2.0,
        "train/loss/web": 1.0,
        "train/loss/code": 3.0,
        "eval/loss": 2.0,
        "eval/web/loss": 1.5,
    }
    charts = _charts(render([read_run(write_run(tmp_path / "a", [line]))]))
    assert [one["label"] for one in charts["Training loss by source"]] == ["web", "code"]
    assert [one["label"] for one in charts["Held-out loss by set"]] == ["web"]
    assert [one["label"] for one in charts["Training loss"]] == [""]


def test_nothing_of_a_run_is_markup(tmp_path):
    evil = write_run(tmp_path / EVIL.replace("/", "\u2044"), [{"step": 1, "train/" + EVIL: 1.0, "train/loss/" + EVIL: 2.0}],
                     config=f"x = {json.dumps(EVIL)}\n", samples=[(1, EVIL)])  # fmt: skip
    page = render([read_run(evil), read_run(write_run(tmp_path / "b", losses([1], float)))])
    tags = [tag for tag, _ in _Elements(page).elements]
    assert tags.count("script") == 2 and "img" not in tags and "link" not in tags
    assert f"<pre>{escape(EVIL)}</pre>" in page and page.count('"use strict"') == 1
    assert [line["label"] for line in _charts(page)["Training loss by source"]] == [EVIL]


def test_the_page_loads_nothing(tmp_path):
    page = render(_two_runs(tmp_path))
    for _, attributes in _Elements(page).elements:
        assert not attributes.keys() & {"src", "href", "srcset", "data", "action", "poster"}
    assert "url(" not in page and "@import" not in page and "default-src 'none'" in page


@pytest.mark.slow
def test_a_run_of_a_million_steps_is_a_page_below_5_mb(tmp_path):
    (tmp_path / "a").mkdir()
    with (tmp_path / "a" / "metrics.jsonl").open("w") as file:
        for step in range(1_000_000):
            file.write(f'{{"step": {step}, "train/loss": {step % 997 / 313:.6f}, "train/grad_norm": {step % 89}}}\n')
    run = read_run(tmp_path / "a")
    assert run.curves["train/loss"].count == 1_000_000
    write_report([run], tmp_path / "report.html")
    assert 20_000 < (tmp_path / "report.html").stat().st_size < 1_000_000


def test_many_long_runs_are_a_page_below_5_mb(tmp_path):
    keys = [f"train/{n}" for n in range(25)]
    lines = [{"step": 1000 * step} | dict.fromkeys(keys, step / 7 + 100000.0) for step in range(2000)]
    run = read_run(write_run(tmp_path / "a", lines))
    assert len(render([run] * 12)) < 5_000_000


def test_a_place_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="choose another --out"):
        write_report(_two_runs(tmp_path), tmp_path / "file" / "report.html")


def test_a_browser_draws_every_curve_without_complaint(tmp_path):
    evil = write_run(tmp_path / EVIL.replace("/", "\u2044"), losses(range(1, 6), float), samples=[(5, EVIL)])
    write_report([*_two_runs(tmp_path), read_run(evil)], tmp_path / "report.html")
    dom, console = open_page((tmp_path / "report.html").as_uri(), tmp_path)
    assert console == [] and 'data-drawn="3"' in dom and "<title>taken" not in dom
    curves = [attributes for tag, attributes in _Elements(dom).elements if tag == "polyline"]
    assert [curve["data-points"] for curve in curves] == ["30", "10", "5", "1", "30", "10", "5"]
    assert all(len(curve["points"].split()) == int(curve["data-points"]) for curve in curves)
    xs, ys = zip(*(map(float, pair.split(",")) for pair in curves[1]["points"].split()), strict=True)
    assert list(xs) == sorted(xs) and list(ys) == sorted(ys, reverse=True)  # 1, 2, ..., 10 rises
    assert re.search(rf'aria-label="Training loss: {re.escape(str(tmp_path))}/a from 3 to 0.1; ', dom)


def test_a_browser_says_so_if_the_page_were_broken(tmp_path):
    write_report(_two_runs(tmp_path), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text().replace('"use strict"', '"use strict"; nonsense()')
    (tmp_path / "report.html").write_text(page)
    dom, console = open_page((tmp_path / "report.html").as_uri(), tmp_path)
    assert console and "data-drawn" not in dom  # a changed script does not even run
