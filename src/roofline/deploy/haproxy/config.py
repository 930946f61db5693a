"""HAProxy's configuration for a fleet: text from a description, and nothing else. For version 2.6 and later."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from roofline.common.errors import ConfigError

BUFFER_BYTES = 65_536  # of a request or answer, also what of a request can be sent again to another replica
CONNECT_SECONDS, REQUEST_SECONDS = 5, 120
IDLE_SECONDS = 30  # as our servers keep idle connections
FOREVER = 86_400  # in place of a server's limit that is off
BEGINNING_BYTES = 512  # of a plain prompt, which has no messages to tell turns apart by
TABLE_ENTRIES, TABLE_EXPIRES = "256k", "1h"  # conversations whose replica is remembered, and for how long
PER_REPLICA = ("/metrics", "/stats")  # whose answers are those of one replica, and would be another one's next time
ADMINISTERED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # would change one replica and not the others
_ERROR = '{{"error": {{"message": "{message}", "type": "server_error", "param": null, "code": "{code}"}}}}'
_ERRORS = {
    502: ("replica_gone", "The server that computed this answer is gone. Try again."),
    503: ("no_replica_ready", "No server is ready. Try again in a moment."),
    504: ("request_timeout", "The answer took longer than the server allows."),
}


@dataclass(frozen=True)
class ProxyServer:
    """A replica as HAProxy knows it. enabled: whether it is given requests at the start; checked: whether its health is
    asked for."""

    name: str
    host: str
    port: int
    enabled: bool = True
    checked: bool = True


@dataclass(frozen=True, kw_only=True)
class ProxyDescription:
    """What HAProxy is to do.

    bind, statistics_bind: addresses, or `fd@N` for a socket that it inherits; runtime_socket: of its runtime API;
    certificate: PEM file with chain and key; check_key: API key that /ready is asked with; answer_seconds: after which
    our servers end any answer, 0: never; drain_seconds: that open requests have at its end; connections: that may be
    open at a time; metrics: address (HOST:PORT) that /metrics is asked at, "" for none.
    """

    bind: str
    statistics_bind: str
    runtime_socket: Path
    servers: tuple[ProxyServer, ...]
    balance: Literal["leastconn", "roundrobin", "prefix", "key"] = "leastconn"
    certificate: Path | None = None
    check_key: str | None = None
    answer_seconds: float = 7200.0
    drain_seconds: int = 120
    connections: int = 16_384
    metrics: str = ""


def haproxy_configuration(description: ProxyDescription) -> str:
    """Return the text of HAProxy's configuration. Raises ConfigError for what cannot be written in it."""
    parts = [_global(description), _defaults(description), _frontend(description), _backend(description)]
    if description.metrics:
        parts.append(f"backend metrics\n    server collector {description.metrics}\n")
    parts.append(_statistics(description))
    return "\n".join(parts)


def quoted(text: str) -> str:
    """Return a text as one word of the configuration, in which nothing is replaced."""
    if any(ord(character) < 32 or ord(character) > 126 for character in text):
        raise ConfigError(f"{text!r} cannot stand in HAProxy's configuration: use visible ASCII characters")
    return "'" + text.replace("'", "'\\''") + "'"


def _global(about: ProxyDescription) -> str:
    return f"""\
# Written by `roofline up`, which keeps this process: a change here is lost when it writes the file again.

global
    log stderr format raw daemon notice
    maxconn {about.connections}
    # The supervisor speaks to HAProxy here: replicas enter and leave without a reload.
    stats socket {quoted(f"unix@{about.runtime_socket}")} mode 600 level admin
    # A request is sent to another replica only while all of it is in this buffer, so larger ones are not.
    tune.bufsize {BUFFER_BYTES}
    # When it is told to end it waits for open requests, and not longer than this.
    hard-stop-after {about.drain_seconds + 10}s
"""


