"""Results of the benchmark: read, judged, told. The figures here are made up."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from click.testing import Result as Ran

from mlagen.cli import cli
from mlagen.codegen import bench, bench_run, gpu
from mlagen.codegen.bench import Result, bars, read_results
from mlagen.codegen.bench_plot import plot
from mlagen.codegen.bench_report import page, summary
from mlagen.codegen.bench_stats import Bar, interval, spread
from mlagen.codegen.errors import GeneratedTestsFailed, UsageError

PLANS = {"stock": 300.0, "host-arrays": 220.0, "upstream": 190.0, "mlagen": 170.0, "floor": 140.0}
#: Of what the index kernel is given; the planner alone is given nothing.
ARRAYS = {"stock": 60.0, "host-arrays": 50.0, "upstream": 40.0, "mlagen": 20.0, "floor": 0.1}
RATES = {"stock": 70.0, "upstream": 80.0, "mlagen": 84.0, "none": 85.0}


def samples(medians: dict[str, float], count: int, **changed: float) -> dict[str, list[float]]:
    """A value a round, some noise about the medians, the same for all in a round."""
    noise = [0.02 * ((7 * turn) % 5 - 2) for turn in range(count)]
    return {name: [m * (1 + n) for n in noise] for name, m in {**medians, **changed}.items()}


def result(version: str = "0.7.2", **changed: float) -> dict[str, Any]:
    """A file's content. `changed`: medians of contenders, in all cells and settings."""
    plans = {name: value for name, value in changed.items() if name in PLANS and value > 100}
    rates = {name: value for name, value in changed.items() if value <= 100}
    cells = [
        {
            "batch": batch,
            "length": length,
            "rounds": 60,
            "idle": samples(PLANS, 60, **plans),
            "busy": samples({**PLANS, "stock": 4300.0}, 60, **plans),
            "arrays_idle": samples(ARRAYS, 60),
            "arrays_busy": samples(ARRAYS, 60, mlagen=30.0),
            "outlasted": {**dict.fromkeys(PLANS, 60), "stock": 0},
            "waits": {**dict.fromkeys(PLANS, 0), "stock": 10},
        }
        for length in (1024, 4096, 16384)
        for batch in (1, 64)
    ]
    moved = [
        {
            "batch": batch,
            "length": 4096,
            "contender": name,
            "planner": 592464,
            "to_gpu": 592464 if batch == 64 else None,
            "to_host": (776 if name == "stock" else 0) if batch == 64 else None,
            "copies": 1,
        }
        for batch in (1, 64)
        for name in PLANS
    ]
    settings = [
        {
            "batch": 64,
            "length": 4096,
            "mode": mode,
            "wanted_share": 0.6,
            "share": 0.59,
            "steps": 30,
            "gpu_step_ms": 11.5,
            "attention_ms": 6.8,
            "rates": samples(RATES, 5, **rates),
            "wrong": dict.fromkeys(RATES, 0),
        }
        for mode in ("ahead", "fenced")
    ]
    plan = {"version": 3, "busy_ms": 4.0, "tokens": 3, "heads": 16, "cells": cells, "bytes": moved}
    loop = {"layers": 61, "host_ms": 1.0, "draft_steps": 2, "tokens": 3, "settings": settings}
    return {
        "kind": "mlagen-bench",
        "schema_version": 1,
        "mlagen": "0.1.0",
        "flashinfer": version,
        "backend": "fa3",
        "gpu": "NVIDIA Fake",
        "torch": "9.8.7",
        "cuda": "13.0",
        "python": "3.12.1",
        "date": "2026-01-31",
        "quick": False,
        "complete": True,
        "seconds": 120.5,
        "plan": plan,
        "loop": loop,
    }


def read(folder: Path, *contents: dict[str, Any]) -> tuple[bench.Result, ...]:
    return read_results(written(folder, *contents))


