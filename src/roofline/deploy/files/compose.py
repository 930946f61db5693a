"""A compose file: replicas of the server's container behind HAProxy, with the models in one volume."""

from dataclasses import dataclass

from roofline.deploy.files.dockerfile import PORT, USER_ID, Chip
from roofline.deploy.files.stopping import stop_seconds

HAPROXY_IMAGE = "haproxy:3.2-alpine"
BALANCER_PORT = 9080
OPEN_FILES = 65_536  # of a server and of HAProxy, which has two for each connection

HAPROXY = """\
global
    log stdout format raw local0
    maxconn 8000
defaults
    log global
    mode http
    option httplog
    timeout connect 5s
    timeout client 2h
    timeout server 2h
    timeout queue 30m
    timeout http-request 30s
    timeout http-keep-alive 60s
resolvers docker
    parse-resolv-conf
    hold valid 2s
frontend clients
    bind :{port}
    http-request set-header X-Request-Id %[uuid()] unless {{ req.hdr(X-Request-Id) -m found }}
    default_backend models
backend models
    balance leastconn
    option httpchk
    http-check send meth GET uri /ready
    http-check expect status 200
    retry-on conn-failure empty-response
    retries 2
    option redispatch
    default-server check inter 1s fall 2 rise 1 resolvers docker init-addr none
    server-template model 1-{replicas} model:{model_port}
"""


@dataclass(frozen=True, kw_only=True)
class ComposeStack:
    """What the file starts. words: of `roofline serve`, the model first. replicas: containers of it. cores, gigabytes:
    that each may take, None: as many as there are."""

    chip: Chip
    words: tuple[str, ...]
    replicas: int = 2
    cores: int | None = None
    gigabytes: int | None = None

    def text(self) -> str:
        """The file, in YAML."""
        import yaml

        dumped: str = yaml.dump(self.stack(), sort_keys=False, default_flow_style=False, width=120)
        heading = (
            "# Replicas of the server behind HAProxy. In a clone of the repository:\n"
            f"#   roofline deploy docker --chip {self.chip} > Dockerfile\n"
            f"#   roofline deploy compose ... > compose.yaml\n"
            "#   ROOFLINE_API_KEY=$(openssl rand -hex 16) docker compose up --build\n"
        )
        return heading + dumped

    def stack(self) -> "dict[str, object]":
        """The file as it is read."""
        configuration = HAPROXY.format(port=BALANCER_PORT, replicas=self.replicas, model_port=PORT)
        return {
            "name": "roofline",
            "services": {"model": self._model(), "balancer": _balancer()},
            "volumes": {"models": {}, "cache": {}},
            "configs": {"haproxy": {"content": configuration.replace("$", "$$")}},  # compose fills in what a $ begins
        }

    def _model(self) -> "dict[str, object]":
        limits = {
            **({} if self.cores is None else {"cpus": str(self.cores)}),
            **({} if self.gigabytes is None else {"memory": f"{self.gigabytes}g"}),
        }
        resources: dict[str, object] = {"limits": limits} if limits else {}
        if self.chip == "cuda":
            resources["reservations"] = {"devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}
        amd = (
            {"devices": ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"], "group_add": ["video", "render"]}
            if self.chip == "rocm"
            else {}
        )
        return {
            "image": f"roofline:{self.chip}",
            "build": {"context": ".", "dockerfile": "Dockerfile"},
            "command": ["serve", *(word.replace("$", "$$") for word in self.words), "--open-probes"],
            "environment": {"ROOFLINE_API_KEY": "${ROOFLINE_API_KEY:?give clients a key}"},
            "volumes": ["models:/models:ro", "cache:/var/cache/roofline"],
            "expose": [str(PORT)],
            "init": True,
            "user": str(USER_ID),
            "read_only": True,
            "tmpfs": ["/tmp"],
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "ulimits": {"nofile": OPEN_FILES},
            "restart": "unless-stopped",
            "stop_grace_period": f"{stop_seconds(self.words)}s",
            **amd,
            "deploy": {"replicas": self.replicas, **({"resources": resources} if resources else {})},
        }


def _balancer() -> "dict[str, object]":
    return {
        "image": HAPROXY_IMAGE,
        "ports": [f"127.0.0.1:{BALANCER_PORT}:{BALANCER_PORT}"],
        "configs": [{"source": "haproxy", "target": "/usr/local/etc/haproxy/haproxy.cfg"}],
        "depends_on": {"model": {"condition": "service_started"}},
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "ulimits": {"nofile": OPEN_FILES},
        "restart": "unless-stopped",
    }