def _defaults(about: ProxyDescription) -> str:
    answer = round(about.answer_seconds) + 60 if about.answer_seconds else FOREVER
    errors = [
        f"    http-error status {status} content-type application/json "
        f"string {quoted(_ERROR.format(message=message, code=code))} hdr Retry-After 1"
        for status, (code, message) in _ERRORS.items()
    ]
    return "\n".join(
        [
            "defaults",
            "    mode http",
            "    log global",
            "    # The log has requests that failed, and what changes of the servers.",
            "    option httplog",
            "    option dontlog-normal",
            "    option log-separate-errors",
            f"    timeout connect {CONNECT_SECONDS}s",
            f"    timeout http-request {REQUEST_SECONDS}s",
            f"    timeout http-keep-alive {IDLE_SECONDS}s",
            "    # Servers end what takes too long themselves, with an error that clients understand: a minute later.",
            f"    timeout server {answer}s",
            f"    timeout client {answer}s",
            "    # No queue here: servers have one, and answer 429 with Retry-After where it is full.",
            "    # Sent again, to another replica, is what got no byte of an answer; never what got one.",
            "    # A server is chosen once the request is here: one that died while it arrived would take it along.",
            "    option http-buffer-request",
            "    retries 3",
            "    option redispatch 1",
            "    retry-on conn-failure empty-response",
            "    # A connection to a server carries one request: a kept one may be gone when it is used, and after",
            "    # several of these a request is given up.",
            "    option http-server-close",
            "    # Each token goes on as it comes.",
            "    option http-no-delay",
            "    option forwardfor",
            *errors,
            "",
        ]
    )


def _frontend(about: ProxyDescription) -> str:
    tls = "" if about.certificate is None else f" ssl crt {quoted(str(about.certificate))} alpn h2,http/1.1"
    lines = [
        "frontend fleet",
        f"    bind {about.bind}{tls}",
        "    http-request set-header X-Request-ID %[uuid] unless { req.hdr(X-Request-ID) -m found }",
    ]
    if about.certificate is not None:
        lines.append("    http-request set-header X-Forwarded-Proto https")
    collected = ["    use_backend metrics if { path /metrics }"] if about.metrics else []
    return "\n".join([*lines, *_refused_paths(about), *collected, "    default_backend replicas", ""])


def _refused_paths(about: ProxyDescription) -> list[str]:
    """Return rules for paths that mean one replica and not the fleet."""
    paths = [path for path in PER_REPLICA if not (about.metrics and path == "/metrics")]
    rows = [
        (paths, 404, "not_of_a_fleet", "Each replica has its own; `roofline status` lists their ports."),
        (ADMINISTERED, 403, "not_of_a_fleet", "Adapters of a fleet are named when it is started (--adapter)."),
    ]
    return [
        f"    http-request return status {status} content-type application/json "
        f"string {quoted(_ERROR.format(message=message, code=code))} if {{ path {' '.join(refused)} }}"
        for refused, status, code, message in rows
    ]


def _backend(about: ProxyDescription) -> str:
    # The value is a format in which % begins a variable.
    key = (
        ""
        if about.check_key is None
        else f" hdr Authorization {quoted(f'Bearer {about.check_key}'.replace('%', '%%'))}"
    )
    servers = [
        f"    server {server.name} {server.host}:{server.port} id {number}{'' if server.enabled else ' disabled'}"
        f"{'' if server.checked else ' no-check'}"
        for number, server in enumerate(about.servers, 1)
    ]
    return "\n".join(
        [
            "backend replicas",
            *_balance(about),
            "    option httpchk",
            f"    http-check send meth GET uri /ready ver HTTP/1.1 hdr Host localhost{key}",
            "    http-check expect status 200",
            f"    timeout check {CONNECT_SECONDS}s",
            "    default-server check inter 1s fastinter 500ms downinter 500ms fall 3 rise 1",
            *servers,
            "",
        ]
    )


