"""roofline lib: where the C library and its header are."""

from typing import Annotated

import typer


def command(
    flags: Annotated[bool, typer.Option("--flags", help="Print what a C compiler needs to use it.")] = False,
) -> None:
    """Show libroofline and roofline.h, which let a C program answer from a bundle."""
    from roofline.backends.cpu.library import library_files

    files = library_files()
    if flags:
        folder = files.library.parent
        typer.echo(f"-I{files.include} -L{folder} -lroofline -Wl,-rpath,{folder}")
        return
    typer.echo(f"library  {files.library}\nheader   {files.include / 'roofline.h'}")
