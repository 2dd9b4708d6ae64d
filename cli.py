"""The command line: parses, calls, prints, exits.

Heavy modules are imported where a command needs them: `mlagen --help` and `mlagen schema`
should not wait for libcst.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from mlagen.codegen.ending import told
from mlagen.codegen.errors import MlagenError, refused_by_system
from mlagen.codegen.report import FORMATS, Format, Printer, Report

_F = TypeVar("_F", bound=Callable[..., Any])
_R = TypeVar("_R", bound=Report)

EPILOG = (
    "Exit codes: 0 nothing wrong, nothing to do; 1 would change, stale, or a known defect; "
    "2 usage; 3 variants.yaml is invalid; 4 drift: unknown shape, anchor missing or ambiguous, "
    "private call changed; 5 someone edited inside what mlagen manages; "
    "6 generated GPU tests failed."
)


def _spec_option(command: _F) -> _F:
    return click.option(
        "--spec",
        "spec_path",
        type=click.Path(path_type=Path),
        help="variants.yaml; without it the nearest above PATH, or above here, or mlagen's own.",
    )(command)


def _flashinfer_option(command: _F) -> _F:
    return click.option(
        "--flashinfer",
        help="A folder, a wheel file, or a version to fetch. Without it: what a fetched release "
        "pins, the one installed, the one that the file was patched for, or the one that "
        "generated/MANIFEST.json names.",
    )(command)


def _unknown_option(command: _F) -> _F:
    return click.option(
        "--allow-unknown",
        is_flag=True,
        help="Of a FlashInfer of no era that mlagen knows, take over what its source tells; what "
        "is made from it says so.",
    )(command)


def _only_option(command: _F) -> _F:
    return click.option(
        "--only", multiple=True, metavar="VARIANT", help="Just this variant; may be repeated."
    )(command)


def _python_option(command: _F) -> _F:
    return click.option(
        "--python",
        metavar="PY",
        help="What to run generated tests in; it has torch, FlashInfer and pytest. Without it: "
        "the Python of the environment that PATH or FlashInfer lies in, else mlagen's own.",
    )(command)


def _json_option(command: _F) -> _F:
    return click.option("--json", "as_json", is_flag=True, help="The report as JSON.")(command)


def _test_option(command: _F) -> _F:
    return click.option(
        "--test/--no-test",
        default=None,
        help="Insist that the generated GPU tests pass before anything is written, or do not run "
        "them. Without either they run where a GPU is.",
    )(command)


def _format_option(command: _F) -> _F:
    """`form`, by --format or its short form --json."""

    @wraps(command)
    def run(*given: Any, as_json: bool, form: Format, **named: Any) -> Any:
        if as_json and form == "github":
            raise click.UsageError("--json is --format json: give one of them")
        return command(*given, form="json" if as_json else form, **named)

    choose = click.option(
        "--format",
        "form",
        type=click.Choice(FORMATS),
        default="text",
        show_default=True,
        help="github: annotations, as workflow commands of GitHub Actions.",
    )
    return cast(_F, choose(_json_option(run)))


class _Commands(click.Group):
    """Click's group, but for how it ends: see `told`."""

    def main(self, *given: Any, **named: Any) -> Any:
        with told():
            return super().main(*given, **named)

    def make_context(self, *given: Any, **named: Any) -> click.Context:
        with told():
            return super().make_context(*given, **named)

    def invoke(self, ctx: click.Context) -> Any:
        with told():
            return super().invoke(ctx)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(package_name="mlagen", prog_name="mlagen")
def cli() -> None:
    """Sync-free FlashInfer MLA plans for SGLang: rendered, spliced in, checked, taken out."""


