"""Calls of tools as each format writes them, and small chat templates with the signs of each."""

import json
from collections.abc import Callable

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hot": {"type": "boolean"},
            "limit": {"type": ["number", "null"]},
            "places": {"type": "array"},
            "more": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def objects(key: str) -> Callable[[str, dict], str]:
    return lambda name, arguments: json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def mistral(name: str, arguments: dict) -> str:
    return f"[TOOL_CALLS][{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}]"


def mistral_args(name: str, arguments: dict) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def xml(name: str, arguments: dict) -> str:
    lines = "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def seed_xml(name: str, arguments: dict) -> str:
    lines = "".join(f"<parameter={key}>{as_text(value)}</parameter>\n" for key, value in arguments.items())
    return f"<seed:tool_call>\n<function={name}>\n{lines}</function>\n</seed:tool_call>"


def glm(name: str, arguments: dict) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{as_text(value)}</arg_value>" for key, value in arguments.items()
    )
    return f"<tool_call>{name}{pairs}</tool_call>"


HY_SUFFIX = ":opensource"


def hy_v3(name: str, arguments: dict) -> str:
    pairs = "".join(
        f"<arg_key{HY_SUFFIX}>{key}</arg_key{HY_SUFFIX}>\n<arg_value{HY_SUFFIX}>{as_text(value)}</arg_value{HY_SUFFIX}>\n"
        for key, value in arguments.items()
    )
    call = f"<tool_call{HY_SUFFIX}>{name}<tool_sep{HY_SUFFIX}>\n{pairs}</tool_call{HY_SUFFIX}>"
    return f"<tool_calls{HY_SUFFIX}>\n{call}\n</tool_calls{HY_SUFFIX}>"


def invokes(section: str, mark: str = "", *, says_text: bool = False) -> Callable[[str, dict], str]:
    def write(name: str, arguments: dict) -> str:
        def attribute(value: object) -> str:
            return f' string="{str(isinstance(value, str)).lower()}"' if says_text else ""

        lines = "".join(
            f'<{mark}parameter name="{key}"{attribute(value)}>{as_text(value)}</{mark}parameter>\n'
            for key, value in arguments.items()
        )
        return f'<{section}>\n<{mark}invoke name="{name}">\n{lines}</{mark}invoke>\n</{section}>'

    return write


def headed(before: str, between: str, after: str) -> Callable[[str, dict], str]:
    return lambda name, arguments: f"{before}{name}{between}{json.dumps(arguments, ensure_ascii=False)}{after}"


KIMI = headed(
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
    ":0<|tool_call_argument_begin|>",
    "<|tool_call_end|><|tool_calls_section_end|>",
)
DEEPSEEK = tuple(f"<\uff5ctool\u2581{word}\uff5c>" for word in ("calls\u2581begin", "call\u2581begin", "sep"))
DEEPSEEK_END = "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"
DSML = "\uff5cDSML\uff5c"


def gemma(name: str, arguments: dict) -> str:
    def written(value: object) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f'<|"|>{key}<|"|>:{written(part)}' for key, part in value.items()) + "}"
        return "[" + ",".join(map(written, value)) + "]" if isinstance(value, list) else json.dumps(value)

    pairs = ",".join(f"{key}:{written(value)}" for key, value in arguments.items())
    return f"<|tool_call>call:{name}{{{pairs}}}<tool_call|>"


def pythonic(before: str = "", behind: str = "") -> Callable[[str, dict], str]:
    def write(name: str, arguments: dict) -> str:
        return f"{before}[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]{behind}"

    return write


WRITERS: dict[str, Callable[[str, dict], str]] = {
    "hermes": hermes,
    "llama3": objects("parameters"),
    "json": objects("arguments"),
    "mistral": mistral,
    "mistral_args": mistral_args,
    "xml": xml,
    "seed_xml": seed_xml,
    "glm": glm,
    "hy_v3": hy_v3,
    "solar": headed(
        "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|><|calls|>",
    ),
    "minimax": invokes("minimax:tool_call"),
    "dsml": invokes(f"{DSML}function_calls", DSML, says_text=True),
    "dsml_v4": invokes(f"{DSML}tool_calls", DSML, says_text=True),
    "kimi": KIMI,
    "deepseek_v3": headed(f"{DEEPSEEK[0]}{DEEPSEEK[1]}function{DEEPSEEK[2]}", "\n```json\n", f"\n```{DEEPSEEK_END}"),
    "deepseek_v31": headed("".join(DEEPSEEK[:2]), DEEPSEEK[2], DEEPSEEK_END),
    "gemma": gemma,
    "lfm2": pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
    "pythonic": pythonic(),
    "harmony": headed("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
}