def written(folder: Path, *contents: dict[str, Any]) -> list[Path]:
    paths = [folder / f"{number}.json" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(json.dumps(content))
    return paths


def verdicts(found: tuple[Bar, ...]) -> list[str]:
    return [bar.verdict for bar in found]


# -- reading ------------------------------------------------------------------------------------


def test_results_come_by_version(tmp_path: Path) -> None:
    found = read(tmp_path, result("0.7.10"), result("0.6.18"), result("0.7.2"))
    assert [one.flashinfer for one in found] == ["0.6.18", "0.7.2", "0.7.10"]


def test_a_post_release_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, result("0.6.18.post1"), result("0.6.18"))
    assert {one.flashinfer for one in found} == {"0.6.18", "0.6.18.post1"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no result of `mlagen bench`"),
        ("[]", "no result of `mlagen bench`"),
        ('{"kind": "other"}', "no result of `mlagen bench`"),
        (json.dumps({**result(), "schema_version": 2}), "schema_version"),
        (json.dumps({**result(), "gpu": 5}), "gpu"),
    ],
)
def test_what_is_no_result_is_told(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        read_results([path])
    assert caught.value.problems[0].path == str(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_results([tmp_path / "x.json"])


def test_two_results_of_one_version(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a second result for FlashInfer"):
        read(tmp_path, result(), result())


def run_of(rate: float, *, share: float = 0.6, rounds: int = 3) -> dict[str, Any]:
    """A result with one setting of the loop alone, in which graphs that plan themselves make so
    many steps where mlagen's plans make 21, SGLang's 20."""
    content = with_device()
    content["plan"] = None
    setting = content["loop"]["settings"][0]
    rates = {"upstream": 20.0, "mlagen": 21.0, "device": rate}
    setting |= {"share": share, "rates": samples(rates, rounds)}
    content["loop"]["settings"] = [setting]
    return content


def of_device(found: Result) -> Bar:
    (bar,) = (bar for bar in bars(found) if "plan themselves" in bar.asked)
    return bar


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ((24.0,), "met"),
        ((20.0,), "missed"),
        ((20.0, 27.0), "met"),
        ((20.0, 22.0), "missed"),
        ((20.0, 23.2), "within noise"),
        ((23.2, 20.0), "within noise"),
        ((20.0, 20.5, 23.5), "within noise"),
    ],
)
def test_a_bar_is_about_the_mean_of_runs(
    tmp_path: Path, rates: tuple[float, ...], verdict: str
) -> None:
    """0.97 / (1 - 0.6 (1 - 16 / 20)) of 21 steps are asked for, 23.15. However many rounds a run
    has, it is one: rounds hang together."""
    runs = [run_of(rate, rounds=3 + 4 * number) for number, rate in enumerate(rates)]
    (found,) = read(tmp_path, *runs)
    assert found.loop is not None
    assert len(found.loop.settings) == len(rates)
    bar = of_device(found)
    assert bar.verdict == verdict
    assert bar.worst.startswith(f"{statistics.fmean(rates) / 21:.3f}, ")
    each = " and ".join(f"{rate / 21:.3f}" for rate in rates)
    assert (f"the mean of {each}, asked 1.102 (" in bar.worst) == (len(rates) > 1)
    rows = [row for row in summary([found]).splitlines() if " | 16k | " in row]
    assert len(rows) == len(rates)


def test_runs_of_one_setting_stand_together_in_any_order(tmp_path: Path) -> None:
    first, second = run_of(24.0), run_of(22.0, share=0.62)
    other = {**first["loop"]["settings"][0], "wanted_share": 0.3, "share": 0.3}
    first["loop"]["settings"].append(other)
    for some in ((first, second), (second, first)):
        (found,) = read(tmp_path, *some)
        assert found.loop is not None
        assert [one.wanted_share for one in found.loop.settings] == [0.6, 0.6, 0.3]


def test_a_run_counts_once(tmp_path: Path) -> None:
    """However often its file is given, and among which others."""
    first, second = run_of(24.0), run_of(22.0)
    for again in ((first, first), (first, second, first), (first, second, second)):
        with pytest.raises(UsageError, match=r"a second result for FlashInfer .*: the part loop"):
            read(tmp_path, *again)
    both = run_of(24.0)
    both["loop"]["settings"].append({**second["loop"]["settings"][0], "mode": "fenced"})
    (found,) = read(tmp_path, first, both)  # the first of both is known, the second is not
    assert found.loop is not None
    assert [one.mode for one in found.loop.settings] == ["ahead", "fenced"]


def test_a_loop_without_settings_is_read(tmp_path: Path) -> None:
    first, second = run_of(24.0), run_of(22.0)
    first["loop"]["settings"] = []
    (found,) = read(tmp_path, first, second)
    assert of_device(found).verdict == "missed"


@pytest.mark.parametrize("version", [None, 1, 2, 4])
def test_plans_of_another_version_are_refused(tmp_path: Path, version: int | None) -> None:
    """Before versions, the page numbers were copied within the plan, and no arrays were timed;
    in version 2 the planner alone was called without the index kernel's arrays ahead of it."""
    content = result("0.6.18")
    del content["plan"]["version"]
    for cell in content["plan"]["cells"]:
        del cell["arrays_idle"], cell["arrays_busy"]
    if version is not None:
        content["plan"]["version"] = version
    paths = written(tmp_path, result(), content)
    says = rf"plan.version: figures of version {version or 1}, .* measure the part again"
    with pytest.raises(UsageError, match=says) as caught:
        read_results(paths)
    assert caught.value.problems[0].path == str(paths[1])
    ran = run("--from", str(paths[0]), "--from", str(paths[1]))
    assert ran.exit_code == 2
    assert f"{paths[1]}: " in ran.stderr
    assert "which mean something else than those of 3; measure the part again" in ran.stderr


def test_plans_without_the_arrays_are_refused(tmp_path: Path) -> None:
    content = result()
    del content["plan"]["cells"][3]["arrays_busy"]
    with pytest.raises(UsageError, match=r"plan\.cells\.3\.arrays_busy: Field required"):
        read(tmp_path, content)


# -- statistics ---------------------------------------------------------------------------------


def test_spread() -> None:
    found = spread([float(number) for number in range(11)])
    assert (found.median, found.low, found.high) == (5, 1, 9)
    assert found.text() == "5 (1-9)"
    assert spread([2.5]).text(1) == "2.5 (2.5-2.5)"


def test_interval_narrows_with_the_number_of_values() -> None:
    def width(count: int) -> float:
        low, high = interval([number / count for number in range(count)])
        return high - low

    assert interval([3.0]) == (3.0, 3.0)
    assert interval([1.0, 2.0, 9.0]) == (1.0, 9.0)
    assert width(400) < width(60) < 0.5


# -- bars ---------------------------------------------------------------------------------------


def test_all_bars_met(tmp_path: Path) -> None:
    (found,) = read(tmp_path, result())
    assert verdicts(bars(found)) == ["met"] * 5
    assert bars(found)[0].worst.startswith("+30 µs (batch 64, ")
    assert bars(found)[0].worst.endswith("; SGLang's +50 µs)")
    assert sum("SGLang's +" in bar.worst for bar in bars(found)) == 1


def test_a_plan_above_the_floor_is_missed(tmp_path: Path) -> None:
    (found,) = read(tmp_path, result(mlagen=185.0))
    assert verdicts(bars(found)) == ["missed", "met", "met", "met", "met"]


def test_a_plan_slower_than_upstreams_is_missed(tmp_path: Path) -> None:
    (found,) = read(tmp_path, result(upstream=160.0))
    assert verdicts(bars(found)) == ["met", "missed", "met", "met", "met"]


def test_a_difference_that_is_no_larger_than_the_noise_is_said_to_be_so(tmp_path: Path) -> None:
    content = result()
    for cell in content["plan"]["cells"]:
        cell["busy"]["upstream"] = [
            value + (1.0 if turn % 2 else -0.5) for turn, value in enumerate(cell["busy"]["mlagen"])
        ]
        cell["busy"]["mlagen"] = [value + 0.3 for value in cell["busy"]["mlagen"]]
    (found,) = read(tmp_path, content)
    assert bars(found)[1].verdict == "within noise"


def test_a_loop_below_its_part_is_missed(tmp_path: Path) -> None:
    (found,) = read(tmp_path, result(none=95.0))
    assert verdicts(bars(found)) == ["met", "met", "met", "missed", "met"]
    assert "0.884" in bars(found)[3].worst


def test_a_loop_slower_than_upstreams_is_missed(tmp_path: Path) -> None:
    content = result()
    fenced = content["loop"]["settings"][1]
    fenced["rates"]["upstream"] = [rate * 1.1 for rate in fenced["rates"]["mlagen"]]
    (found,) = read(tmp_path, content)
    assert verdicts(bars(found)) == ["met", "met", "met", "met", "missed"]
    assert "fenced" in bars(found)[4].worst


def test_no_bar_without_its_figures(tmp_path: Path) -> None:
    content = result()
    content["plan"]["cells"] = [cell for cell in content["plan"]["cells"] if cell["batch"] == 1]
    content["loop"] = None
    (found,) = read(tmp_path, content)
    assert [bar.asked for bar in bars(found)] == [
        "no plan is slower than SGLang's",
        "no plan and index arrays are slower than SGLang's",
    ]


# -- told ---------------------------------------------------------------------------------------


def test_the_table_is_markdown_with_one_width(tmp_path: Path) -> None:
    text = summary(read(tmp_path, result("0.6.18"), result("0.7.2", mlagen=185.0)))
    blocks = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 4
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1
    assert "| 0.6.18 | 64 | 300 / 4300 | 220 / 220 | 190 / 190 | 170 / 170 | 140 / 140 |" in text
    arrays = "| 0.6.18 | µs with the index kernel's arrays |"
    assert f"{arrays} 360 / 4360 | 270 / 270 | 230 / 230 | 190 / 200 |  |\n" in text
    assert "| 0.7.2 | µs with the index kernel's arrays | 360 / 4360 |" in text
    assert "| 0.6.18 | KiB to the GPU / back | 578.6 / 0.8 |" in text
    assert "1.200 (1.200-1.200)" in text  # ours to stock
    assert text.count("**missed**") == 1
    assert text.endswith("|\n")


def test_arrays_are_added_round_by_round(tmp_path: Path) -> None:
    """The median of the sums, which is not the sum of the medians."""
    content = result()
    for cell in content["plan"]["cells"]:
        cell["idle"]["mlagen"] = [100.0, 200.0, 300.0] * 20
        cell["arrays_idle"]["mlagen"] = [50.0, 10.0, 20.0] * 20
        cell["busy"]["mlagen"] = [400.0, 500.0, 600.0] * 20
        cell["arrays_busy"]["mlagen"] = [0.0, 300.0, 30.0] * 20
    (found,) = read(tmp_path, content)
    assert found.plan is not None
    cell = found.plan.cells[0]
    assert cell.whole("idle")["mlagen"] == (150.0, 210.0, 320.0) * 20
    assert cell.whole("busy")["mlagen"] == (400.0, 800.0, 630.0) * 20
    text = summary([found])
    assert "kernel's arrays | 360 / 4360 | 270 / 270 | 230 / 230 | 210 / 630 |  |" in text
    assert "| 0.7.2 | 64 | 300 / 4300 | 220 / 220 | 190 / 190 | 200 / 500 | 140 / 140 |" in text


def test_one_bar_is_about_the_plan_with_the_arrays(tmp_path: Path) -> None:
    """What is moved out of the plan is not gone."""
    content = result()
    for cell in content["plan"]["cells"]:
        for condition in ("arrays_idle", "arrays_busy"):
            cell[condition]["mlagen"] = [1000.0] * 60
    (found,) = read(tmp_path, content)
    before = bars(read(tmp_path, result())[0])
    changed = [bar for bar, other in zip(bars(found), before, strict=True) if bar != other]
    assert [bar.asked for bar in changed] == ["no plan and index arrays are slower than SGLang's"]
    assert [bar.verdict for bar in changed] == ["missed"]


def test_rounds_without_their_arrays_are_refused(tmp_path: Path) -> None:
    content = result()
    content["plan"]["cells"][0]["arrays_busy"]["mlagen"].pop()
    with pytest.raises(UsageError, match="busy and arrays_busy differ in their rounds"):
        read(tmp_path, content)


def test_broken_off_quick_and_wrong_runs_are_marked(tmp_path: Path) -> None:
    content = {**result(), "complete": False, "quick": True}
    content["loop"]["settings"][0]["wrong"]["upstream"] = 2
    text = summary(read(tmp_path, content))
    assert "a quick run, **broken off**" in text
    assert "wrong output: upstream" in text


def test_what_has_only_sizes_says_so(tmp_path: Path) -> None:
    text = page(read(tmp_path, result()), "plot.svg")
    assert "≥ 578.6 / ?" in text


def test_the_page_has_every_figure_and_the_plot(tmp_path: Path) -> None:
    text = page(read(tmp_path, result("0.6.18"), result("0.7.2")), "benchmarks.svg")
    assert "](benchmarks.svg)" in text
    assert text.count("### FlashInfer ") == 2
    assert "2026-01-31" in text
    assert "1.27 end to end" in text
    assert "FlashInfer 0.7.2, batch 64, 4k, share 0.59, ahead: 1.20 with mlagen's plans" in text
    for condition in ("idle", "busy"):
        assert text.count(f"GPU {condition}, median (p10-p90)") == 2


def test_the_committed_page_is_what_results_make() -> None:
    """Its method is not edited by hand; without results it is the skeleton."""
    committed = Path(__file__).parents[1] / "docs" / "benchmarks.md"
    text = committed.read_text("utf-8")
    method = page((), "").partition("## What is measured")[2]
    assert method in text


def test_the_plot_is_valid_and_shows_all(tmp_path: Path) -> None:
    text = plot(read(tmp_path, result("0.6.18"), result("0.7.2"), result("0.7.4")))
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}polyline")) == 3 * len(PLANS)
    assert len(root.findall(f"{space}rect")) == 1 + 3 * 2 * 3  # the ground; bars of settings
    width, height = (float(word) for word in root.attrib["viewBox"].split()[2:])
    for text_element in root.iter(f"{space}text"):
        assert 0 <= float(text_element.attrib["x"]) <= width
        assert 0 <= float(text_element.attrib["y"]) <= height


