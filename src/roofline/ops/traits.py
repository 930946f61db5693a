"""The traits of ops: a start reads them without the vocabulary, which it does not need."""

from enum import Enum


class Trait(Enum):
    """What is true of an op, declared with it. Passes and backends ask for traits; they keep no lists of op names.

    That an op reads or writes the cache, or makes integer rows, needs no trait: the types of its operands and results
    say so (`Instr.writes_cache`, `Instr.makes_integers`).
    """

    ROW_WISE = "row i of each result depends on row i of the values alone"
    BY_COLUMN = "column i of the result depends on column i of the values alone"
    BY_HEAD = "with `heads` heads: a head of the result depends on the same head of the first value alone"
    GATED = "takes gate and up as two values, or as one with both side by side"
    PRODUCT = "multiplies the rows of its first value with its first weight, a matrix [out, in]"
    EXPERTS = (
        "multiplies the rows of its first value with those matrices of its first weight that its second value names"
    )
    HEAD_PRODUCT = "multiplies each head of its first value with a matrix of its own, a part of its first weight's rows"
    HEAD_MOVE = "with `heads` heads: a head of the result is made of the same heads of its values"
    WHOLE_VALUES = "its values are no views, so a linear that makes one of them is not merged with others"
    VIEW = "the result is some columns of the value, in the same memory"
    SCALES = "column i of the result is a multiple of the i-th element of its weights together"
    ROUNDED = "on a target with 16-bit activations the result is rounded to them"
    READS_WIDE = "computes in float32 inside, so results that only such ops read are not rounded before them"
    SPLITS = "its matrix may be divided among ranks, as the family's spec says"
    LONG_SUM = "adds up many terms, which libraries do in an order that may depend on the number of rows"
