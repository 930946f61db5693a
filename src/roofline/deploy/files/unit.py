"""A systemd unit for one server: started once the model answers, watched, and shut off from the rest of the machine.

That no written memory is run, and which system calls there are, was tried with a server on a CPU that answers, holds
answers to a form, and compares golden prompts. GPUs are left more: their drivers are devices, and Triton and the
drivers write code that they then run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from roofline.common.errors import ConfigError
from roofline.deploy.files.stopping import stop_seconds

Gpu = Literal["none", "nvidia", "amd"]
WATCHDOG_SECONDS = 60
HIDDEN = ("/home", "/root", "/run/user")  # that ProtectHome takes away

# (setting, value), in the order of the unit; comments say why where it is not plain.
HARDENING = (
    ("DynamicUser", "yes", ""),
    ("UMask", "0077", ""),
    ("NoNewPrivileges", "yes", ""),
    ("CapabilityBoundingSet", "", ""),
    ("ProtectSystem", "strict", ""),
    ("PrivateTmp", "yes", ""),
    ("ProtectKernelTunables", "yes", ""),
    ("ProtectKernelModules", "yes", ""),
    ("ProtectKernelLogs", "yes", ""),
    ("ProtectControlGroups", "yes", ""),
    ("ProtectClock", "yes", ""),
    ("ProtectHostname", "yes", ""),
    ("ProtectProc", "invisible", ""),
    ("LockPersonality", "yes", ""),
    ("RestrictNamespaces", "yes", ""),
    ("RestrictRealtime", "yes", ""),
    ("RestrictSUIDSGID", "yes", ""),
    ("RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6 AF_NETLINK", "AF_NETLINK: the names of network interfaces."),
    ("SystemCallArchitectures", "native", ""),
    ("SystemCallFilter", "@system-service", ""),
    ("SystemCallFilter", "~@privileged", ""),
    ("SystemCallErrorNumber", "EPERM", ""),
)
CPU_ALONE = (
    ("PrivateDevices", "yes", ""),
    ("PrivateUsers", "yes", ""),
    ("MemoryDenyWriteExecute", "yes", "Nothing compiles code at run time on a CPU."),
)
DEVICES = {
    "nvidia": ("char-nvidia", "char-nvidiactl", "char-nvidia-frontend", "char-nvidia-uvm", "char-nvidia-caps"),
    "amd": ("/dev/kfd", "char-drm"),
}


@dataclass(frozen=True, kw_only=True)
class ServiceUnit:
    """What a unit starts.

    program: the path of `roofline`. words: of `roofline serve`, the model first. environment: a file of variables, such
    as ROOFLINE_API_KEY; credentials: files by the flags that name them, such as --api-keys; root alone need read both.
    readable: further paths that the server reads, also where they lie in somebody's home.
    """

    program: Path
    words: tuple[str, ...]
    environment: Path
    credentials: Mapping[str, Path] = field(default_factory=dict)
    gpu: Gpu = "none"
    readable: tuple[Path, ...] = ()

    def text(self) -> str:
        """The unit. Raises ConfigError for words that it cannot hold, and for a program in somebody's home."""
        if is_hidden(self.program):
            raise ConfigError(
                f"{self.program}: the unit takes homes away from the server; install it elsewhere, such as in "
                "/opt/roofline (`python -m venv /opt/roofline`), and give --program"
            )
        words = " ".join(quoted(word.replace("$", "$$")) for word in self.words)
        command = f"{quoted(str(self.program))} serve {words}"  # of a program's own path $ begins nothing
        names = {flag: flag.removeprefix("--") for flag in self.credentials}
        command += "".join(f" {flag} %d/{name}" for flag, name in names.items())  # systemd writes the folder for %d
        lines = [
            "[Unit]",
            "Description=Roofline serves " + escaped(self.words[0] if self.words else "a model"),
            "After=network-online.target",
            "Wants=network-online.target",
            "StartLimitIntervalSec=10min",
            "StartLimitBurst=5",
            "",
            "[Service]",
            "Type=notify",
            "NotifyAccess=main",
            f"ExecStart={command}",
            *(f"LoadCredential={names[flag]}:{escaped(str(path))}" for flag, path in self.credentials.items()),
            f"EnvironmentFile=-{escaped(str(self.environment))}",
            "Environment=ROOFLINE_HOME=/var/cache/roofline",
            "CacheDirectory=roofline",
            "StateDirectory=roofline",
            "RuntimeDirectory=roofline",
            "WorkingDirectory=/var/lib/roofline",
            "# A model may be fetched and compiled at the first start.",
            "TimeoutStartSec=30min",
            "# Answers that run may finish; only the server is told to end, and it ends its engines.",
            f"TimeoutStopSec={stop_seconds(self.words)}",
            "KillMode=mixed",
            f"WatchdogSec={WATCHDOG_SECONDS}",
            "Restart=on-failure",
            "RestartSec=2",
            "LimitNOFILE=65536",
            "",
            *self._hardening(),
            "",
            "[Install]",
            "WantedBy=multi-user.target",
        ]
        return "\n".join(lines) + "\n"

    def _hardening(self) -> list[str]:
        rows = [*HARDENING, *(CPU_ALONE if self.gpu == "none" else ())]
        lines = [f"{f'# {why}{chr(10)}' if why else ''}{name}={value}" for name, value, why in rows]
        if self.gpu != "none":
            lines += ["DevicePolicy=closed", *(f"DeviceAllow={device} rw" for device in DEVICES[self.gpu])]
            lines += ["SupplementaryGroups=render video"] if self.gpu == "amd" else []
        hidden = [path for path in self.readable if is_hidden(path)]
        lines += ["ProtectHome=tmpfs" if hidden else "ProtectHome=yes"]
        return lines + [f"BindReadOnlyPaths={quoted(str(path))}" for path in hidden]


def is_hidden(path: Path) -> bool:
    """Whether a path lies in somebody's home."""
    return str(path).startswith(tuple(f"{home}/" for home in HIDDEN))


def quoted(word: str) -> str:
    """A word of a unit: % means itself. Raises ConfigError for one with a line break."""
    word = escaped(word)
    if word and not any(character in word for character in " \t\"'\\;"):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def escaped(text: str) -> str:
    """A text of a unit: % means itself. Raises ConfigError for one with a line break."""
    if any(ord(character) < 32 for character in text):
        raise ConfigError(f"{text!r}: a unit of systemd holds no line breaks and no control characters")
    return text.replace("%", "%%")