@pytest.mark.parametrize("part", ["plan", "loop"])
def test_parts_alone_are_told_too(tmp_path: Path, part: str) -> None:
    content = {**result(), part: None}
    found = read(tmp_path, content)
    ElementTree.fromstring(plot(found))
    assert summary(found)
    assert page(found, "x.svg")


# -- the command --------------------------------------------------------------------------------


def run(*args: str) -> Ran:
    return CliRunner().invoke(cli, ["bench", *args])


def test_from_results(tmp_path: Path) -> None:
    path = written(tmp_path, result())[0]
    docs = tmp_path / "docs" / "benchmarks.md"
    ran = run("--from", str(path), "--docs", str(docs))
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.startswith("- FlashInfer 0.7.2")
    assert ran.stdout.endswith("|\n")
    assert f"wrote {docs}" in " ".join(ran.stderr.split())
    assert "](benchmarks.svg)" in docs.read_text("utf-8")
    ElementTree.parse(docs.with_suffix(".svg"))


def test_the_gate(tmp_path: Path) -> None:
    path = str(written(tmp_path, result(mlagen=185.0))[0])
    assert run("--from", path).exit_code == 0
    ran = run("--from", path, "--gate")
    assert ran.exit_code == 1
    assert "bar-missed: asked: a plan at batch 64" in ran.stderr


