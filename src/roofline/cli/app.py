"""The command `roofline` in Typer: registers every command; each is one short file that imports what it needs when it
runs. Importing Typer takes longer than loading a bundle, so calls that need no help or error message go round it
(quick.py)."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from roofline.cli.measure import bench_engine, bench_latency, bench_links, bench_train, doctor, kernels, profile
from roofline.cli.models import compile, lib, list_models, pull, remove, show
from roofline.cli.options import typed
from roofline.cli.run import chat, generate, serve
from roofline.cli.training import card as train_card
from roofline.cli.training import data, parity, train
from roofline.cli.tuning import files as tune_files
from roofline.cli.tuning import gemms as tune_gemms
from roofline.cli.tuning import tune
from roofline.common.errors import RooflineError


class Commands(TyperGroup):
    """Turns errors with a cause and a remedy into one line on stderr and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RooflineError as error:
            if ctx.params.get("debug"):
                raise
            print(f"roofline: {error}", file=sys.stderr)
            raise typer.Exit(1) from error


class App(typer.Typer):
    """Registers commands whose options are described as in options.py."""

    def command(self, name: str | None = None, **settings: Any) -> Any:
        register = super().command(name, **settings)
        return lambda function: register(typed(function))


app = App(
    name="roofline",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="One LLM stack for every chip; every number stands beside the limit of the chip it ran on.",
)


def print_version(wanted: bool) -> None:
    """--version"""
    if wanted:
        import roofline

        print(roofline.__version__)
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=print_version)
    ] = False,
    no_tune: Annotated[bool, typer.Option("--no-tune", help="Do not use what `roofline tune` chose.")] = False,
) -> None:
    from roofline.common import env, log

    if no_tune:
        env.turn_off("ROOFLINE_TUNED")
    log.configure()


app.command("pull")(pull.command)
app.command("list")(list_models.command)
app.command("rm")(remove.command)
app.command("compile")(compile.command)
app.command("lib")(lib.command)
app.command("show")(show.command)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("serve")(serve.command)
app.command("doctor")(doctor.command)
app.command("profile")(profile.command)
app.command("kernels")(kernels.command)
app.command("parity")(parity.command)

tuning = App(cls=tune.Commands, help="Measure kernel variants for a model and keep what wins: tune [run] MODEL.")
tuning.command("run")(tune.run)
tuning.command("explain")(tune.explain)
tuning.command("gemms")(tune_gemms.gemms)
tuning.command("export")(tune_files.export)
tuning.command("import")(tune_files.import_)
app.add_typer(tuning, name="tune")

training = App(cls=tune.Commands, help="Train a model: train [run] CONFIG.yaml.")
training.command("run")(train.run)
training.command("export")(train.export)
training.command("relay")(train.relay)
training.command("card")(train_card.command)
app.add_typer(training, name="train")

reading = App(no_args_is_help=True, help="What a training run reads.")
reading.command("tokenize")(data.tokenize)
reading.command("learn-vocabulary")(data.learn_vocabulary)
reading.command("verify-order")(data.verify_order)
app.add_typer(reading, name="data")

bench = App(no_args_is_help=True, help="Measure.")
bench.command("engine")(bench_engine.command)
bench.command("latency")(bench_latency.command)
bench.command("links")(bench_links.command)
bench.command("train")(bench_train.command)
app.add_typer(bench, name="bench")
