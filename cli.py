"""The command line: parses, calls, prints, exits.

Heavy modules are imported where a command needs them: `mlagen --help` and `mlagen schema`
should not wait for libcst.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from mlagen.codegen.errors import MlagenError
from mlagen.codegen.report import Printer, Report

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
        help="variants.yaml; without it the one found upwards from here, else mlagen's own.",
    )(command)


def _flashinfer_option(command: _F) -> _F:
    return click.option(
        "--flashinfer",
        help="A folder, a wheel file, or a version to fetch. Without it: what a fetched release "
        "pins, the one installed, or the one that generated/MANIFEST.json names.",
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


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(package_name="mlagen", prog_name="mlagen")
def cli() -> None:
    """Sync-free FlashInfer MLA plans for SGLang: rendered, spliced in, checked, taken out."""


@cli.command()
@click.argument("spec_file", metavar="VARIANTS.YAML", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Instead of generated/ beside it.")
@click.option("--check", is_flag=True, help="Only tell whether generated/ is current.")
@_flashinfer_option
@_json_option
def render(
    spec_file: Path, out: Path | None, check: bool, flashinfer: str | None, as_json: bool
) -> None:
    """Render plan functions and hooks into generated/."""
    from mlagen.codegen import commands

    _run("render", as_json, partial(commands.render, spec_file, out, check, flashinfer))


@cli.command()
@click.argument("path")
@click.option("--diff", is_flag=True, help="Print a diff for `git apply`; PATH is not written.")
@click.option("--check", is_flag=True, help="Only tell whether the file would change.")
@click.option("--out", metavar="DIR", help="Write the patched file into this folder.")
@click.option(
    "--test/--no-test",
    default=None,
    help="Insist that the generated GPU tests pass before anything is written, or do not run "
    "them. Without either they run where a GPU is.",
)
@_spec_option
@_flashinfer_option
@_only_option
@_python_option
@_json_option
def patch(
    path: str,
    diff: bool,
    check: bool,
    out: str | None,
    test: bool | None,
    spec_path: Path | None,
    flashinfer: str | None,
    only: tuple[str, ...],
    python: str | None,
    as_json: bool,
) -> None:
    """Splice the plans into SGLang's MLA back end.

    PATH is the file, a checkout, an installed sglang, or a release such as sglang==0.5.17.
    """
    from mlagen.codegen import commands

    inputs = (spec_path, flashinfer, only)
    work = partial(commands.patch, path, diff, check, out, *inputs, test, python)
    _run("patch", as_json, work)


@cli.command()
@click.argument("path")
@click.option("--diff", is_flag=True, help="Print a diff for `git apply`; write nothing.")
@_json_option
def unpatch(path: str, diff: bool, as_json: bool) -> None:
    """Take everything out again, byte for byte."""
    from mlagen.codegen import commands

    _run("unpatch", as_json, partial(commands.unpatch, path, diff))


@cli.command()
@click.argument("path")
@_spec_option
@_flashinfer_option
@_only_option
@_json_option
def check(
    path: str,
    spec_path: Path | None,
    flashinfer: str | None,
    only: tuple[str, ...],
    as_json: bool,
) -> None:
    """Is every fast plan in the file, mlagen's or hand-written, right for this FlashInfer?"""
    from mlagen.codegen import commands

    _run("check", as_json, partial(commands.check, path, spec_path, flashinfer, only))


@cli.command()
@click.argument("path", required=False)
@_spec_option
@_flashinfer_option
@_json_option
def inspect(
    path: str | None, spec_path: Path | None, flashinfer: str | None, as_json: bool
) -> None:
    """Show what is found: FlashInfer's private call, SGLang's shape, sites, waits."""
    from mlagen.codegen import commands

    _run("inspect", as_json, partial(commands.inspect, path, spec_path, flashinfer))


@cli.command("test")
@click.argument("path", required=False)
@click.option("-k", "keyword", metavar="EXPR", help="Just the tests that this names, as in pytest.")
@click.option("--keep", metavar="DIR", help="Run the tests in this folder and leave them there.")
@_spec_option
@_flashinfer_option
@_only_option
@_python_option
@_json_option
def run_tests(
    path: str | None,
    keyword: str | None,
    keep: str | None,
    spec_path: Path | None,
    flashinfer: str | None,
    only: tuple[str, ...],
    python: str | None,
    as_json: bool,
) -> None:
    """Prove the functions on a GPU: those in PATH, or as they are rendered for FlashInfer.

    A PATH that is not patched is tested as `patch` would write it.
    """
    from mlagen.codegen import commands

    work = partial(commands.test, path, spec_path, flashinfer, only, python, keyword, keep)
    _run("test", as_json, work)


@cli.command()
@click.option("--quick", is_flag=True, help="Fewer cells and rounds, in well under a minute.")
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
@click.option("--keep", metavar="DIR", help="Run in this folder and leave the scripts there.")
@click.option("--gate", is_flag=True, help="Exit 1 where a bar is missed.")
@_flashinfer_option
@_python_option
@_json_option
def bench(
    quick: bool,
    out: str | None,
    given: tuple[Path, ...],
    svg: str | None,
    docs: str | None,
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
    work = partial(commands.bench, flashinfer, python, quick, *files, gate)
    _run("bench", as_json, work, bench_report.show)


@cli.command()
def schema() -> None:
    """Print the JSON Schema of variants.yaml."""
    from mlagen.codegen.spec import schema_text

    Printer().answer(schema_text())


def _print(printer: Printer, report: Report, as_json: bool) -> None:
    printer.report(report, as_json=as_json)


def _run(
    command: str,
    as_json: bool,
    work: Callable[[], _R],
    show: Callable[[Printer, _R, bool], None] = _print,
) -> None:
    """Do a command's work and show its report; errors are reports too."""
    printer = Printer()
    try:
        report = work()
    except MlagenError as error:
        if as_json:
            failed = Report(command, error.exit_code, problems=error.problems)
            printer.report(failed, as_json=True)
        else:
            printer.progress("\n".join(str(problem) for problem in error.problems))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)  # click would exit 1, which here means "would change"
    show(printer, report, as_json)
    sys.exit(report.exit_code)


def main() -> None:
    """Entry point of `mlagen` and `python -m mlagen`."""
    cli(prog_name="mlagen")