def test_json(tmp_path: Path) -> None:
    path = str(written(tmp_path, result(mlagen=185.0))[0])
    ran = run("--from", path, "--json", "--gate")
    found = json.loads(ran.stdout)
    assert (found["command"], found["exit_code"], ran.exit_code) == ("bench", 1, 1)
    (one,) = found["results"]
    assert [bar["verdict"] for bar in one["bars"]] == ["missed", "met", "met", "met", "met"]
    assert len(one["plans"]) == 6 * 2 * len(PLANS)
    assert one["loop"][0]["steps_per_second"]["none"]["count"] == 5


def test_from_and_what_needs_a_run_do_not_go_together(tmp_path: Path) -> None:
    path = str(written(tmp_path, result())[0])
    for option in ("--out", "--keep"):
        ran = run("--from", path, option, str(tmp_path / "x"))
        assert ran.exit_code == 2
        assert "--from measures nothing" in ran.output


def test_without_a_gpu_nothing_is_pretended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "cuda_trouble", lambda: "the driver shows none")
    ran = run("--out", str(tmp_path / "x.json"))
    assert ran.exit_code == 2
    assert "cannot-measure: nothing can be measured: no CUDA GPU here" in ran.output
    assert not (tmp_path / "x.json").exists()


# -- running ------------------------------------------------------------------------------------

HOST = gpu.GpuHost("python", "NVIDIA Fake", "9.8.7", "0.7.2", Path("flashinfer"))
FILES = {"mlagen_generated/bench/run.py": b"print('here')\n"}


def ends(
    patch: pytest.MonkeyPatch, status: int | None, content: dict[str, Any] | None
) -> list[Any]:
    """Let the script end so, with this for its answer; gives the arguments it is started with."""
    started: list[Any] = []

    def run_script(host: object, script: Path, args: list[str], **_: object) -> gpu.Ended:
        assert script.is_file()
        started.append(args)
        if content is not None:
            Path(args[1]).write_text(json.dumps(content))
        return gpu.Ended(status, 60, "the last line")

    patch.setattr(gpu, "run_script", run_script)
    return started


def test_a_run_gives_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = ends(monkeypatch, 0, result())
    found, data = bench_run.measure(FILES, HOST, kept=None, quick=True)
    assert found.flashinfer == "0.7.2"
    assert json.loads(data) == result()
    assert started[0][2:] == ["--quick"]
    assert not Path(started[0][1]).parent.exists()


def test_a_wrong_output_is_no_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends(monkeypatch, 3, None)
    with pytest.raises(GeneratedTestsFailed, match="wrong-output: the last line"):
        bench_run.measure(FILES, HOST, kept=None, quick=False)


