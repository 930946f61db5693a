"""The formats of tool calls that are known, in the order in which a chat template is asked for their signs."""

from types import MappingProxyType

from roofline.text.replies.call_format import CallFormat
from roofline.text.replies.formats.argument_keys import ArgumentKeyCalls, HunyuanCalls
from roofline.text.replies.formats.deepseek import DeepseekCalls, OlderDeepseekCalls
from roofline.text.replies.formats.gemma import GemmaCalls
from roofline.text.replies.formats.harmony import HarmonyCalls
from roofline.text.replies.formats.hermes import HermesCalls
from roofline.text.replies.formats.invokes import DsmlCalls, DsmlToolCalls, MinimaxCalls
from roofline.text.replies.formats.kimi import KimiCalls
from roofline.text.replies.formats.mistral import MistralArgumentsCalls, MistralCalls
from roofline.text.replies.formats.objects import JsonCalls, ObjectCalls
from roofline.text.replies.formats.pythonic import BarePythonicCalls, PythonicCalls
from roofline.text.replies.formats.solar import SolarCalls
from roofline.text.replies.formats.xml_parameters import SeedCalls, XmlParameterCalls

FORMATS: tuple[type[CallFormat], ...] = (
    MistralArgumentsCalls,
    MistralCalls,
    XmlParameterCalls,
    SeedCalls,
    HunyuanCalls,
    ArgumentKeyCalls,
    MinimaxCalls,
    DsmlToolCalls,
    DsmlCalls,
    KimiCalls,
    OlderDeepseekCalls,
    DeepseekCalls,
    GemmaCalls,
    HarmonyCalls,
    SolarCalls,
    PythonicCalls,
    BarePythonicCalls,
    HermesCalls,
    ObjectCalls,
    JsonCalls,
)
CALL_FORMATS = MappingProxyType({form.name: form for form in FORMATS})
CALL_MARKS = tuple(dict.fromkeys(mark for form in FORMATS for mark in form.marks))


def call_format(template: str) -> type[CallFormat] | None:
    """Return the format of calls of a model with this chat template; None: it has the signs of none."""
    return next((form for form in FORMATS if form.writes(template)), None)
