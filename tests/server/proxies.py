"""nginx and HAProxy in front of a server, as their users set them up."""

import contextlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr crit;
events {{}}
http {{
    access_log off; client_max_body_size 64m;
    client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
    uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    upstream model {{ server {target}; keepalive 2; }}
    server {{
        listen 127.0.0.1:{port};
        location = /stats {{ return 403; }}
        location / {{
            proxy_pass http://model; proxy_http_version 1.1; proxy_buffering off; {more}
            proxy_set_header Host localhost; {upgrade}
        }}
    }}
}}
"""
UPGRADE = 'proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection "upgrade";'
HAPROXY = """
global
    maxconn 100
defaults
    mode http
    timeout connect 5s
    timeout client 20s
    timeout server 20s
    http-reuse always
frontend users
    bind 127.0.0.1:{port}
    http-request deny if {{ path /stats }}
    default_backend model
backend model
    http-request set-header Host localhost
    server one {target} pool-max-conn 2
"""
KINDS = {
    "nginx": ("nginx", NGINX, {"more": "", "upgrade": UPGRADE}),
    "nginx, bodies as they come": ("nginx", NGINX, {"more": "proxy_request_buffering off;", "upgrade": UPGRADE}),
    "nginx, HTTP/1.0": ("nginx", NGINX.replace("1.1;", "1.0;"), {"more": "", "upgrade": ""}),
    "haproxy": ("haproxy", HAPROXY, {}),
}


def program(kind: str) -> str | None:
    """Where the proxy of a kind is, None: it is not installed. Debian has them in /usr/sbin."""
    return shutil.which(KINDS[kind][0]) or shutil.which(KINDS[kind][0], path="/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def proxy(kind: str, target: str, folder: Path) -> Iterator[str]:
    """The base address of a proxy in front of `target`, which refuses /stats."""
    name, text, parts = KINDS[kind]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = folder / f"{name}.conf"
    settings.write_text(text.format(folder=folder, port=port, target=target.removeprefix("http://"), **parts))
    options = ["-c", str(settings), "-p", str(folder)] if name == "nginx" else ["-db", "-f", str(settings)]
    running = subprocess.Popen([str(program(kind)), *options], stderr=subprocess.PIPE)
    try:
        while running.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            threading.Event().wait(0.02)
        assert running.poll() is None, f"{name} did not start: {running.stderr and running.stderr.read().decode()}"
        yield f"http://127.0.0.1:{port}"
    finally:
        running.kill()
        running.communicate()
