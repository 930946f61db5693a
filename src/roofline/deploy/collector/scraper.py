"""Asks one replica for its metrics: over one kept connection, within bounded time and bytes, unpacking nothing."""

import asyncio
import ssl

import httpx

from roofline.common.addresses import why_unreachable
from roofline.common.errors import ConfigError
from roofline.common.files import cause_of
from roofline.deploy.collector.errors import ScrapeError
from roofline.deploy.collector.page import MAX_BYTES, MetricsPage, read_page
from roofline.deploy.collector.targets import CollectorTarget

# The first form is what `roofline serve` and vLLM write; nothing is compressed, so that no page grows when unpacked.
_HEADERS = {"Accept": "text/plain;version=0.0.4,application/openmetrics-text;q=0.5", "Accept-Encoding": "identity"}
_REASONS = {
    401: "it asks for a key (--replica-key)",
    403: "the key may not read metrics",
    404: "there is no such page",
    503: "it is not ready",
}


class ReplicaScraper:
    """Reads the metrics of one target. Raises ConfigError where the certificates that it is to trust are none."""

    def __init__(self, target: CollectorTarget, seconds: float) -> None:
        self.target, self._seconds = target, seconds
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=60)
        transport = httpx.AsyncHTTPTransport(
            verify=_trust(target), limits=limits, uds=target.socket, trust_env=False, retries=0
        )
        self._client = httpx.AsyncClient(transport=transport, trust_env=False, timeout=seconds, headers=_HEADERS)

    async def scrape(self) -> MetricsPage:
        """Return what the replica shows now. Raises ScrapeError, after at most the seconds of a scrape."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._seconds
        try:
            async with asyncio.timeout_at(end):
                body, kind = await self._fetch()
        except TimeoutError as error:
            raise ScrapeError(f"it took longer than {self._seconds:g} s") from error
        except httpx.TimeoutException as error:
            raise ScrapeError(f"it took longer than {self._seconds:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise ScrapeError(f"it cannot be read: {why_unreachable(error) or type(error).__name__}") from error
        # In a thread: a large page takes the parser 50 ms, in which other replicas are read.
        return await asyncio.to_thread(read_page, body, kind, max(0.1, end - loop.time()))

    async def _fetch(self) -> tuple[bytes, str]:
        async with self._client.stream("GET", self.target.url, headers=dict(self.target.headers)) as response:
            if response.status_code != 200:
                reason = _REASONS.get(response.status_code, response.reason_phrase)
                raise ScrapeError(f"it answers {response.status_code}: {reason}")
            coding = response.headers.get("content-encoding", "identity").strip().lower()
            if coding not in ("", "identity"):
                raise ScrapeError(f"it sends its metrics as {coding[:40]} though it was asked for plain text")
            body = bytearray()
            async for part in response.aiter_raw():
                body += part
                if len(body) > MAX_BYTES:
                    raise ScrapeError(f"its metrics have more than {MAX_BYTES:,} bytes")
            return bytes(body), response.headers.get("content-type", "")

    async def close(self) -> None:
        """End the connection."""
        await self._client.aclose()


def _trust(target: CollectorTarget) -> ssl.SSLContext | bool:
    """What a target's certificate is checked with. Reading this machine's takes 20 ms, so that only TLS has it."""
    if not target.address.startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return ssl.create_default_context(cafile=None if target.trust is None else str(target.trust))
    except OSError as error:  # ssl.SSLError is one too
        reason = getattr(error, "reason", None) or cause_of(error)
        raise ConfigError(f"--trust {target.trust} holds no certificates: {reason}") from error
