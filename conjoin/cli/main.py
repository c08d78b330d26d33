"""The list of commands, and what becomes of a user's mistake."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from conjoin.api import ConjoinError, __version__
from conjoin.cli.calibrating import calibrate_command
from conjoin.cli.inspecting import doctor_command, inspect_command
from conjoin.cli.machines import machine_app
from conjoin.cli.planning import compare_command, diff_command, explain_command, plan_command
from conjoin.cli.rules import rules_app
from conjoin.cli.running import run_command, verify_command
from conjoin.cli.simulating import simulate_command

app = typer.Typer(
    name="conjoin",
    help="Find, prove and run the fastest way to train a PyTorch model on a given machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"conjoin {__version__}")
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
app.command("explain")(explain_command)
app.command("diff")(diff_command)
app.command("simulate")(simulate_command)
app.command("run")(run_command)
app.command("verify")(verify_command)
app.command("calibrate")(calibrate_command)
app.command("doctor")(doctor_command)
app.add_typer(machine_app, name="machine")
app.add_typer(rules_app, name="rules")


def main(arguments: list[str] | None = None) -> int:
    """Run a command; a user's mistake is one message and exit code 2, never a traceback."""
    try:
        app(args=arguments)
    except ConjoinError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
