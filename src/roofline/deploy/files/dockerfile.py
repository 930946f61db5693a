"""Dockerfiles of the server: built from a clone of the repository, run by nobody in particular, told by its key.

The first stage compiles, the second has what runs alone. On a GPU a C compiler stays: Triton compiles a small launcher
for each kernel.
"""

from dataclasses import dataclass
from typing import Literal

Chip = Literal["cpu", "cuda", "rocm"]
PORT = 8000
USER_ID = 10001  # of a user without a name elsewhere; Kubernetes asks for a number
PYTHON_IMAGE = "python:3.12-slim-bookworm"
# What compiles, and what the module needs of it: an image whose Python and C library are those of the runtime's.
UBUNTU = "ubuntu:24.04"
CUDA_IMAGE = "nvidia/cuda:12.9.1-base-ubuntu24.04"
BUILD_PACKAGES = ("cmake", "g++", "ninja-build")
ADDRESS = f"http://127.0.0.1:{PORT}/health"
PROBE = f"import urllib.request as r; r.urlopen('{ADDRESS}', timeout=3)"


@dataclass(frozen=True, kw_only=True)
class ContainerImage:
    """One of the images. builder, runtime: images that its stages begin with; python: that is installed in both, none
    where they have one; extra: of the package; runtime_packages: that running needs."""

    chip: Chip
    builder: str
    runtime: str
    python: tuple[str, ...] = ()
    extra: str = ""
    runtime_packages: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """The Dockerfile."""
        extra = f"[{self.extra}]" if self.extra else ""
        lines = [
            f"# Roofline's server for {self.chip}. In a clone of the repository:",
            f"#   roofline deploy docker --chip {self.chip} > Dockerfile && docker build -t roofline:{self.chip} .",
            *(f"# {note}" for note in self.notes),
            f"FROM {self.builder} AS build",
            "",
            *_packages((*BUILD_PACKAGES, *self.python)),
            "WORKDIR /source",
            "COPY pyproject.toml CMakeLists.txt README.md LICENSE ./",
            "COPY include include",
            "COPY native native",
            "COPY src src",
            "RUN python3 -m venv /opt/roofline",
            "ENV PATH=/opt/roofline/bin:$PATH",
            *(["# The address of torch's wheels for ROCm.", "ARG PIP_EXTRA_INDEX_URL"] if self.chip == "rocm" else []),
            "# What is installed is the clone, so its version is that of the clone.",
            "# hadolint ignore=DL3013",
            f"RUN pip install --no-cache-dir '.{extra}'",
            "",
            f"FROM {self.runtime}",
            "",
            *_packages((*self.python, *self.runtime_packages)),
            f"RUN useradd --uid {USER_ID} --create-home --shell /usr/sbin/nologin roofline \\",
            "    && install -d -o roofline -g roofline /models /var/cache/roofline",
            "COPY --from=build /opt/roofline /opt/roofline",
            "ENV PATH=/opt/roofline/bin:$PATH \\",
            "    PYTHONUNBUFFERED=1 \\",
            "    ROOFLINE_HOME=/var/cache/roofline",
            f"USER {USER_ID}",
            "WORKDIR /home/roofline",
            "# Models that are there already; what is pulled and compiled is kept in /var/cache/roofline.",
            'VOLUME ["/models", "/var/cache/roofline"]',
            f"EXPOSE {PORT}",
            "STOPSIGNAL SIGTERM",
            "# That the process lives; /ready says whether it answers, and needs a key, or --open-probes.",
            "HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \\",
            f'    CMD ["python3", "-c", "{PROBE}"]',
            "# With ROOFLINE_API_KEY it listens for everybody who reaches the container, without one inside it alone.",
            'ENTRYPOINT ["python3", "-m", "roofline.deploy.container"]',
            'CMD ["serve"]',
        ]
        return "\n".join(lines) + "\n"


IMAGES = {
    "cpu": ContainerImage(chip="cpu", builder=PYTHON_IMAGE, runtime=PYTHON_IMAGE),
    "cuda": ContainerImage(
        chip="cuda",
        builder=UBUNTU,
        runtime=CUDA_IMAGE,
        python=("python3-dev", "python3-venv"),
        extra="gpu",
        runtime_packages=("gcc", "libc6-dev"),
        notes=("Run it with --gpus all and NVIDIA's container toolkit on the host.",),
    ),
    "rocm": ContainerImage(
        chip="rocm",
        builder=UBUNTU,
        runtime=UBUNTU,
        python=("python3-dev", "python3-venv"),
        extra="gpu",
        runtime_packages=("gcc", "libc6-dev"),
        notes=(
            "Build it with --build-arg PIP_EXTRA_INDEX_URL=ADDRESS; torch brings ROCm's libraries with it.",
            "Run it with --device /dev/kfd --device /dev/dri --group-add video --group-add render.",
        ),
    ),
}


def dockerfile(chip: Chip) -> str:
    """Return the Dockerfile for a kind of chip."""
    return IMAGES[chip].text()


def _packages(names: tuple[str, ...]) -> list[str]:
    """The step that installs packages of the distribution, none where there are none."""
    if not names:
        return []
    return [
        "# The versions are those of the image's release, which is pinned.",
        "# hadolint ignore=DL3008",
        f"RUN apt-get update && apt-get install --yes --no-install-recommends {' '.join(sorted(names))} \\",
        "    && rm -rf /var/lib/apt/lists/*",
    ]
