"""What all sections of a configuration have in common."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

from roofline.common.errors import ConfigError
from roofline.common.units import parse_bytes
from roofline.train.config.duration import parse


def _epochs(value: object) -> object:
    """A duration; a bare number counts epochs, as in Composer."""
    return f"{value}ep" if isinstance(value, int) and not isinstance(value, bool) else value


def _duration(text: str) -> str:
    parse(text)
    return text


def _length(text: str) -> str:
    count, unit = parse(text)
    if unit == "dur" or not count:
        raise ValueError(f"{text!r} is no length of a run, such as 200ba or 1ep")
    return text


def _bytes(value: int | str) -> int | str:
    try:
        parse_bytes("", value)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix(": ")) from error
    return value


Duration = Annotated[str, BeforeValidator(_epochs), AfterValidator(_duration)]
RunLength = Annotated[str, BeforeValidator(_epochs), AfterValidator(_length)]
Bytes = Annotated[int | str, AfterValidator(_bytes)]


class Section(BaseModel):
    """Part of a configuration: unknown keys are refused, and a null stands for the default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in cls.model_fields}