def _balance(about: ProxyDescription) -> list[str]:
    """Return the lines that say which replica a request goes to."""
    if about.balance == "key":
        return [
            "    # One key's requests go to one replica; those without a key in turn.",
            "    http-request set-var(txn.key) req.hdr(x-api-key)",
            "    http-request set-var(txn.key) req.hdr(authorization) if { req.hdr(authorization) -m found }",
            "    balance hash var(txn.key)",
            "    hash-type consistent sdbm avalanche",
        ]
    if about.balance == "prefix":
        return _prefix_balance(about.servers)
    return [f"    balance {about.balance}"]


def _prefix_balance(servers: tuple[ProxyServer, ...]) -> list[str]:
    """Return lines by which a conversation comes back to the replica that has its pages.

    A table says where its beginning went last. HAProxy's consistent hash with a bound (hash-balance-factor) would need
    no table, but leaves replicas out while fewer requests are open than there are replicas.
    """
    query = 'req.body,json_query("$.{}")'.format
    system = "{ var(txn.role) -m str system developer }"
    values = [
        ("role", query("messages[0].role"), ""),
        ("first", query("messages[0].content"), ""),
        ("first", query("messages[0].content[0].text"), "unless { var(txn.first) -m found }"),
        ("second", query("messages[1].content"), f"if {system}"),
        ("second", query("messages[1].content[0].text"), f"if {system} !{{ var(txn.second) -m found }}"),
        ("system", query("system"), ""),
        ("system", query("instructions"), "unless { var(txn.system) -m found }"),
        ("prompt", f"{query('prompt')},bytes(0,{BEGINNING_BYTES})", ""),
        ("prompt", f"{query('input')},bytes(0,{BEGINNING_BYTES})", "unless { var(txn.prompt) -m found }"),
    ]
    lines = [
        f"    http-request set-var(txn.{name}) '{value}' {condition}".rstrip() for name, value, condition in values
    ]
    joined = "str(),concat(,txn.system),concat(,txn.first),concat(,txn.second),concat(,txn.prompt)"
    return [
        "    # Turns of one conversation begin alike: with what the model is told, and the first question. Of a plain",
        f"    # prompt it is the first {BEGINNING_BYTES} bytes.",
        *lines,
        f"    http-request set-var(txn.beginning) {joined}",
        "    # A text that ends behind the buffer is not found as JSON: the body's beginning stands for it.",
        f"    http-request set-var(txn.beginning) 'req.body,bytes(0,{BEGINNING_BYTES})' "
        f"if {{ var(txn.beginning) -m len 0 }} {{ req.body_len gt {BUFFER_BYTES // 2} }}",
        "    http-request set-var(txn.conversation) var(txn.beginning),sha1 unless { var(txn.beginning) -m len 0 }",
        "    # A new one goes where the fewest requests are open, and comes back there unless that one has two more",
        "    # than one and a half times the mean: 2 * open * replicas > 3 * all + 4 * replicas.",
        "    balance leastconn",
        f"    stick-table type binary len 20 size {TABLE_ENTRIES} expire {TABLE_EXPIRES}",
        "    http-request set-var(txn.place) var(txn.conversation),table_server_id(replicas)",
        "    http-request set-var(txn.replicas) nbsrv(replicas)",
        "    http-request set-var(txn.slack) var(txn.replicas),mul(4)",
        "    http-request set-var(txn.most) be_conn(replicas),mul(3),add(txn.slack)",
        *(
            f"    http-request set-var(txn.full) bool(1) if {{ var(txn.place) -m int {number} }} "
            f"{{ srv_conn(replicas/{server.name}),mul(2),mul(txn.replicas),sub(txn.most) -m int gt 0 }}"
            for number, server in enumerate(servers, 1)
        ),
        "    stick match var(txn.conversation) unless { var(txn.full) -m bool }",
        "    stick store-request var(txn.conversation)",
    ]


def _statistics(about: ProxyDescription) -> str:
    return f"""\
frontend statistics
    bind {about.statistics_bind}
    stats enable
    stats uri /
    stats refresh 5s
"""
