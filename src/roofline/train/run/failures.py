"""What a user can do about an error that a library raised in a run."""

import errno
import re

from roofline.common.errors import RooflineError
from roofline.common.files import cause_of
from roofline.train.config.schema import TrainConfig
from roofline.train.memory.exhausted import is_out_of_memory, out_of_memory
from roofline.train.parallel.processes import World
from roofline.train.run_folder import folder_of
from roofline.train.storage.store import StoreError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOST = re.compile(r"connection (closed|reset) by peer|broken pipe", re.IGNORECASE)  # by gloo


def explained(error: Exception, config: TrainConfig, world: World) -> RooflineError | None:
    """Our error with the remedy in place of a library's; None for one that is not known."""
    if is_out_of_memory(error):
        return out_of_memory("training", str(error) or type(error).__name__)
    if world.grouped and _LOST.search(str(error)):
        return RooflineError("another process of this run has ended; what it said stands above")
    if isinstance(error, OSError) and error.errno in FULL:
        return StoreError(
            f"{error.filename or folder_of(config)}: {cause_of(error)}: free some space there; checkpoints that are "
            "complete are kept, and autoresume=true goes on from the last"
        )
    return None
