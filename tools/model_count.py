"""Counts the model types of transformers and the architectures of GGUF files that we read.

python -m tools.model_count             # write the figures into README.md and docs/models.md, between their marks
"""

import re
from importlib.metadata import version
from pathlib import Path

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.weights.config.hf import from_hf
from roofline.weights.families.table import ARCHITECTURES

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "models.md")
START, END = "<!-- count: python -m tools.model_count -->", "<!-- end of count -->"
_MARKED = re.compile(f"{re.escape(START)}\n.*?{re.escape(END)}", re.DOTALL)


def is_read(model_type: str) -> bool:
    """Whether config.json of that type has a reader, or its text part has, where it is one of several."""
    try:
        from_hf(Path("config.json"), {"model_type": model_type, "text_config": {}})
    except UnsupportedError as error:
        return "model_type" not in error.what
    except ConfigError:
        return True  # of a type that we have: it has no sizes
    return True


def counted() -> str:
    """The sentence with the figures, between its marks."""
    from gguf import MODEL_ARCH_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if is_read(kind)]
    architectures = [name for name in MODEL_ARCH_NAMES.values() if name in ARCHITECTURES]
    causal, known = len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), len(MODEL_ARCH_NAMES)
    text = (
        f"Read are {len(types)} of the {causal} causal model types of transformers {_release('transformers')}, and "
        f"{len(architectures)} of the {known} architectures of the package gguf {_release('gguf')}."
    )
    return f"{START}\n{text}\n{END}"


def with_count(page: str) -> str:
    """A page with the figures of now. Raises ValueError where it has no marks."""
    written, marks = _MARKED.subn(lambda _: counted(), page)
    if marks != 1:
        raise ValueError(f"the page needs one {START} and, after it, {END}")
    return written


def _release(package: str) -> str:
    """The first two numbers of what is installed."""
    return ".".join(version(package).split(".")[:2])


def main() -> None:
    for path in PAGES:
        path.write_text(with_count(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