@pytest.mark.parametrize(("status", "content"), [(2, None), (1, result()), (0, None), (None, None)])
def test_a_run_that_does_not_come_to_its_end(
    monkeypatch: pytest.MonkeyPatch, status: int | None, content: dict[str, Any] | None
) -> None:
    ends(monkeypatch, status, content)
    with pytest.raises(UsageError, match="cannot-measure: the benchmark"):
        bench_run.measure(FILES, HOST, kept=None, quick=False)


def test_scripts_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    bench_run.keep(FILES, tmp_path / "kept")
    bench_run.keep(FILES, tmp_path / "kept")
    (tmp_path / "kept" / "mine.txt").touch()
    with pytest.raises(UsageError, match="not empty"):
        bench_run.keep(FILES, tmp_path / "kept")


# -- plans that the GPU makes -------------------------------------------------------------------

DEVICE = {"device": 60.0, "device-graph": 30.0}
DEVICE_ARRAYS = {"device": 2.0, "device-graph": 20.0}


def with_device(**changed: float) -> dict[str, Any]:
    """A result with the contenders that plan on the GPU, and a setting with uneven lengths."""
    content = result()
    for cell in content["plan"]["cells"]:
        for condition in ("idle", "busy"):
            plans = {name: changed.get(name, value) for name, value in DEVICE.items()}
            cell[condition] |= samples(plans, 60)
            cell[f"arrays_{condition}"] |= samples(DEVICE_ARRAYS, 60)
        cell["outlasted"] |= dict.fromkeys(DEVICE, 60)
        cell["waits"] |= dict.fromkeys(DEVICE, 0)
    rates = {"upstream": 20.0, "mlagen": 21.0, "device": changed.get("rate", 23.5)}
    uneven = {
        **content["loop"]["settings"][0],
        "length": 16384,
        "uneven": True,
        "share": 0.6,
        "attention_ms": 20.0,
        "device_attention_ms": 16.0,
        "rates": samples(rates, 3),
        "wrong": dict.fromkeys(rates, 0),
    }
    content["loop"]["settings"].insert(0, uneven)
    return content


#: What three draws take of FlashInfer's time, to their geometric mean.
OF_DRAWS = (1.0, 1.04, 1 / 1.04)


def attention(version: str = "0.7.2", **changed: Any) -> dict[str, Any]:
    """A file of the part `attention`; `changed` in all cells."""
    means = {"equal": 88.0, "one long": 88.0}
    cells = [
        {
            "kind": kind,
            "heads": heads,
            "tokens": tokens,
            "batch": batch,
            "length": length,
            "backend": "fa3",
            "draw": draw,
            "sum": batch * length,
            "same": True,
            "plan_us": 6.1,
            "stock": [100.0] * 5,
            "mlagen": [means.get(kind, 80.0) * OF_DRAWS[draw]] * 5,
            **changed,
        }
        for kind in ("geometric", "log-normal", "uniform", "one long", "equal")
        for heads, tokens in ((16, 1), (128, 3))
        for batch, length in ((16, 1024), (64, 4096))
        for draw in range(1 if kind == "equal" else 3)
    ]
    kernel = [
        {"tiles": tiles, "thorough": thorough, "us": [4.0 + tiles / 200] * 4}
        for tiles in (16, 64, 256, 1024)
        for thorough in (False, True)
    ]
    schedule = {
        **{name: cells[0][name] for name in ("kind", "heads", "tokens", "batch", "length")},
        "backend": "fa3",
        "stock": [[[0, 0, 4096], [1, 0, 2048]], [[2, 0, 512]]],
        "mlagen": [[[0, 0, 4096]], [[1, 0, 2048], [2, 0, 512]]],
    }
    part = {"version": 2, "layers": 61, "cells": cells, "kernel": kernel, "schedule": schedule}
    return {**result(version), "plan": None, "loop": None, "attention": {**part, "left_out": []}}


def verdict_of(content: dict[str, Any], folder: Path, says: str) -> str:
    (found,) = read(folder, content)
    (bar,) = (bar for bar in bars(found) if says in bar.asked)
    return bar.verdict


def test_bars_of_the_gpus_plans(tmp_path: Path) -> None:
    (found,) = read(tmp_path, with_device())
    assert verdicts(bars(found)) == ["met"] * 8
    for name, says in (("device", "launched on the GPU"), ("device-graph", "in the graph at")):
        assert verdict_of(with_device(**{name: 185.0}), tmp_path, says) == "missed"


def test_what_is_asked_of_the_loop_follows_from_the_attention(tmp_path: Path) -> None:
    """r 0.8 and s 0.6: a step is 0.88 as long."""
    (found,) = read(tmp_path, with_device())
    assert found.loop is not None
    setting = found.loop.settings[0]
    assert setting.asked_of_device == pytest.approx(0.97 / 0.88)
    assert setting.best_host == "mlagen"
    assert found.loop.settings[1].asked_of_device is None
    says = "graphs that plan themselves"
    assert verdict_of(with_device(), tmp_path, says) == "met"
    assert verdict_of(with_device(rate=22.0), tmp_path, says) == "missed"