@cli.command()
@click.argument("spec_file", metavar="VARIANTS.YAML", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Instead of generated/ beside it.")
@click.option("--check", is_flag=True, help="Only tell whether generated/ is current.")
@_flashinfer_option
@_unknown_option
@_format_option
def render(
    spec_file: Path,
    out: Path | None,
    check: bool,
    flashinfer: str | None,
    allow_unknown: bool,
    form: Format,
) -> None:
    """Render plan functions and hooks into generated/."""
    from mlagen.codegen import commands

    inputs = (flashinfer, allow_unknown)
    _run("render", form, partial(commands.render, spec_file, out, check, *inputs))


@cli.command()
@click.argument("path")
@click.option("--diff", is_flag=True, help="Print a diff for `git apply`; PATH is not written.")
@click.option("--check", is_flag=True, help="Only tell whether the file would change.")
@click.option("--out", metavar="DIR", help="Write the patched file into this folder.")
@_test_option
@_spec_option
@_flashinfer_option
@_unknown_option
@_only_option
@_python_option
@_format_option
def patch(
    path: str,
    diff: bool,
    check: bool,
    out: str | None,
    test: bool | None,
    spec_path: Path | None,
    flashinfer: str | None,
    allow_unknown: bool,
    only: tuple[str, ...],
    python: str | None,
    form: Format,
) -> None:
    """Splice the plans into SGLang's MLA back end.

    PATH is the file, a checkout, an installed sglang, or a release: its wheel, or sglang==0.5.17.
    """
    from mlagen.codegen import commands

    inputs = (spec_path, flashinfer, only)
    _shows_no_diff(form, diff)
    work = partial(commands.patch, path, diff, check, out, *inputs, test, python, allow_unknown)
    _run("patch", form, work)


@cli.command()
@click.argument("path")
@click.option("--diff", is_flag=True, help="Print the change for `git apply`; write nothing.")
@click.option("--sglang", metavar="SGLANG", help="The SGLang then: a version to fetch, or a place.")
@click.option(
    "--from",
    "start",
    metavar="FLASHINFER",
    help="The FlashInfer now; without it the one that the patched file names, a fetched release "
    "pins, or that is installed beside the file.",
)
@_spec_option
@_flashinfer_option
@_unknown_option
@_only_option
@_format_option
def upgrade(
    path: str,
    diff: bool,
    sglang: str | None,
    start: str | None,
    spec_path: Path | None,
    flashinfer: str | None,
    allow_unknown: bool,
    only: tuple[str, ...],
    form: Format,
) -> None:
    """Tell what another FlashInfer (--flashinfer) or SGLang (--sglang) would change; write nothing.

    An SGLang that is fetched brings the FlashInfer that it pins, where none is given.
    """
    from mlagen.codegen import upgrade as upgrading

    _shows_no_diff(form, diff)
    wish = upgrading.Wish(path, flashinfer, sglang, start, spec_path, only, diff, allow_unknown)
    _run("upgrade", form, partial(upgrading.upgrade, wish))


@cli.command()
@click.argument("path")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The package's folder.")
@click.option("--check", is_flag=True, help="Only tell whether --out is current.")
@_test_option
@_spec_option
@_flashinfer_option
@_unknown_option
@_only_option
@_python_option
@_format_option
def plugin(
    path: str,
    out: Path,
    check: bool,
    test: bool | None,
    spec_path: Path | None,
    flashinfer: str | None,
    allow_unknown: bool,
    only: tuple[str, ...],
    python: str | None,
    form: Format,
) -> None:
    """Write a package that makes the changes when SGLang loads the file; PATH is only read.

    For SGLang 0.5.11 and later, which loads plugins. Where the file or FlashInfer are not those
    that it was made for, the package keeps the server from starting.
    """
    from mlagen.codegen import plugin_run

    inputs = (spec_path, flashinfer, only)
    work = partial(plugin_run.plugin, path, out, check, *inputs, test, python, allow_unknown)
    _run("plugin", form, work)


@cli.command()
@click.argument("path")
@click.option("--diff", is_flag=True, help="Print a diff for `git apply`; write nothing.")
@_format_option
def unpatch(path: str, diff: bool, form: Format) -> None:
    """Take everything out again, byte for byte."""
    from mlagen.codegen import commands

    _shows_no_diff(form, diff)
    _run("unpatch", form, partial(commands.unpatch, path, diff))


@cli.command()
@click.argument("path")
@_spec_option
@_flashinfer_option
@_only_option
@_format_option
def check(
    path: str,
    spec_path: Path | None,
    flashinfer: str | None,
    only: tuple[str, ...],
    form: Format,
) -> None:
    """Is every fast plan in the file, mlagen's or hand-written, right for this FlashInfer?"""
    from mlagen.codegen import commands

    _run("check", form, partial(commands.check, path, spec_path, flashinfer, only))


@cli.command()
@click.argument("path", required=False)
@_spec_option
@_flashinfer_option
@_format_option
def inspect(path: str | None, spec_path: Path | None, flashinfer: str | None, form: Format) -> None:
    """Show what is found: FlashInfer's private call, SGLang's shape, sites, waits."""
    from mlagen.codegen import commands

    _run("inspect", form, partial(commands.inspect, path, spec_path, flashinfer))


@cli.command("test")
@click.argument("path", required=False)
@click.option("-k", "keyword", metavar="EXPR", help="Just the tests that this names, as in pytest.")
@click.option("--keep", metavar="DIR", help="Run the tests in this folder and leave them there.")
@_spec_option
@_flashinfer_option
@_only_option
@_python_option
@_format_option
def run_tests(
    path: str | None,
    keyword: str | None,
    keep: str | None,
    spec_path: Path | None,
    flashinfer: str | None,
    only: tuple[str, ...],
    python: str | None,
    form: Format,
) -> None:
    """Prove the functions on a GPU: those in PATH, or as they are rendered for FlashInfer.

    A PATH that is not patched is tested as `patch` would write it.
    """
    from mlagen.codegen import commands

    work = partial(commands.test, path, spec_path, flashinfer, only, python, keyword, keep)
    _run("test", form, work)


@cli.command()
@click.option("--quick", is_flag=True, help="Fewer cells and rounds, in well under a minute.")
@click.option(
    "--seconds",
    type=click.IntRange(min=1),
    help="Leave out what there is no time for; what tells the most comes first.",
)
@click.option("--out", metavar="FILE", help="Write all that was measured into this JSON file.")
@click.option(
    "--from",
    "given",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measure nothing: take what --out wrote; may be repeated, for one table of several.",
)
@click.option("--svg", metavar="FILE", help="Write a plot.")
@click.option("--docs", metavar="FILE", help="Write the page that docs/benchmarks.md is.")
@click.option("--draw", metavar="FILE", help="Draw a schedule, FlashInfer's and the GPU's (SVG).")
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["plan", "loop", "attention", "bytes"]),
    help="Measure just this part; may be repeated. attention is measured only where asked for.",
)
@click.option("--keep", metavar="DIR", help="Run in this folder and leave the scripts there.")
@click.option("--gate", is_flag=True, help="Exit 1 where a bar is missed.")
@_flashinfer_option
@_python_option
@_json_option
def bench(
    quick: bool,
    seconds: int | None,
    out: str | None,
    given: tuple[Path, ...],
    svg: str | None,
    docs: str | None,
    draw: str | None,
    parts: tuple[str, ...],
    keep: str | None,
    gate: bool,
    flashinfer: str | None,
    python: str | None,
    as_json: bool,
) -> None:
    """Measure what plans cost: FlashInfer's own, SGLang's, mlagen's, the planner alone.

    Host time, waits and bytes of a plan, and the speed of a speculative-decoding loop, on the GPU
    here. Ends with a table in Markdown.
    """
    from mlagen.codegen import bench_report, commands

    files = (out, given, svg, docs, keep)
    work = partial(commands.bench, flashinfer, python, quick, *files, gate, draw, parts, seconds)
    _run("bench", "json" if as_json else "text", work, bench_report.show)


