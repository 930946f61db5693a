"""Fixtures that several rooms share."""

import functools
import gc
import logging
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import pytest
from hypothesis import HealthCheck, settings

from tests.command_line import loggers_as_before
from tests.process_state import process_state_as_before

# Tests of bundles switch it on with a ROOFLINE_HOME of their own; no other leaves compiled models in the user's cache.
os.environ.setdefault("ROOFLINE_BUNDLES", "off")
# Read when torch or numpy is imported, here and in the processes that tests start. As many test processes as cores run
# beside each other: with a thread for each core in each of them, most of their time went into waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).parent
# By the processor time of their slow tests, then of their other tests.
LONGEST = (
    "backends/test_cpu_program.py",
    "train/test_exhausted_ranks.py",
    "train/test_processes.py",
    "e2e/test_finetune.py",
    "backends/test_cpu_architectures.py",
    "bundle/test_library_sanitizers.py",
    "e2e/test_sockets.py",
    "e2e/test_robust.py",
    "train/test_shardings.py",
    "e2e/test_exact.py",
    "train/test_parallel.py",
    "bench/serving/test_commands.py",
    "e2e/test_readme.py",
    "models/test_config_variants.py",
    "train/test_owner.py",
    "train/test_memory.py",
    "train/test_probe.py",
    "train/test_hung.py",
    "train/test_relay.py",
    "train/test_adapter_runs.py",
    "train/test_finetune.py",
    "train/test_loop.py",
    "bench/plan/test_plan.py",
    "bench/plan/test_fleet.py",
)
# Of the examples that a test asks hypothesis for, a quick run draws one in so many, and not fewer than so many; others
# in each run. The slow run draws all.
ONE_EXAMPLE_IN, FEWEST_EXAMPLES = 5, 10
QUICK_FRAME = 0.05  # seconds: setups and teardowns that take longer are among --durations
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # variables by which httpx reads others than this machine's


def pytest_configure() -> None:
    """Whoever starts the tests in the background of a shell has SIGINT ignored, here and in every process of a test.
    Fewer collections of garbage take a twentieth off the processor time of a run. Hypothesis fails a test one of whose
    examples takes 0.2 s, or whose examples take long to draw: on a busy machine any may."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")
    gc.set_threshold(500_000, 50, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest begin first: the last ones of a run then end together on all its processes."""
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Quick tests of hypothesis are there again as slow ones, which draw all examples."""
    made = yield
    if isinstance(made, list):
        made += [with_all_examples(item) for item in made if draws_fewer(item)]
    return made


def draws_fewer(item: pytest.Item) -> TypeGuard[pytest.Function]:
    is_drawn = isinstance(item, pytest.Function) and hasattr(item.obj, "hypothesis")
    return is_drawn and item.get_closest_marker("slow") is None


def with_all_examples(item: pytest.Function) -> pytest.Function:
    again = pytest.Function.from_parent(
        item.parent,
        name=f"{item.name} (all examples)",
        callspec=getattr(item, "callspec", None),
        callobj=item.obj,
        fixtureinfo=item._fixtureinfo,
        originalname=item.originalname,
    )
    again.add_marker("slow")
    return again


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Quick tests of hypothesis draw a part of their examples."""
    if not draws_fewer(item):
        return (yield)
    import hypothesis

    asked = item.obj._hypothesis_internal_use_settings
    fewer = min(asked.max_examples, max(FEWEST_EXAMPLES, asked.max_examples // ONE_EXAMPLE_IN))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(item.obj, "_hypothesis_internal_use_settings", hypothesis.settings(asked, max_examples=fewer))
        return (yield)


def tell_less(worker: Any) -> None:
    """Keep from the main process what it makes nothing of: that a test begins, and that its fixtures were set up and
    torn down at once. Half of what the messages of 14,000 tests take is saved, 0.5 ms of each.
    """
    send = worker.sendevent

    def send_what_counts(name: str, **values: Any) -> None:
        report = values["data"] if name == "testreport" else {"when": "call"}
        is_frame = report["when"] != "call" and report["outcome"] == "passed" and not report["sections"]
        if name != "logstart" and not (is_frame and report["duration"] < QUICK_FRAME):
            send(name, **values)

    worker.sendevent = send_what_counts


@pytest.hookimpl(specname="pytest_collection_finish")
def pytest_workers_tell_less(session: pytest.Session) -> None:
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":  # of xdist, which has no hook that says what is sent
            tell_less(plugin)


def pytest_collection_finish() -> None:
    """Thousands of tests and their modules stay until the end: no collection needs to look at them. Handlers
    of pytest are added to each logger that passes nothing on, six times a test: torch has 60, of debugging that is off.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger) and not logger.handlers:
            logger.propagate = True
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Numbers that a test or its fixtures draw from torch are the same alone, in company and in every run."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Each client of httpx reads all certificates of this machine, 20 ms of processor time, whatever it talks with.
    Tests make thousands of clients, most of them for addresses without TLS: those that name no certificates share
    what was read.
    """
    from httpx._transports import default

    plain = default.create_ssl_context

    @functools.cache
    def shared(trust_env: bool, *files: str | None) -> ssl.SSLContext:
        """The context of this machine's certificates, or of those in `files`, which CERTIFICATES name."""
        return plain(trust_env=trust_env)

    def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return plain(verify, cert, trust_env)
        return shared(trust_env, *map(os.environ.get, CERTIFICATES))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", create)
        yield


@pytest.fixture(scope="session", autouse=True)
def dry_runs_are_remembered() -> Iterator[None]:
    """Where a test module has brought torch. Tests of the memory of runs have the plain one (tests/train)."""
    if "roofline.train.memory.estimate" not in sys.modules:
        yield
        return
    from roofline.train.memory import estimate
    from tests.train.dry_runs import remembering

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "dry_run", remembering(estimate.dry_run))
        yield


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A program that runs inside the test process configures our loggers, which hides their lines from `caplog`."""
    with loggers_as_before():
        yield


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """A test that leaves its process changed fails itself, and not a later one that happens to run behind it."""
    with process_state_as_before():
        yield


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Runs code in a fresh interpreter that must succeed: what it printed."""

    def run(code: str, timeout: float = 60) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def tiny_llama() -> dict[str, Any]:
    """The config.json of a model of two layers, for random weights."""
    return {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 96, "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }  # fmt: skip


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1 as a GGUF file: ROOFLINE_TEST_GGUF, or what `roofline pull smollm2-135m` stored."""
    named = os.environ.get("ROOFLINE_TEST_GGUF")
    if named:
        return Path(named)
    from roofline.weights import sources

    stored = sources.stored_path("smollm2-135m")
    if stored is None:
        pytest.skip("the model smollm2-135m is not there: run `roofline pull smollm2-135m`")
    return stored
