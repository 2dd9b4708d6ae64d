"""What each command does, up to its report. Prints nothing.

Modules that need libcst are imported by the commands that need them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import EditedError, GeneratedTestsFailed, Problem, UsageError, usage
from .flashinfer.find import find_flashinfer
from .flashinfer.read import derived_facts, explain, read_plan_api
from .flashinfer_choice import NAMED_BY_FILE, flashinfer_to_render
from .inputs import inputs_of, package_of
from .ownership import refuse_foreign
from .provenance import as_text, read_header
from .publish import publish, would_replace, write_tree
from .report import Facts, RanTest, Report, unified_diff
from .restore import unpatched
from .sglang.find import BACKEND_FILE, find_target
from .spec import load_spec
from .spec_choice import SpecChoice, choose_spec

if TYPE_CHECKING:
    from .bench import Result
    from .bench_report import BenchReport
    from .gpu import GpuHost, NoGpu
    from .prove import Suite


def render(
    spec_file: Path,
    out: Path | None,
    check: bool,
    flashinfer: str | None,
    allow_unknown: bool = False,
) -> Report:
    """Write generated/, or tell whether it is current."""
    from . import generated

    spec = SpecChoice(spec_file).load()
    folder = out or spec_file.parent / "generated"
    if check:
        source = find_flashinfer(flashinfer or generated.requirement_of(folder))
    else:
        source = flashinfer_to_render(flashinfer, folder)
    api = read_plan_api(source, allow_unknown=allow_unknown)
    made = generated.generate(spec, api)
    facts = (
        ("variants.yaml", str(spec_file)),
        ("FlashInfer", source.label),
        *derived_facts(api),
        ("into", str(folder)),
    )
    if not check:
        changed = write_tree(folder, made.files, guard=refuse_foreign)
        note = f"wrote {', '.join(changed)}" if changed else "nothing to do: all files are current"
        return Report("render", 0, facts=facts, notes=(note,))
    differing = generated.differing(made, folder)
    if not differing:
        return Report("render", 0, facts=facts, notes=("all files are current",))
    diff = b"".join(
        unified_diff((folder / name).as_posix().lstrip("/"), old, new)
        for name, old, new in differing
        if old is not None
    )
    notes = tuple(
        f"{name} is {'missing' if old is None else 'not current'}: run `mlagen render`"
        for name, old, _ in differing
    )
    return Report("render", 1, facts=facts, notes=notes, diff=as_text(diff))


def patch(
    path: str,
    diff: bool,
    check: bool,
    out: str | None,
    spec_path: Path | None,
    flashinfer: str | None,
    only: tuple[str, ...],
    test: bool | None = None,
    python: str | None = None,
    allow_unknown: bool = False,
) -> Report:
    """Splice the plans into a file; or show, or tell, or write elsewhere.

    Where a GPU is, what would be written passes the generated tests first; `test` True insists on
    that, False leaves it out. `python` is what to run them in.
    """
    from .patch import prepare, site_states
    from .plugin_installed import refuse_to_patch_beside

    if out is not None and not out.strip():
        raise usage("an empty folder name", path="--out")
    if check and out is not None:
        raise usage("--check writes nothing, --out writes", path="--out", hint="give one of them")
    if test and out is None and (diff or check):
        message = "--diff and --check write nothing, --test is for what is written"
        raise usage(message, path="--test", hint="give one of them, or --out as well")
    found = find_target(path)
    if found.file is None and not (diff or check or out):
        raise _not_written_to(
            path, "add --diff to see the change, or --out DIR to have the patched file"
        )
    if not (diff or check or out):
        refuse_to_patch_beside(found)
    inputs = inputs_of(found, spec_path, flashinfer, only, allow_unknown=allow_unknown)
    with inputs.choice.named():
        made = prepare(found, inputs.spec, inputs.api)
    if made.patched == made.original:
        raise made.no_place("choose another variant; `mlagen unpatch` takes out what is there")
    notes: list[str] = []
    tests: tuple[RanTest, ...] = ()
    written = False
    files = {Path(BACKEND_FILE).name: made.patched}
    if out is not None:
        refuse_foreign(would_replace(out, files))  # tests on a GPU take minutes
    if out is not None or test or (made.changes and not (diff or check)):
        from .prove import before_publishing

        remark = before_publishing(made, test, python, inputs.places)
        notes, tests = [remark.note], remark.tests
    if out is not None:
        write_tree(out, files, guard=refuse_foreign)
        notes += [f"wrote {Path(out) / name}" for name in files]
        written = True
    elif not made.changes:
        notes.append("nothing to do: the file is patched and current")
    elif diff or check:
        notes.append("would change; nothing was written. The sites are those of the file as it is")
    elif found.file is not None:
        publish(found.file, made.patched)
        notes.append(f"patched {found.file.path}; `mlagen unpatch` takes it out again")
        written = True
    if made.changes:
        executed = "" if tests or written else "; nothing was executed"
        notes.append(f"checked by reading it back{executed}")
    text = as_text(unified_diff(found.label, found.data, made.patched)) if diff else ""
    shown = replace(found, data=made.patched) if written else found
    would = made.changes and not written
    return Report(
        "patch",
        1 if would else 0,
        sites=site_states(shown, made, inputs.spec),
        facts=inputs.facts,
        diff=text,
        notes=tuple(notes),
        tests=tests,
    )


def unpatch(path: str, diff: bool) -> Report:
    """Take mlagen's regions out of a file, byte for byte."""
    found = find_target(path)
    try:
        original = unpatched(found.data, found.label)
    except EditedError as error:
        if all(problem.code != "edited-region" for problem in error.problems):
            raise
        from .edited import both_texts

        raise both_texts(found) or error from None
    if original == found.data:
        return Report("unpatch", 0, notes=("nothing to do: the file has no regions of mlagen",))
    if diff:
        text = as_text(unified_diff(found.label, found.data, original))
        return Report("unpatch", 1, diff=text, notes=("would change; nothing was written",))
    if found.file is None:
        raise _not_written_to(path, "add --diff, or give the file")
    publish(found.file, original)
    return Report("unpatch", 0, notes=(f"took mlagen's regions out of {found.file.path}",))


