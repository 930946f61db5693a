"""Numbers of a JSON schema as llguidance keeps them: 64-bit floats, read without the last bit of care.

What it reads exactly are integers up to 2**53, and decimal fractions of at most 15 digits (a few of 16) with at most 22
places: read as an integer divided by a power of ten, both exact.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Literal

from roofline.common.json_types import JsonObject

EXACT = 2**53  # integers up to here are floats
MOST_PLACES = 22  # powers of ten up to here are floats
BOUND_DIGITS = 15  # that every float keeps
WIDEST = 2**63 - 2**13  # of a bound: the library makes integers of 64 bits of it
SLACK = 2**12  # more than what two floats below 2**63 are apart
MOST_CORE = 2**17  # of `multipleOf` without factors of ten's: the library makes about as many states of it
FACTOR = 2**32 - 1  # of `multipleOf`, without its decimal point

SMALLEST = Decimal("1e-15")  # that an excluded 0 leaves

Side = Literal["least", "most"]
Place = tuple[str, ...]
KEYS: tuple[tuple[str, str, Side], ...] = (
    ("minimum", "exclusiveMinimum", "least"),
    ("maximum", "exclusiveMaximum", "most"),
)


class Refused(ValueError):
    """What the library cannot hold an answer to. place: of it, below the schema that it is in."""

    def __init__(self, problem: str, place: Place) -> None:
        super().__init__(problem)
        self.place = place


def exact(value: object, place: Place) -> object:
    """A value of `enum` or `const`, with the same numbers. Raises Refused for one that would be rounded."""
    if isinstance(value, dict):
        return {key: exact(item, (*place, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [exact(item, (*place, str(number))) for number, item in enumerate(value)]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if not _survives(value):
        where = "beside properties, required, items, minItems, maxItems, anyOf and $ref alone"
        problem = f"integers to 2**53 can, and fractions of 15 digits; others {where}"
        raise Refused(f"{_shortened(value)} cannot be held exactly: {problem}, or give it as a string", place)
    return int(value) if value == int(value) else value


def bounds(schema: JsonObject) -> JsonObject:
    """The bounds of a schema as the library keeps them: where it would round one, another a little within it.

    The library lets 0 through where `exclusiveMinimum` is 0 and `maximum` 0.5, and a decimal fraction may lie within a
    bound and be the bound itself once it is read as a float. So a bound that is excluded becomes the next number of 15
    digits within it; where only integers may come, it stays. Raises Refused for a bound that leaves no number which the
    library can write.
    """
    result: JsonObject = {}
    for plain, strict, side in KEYS:
        result |= {key: None for key in (plain, strict) if schema.get(key, 0) is None}  # which the library refuses
        value, excluded = schema.get(plain), schema.get(strict)
        if isinstance(excluded, bool):  # as in the fourth draft: whether the plain bound is one that is excluded
            value, excluded = (None, value) if excluded else (value, None)
        if value is not None:
            result[plain] = _bound(value, side, plain)
        if excluded is not None:
            result[strict] = _bound(excluded, side, strict, strict=schema.get("type") != "integer")
    if _leaves_none(result) and not _leaves_none(schema):
        key = "minimum" if "minimum" in result else "exclusiveMinimum"
        problem = (
            f"bounds of more than {BOUND_DIGITS} digits are held a little within, and these leave no number between"
        )
        raise Refused(f"{problem}: widen them, or ask for a string with a pattern", (key,))
    return result


def _leaves_none(schema: JsonObject) -> bool:
    """Whether no number lies within the bounds of a schema."""
    lows: list[tuple[Fraction, bool]] = []
    highs: list[tuple[Fraction, bool]] = []
    for plain, strict, side in KEYS:
        for key in (plain, strict):
            value = schema.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                (lows if side == "least" else highs).append((Fraction(Decimal(repr(value))), key == strict))
    if not lows or not highs:
        return False
    low, high = max(lows), min(highs, key=lambda bound: (bound[0], not bound[1]))
    return low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))


def _bound(value: object, side: Side, key: str, strict: bool = False) -> object:
    """A bound that the library keeps. strict: it must lie within the one of the schema."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused("it is no finite number", (key,))
    sign = 1 if side == "least" else -1  # where the numbers within the bound lie
    context = Context(prec=BOUND_DIGITS, rounding=ROUND_CEILING if sign > 0 else ROUND_FLOOR)
    if abs(value) > EXACT - key.startswith("exclusive"):  # the library adds 1 to one that is excluded
        inner = max(sign * int(value), -WIDEST) + SLACK
        if inner > WIDEST:
            widest = f"{WIDEST - SLACK:.0e}".replace("e+", " x 10^")
            raise Refused(
                f"{_shortened(value)} leaves no numbers that can be held exactly: up to {widest} there are", (key,)
            )
        return int(context.create_decimal(sign * inner))
    decimal = Decimal(repr(value))
    if strict:
        decimal = _inside(decimal, sign, context)
    elif _survives(value):
        return int(value) if value == int(value) else value
    rounded = context.create_decimal(decimal)
    if _places(rounded) > MOST_PLACES:
        rounded = rounded.quantize(Decimal(1).scaleb(-MOST_PLACES), rounding=context.rounding)
    return int(rounded) if rounded == int(rounded) else float(rounded)


