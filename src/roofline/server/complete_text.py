"""What of a text side is built beside the first requests."""

from errno import EMFILE, ENFILE
from typing import TYPE_CHECKING

from roofline.common import log
from roofline.common.errors import RooflineError

if TYPE_CHECKING:
    from roofline.server.text_side import TextSide

LOG = log.get("server")
LATER = "what was left of the tokenizer for later is not built, and the first request that needs it tries again"


def complete_text(text: "TextSide", encoder: bool, about: str = "") -> None:
    """Build what the first odd request would have to wait for, and log what is wrong, which whoever asks is told too.
    Raises nothing: it runs on a thread that nobody waits for.

    encoder: the model has no chats anyway; about: what lines of the log begin with.
    """
    try:
        text.complete()
        if text.chat_notice and not encoder:
            LOG.warning("%s%s", about, text.chat_notice)
        if text.tools_notice and not encoder:
            LOG.warning("%s%s", about, text.tools_notice)
    except RooflineError as error:
        LOG.warning("%s%s", about, error)
    except OSError as error:
        remedy = ". Raise the limit of open files (ulimit -n)" if error.errno in (EMFILE, ENFILE) else ""
        LOG.error("%s%s: %s%s", about, LATER, error, remedy)
    except Exception:
        LOG.exception("%s%s", about, LATER)