@cli.command()
@click.option("--sglang", multiple=True, metavar="V", help="Just this SGLang; may be repeated.")
@click.option(
    "--flashinfer", multiple=True, metavar="V", help="Just this FlashInfer; may be repeated."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; without it one a core.")
@click.option("--markdown", metavar="FILE", help="Write the page, and its facts as JSON beside it.")
@click.option("--check", metavar="FILE", help="Only tell whether the page and its facts are so.")
@click.option("--refresh", is_flag=True, help="Ask the registry, and fetch what is missing.")
@_spec_option
@_json_option
def matrix(
    sglang: tuple[str, ...],
    flashinfer: tuple[str, ...],
    jobs: int | None,
    markdown: str | None,
    check: str | None,
    refresh: bool,
    spec_path: Path | None,
    as_json: bool,
) -> None:
    """Which SGLang fits which FlashInfer, each variant: tried, and told as a table.

    Every SGLang with the FlashInfer that it pins, and the newest with every FlashInfer. Fetches
    nothing without --refresh: what the cache has is tried, the rest is as docs/compatibility.json
    has it.
    """
    from mlagen.codegen.matrix import command
    from mlagen.codegen.matrix.gather import Wish

    wish = Wish(sglang, flashinfer, jobs or os.cpu_count() or 1, refresh)
    work = partial(command.matrix, wish, spec_path, markdown, check)
    _run("matrix", "json" if as_json else "text", work, command.show)


@cli.command()
@click.option("--report", is_flag=True, help="That of what --json prints, instead.")
def schema(report: bool) -> None:
    """Print the JSON Schema of variants.yaml."""
    from mlagen.codegen import report_schema, spec

    Printer().answer(report_schema.schema_text() if report else spec.schema_text())


def _shows_no_diff(form: Format, diff: bool) -> None:
    """A diff in a workflow's log could be taken for workflow commands."""
    if diff and form == "github":
        raise click.UsageError("--format github shows no diff: leave --diff out")


def _run(
    command: str,
    form: Format,
    work: Callable[[], _R],
    show: Callable[[Printer, _R, bool], None] | None = None,
) -> None:
    """Do a command's work and show its report; errors are reports too.

    `show`: for a report that has text and JSON of its own (True: as JSON).
    """
    printer = Printer()
    try:
        try:
            report = work()
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            raise refused_by_system(error) from None
    except MlagenError as error:
        if form == "text":
            printer.progress("\n".join(str(problem) for problem in error.problems))
        else:
            printer.report(Report(command, error.exit_code, problems=error.problems), form)
        sys.exit(error.exit_code)
    if show is None:
        printer.report(report, form)
    else:
        show(printer, report, form == "json")
    sys.exit(report.exit_code)


def main() -> None:
    """Parse the command line, do what it says, exit."""
    cli(prog_name="mlagen")