def test_bars_of_attention(tmp_path: Path) -> None:
    (found,) = read(tmp_path, attention())
    assert verdicts(bars(found)) == ["met"] * 7
    worst = [bar.worst for bar in bars(found)]
    assert worst[0] == "52 of 52 draws"
    assert worst[1] == "0.915 (one long, 16 heads x 1, batch 16, 1k, fa3, draw 1)"
    assert worst[2].startswith("0.800, highest draw 0.832 (")
    assert worst[2].endswith(", 16 heads x 1, batch 64, 4k, fa3)")
    assert worst[4] == "0.831 (10 shapes)"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"same": False}, "bits of FlashInfer's"),
        ({"mlagen": [103.0] * 5}, "at most 1.02 of FlashInfer's"),
        ({"mlagen": [86.0] * 5}, "16 heads"),
        ({"mlagen": [92.0] * 5}, "128 heads"),
        ({"mlagen": [86.0] * 5}, "geometric mean"),
        ({"plan_us": 80.0}, "thorough plan"),
    ],
)
def test_bars_of_attention_can_be_missed(tmp_path: Path, changed: Any, says: str) -> None:
    assert verdict_of(attention(**changed), tmp_path, says) == "missed"


def one_draw(content: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """With that in one draw of one of the cells that bars are about."""
    place = {"kind": "geometric", "heads": 16, "batch": 64, "draw": 1}
    (cell,) = (c for c in content["attention"]["cells"] if place.items() <= c.items())
    cell.update(changed)
    return content


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"same": False}, "bits of FlashInfer's"),
        ({"mlagen": [103.0] * 5}, "at most 1.02 of FlashInfer's"),
        ({"plan_us": 80.0}, "thorough plan"),
    ],
)
def test_each_draw_is_held_to_what_is_asked_anywhere(
    tmp_path: Path, changed: Any, says: str
) -> None:
    (found,) = read(tmp_path, one_draw(attention(), **changed))
    (bar,) = (bar for bar in bars(found) if bar.verdict == "missed" and says in bar.asked)
    assert "geometric, 16 heads x 1, batch 64, 4k, fa3, draw 1" in bar.worst


def test_a_shape_is_held_to_the_mean_of_its_draws(tmp_path: Path) -> None:
    """0.80, 0.769 and what is given here, of 0.84 at most."""
    says = "at most 0.84"
    assert verdict_of(one_draw(attention(), mlagen=[95.0] * 5), tmp_path, says) == "met"
    content = one_draw(attention(), mlagen=[97.0] * 5)
    (found,) = read(tmp_path, content)
    (bar,) = (bar for bar in bars(found) if says in bar.asked)
    assert bar.verdict == "missed"
    assert bar.worst.startswith("0.842, highest draw 0.970 (geometric, 16 heads x 1, batch 64")
    # A round in which that draw was fast: it may be as fast as that.
    noisy = one_draw(attention(), mlagen=[97.0] * 4 + [90.0])
    assert verdict_of(noisy, tmp_path, says) == "within noise"


def test_a_shape_counts_once_in_the_mean(tmp_path: Path) -> None:
    """However often it was drawn: equal lengths were once."""
    content = attention()
    for cell in content["attention"]["cells"]:
        cell["mlagen"] = [(100.0 if cell["kind"] == "equal" else 81.0)] * 5
    (found,) = read(tmp_path, content)
    (bar,) = (bar for bar in bars(found) if "in the geometric mean" in bar.asked)
    assert bar.worst == f"{0.81**0.8:.3f} (10 shapes)"


def test_the_plan_is_in_the_time_of_ours(tmp_path: Path) -> None:
    """Nothing is added to it, however long the plan alone is."""
    for plan_us in (1.0, 500.0):
        (found,) = read(tmp_path, attention(plan_us=plan_us, mlagen=[75.0] * 5))
        assert found.attention is not None
        cell = found.attention.cells[0]
        assert cell.ratios == [0.75] * 5
        assert cell.plan_parts(61) == [pytest.approx(plan_us / (61 * 75.0))] * 5


@pytest.mark.parametrize("version", [None, 1, 3])
def test_attention_of_another_version_is_refused(tmp_path: Path, version: int | None) -> None:
    """Before versions, the plan was not in the time of ours, and no cell had a draw."""
    content = attention()
    del content["attention"]["version"]
    for cell in content["attention"]["cells"]:
        del cell["draw"]
    if version is not None:
        content["attention"]["version"] = version
    paths = written(tmp_path, result(), content)
    says = rf"attention.version: figures of version {version or 1}, .* measure the part again"
    with pytest.raises(UsageError, match=says) as caught:
        read_results(paths)
    assert caught.value.problems[0].path == str(paths[1])


@pytest.mark.parametrize("tiles", [16, 64, 256, 1024])
def test_a_slow_kernel_is_missed(tmp_path: Path, tiles: int) -> None:
    content = attention()
    for one in content["attention"]["kernel"]:
        if one["tiles"] == tiles:
            one["us"] = [12.5] * 4
    assert verdict_of(content, tmp_path, "a quick plan") == "missed"
    for one in content["attention"]["kernel"]:
        one["us"] = [12.5 if one["thorough"] else 4.5] * 4
    assert verdict_of(content, tmp_path, "a quick plan") == "met"


def test_parts_of_several_runs_are_one_result(tmp_path: Path) -> None:
    (found,) = read(tmp_path, with_device(), attention())
    assert None not in (found.plan, found.loop, found.attention)
    assert found.seconds == 241.0
    assert len(bars(found)) == 15
    with pytest.raises(UsageError, match="the part attention again"):
        read(tmp_path, with_device(), attention(), attention())
    with pytest.raises(UsageError, match="on another machine"):
        read(tmp_path, with_device(), {**attention(), "gpu": "NVIDIA Other"})