def check(
    path: str, spec_path: Path | None, flashinfer: str | None, only: tuple[str, ...]
) -> Report:
    """Judge every fast plan in a file against the FlashInfer at hand; where a plugin is installed
    that takes the file's place, in the plugin's text."""
    from .check import check_file
    from .plugin_installed import find_plugin

    found = find_target(path)
    plugin = find_plugin(found)
    loaded = plugin.text_for(found) if plugin is not None and plugin.takes(found) else found
    inputs = inputs_of(loaded, spec_path, flashinfer, only, as_patched=True)
    with inputs.choice.named():
        result = check_file(loaded, inputs.spec, inputs.api)
    facts = inputs.facts
    if plugin is not None:
        result = plugin.checked(result, found, inputs.api)
        facts += plugin.facts(found, inputs.api)
    how = ", as derived from its source" if inputs.api.derived else ""
    verdict = f"right for FlashInfer {inputs.api.version or '(version unknown)'}{how}"
    if inputs.why == NAMED_BY_FILE:
        verdict += f": {NAMED_BY_FILE}, so that a bump is not seen"
    return Report(
        "check",
        result.exit_code,
        problems=result.problems,
        sites=result.sites,
        facts=facts,
        notes=(verdict,) if result.exit_code == 0 else (),
    )


def inspect(path: str | None, spec_path: Path | None, flashinfer: str | None) -> Report:
    """Show what is found: of FlashInfer alone, or of a file as well."""
    from .flashinfer.waits import find_waits
    from .waits import plan_facts, plan_waits

    if path is None:
        source = find_flashinfer(flashinfer)
        facts = explain(read_plan_api(source))
        stock = find_waits(source)
        return Report("inspect", 0, facts=(*facts, *plan_facts(stock)), waits=plan_waits(stock))
    from .inspection import inspect_file
    from .plugin_installed import plugin_facts

    found = find_target(path)
    inputs = inputs_of(found, spec_path, flashinfer, (), as_patched=True)
    stock = find_waits(inputs.source)
    result = inspect_file(found, inputs.spec, inputs.api, stock)
    return Report(
        "inspect",
        0,
        waits=(*plan_waits(stock), *result.waits),
        problems=result.problems,
        sites=result.sites,
        facts=tuple(
            dict.fromkeys(
                (
                    *inputs.facts,
                    *explain(inputs.api),
                    *plan_facts(stock),
                    *result.facts,
                    *plugin_facts(found, inputs.api),
                )
            )
        ),
    )


def test(
    path: str | None,
    spec_path: Path | None,
    flashinfer: str | None,
    only: tuple[str, ...],
    python: str | None,
    keyword: str | None,
    keep: str | None,
) -> Report:
    """Run the generated tests on a GPU: on the functions of a file, patched or as `patch` would
    patch it; without one, on those rendered for the FlashInfer that `python` imports.

    Raises UsageError where they cannot run.
    """
    if keep is not None and not keep.strip():
        raise usage("an empty folder name", path="--keep")
    wish = _Wish(only, python, keyword, Path(keep) if keep is not None else None)
    if path is None:
        return _test_rendering(spec_path, flashinfer, wish)
    return _test_file(path, spec_path, flashinfer, wish)


