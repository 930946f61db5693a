"""What a callback is: it watches the lines of a run's log, and may end the run."""

from collections.abc import Sequence

from roofline.common.json_types import JsonMapping


class Callback:
    """The base of callbacks; a hook that is not written does nothing.

    Hooks are called in the first process alone, and all processes do what they say: a text that a hook returns ends
    the run after its step, as max_duration does, with the text as the reason; an error ends it without a checkpoint.
    """

    def earlier(self, lines: Sequence[JsonMapping]) -> str | None:
        """Where a run goes on from a checkpoint: the lines before it, so that nothing else has to be kept."""
        return None

    def step(self, line: JsonMapping) -> str | None:
        """After each step, with its line of the log: step, tokens, loss, lr, grad_norm, seconds and others."""
        return None

    def evaluation(self, line: JsonMapping) -> str | None:
        """After each evaluation, with its line of the log: step, label, eval_loss, perplexity, eval_tokens."""
        return None

    def close(self) -> None:
        """At the end of the run, however it ends."""
        return None