def test_what_one_run_left_out_another_has(tmp_path: Path) -> None:
    first, second = result(), {**result(), "date": "2026-02-01"}
    first["plan"]["cells"] = first["plan"]["cells"][:2]
    first["plan"]["left_out"] = ["batch 64, 16384 tokens", "batch 1, 9 tokens"]
    first["loop"]["settings"] = first["loop"]["settings"][1:]
    second["plan"]["left_out"] = ["batch 1, 9 tokens"]
    second["plan"]["cells"][0]["idle"]["mlagen"] = [7.0] * 60
    first["loop"]["left_out"] = [_named(setting) for setting in result()["loop"]["settings"][:1]]
    (found,) = read(tmp_path, first, second)
    whole = read(tmp_path, result())[0]
    assert found.plan is not None
    assert found.loop is not None
    assert found.loop.left_out == ()
    assert whole.plan is not None
    assert whole.loop is not None
    assert sorted(map(str, found.plan.cells)) == sorted(map(str, whole.plan.cells))
    assert sorted(map(str, found.loop.settings)) == sorted(map(str, whole.loop.settings))
    assert found.plan.cells[0].idle["mlagen"][0] != 7.0  # the first has the word
    assert found.plan.left_out == ("batch 1, 9 tokens",)
    assert found.date == ", ".join(sorted({first["date"], "2026-02-01"}))
    with pytest.raises(UsageError, match="the part plan again"):
        read(tmp_path, result(), second)


def _named(setting: dict[str, Any]) -> str:
    """As the script names a setting that it leaves out."""
    shape = f"batch {setting['batch']}, {setting['length']} tokens, even lengths"
    return f"{shape}, share {setting['wanted_share']}, {setting['mode']}"


def test_graphs_that_plan_themselves_have_a_column_where_they_are_measured(tmp_path: Path) -> None:
    """In the loop with even lengths, which older results have without them; no bar is about it."""
    older, newer = result("0.6.18"), result("0.7.2")
    (found,) = read(tmp_path, older)
    assert "in the graph / mlagen's" not in summary([found])
    for setting in newer["loop"]["settings"]:
        setting["rates"]["device"] = [1.25 * rate for rate in setting["rates"]["mlagen"]]
        setting["wrong"]["device"] = 0
        setting |= {"attention_ms": 20.0, "device_attention_ms": 16.0}
    both = read(tmp_path, older, newer)
    text = summary(both)
    rows = [line for line in text.splitlines() if line.startswith("| 0.") and " | ahead | " in line]
    ends = {line.split(" | ")[0].strip("| "): line.rsplit(" | ", 1)[1] for line in rows}
    assert ends == {"0.6.18": " |", "0.7.2": "1.250 (1.250-1.250) |"}
    assert "in the graph" in page(both, "plot.svg").partition("Steps per second")[2]
    assert [str(bar) for bar in bars(both[1])] == [
        str(bar) for bar in bars(read(tmp_path, result("0.7.2"))[0])
    ]


def test_clocks_have_a_column_where_they_were_read(tmp_path: Path) -> None:
    """Of the best host plan and of graphs that plan themselves, in the loop with uneven lengths."""
    older, newer = with_device(), with_device()
    older["flashinfer"] = "0.6.18"
    newer["loop"]["settings"][0]["clocks"] = {
        "upstream": [1700, 1700, 1700],
        "mlagen": [1690, 1650, 1700],
        "device": [1500, 1540, 1535],
    }
    (found,) = read(tmp_path, older)
    assert "SM clock" not in summary([found])
    older["loop"]["settings"][0]["clocks"] = {"upstream": [], "device": []}
    text = summary(read(tmp_path, older, newer))
    rows = [line for line in text.splitlines() if " | 16k | " in line and "ahead" not in line]
    assert [row.rsplit(" | ", 1)[1] for row in rows] == [" |", "1690 / 1535 |"]


def test_how_plans_come_by_page_numbers_is_told(tmp_path: Path) -> None:
    older, newer = result("0.6.18"), result("0.7.2")
    newer["plan"]["in_place"] = False
    text = page(read(tmp_path, older, newer), "plot.svg")
    assert "0.6.18 as up to SGLang 0.5.21 (in place), 0.7.2 as from 0.5.22 on (a copy)." in text
    again = result("0.7.2")
    again["plan"]["cells"] = again["plan"]["cells"][:1]
    with pytest.raises(UsageError, match="find page numbers in place, those"):
        read(tmp_path, newer, again)
    with pytest.raises(UsageError, match="copy page numbers, those"):
        read(tmp_path, again, newer)


def test_what_neither_run_has_is_left_out(tmp_path: Path) -> None:
    """Also where only one of them says so: the other was not asked for it."""
    first, second = attention(), attention()
    cell = first["attention"]["cells"].pop()
    shape = f"{cell['heads']} heads, {cell['tokens']} tokens, batch {cell['batch']}"
    name = f"{cell['backend']}, {shape}, {cell['length']}, {cell['kind']}, draw {cell['draw']}"
    first["attention"]["left_out"] = [name, "another", "64 tiles, quick"]
    second["attention"]["cells"] = [cell]
    (found,) = read(tmp_path, first, second)
    assert found.attention is not None
    assert found.attention.left_out == ("another",)
    assert "Left out for want of time: another." in page((found,), "plot.svg")


def test_attention_of_two_runs_is_put_together(tmp_path: Path) -> None:
    """By draws; what both have is the first's."""
    first, second = attention(), attention(mlagen=[70.0] * 5)
    part, other = first["attention"], second["attention"]
    kept = part["cells"][::2]
    part.update(cells=kept, kernel=part["kernel"][:3], schedule=None, left_out=["one", "two"])
    other.update(cells=other["cells"][1:], left_out=["two"])
    other["kernel"][0]["us"] = [99.0] * 4
    (found,) = read(tmp_path, first, second)
    (whole,) = read(tmp_path, attention())
    assert found.attention is not None
    assert whole.attention is not None
    assert sorted(map(str, found.attention.cells)) == sorted(map(str, whole.attention.cells))
    assert sum(cell.mlagen == (70.0,) * 5 for cell in found.attention.cells) == len(
        whole.attention.cells
    ) - len(kept)
    assert found.attention.kernel == whole.attention.kernel
    assert found.attention.schedule == whole.attention.schedule
    assert found.attention.left_out == ("one", "two")