@dataclass(frozen=True)
class _Wish:
    """What to test of the functions at hand: variants (empty: all), tests by pytest's -k; where:
    in which Python, in which folder."""

    only: tuple[str, ...]
    python: str | None
    keyword: str | None
    kept: Path | None


def _test_rendering(spec_path: Path | None, flashinfer: str | None, wish: _Wish) -> Report:
    from . import gpu, prove
    from .patch import select
    from .render import render

    choice = choose_spec(spec_path)
    spec = choice.load()
    select(spec, wish.only)
    source, why = find_flashinfer(flashinfer) if flashinfer is not None else None, "given"
    chosen = gpu.find_python(wish.python, (package_of(source),))
    host: GpuHost | NoGpu | None = None
    if source is None:
        host = _must_run(gpu.look(chosen))
        source, why = find_flashinfer(str(host.package)), f"that of {chosen}"
    api = read_plan_api(source)
    facts = (("variants.yaml", choice.told), ("FlashInfer", f"{source.label} ({why})"))
    suite = prove.suite_of_rendering(render(spec, api), wish.only)
    return _tested(suite, host or gpu.look(chosen, api), facts, source.label, wish)


def _test_file(path: str, spec_path: Path | None, flashinfer: str | None, wish: _Wish) -> Report:
    from . import gpu, prove
    from .check import stale_problems
    from .patch import prepare, select, site_states

    found = find_target(path)
    host: GpuHost | NoGpu | None = None
    why = "given"
    if wish.python is not None and flashinfer is None:
        host = _must_run(gpu.look(gpu.find_python(wish.python)))
        flashinfer, why = str(host.package), f"that of {host.python}"
    inputs = inputs_of(found, spec_path, flashinfer, (), as_patched=True, given=why)
    select(inputs.spec, wish.only)
    with inputs.choice.named():
        made = prepare(found, inputs.spec, inputs.api)
    patched = read_header(found.data, path=found.label) is not None
    state = "as they stand in the file" if patched else "as `mlagen patch` would write them"
    facts = (*inputs.facts, ("functions", state))
    if patched and made.changes:
        sites = site_states(found, made, inputs.spec)
        problems = tuple(stale_problems(found, made, sites))
        note = "no test was run: the file is not what these tests are made for"
        return Report("test", 1, problems=problems, sites=sites, facts=facts, notes=(note,))
    suite = prove.suite_of_file(made, wish.only)
    if host is None:
        host = gpu.look(gpu.find_python(wish.python, inputs.places), inputs.api)
    return _tested(suite, host, facts, found.label, wish)


def _tested(suite: Suite, host: GpuHost | NoGpu, facts: Facts, label: str, wish: _Wish) -> Report:
    """Run a suite and report; never exit code 0 where no test passed."""
    from . import prove

    if wish.kept is not None:
        prove.keep(suite, wish.kept)
    proof = prove.prove(suite, _must_run(host, wish.kept), kept=wish.kept, keyword=wish.keyword)
    run = proof.run
    if wish.keyword is not None and not run.tests and run.ended.status in (4, 5):
        raise usage(
            f"{run.trouble or 'no test was collected'}: pytest {run.ended}",
            path="-k",
            code="no-test-ran",
            hint="give -k a part of a test's name",
        )
    problems: tuple[Problem, ...] = ()
    exit_code = 0
    if not run.ok:
        problems, exit_code = prove.problems_of(proof, label), GeneratedTestsFailed.exit_code
    elif not run.passed:
        message = f"all {run.skipped} generated GPU tests were skipped: nothing is proved"
        problems = (Problem(label, 0, 0, "no-test-ran", message),)
        exit_code = UsageError.exit_code
    return Report(
        "test",
        exit_code,
        problems=problems,
        facts=(*facts, *prove.facts_of(proof)),
        notes=prove.notes_of(run),
        tests=run.tests,
    )


def _must_run(host: GpuHost | NoGpu, kept: Path | None = None) -> GpuHost:
    """The host, or the UsageError that says why there is none."""
    from .gpu import GpuHost

    if isinstance(host, GpuHost):
        return host
    written = f"; the tests were written to {kept}" if kept is not None else ""
    message = f"the generated GPU tests cannot run: {host.reason}{written}"
    raise usage(message, path="mlagen test", code="cannot-test", hint=host.hint)


