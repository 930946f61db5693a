"""What a user can do about an error that a library raised in a run."""

import errno
import re

from roofline.common.errors import RooflineError, SaidElsewhere
from roofline.common.files import cause_of
from roofline.train.config.schema import TrainConfig
from roofline.train.memory.exhausted import is_out_of_memory, out_of_memory
from roofline.train.parallel import meeting
from roofline.train.parallel.processes import World
from roofline.train.run_folder import folder_of
from roofline.train.storage.store import StoreError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# By gloo.
_LOST = re.compile(r"connection (closed|reset) by peer|broken pipe", re.IGNORECASE)
_LATE = re.compile(r"timed out (waiting|after)|timeout", re.IGNORECASE)


def explained(error: Exception, config: TrainConfig, world: World) -> RooflineError | None:
    """Our error with the remedy in place of a library's; None for one that is not known."""
    if is_out_of_memory(error):
        place = f" on rank {world.rank}" if world.grouped else ""
        return out_of_memory(f"training{place}", str(error) or type(error).__name__)
    if world.grouped and _LATE.search(str(error)):
        return _waited_in_vain(config, world)
    if world.grouped and _LOST.search(str(error)):
        return _lost(world)
    if isinstance(error, OSError) and error.errno in FULL:
        return StoreError(
            f"{error.filename or folder_of(config)}: {cause_of(error)}: free some space there; checkpoints that are "
            "complete are kept, and autoresume=true goes on from the last"
        )
    return None


def _waited_in_vain(config: TrainConfig, world: World) -> RooflineError:
    """Return the error that names the ranks which do not answer; the first rank that has waited in vain says it."""
    silent = world.meeting.silent() if world.meeting is not None else []
    seconds = f"{config.dist_timeout:g} s (dist_timeout)"
    if not silent:
        return RooflineError(
            f"the processes of this run have waited for each other for {seconds}: one was slower than that, in a "
            "checkpoint perhaps: raise dist_timeout"
        )
    numbers = ", ".join(map(str, silent))
    said = f"process {numbers} of {world.size} has" if len(silent) == 1 else f"processes {numbers} of {world.size} have"
    message = (
        f"{said} not answered for {seconds}: stopped, stuck or cut off; end what is left of it, and autoresume=true "
        "goes on from the last checkpoint"
    )
    late = world.meeting.late() if world.meeting is not None else []
    speaker = min(late or [rank for rank in range(world.size) if rank not in silent])
    return RooflineError(message) if world.rank == speaker else SaidElsewhere(message)


def _lost(world: World) -> RooflineError:
    """Return the error of a rank whose connection to another one has ended.

    A rank that has waited in vain for a third one closes its connections: it names that one, and this rank is silent.
    """
    message = "another process of this run has ended; what it said stands above"
    if world.meeting is not None:
        world.meeting.answer()
        if world.meeting.late(meeting.ANSWER_SECONDS):
            return SaidElsewhere(message)
    return RooflineError(message)
