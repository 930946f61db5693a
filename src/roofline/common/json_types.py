"""Types of parsed JSON and YAML: values of any kind under text keys."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]  # one that is only read
