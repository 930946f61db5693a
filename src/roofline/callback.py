"""Callbacks of `ChatModule.generate`, called as MLC calls those of `mlc_chat.callback`."""

__all__ = ["DeltaCallback", "StreamToStdout"]


class DeltaCallback:
    """The base of callbacks that want what is new of an answer; a subclass has `delta_callback`.

    callback_interval: how many pieces of the answer come between two calls.
    """

    def __init__(self, callback_interval: int = 2) -> None:
        self.callback_interval = callback_interval
        self.curr_message = ""

    def __call__(self, message: str = "", stopped: bool = False) -> None:
        """Take the answer as it is so far, or its end."""
        if stopped:
            self.stopped_callback()
            self.curr_message = ""
        else:
            delta = message.removeprefix(self.curr_message)
            self.curr_message = message
            self.delta_callback(delta)

    def delta_callback(self, delta_message: str) -> None:
        """Take what came since the last call."""
        raise NotImplementedError

    def stopped_callback(self) -> None:
        """Called once the answer is complete, or has failed."""


class StreamToStdout(DeltaCallback):
    """Prints an answer as it comes, and a new line behind it."""

    def delta_callback(self, delta_message: str) -> None:
        print(delta_message, end="", flush=True)

    def stopped_callback(self) -> None:
        print()