def bench(
    flashinfer: str | None,
    python: str | None,
    quick: bool,
    out: str | None,
    given: tuple[Path, ...],
    svg: str | None,
    docs: str | None,
    keep: str | None,
    gate: bool,
    draw: str | None = None,
    parts: tuple[str, ...] = (),
    seconds: int | None = None,
) -> BenchReport:
    """Measure what plans cost on a GPU, or take results that were measured; write what is asked
    for of them.

    Raises UsageError where nothing can be measured.
    """
    from .bench import read_results
    from .bench_report import BenchReport

    named = (("--out", out), ("--svg", svg), ("--docs", docs), ("--keep", keep), ("--draw", draw))
    for option, name in named:
        if name is not None and not name.strip():
            raise usage("an empty file name", path=option)
    if not given:
        wish = _Measure(quick, parts, seconds, out, svg, docs, keep, draw)
        return _measured(flashinfer, python, wish, gate)
    measuring = (
        ("--out", out),
        ("--keep", keep),
        ("--part", parts or None),
        ("--seconds", seconds),
    )
    for option, used in measuring:
        if used is not None:
            raise usage("--from measures nothing", path=option, hint="give one of them")
    results = read_results(given)
    return BenchReport.of(results, gate, notes=_written(results, svg, docs, draw))


@dataclass(frozen=True)
class _Measure:
    """What to measure (`parts`: none, those that run.py measures by itself), and what to write."""

    quick: bool
    parts: tuple[str, ...]
    seconds: int | None
    out: str | None
    svg: str | None
    docs: str | None
    keep: str | None
    draw: str | None


def _measured(
    flashinfer: str | None, python: str | None, wish: _Measure, gate: bool
) -> BenchReport:
    from . import bench_run, gpu
    from .bench_report import BenchReport
    from .render import render
    from .render_bench import bench_files
    from .spec import shipped_spec

    source = find_flashinfer(flashinfer) if flashinfer is not None else None
    chosen = gpu.find_python(python, (package_of(source),))
    if source is None:
        host = _must_measure(gpu.look(chosen))
        source = find_flashinfer(str(host.package))
    api = read_plan_api(source)
    files = bench_files(render(load_spec(shipped_spec()), api))
    out = wish.out
    kept = Path(wish.keep) if wish.keep is not None else None
    if kept is not None:
        bench_run.keep(files, kept)
    host = _must_measure(gpu.look(chosen, api), kept)
    result, data = bench_run.measure(
        files, host, kept=kept, quick=wish.quick, parts=wish.parts, seconds=wish.seconds
    )
    notes = _written((result,), wish.svg, wish.docs, wish.draw)
    if out is None:
        notes = (*notes, "--out FILE keeps the figures, for --from and --docs")
    else:
        write_tree(Path(out).parent, {Path(out).name: data})
        notes = (*notes, f"wrote {out}")
    facts = (("python", host.python), ("GPU", host.gpu), ("FlashInfer", source.label))
    return BenchReport.of((result,), gate, facts=facts, notes=notes)


def _written(
    results: tuple[Result, ...], svg: str | None, docs: str | None, drawn: str | None
) -> tuple[str, ...]:
    """Write the page, the plot and a schedule's picture; a page has its plot beside it where none
    is named."""
    from .bench_draw import draw, shown
    from .bench_plot import plot
    from .bench_report import page

    if docs is not None and svg is None:
        svg = str(Path(docs).with_suffix(".svg"))
    texts = {}
    if svg is not None:
        texts[svg] = plot(results)
    if docs is not None and svg is not None:
        there = os.path.relpath(svg, Path(docs).parent)
        texts[docs] = page(results, Path(there).as_posix())
    if drawn is not None:
        texts[drawn] = draw(*shown(results, drawn))
    for name, text in texts.items():
        write_tree(Path(name).parent, {Path(name).name: text.encode()})
    return tuple(f"wrote {name}" for name in texts)


def _must_measure(host: GpuHost | NoGpu, kept: Path | None = None) -> GpuHost:
    """The host, or the UsageError that says why there is none."""
    from .gpu import GpuHost

    if isinstance(host, GpuHost):
        return host
    written = f"; the scripts were written to {kept}" if kept is not None else ""
    message = f"nothing can be measured: {host.reason}{written}"
    hint = host.hint.replace("mlagen test PATH", "mlagen bench")
    raise usage(message, path="mlagen bench", code="cannot-measure", hint=hint)


def _not_written_to(path: str, hint: str) -> UsageError:
    message = "a release is read from its wheel, which is not written to"
    return usage(message, path=path, code="nothing-to-write", hint=hint)