def test_rounds_that_were_set_aside_are_told(tmp_path: Path) -> None:
    content = result()
    assert "set aside, as" not in page(read(tmp_path, content), "plot.svg")
    content["plan"]["cells"][1]["set_aside"] = 7
    content["plan"]["cells"][2]["set_aside"] = 5
    rounds = 60 * 2 * len(content["plan"]["cells"]) + 12
    text = page(read(tmp_path, content), "plot.svg")
    assert f"Rounds set aside, as the host was slow: 12 of {rounds}." in text


def test_waits_are_those_that_most_lengths_agree_on(tmp_path: Path) -> None:
    content = result()
    for cell in content["plan"]["cells"]:
        cell["waits"]["stock"] = 3
    one = next(c for c in content["plan"]["cells"] if (c["batch"], c["length"]) == (64, 4096))
    one["waits"]["stock"] = 4
    ran = run("--from", str(written(tmp_path, content)[0]))
    assert "| 0.7.2 | waits for the GPU | 3 |" in ran.output


def test_all_that_the_gpu_plans_is_told(tmp_path: Path) -> None:
    found = read(tmp_path, result("0.6.18"), with_device(), attention())
    text = page(found, "x.svg")
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1
    assert "| 60 / 60 | 30 / 30 | 140 / 140 |" in text
    assert "| 190 / 200 | 62 / 62 | 50 / 50 |  |" in text  # with the index kernel's arrays
    assert "|  |  | 140 / 140 |" in text  # what older results have not
    assert "| 190 / 200 |  |  |  |" in text
    assert "| 0.7.2 | 64 | 16k | 0.60 | 0.800 | 20.0 | 21.0 | 23.5 | 1.119 (1.119-1.119) |" in text
    assert "| 0.7.2 | 16 x 1 | 0.800 | 0.800 | 0.800 | 0.880 | 0.880 | 0.831 |" in text
    assert "| 0.7.2 | quick | 4.1 | 4.3 | 5.3 | 9.1 |" in text
    assert text.count("| 16 x 1 | 16 | 1k | ") == 5
    drawn = "100.0 (100.0-100.0) | 80.0 (76.9-83.2) | 6.1 (6.1-6.1) | 0.800 (0.769-0.832) |"
    assert f"| 16 x 1 | 16 | 1k | uniform | fa3 | {drawn}" in text
    assert "| 16 x 1 | 16 | 1k | equal | fa3 | 100.0 | 88.0 | 6.1 | 0.880 |" in text
    ElementTree.fromstring(plot(found))


def test_other_bits_are_marked(tmp_path: Path) -> None:
    text = page(read(tmp_path, one_draw(attention(), same=False)), "x.svg")
    assert text.count("0.800 (0.769-0.832) **other bits** |") == text.count("**other bits**") == 1


def test_a_schedule_is_drawn(tmp_path: Path) -> None:
    paths = [str(path) for path in written(tmp_path, result("0.6.18"), attention())]
    drawn = tmp_path / "docs" / "schedule.svg"
    ran = run("--from", paths[0], "--from", paths[1], "--draw", str(drawn))
    assert ran.exit_code == 0, ran.output
    root = ElementTree.parse(drawn).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}rect")) == 1 + 2 * 3  # the ground; three pieces, twice
    texts = [element.text or "" for element in root.iter(f"{space}text")]
    assert any("has 6144 KV tokens, 1.85 times the mean" in text for text in texts)
    assert any("has 4096 KV tokens, 1.23 times the mean" in text for text in texts)
    width, height = (float(word) for word in root.attrib["viewBox"].split()[2:])
    for element in root.iter(f"{space}rect"):
        x, y = float(element.get("x", "0")), float(element.get("y", "0"))
        assert x + float(element.attrib["width"]) <= width
        assert y + float(element.attrib["height"]) <= height


def test_without_a_schedule_nothing_is_drawn(tmp_path: Path) -> None:
    drawn = tmp_path / "schedule.svg"
    ran = run("--from", str(written(tmp_path, result())[0]), "--draw", str(drawn))
    assert ran.exit_code == 2
    assert "no-schedule" in ran.output
    assert not drawn.exists()


def test_json_of_attention(tmp_path: Path) -> None:
    ran = run("--from", str(written(tmp_path, attention())[0]), "--json")
    (one,) = json.loads(ran.stdout)["results"]
    assert len(one["attention"]) == 52
    assert [cell["draw"] for cell in one["attention"][:4]] == [0, 1, 2, 0]
    assert one["attention"][1]["ratio"]["median"] == pytest.approx(0.832)
    assert len(one["kernel"]) == 8


def test_parts_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = ends(monkeypatch, 0, attention())
    bench_run.measure(FILES, HOST, kept=None, quick=False, parts=("attention", "plan"), seconds=9)
    assert started[0][2:] == ["--parts", "attention,plan", "--seconds", "9"]
    for option in (("--part", "plan"), ("--seconds", "9")):
        ran = run("--from", str(written(tmp_path, result())[0]), *option)
        assert ran.exit_code == 2
        assert "--from measures nothing" in ran.output
