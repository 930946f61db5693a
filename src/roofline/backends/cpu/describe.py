"""What the cpu backend would run with here, and why: for `doctor`."""

from typing import Any


def describe() -> dict[str, Any]:
    """isa and threads with the reason of each choice, instruction sets available, formats, orders, core's identity.

    Raises UnsupportedError where ROOFLINE_ISA names an instruction set this chip lacks.
    """
    from roofline import _native
    from roofline.backends.cpu.select import choose_isa, choose_threads
    from roofline.program.target import CPU

    isa, threads = choose_isa(), choose_threads()
    orders = {
        "linear (quantised weights)": CPU.quantised_order,
        "linear (logits)": CPU.logits_order,
        "linear (float weights)": CPU.float_order,
        **CPU.orders,
    }
    return {
        "isa": {"value": isa.value, "reason": isa.reason, "available": _native.isas()},
        "threads": {"value": threads.value, "reason": threads.reason},
        "formats": _native.format_names(),
        "orders": orders,
        "kv": CPU.attend_dtypes["kv_dtype"],
        "core": _native.build_id(),
    }
