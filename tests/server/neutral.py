"""Values for tables of fields that ask for nothing."""

SAMPLES = {dict: {"a": "b"}, str: "x", int: 3}


def sample(value: object) -> object:
    """A value of a table; of a type, which stands for all of its values, one of them."""
    return SAMPLES[value] if isinstance(value, type) else value
