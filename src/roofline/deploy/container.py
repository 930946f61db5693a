"""What a container runs: `python -m roofline.deploy.container [COMMAND] [WORDS...]`, in place of `roofline COMMAND`.

`serve`, also where no command is given, gets what only the container's surroundings know: which model, and where to
listen. All other commands are run as they are.

The model is the first word behind `serve`, or ROOFLINE_MODEL, or the one in SageMaker's folder, or HF_MODEL_ID, or the
only one in /models. Without a key a server listens inside its container alone, unless the call says --host; in
SageMaker, which lets in whom AWS has let in and sends no key, it listens for all on 8080.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from roofline.common import env
from roofline.common.errors import ConfigError, RooflineError

SAGEMAKER, SAGEMAKER_PORT = Path("/opt/ml/model"), 8080
MODELS = Path("/models")
PREFIXES = ("SM_ROOFLINE_", "SM_VLLM_")  # SM_ROOFLINE_MAX_RUNNING=8 is --max-running=8; vLLM's image reads SM_VLLM_*
ABOUT = ("--version", "--help", "-h")  # flags of `roofline` itself
MOST_DEPTH = 3  # folders in folders in which the only model is looked for
MOST_LISTED = 8
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")


def container_words(
    words: Sequence[str],
    environment: Mapping[str, str],
    sagemaker: Path = SAGEMAKER,
    models: Path = MODELS,
) -> list[str]:
    """Return the words of `roofline` for those of the container. Raises ConfigError where there is no model to serve.

    sagemaker, models: the folders in which SageMaker, and a volume, have the model.
    """
    words = list(words) or ["serve"]
    if words[0].startswith("-") and words[0] not in ABOUT:
        words = ["serve", *words]
    if words[0] != "serve" or "--help" in words:
        return words
    sagemaker = Path(environment.get("SM_MODEL_DIR") or sagemaker)
    in_sagemaker = "SM_MODEL_DIR" in environment or sagemaker.is_dir()
    options = words[1:]
    names_model = bool(options) and not options[0].startswith("-")
    position = 2 if names_model else 1
    words[position:position] = _options_of(environment) if in_sagemaker else []
    if not names_model and not _has(words, "--model", "--config"):
        words.insert(1, _model(environment, sagemaker, models))
    if _has(words, "--host", "--uds", "--config"):
        return words
    if in_sagemaker:
        port = environment.get("SAGEMAKER_BIND_TO_PORT") or str(SAGEMAKER_PORT)
        return [*words, "--host", "0.0.0.0", *([] if _has(words, "--port") else ["--port", port])]
    if environment.get("ROOFLINE_API_KEY", "").strip() or _has(words, "--api-key", "--api-keys"):
        return [*words, "--host", "0.0.0.0"]
    return words


def only_model_in(folder: Path, depth: int = MOST_DEPTH) -> Path | None:
    """Return the model that a folder is, or that it alone holds; None where there is none. Raises ConfigError for
    several."""
    from roofline.bundle.reader import is_bundle

    if not folder.is_dir():
        return None
    if (folder / "config.json").is_file() or is_bundle(folder):
        return folder
    files = [
        file for file in sorted(folder.glob("*.gguf")) if not (part := _PART.search(file.name)) or part[1] == "00001"
    ]
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    models = [*files, *(model for path in inner if depth and (model := only_model_in(path, depth - 1)) is not None)]
    if len(models) > 1:
        listed = ", ".join(path.name for path in models[:MOST_LISTED])
        raise ConfigError(f"{folder} holds {len(models)} models ({listed}): name one, with ROOFLINE_MODEL=PATH")
    return models[0] if models else None


def main(words: Sequence[str]) -> int:
    """Become `roofline` with the words that stand for the container's. Returns only where that is not possible."""
    environment = env.all_foreign()
    try:
        command = container_words(words, environment)
    except RooflineError as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 1
    if command[0] == "serve" and not _has(command, "--host", "--uds", "--config", "--help"):
        notice = "no key: the server is reached from inside its container alone. Give it ROOFLINE_API_KEY, or --host"
        print(f"roofline: {notice}", file=sys.stderr)
    sys.stderr.flush()
    # The same process, so that signals to the container reach the server.
    os.execv(sys.executable, [sys.executable, "-m", "roofline", *command])


def _model(environment: Mapping[str, str], sagemaker: Path, models: Path) -> str:
    """The model to serve where the call names none."""
    if name := environment.get("ROOFLINE_MODEL"):
        return name
    if (model := only_model_in(sagemaker)) is not None:
        return str(model)
    if hub := environment.get("HF_MODEL_ID"):
        return f"hf:{hub}"
    if (model := only_model_in(models)) is not None:
        return str(model)
    raise ConfigError(
        f"there is no model: name one (`serve MODEL`, or ROOFLINE_MODEL=MODEL), or put one into {models} "
        f"(a volume) or {sagemaker} (SageMaker)"
    )


def _options_of(environment: Mapping[str, str]) -> list[str]:
    """Options of serve from variables: the only way to give some in SageMaker, which calls `serve` alone."""
    words = []
    for prefix in PREFIXES:
        for name, value in environment.items():
            if name.startswith(prefix):
                option = name.removeprefix(prefix).lower().replace("_", "-")
                switch = {"": "", "true": "", "false": "no-"}.get(value.strip().lower())
                words.append(f"--{option}={value}" if switch is None else f"--{switch}{option}")
    return sorted(words)


def _has(words: Sequence[str], *flags: str) -> bool:
    end = words.index("--") if "--" in words else len(words)
    return any(word.partition("=")[0] in flags for word in words[:end])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
