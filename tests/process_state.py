"""What tests share with the later ones of their process, and leave as they found it."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)


def _variables() -> dict[str, str]:
    return {name: os.environ[name] for name in os.environ if name.startswith("ROOFLINE_")}


@contextmanager
def process_state_as_before() -> Iterator[None]:
    """Puts back what the block changed of this process, and fails where no program has a reason to leave it changed.

    Some programs make all of torch deterministic: that alone is put back without a word.
    """
    handlers = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
    folder, variables = os.getcwd(), _variables()
    yield
    changed = []
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
            changed.append(f"the handler of {number.name}")
    if os.getcwd() != folder:
        os.chdir(folder)
        changed.append("the working directory")
    if _variables() != variables:
        for name in {*variables, *_variables()}:
            os.environ.pop(name, None)
        os.environ.update(variables)
        changed.append("a variable of the environment")
    torch = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    assert not changed, f"left behind for later tests: {', '.join(changed)}"
