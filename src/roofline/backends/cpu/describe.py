"""What the cpu backend would run with here, and why: for `doctor`."""


def describe() -> dict[str, object]:
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
        "core": f"{_native.build_id()} ({_native.compiler()})",
        "tuned": _tuned(str(isa.value), int(threads.value)),
    }


def _tuned(isa: str, threads: int) -> str:
    """What the tuning store has for this machine, in a line."""
    from roofline.backends.cpu.select import setting_of
    from roofline.hardware import detect
    from roofline.hardware.tuning import store as tunings

    chip = detect.detect().fingerprint
    stored = tunings.load("cpu", chip)
    if not stored.records:
        return "nothing yet: roofline tune MODEL"
    setting = setting_of(isa, threads)
    usable = [r for r in stored.records.values() if r.setting == setting]
    models = {v.model for v in stored.verdicts.values() if v.kept and v.setting == setting}
    text = f"{len(usable)} shapes, used by {', '.join(sorted(models)) or 'no model'}; in {tunings.path('cpu', chip)}"
    stale = len(stored.records) - len(usable)
    return f"{text}; {stale} of other builds or settings are ignored" if stale else text
