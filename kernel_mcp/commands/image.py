"""`kernel-mcp image build`: the image that the kernels of `--sandbox container` run in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kernel_mcp.config.load import HELP, OTHERS, settings_from, settings_parser
from kernel_mcp.errors import ConfigError, SandboxUnavailable
from kernel_mcp.linux.process import foreign_environment
from kernel_mcp.sandbox.base import ContainerOptions
from kernel_mcp.sandbox.container.engine import Engine
from kernel_mcp.sandbox.select import select_sandbox

CONTAINERFILE = Path(__file__).with_name("Containerfile")
ABOUT = """\
Build the image that kernels run in under --sandbox container, name it as --container-image says,
and start a process in it as a test. It holds a C library, certificates and fonts: interpreter and
packages are mounted.
"""
EPILOG = """\
examples:
  kernel-mcp image build
  kernel-mcp image build --engine docker --from debian:trixie-slim
  debootstrap --variant=minbase bookworm root && tar -C root -c . > root.tar
  kernel-mcp image build --from root.tar
"""
_USAGE = "image: expected build; see kernel-mcp image build --help"
_HELP = """\
usage: kernel-mcp image build [flags]

  build    make the image that the kernels of --sandbox container run in

Its flags: kernel-mcp image build --help"""
_SHOWN = ("container-engine", "container-image", "container-runtime")


def main(argv: Sequence[str]) -> int:
    """Run `image build`; its exit code. Raises ConfigError, SandboxUnavailable."""
    if argv and argv[0] in HELP:
        print(_HELP)
        return 0
    if not argv or argv[0] != "build":
        raise ConfigError(_USAGE)
    parser = settings_parser("kernel-mcp image build", ABOUT, f"{EPILOG}\n{OTHERS}", shown=_SHOWN)
    group = parser.add_argument_group("the image")
    group.add_argument(
        "--engine", dest="container-engine", metavar="podman|docker", help="--container-engine"
    )
    group.add_argument(
        "--from",
        dest="base",
        metavar="IMAGE|TAR",
        help="base image of the Containerfile, or a root filesystem to take as it is "
        "(default: debian:bookworm-slim)",
    )
    flags = vars(parser.parse_args(list(argv[1:])))
    base = str(flags.pop("base", ""))
    options = ContainerOptions.of(settings_from(flags))
    engine = Engine.find(options)
    command = build_command(engine, options.image, base)
    done = subprocess.run(command, env=foreign_environment(), check=False)
    if done.returncode != 0:
        raise SandboxUnavailable(
            f"{engine.kind} could not build the image (exit code {done.returncode}); what it wrote "
            "says why. Without a registry, give a root filesystem with --from"
        )
    select_sandbox("container", container=options)
    print(f"the image {options.image} is ready; a process ran in it", file=sys.stderr)
    return 0


def build_command(engine: Engine, image: str, base: str) -> list[str]:
    """The engine's command line; a `base` that is a file is imported. Raises ConfigError."""
    if base.startswith("-"):
        raise ConfigError(f"--from {base}: expected the name of an image or a tar file")
    if base and Path(base).is_file():
        return engine.command("import", base, image)
    if base.endswith((".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.zst")):
        raise ConfigError(f"--from {base}: there is no such file")
    chosen = ["--build-arg", f"BASE={base}"] if base else []
    words = ["--tag", image, "--file", str(CONTAINERFILE), *chosen, str(CONTAINERFILE.parent)]
    return engine.command("build", *words)