def _inside(decimal: Decimal, sign: int, context: Context) -> Decimal:
    """The next number of 15 digits within a bound."""
    if abs(decimal) < SMALLEST:
        return sign * SMALLEST if decimal * sign >= 0 else Decimal(0)
    return context.next_plus(decimal) if sign > 0 else context.next_minus(decimal)


def count(value: object, place: Place) -> int:
    """A number of items or characters. Raises Refused for a value that is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or not float(value).is_integer():
        raise Refused("it must be a whole number, 0 or more", place)
    return int(value)


def multiple(value: object) -> object:
    """The value of `multipleOf`. Raises Refused for one that is none, or would be rounded."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise Refused("it must be a number above 0", ("multipleOf",))
    scaled = _scaled(value)
    if scaled is None:
        raise Refused(f"{_shortened(value)} cannot be held exactly", ("multipleOf",))
    core = scaled[0]
    for factor in (2, 5):
        while core % factor == 0:
            core //= factor
    if core > MOST_CORE:
        problem = f"{_shortened(value)} takes too long to be held: without its factors 2 and 5 it may be {MOST_CORE}"
        raise Refused(f"{problem} at most. Leave it out and check the answer, or ask for the quotient", ("multipleOf",))
    return int(value) if value == int(value) else value


def refuse_products(values: list[object]) -> None:
    """Refuse several values of `multipleOf` whose common multiple the library could not hold. Raises ValueError."""
    numbers = {value for value in values if isinstance(value, int | float) and not isinstance(value, bool)}
    scaled = [pair for value in numbers if value > 0 and (pair := _scaled(value)) is not None]
    places = max((places for _, places in scaled), default=0)
    product = math.prod(digits * 10 ** (places - own_places) for digits, own_places in scaled)
    if len(scaled) > 1 and product > FACTOR:
        raise ValueError("multipleOf: several are combined, whose common multiple is too large")


def _survives(value: int | float) -> bool:
    """Whether the library reads and writes a number without changing it."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if value == int(value):
        return abs(value) <= EXACT
    decimal = Decimal(repr(value))
    return abs(int(decimal.scaleb(_places(decimal)))) <= EXACT and _places(decimal) <= MOST_PLACES


def _places(decimal: Decimal) -> int:
    """Digits behind the decimal point."""
    exponent = decimal.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _scaled(value: int | float) -> tuple[int, int] | None:
    """A number without its decimal point, and how many digits stood behind that, as the library finds them; None where
    it would find another number."""
    if not _survives(value):
        return None
    digits, places = float(value), 0
    while digits != int(digits):  # its own way, with its own rounding
        digits, places = digits * 10.0, places + 1
    exact_value = Fraction(int(digits), 10**places)
    return (int(digits), places) if digits <= FACTOR and exact_value == Fraction(Decimal(repr(value))) else None


def _shortened(value: int | float) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
