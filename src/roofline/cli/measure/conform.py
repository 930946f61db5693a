"""roofline conform: whether a server keeps what OpenAI's protocol promises."""

from dataclasses import asdict, dataclass
from typing import Annotated

from roofline.cli.options import AsJson
from roofline.cli.output import console, print_json
from roofline.cli.parser import Argument
from roofline.common.addresses import check_address, why_unreachable
from roofline.common.errors import ConfigError
from roofline.common.options import Options, option

COLORS = {"pass": "green", "fail": "red", "missing": "yellow", "skipped": "yellow"}


@dataclass(frozen=True)
class ConformOptions(Options):
    """What `conform` asks a server."""

    model: str | None = option(None, "The model to ask for. Default: the first that the server lists.")
    api_key: str | None = option(None, "Sent as a bearer token.", secret=True)
    only: str | None = option(None, "Only checks whose names contain one of these, with commas.")
    seconds: float = option(120.0, "That one request may take.", minimum=1, unit="seconds")


def command(
    url: Annotated[str, Argument("Of any OpenAI-compatible server, with or without /v1.")],
    options: ConformOptions,
    as_json: AsJson = False,
) -> int:
    """Check from outside what a server promises: streams, stop strings, counts, tools, schemas, refusals, cancelling.

    Ends with status 1 where a promise is broken. What a server says it does not have is missing, and no failure; what
    cannot be checked here, as where a client package is not installed, is skipped.
    """
    import httpx

    from roofline.bench.conform.client import Server, Violation
    from roofline.bench.conform.run import ALL_CHECKS, conform

    words = [word.strip().replace(" ", "_") for word in (options.only or "").split(",") if word.strip()]
    names = tuple(check.__name__ for check in ALL_CHECKS if not words or any(word in check.__name__ for word in words))
    if not names:
        raise ConfigError(f"--only {options.only}: no check has such a name; there are {', '.join(_names())}")
    terminal = console()
    check_address(url)
    server = Server(url, options.model, options.api_key, options.seconds)
    findings = []
    try:
        for finding in conform(server, names):
            findings.append(finding)
            if not as_json:
                terminal.print(f"[{COLORS[finding.outcome]}]{finding.outcome:>7}[/]  {finding.promise}")
                terminal.print(f"         {finding.detail[:400]}", style="dim", markup=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{url} cannot be asked: {why_unreachable(error)}. Give the address of a running server"
        ) from error
    except Violation as error:
        raise ConfigError(f"{url} cannot be checked: {error}. Name a model with --model") from error
    finally:
        server.close()
    counts = {outcome: sum(finding.outcome == outcome for finding in findings) for outcome in COLORS}
    if as_json:
        print_json(
            {"url": url, "model": server.model, "counts": counts, "checks": [asdict(finding) for finding in findings]}
        )
    else:
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        terminal.print(f"{server.model}: {summary}")
    return 1 if counts["fail"] or counts["skipped"] == len(findings) else 0


def _names() -> list[str]:
    from roofline.bench.conform.run import ALL_CHECKS

    return [check.__name__.replace("_", " ") for check in ALL_CHECKS]
