"""roofline collect: the metrics of several servers, summed and served at one address."""

from typing import Annotated

from roofline.cli.parser import Argument
from roofline.deploy.collector.options import CollectOptions

ADDRESS_HELP = "Servers: http://HOST:PORT, https://HOST:PORT or unix:PATH, each also as NAME=ADDRESS."


def command(addresses: Annotated[list[str], Argument(ADDRESS_HELP)], options: CollectOptions) -> None:
    """Read /metrics of several servers and serve their sums, and each one's figures, at one /metrics.

    Servers that do not answer are said to be down and do not hold up the others; sums never go back. /replicas says
    what is wrong with which.
    """
    import asyncio

    from roofline.common import env, log
    from roofline.common.processes import hide_argument
    from roofline.deploy.collector.collector import MetricsCollector
    from roofline.deploy.collector.series import SeriesFolder
    from roofline.deploy.collector.service import listen_on, serve_collector, single_key
    from roofline.deploy.collector.targets import read_targets
    from roofline.deploy.until_signal import until_signal
    from roofline.server.options import is_loopback

    key = options.replica_key if options.replica_key is not None else env.read("ROOFLINE_API_KEY")
    for secret in filter(None, (key, options.api_key)):
        hide_argument(secret)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    targets = read_targets(addresses, headers, options.trust)
    sink = None if options.series is None else SeriesFolder(options.series)
    collector = MetricsCollector(targets, options.interval, options.scrape_seconds, sink)
    if options.api_key is None and not is_loopback(options.host):
        log.get("deploy").warning("%s can be reached from other machines and there is no --api-key", options.host)
    listening = listen_on(options.host, options.port)
    host = f"[{options.host}]" if ":" in options.host else options.host
    log.say(f"Metrics of {len(addresses)} servers: http://{host}:{listening.getsockname()[1]}/metrics")
    admits = None if options.api_key is None else single_key(options.api_key)
    asyncio.run(until_signal(serve_collector(collector, listening, options.host, admits)))
