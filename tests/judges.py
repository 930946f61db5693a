"""Packages that results are compared with and that the development environment cannot hold.

Their versions would change those of other packages there, so `make test-judges` installs them beside it, in the
versions of `tests/judges.txt`, and runs the tests that need them. There a missing package is a failure; in other
runs the test is skipped.
"""

import importlib
import os
from importlib.util import find_spec
from types import ModuleType

import pytest


def require(package: str) -> None:
    """Skip the test where `package` is not installed, or fail it in the run that must have all of them."""
    if find_spec(package) is not None:
        return
    reason = f"the judge is the package {package}, which `make test-judges` installs"
    if os.environ.get("ROOFLINE_TEST_JUDGES"):
        pytest.fail(f"{reason}, and it is not installed")
    pytest.skip(reason)


def judge(module: str) -> ModuleType:
    """Import `module` of a package that results are compared with, as `require` allows."""
    require(module.partition(".")[0])
    return importlib.import_module(module)
