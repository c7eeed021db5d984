import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from groundhop import jsonl
from groundhop.pipeline import effects, findings, plots
from groundhop.pipeline.findings import STAGES
from groundhop.pipeline.plots import Curve, Estimate
from groundhop.pipeline.report import render, run
from groundhop.records import Bucketed, Verdict


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


folder = _load("run_folder")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built: Path = folder.make_run(tmp_path_factory.mktemp("run") / "synthetic")
    return built


@pytest.fixture(scope="module")
def page(full: Path) -> str:
    return render(full)


def bucketed(passed: int, judged: int, name: str = "q") -> Bucketed:
    return Bucketed(
        question_id=name,
        policy="base",
        passed=passed,
        judged=judged,
        errors=0,
        mean=0.5,
        low=0.1,
        high=0.9,
        bucket=None,
    )


def test_the_report_of_a_whole_run_misses_nothing(page: str) -> None:
    assert "not run yet" not in page and page.count("state-done") > len(STAGES)


def test_a_run_that_has_not_begun_still_gets_a_report(tmp_path: Path) -> None:
    run(tmp_path, tmp_path / "report.html")
    assert "Nothing ran yet" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_a_run_stopped_midway_gets_a_report_that_says_what_is_missing(tmp_path: Path, count: int) -> None:
    names = tuple(name for name, _ in STAGES[:count])
    text = render(folder.make_run(tmp_path / "run", only=names))
    assert text.count('off">not run yet') == len(STAGES) - count


def test_a_stage_killed_on_its_way_is_called_half_done(tmp_path: Path) -> None:
    root = folder.make_run(tmp_path / "run", only=("pages", "graph"))
    (root / "graph" / "done.json").unlink()
    assert [stage.state for stage in findings.look(root)][:3] == ["done", "half done", "not run yet"]


def test_text_from_pages_and_models_never_becomes_markup(page: str) -> None:
    assert "&lt;script&gt;document.title" in page
    assert not re.search(r"<script|<img", page)


def test_the_report_fetches_nothing(page: str) -> None:
    outside = re.findall(r"""(?:src|href|url\()\s*=?\s*["']?(?:https?:)?//[^"')\s]+""", page)
    assert outside == []


def test_the_same_run_gives_the_same_bytes(full: Path, page: str) -> None:
    assert render(full) == page


def test_a_question_set_given_as_a_file_is_shown_under_its_name(tmp_path: Path) -> None:
    root = folder.make_run(tmp_path / "run", only=("evaluate",))
    shutil.copytree(root / "evaluate", root / "evaluate-browse_comp")
    assert "Question set: browse_comp" in render(root)


def test_each_drop_is_counted_under_its_reason(full: Path) -> None:
    assert {stage.name: stage.drops for stage in findings.look(full)}["questions"] == {"one_hop": 20, "ambiguous": 10}


def test_a_later_verdict_replaces_an_earlier_one(tmp_path: Path) -> None:
    jsonl.write(tmp_path / "rollouts.jsonl", [folder.rollout("base", "q", 0, True)])
    said = [
        Verdict(question_id="q", repeat=0, policy="base", correct=correct, judge="exact") for correct in (None, True)
    ]
    jsonl.write(tmp_path / "verdicts.jsonl", said)
    ((_, verdict),) = findings.tries(tmp_path)
    assert verdict is not None and verdict.correct is True


def test_samples_show_a_loss_beside_a_gain(full: Path) -> None:
    stories = [[v is not None and v.correct is True for _, v in sample.tries] for sample in findings.samples(full)]
    assert stories[0][-1] and not stories[0][0] and any(not story[-1] and any(story) for story in stories)


def test_one_more_try_is_right_with_the_posterior_mean() -> None:
    wrong, right = plots.predicted_counts([bucketed(2, 8), bucketed(8, 8)], tries=1)
    assert right.value == pytest.approx(2.5 / 9 + 8.5 / 9) and wrong.value + right.value == pytest.approx(2)


def test_predicted_counts_share_out_all_questions() -> None:
    guesses = plots.predicted_counts([bucketed(k, 8, str(k)) for k in range(9)], tries=8)
    assert sum(guess.value for guess in guesses) == pytest.approx(9)


def test_a_step_that_was_done_again_after_a_kill_counts_once() -> None:
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 2, "a": 3.0}]
    (curve,) = effects.curves(rows, [("t", {"a": "a"}, True)])
    assert (curve.steps, curve.lines) == ([1, 2], {"a": [1.0, 3.0]})


def test_a_curve_without_any_value_is_not_drawn() -> None:
    assert effects.curves([{"step": 1, "a": None}], [("t", {"a": "a"}, True), ("u", {"b": "b"}, True)]) == []


def test_pictures_survive_values_that_are_missing_or_not_numbers() -> None:
    svg = plots.curves([Curve("reward", [1, 2, 3], {"mean": [None, float("nan"), 0.5]}, zero=True)])
    assert svg.startswith("<svg") and "NaN" not in svg


def test_markup_in_a_name_stays_text() -> None:
    svg = plots.estimates([Estimate("x <b>", 0.5, 0.4, 0.6)], "label", share=True)
    assert "<b>" not in svg and svg.endswith("</svg>\n")


def test_chromium_shows_the_report(full: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not on PATH")
    run(full, full / "report.html")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
    quiet = ("--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}")
    command = [chromium, *flags, *quiet, "--dump-dom", (full / "report.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True).stdout
    assert "<title>Groundhop: synthetic</title>" in dom and dom.count("<svg") >= 7 and dom.count('class="try ') == 12
