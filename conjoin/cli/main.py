"""The list of commands, and what becomes of a user's mistake."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Callable
from functools import cache
from io import TextIOWrapper
from typing import Annotated

import typer
from typer.exceptions import TyperException

from conjoin.cli.commands.calibrate import calibrate_command
from conjoin.cli.commands.explain import explain_command
from conjoin.cli.commands.fits import fits_command
from conjoin.cli.commands.inspect import doctor_command, inspect_command
from conjoin.cli.commands.machine import machine_app
from conjoin.cli.commands.plan import compare_command, diff_command, plan_command
from conjoin.cli.commands.rules import rules_app
from conjoin.cli.commands.run import run_command
from conjoin.cli.commands.simulate import simulate_command
from conjoin.cli.commands.verify import verify_command
from conjoin.environment import installed_version
from conjoin.errors import ConjoinError, UsageError

app = typer.Typer(
    name="conjoin",
    help="Find, prove and run the fastest way to train a PyTorch model on a given machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes would take half of the time that help takes
    context_settings={"max_content_width": 120},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"conjoin {installed_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # its callback has done what it asks for
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command."""


app.command("inspect")(inspect_command)
app.command("plan")(plan_command)
app.command("compare")(compare_command)
app.command("fits")(fits_command)
app.command("explain")(explain_command)
app.command("diff")(diff_command)
app.command("simulate")(simulate_command)
app.command("run")(run_command)
app.command("verify")(verify_command)
app.command("calibrate")(calibrate_command)
app.command("doctor")(doctor_command)
app.add_typer(machine_app, name="machine")
app.add_typer(rules_app, name="rules")


_INTERRUPTED = 130
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a full or broken disk answers to writing; the standard output may be a file on one."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; a user's mistake is one message and exit code 2, never a traceback."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # not every locale has a word for ×
    try:
        code = _run(arguments)
    except ConjoinError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        print("stopped", file=sys.stderr)
    return code


@cache
def _commands() -> Callable[..., object]:
    """All commands with their flags: typer reads them anew from every function whenever the app is called."""
    return typer.main.get_command(app)


def _run(arguments: list[str] | None) -> int:
    try:
        try:
            code = _commands()(args=arguments, standalone_mode=False)
        finally:
            if sys.stdout is not None:  # it is None after >&- in a shell
                sys.stdout.flush()
    except TyperException as error:
        return _refuse(error, sys.argv[1:] if arguments is None else arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except OSError as error:
        if error.errno not in (errno.EPIPE, *_NO_ROOM):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries again to write the rest when it ends
        if error.errno == errno.EPIPE:  # nobody reads on, as after `| head`
            return 1
        raise UsageError(
            f"What the command had to say could not be written: {error.strerror}. Its answer, or a file, is not "
            f"complete. Make room, or write elsewhere."
        ) from None
    return code if isinstance(code, int) else 0


def _refuse(error: TyperException, arguments: list[str]) -> int:
    """An option that is not there or not so, in the words of every other mistake; a command by itself gets its help."""
    why = error.format_message().strip()
    if why.startswith("Usage: "):
        print(why, file=sys.stderr)
        return error.exit_code
    raise UsageError(
        f"`conjoin {shlex.join(arguments)}` cannot be done as it is written. {why}{'' if why[-1:] in '.?' else '.'} "
        f"`{' '.join(['conjoin', *_command(app, arguments)])} --help` lists what it takes."
    ) from None


def _command(group: typer.Typer, words: list[str]) -> list[str]:
    """The command that words begin with, as far as there is one: `machine`, `show`."""
    groups = {each.name: each.typer_instance for each in group.registered_groups}
    match words:
        case [name, *rest] if (inner := groups.get(name)) is not None:
            return [name, *_command(inner, rest)]
        case [name, *_] if name in {each.name for each in group.registered_commands}:
            return [name]
    return []


if __name__ == "__main__":
    sys.exit(main())
