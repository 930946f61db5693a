"""The commands by name: where each one's function is, which is imported when it is called."""

from importlib import import_module

from roofline.cli.parser import Command, UsageError
from roofline.common.names import did_you_mean


class CommandGroup:
    """Commands under a common name. default: the one that a call means which names none of them."""

    def __init__(self, help: str, commands: "dict[str, str | CommandGroup]", default: str | None = None) -> None:
        self.help, self.commands, self.default = help, commands, default  # commands: name -> "module:function"


ROOT = CommandGroup(
    "One LLM stack for every chip; every number stands beside the limit of the chip it ran on.",
    {
        "pull": "models.pull:command",
        "list": "models.list_models:command",
        "rm": "models.remove:command",
        "compile": "models.compile:command",
        "lib": "models.lib:command",
        "info": "models.info:command",
        "convert": "models.convert:command",
        "quantize": "models.quantize:command",
        "merge": "models.merge:command",
        "show": "models.show:command",
        "generate": "run.generate:command",
        "chat": "run.chat:command",
        "serve": "run.serve:command",
        "up": "deploy.up:command",
        "status": "deploy.fleet:status",
        "roll": "deploy.fleet:roll",
        "scale": "deploy.fleet:scale",
        "down": "deploy.fleet:down",
        "verify": "run.verify:command",
        "batch": "run.batch:command",
        "replay": "run.replay:command",
        "keys": CommandGroup("Keys of `serve --api-keys`.", {"new": "run.keys:new"}),
        "collect": "deploy.collect:command",
        "deploy": CommandGroup(
            "Files with which other programs run and watch servers.",
            {
                "systemd": "deploy.files:systemd",
                "docker": "deploy.files:docker",
                "compose": "deploy.files:compose",
                "k8s": "deploy.kubernetes:command",
                "prometheus": "deploy.prometheus:command",
            },
        ),
        "doctor": "measure.doctor:command",
        "conform": "measure.conform:command",
        "eval": "measure.evaluate:command",
        "profile": "measure.profile:command",
        "plan": "measure.plan:command",
        "kernels": "measure.kernels:command",
        "finetune": "training.finetune:command",
        "prefer": "training.prefer:prefer",
        "reinforce": "training.prefer:reinforce",
        "parity": "training.parity:command",
        "tune": CommandGroup(
            "Measure kernel variants for a model and keep what wins: tune [run] MODEL.",
            {
                "run": "tuning.tune:run",
                "explain": "tuning.tune:explain",
                "gemms": "tuning.gemms:gemms",
                "export": "tuning.files:export",
                "import": "tuning.files:import_",
            },
            default="run",
        ),
        "train": CommandGroup(
            "Train a model: train [run] CONFIG.yaml.",
            {
                "run": "training.train:run",
                "export": "training.train:export",
                "relay": "training.train:relay",
                "card": "training.card:command",
            },
            default="run",
        ),
        "data": CommandGroup(
            "What a training run reads.",
            {
                "tokenize": "training.data:tokenize",
                "learn-vocabulary": "training.data:learn_vocabulary",
                "verify-order": "training.data:verify_order",
            },
        ),
        "bench": CommandGroup(
            "Measure.",
            {
                "check": "measure.bench_report:check",
                "cost": "measure.bench_report:cost",
                "engine": "measure.bench_engine:command",
                "history": "measure.bench_report:history",
                "latency": "measure.bench_latency:command",
                "links": "measure.bench_links:command",
                "lora": "measure.bench_lora:command",
                "parity": "training.parity:command",
                "replay": "measure.bench_replay:command",
                "report": "measure.bench_report:report",
                "roofs": "measure.bench_roofs:command",
                "train": "measure.bench_train:command",
                "traffic": "measure.bench_traffic:command",
                "load": "measure.bench_load:command",
                "curve": "measure.bench_curve:command",
                "sweep": "measure.bench_sweep:command",
                "tasks": "measure.bench_tasks:command",
                "decode": "measure.bench_decode:command",
                "compare": "measure.bench_compare:command",
                "recompute": "measure.bench_recompute:command",
            },
        ),
    },
)


def find(words: list[str]) -> tuple[str, str | CommandGroup, list[str]]:
    """The command or group that `words` name, its full name, and the words after it. Raises UsageError."""
    path: list[str] = []
    entry: str | CommandGroup = ROOT
    while isinstance(entry, CommandGroup):
        if words and words[0] in entry.commands:
            path.append(words[0])
            entry, words = entry.commands[words[0]], words[1:]
        elif not words or words[0] == "--help":
            if entry.default is not None and not words:
                return " ".join([*path, entry.default]), entry.commands[entry.default], words
            return " ".join(path), entry, words
        elif entry.default is not None:
            path.append(entry.default)
            entry = entry.commands[entry.default]
        else:
            near = did_you_mean(words[0], entry.commands)
            raise UsageError(f"there is no command {words[0]!r}{near}", group=" ".join(path))
    return " ".join(path), entry, words


def load(place: str) -> Command:
    """The function of a command."""
    module, _, name = place.partition(":")
    command: Command = getattr(import_module(f"roofline.cli.{module}"), name)
    return command
