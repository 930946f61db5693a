"""roofline lib: where the C library and its header are."""

from typing import Annotated

from roofline.cli.options import AsJson
from roofline.cli.output import print_json
from roofline.common.options import Option


def command(
    flags: Annotated[bool, Option("Print what a C compiler needs to use it.")] = False, as_json: AsJson = False
) -> None:
    """Show libroofline and roofline.h, which let a C program answer from a bundle."""
    from roofline.backends.cpu.library import library_files

    files = library_files()
    folder, header = files.library.parent, files.include / "roofline.h"
    compiler = f"-I{files.include} -L{folder} -lroofline -Wl,-rpath,{folder}"
    if as_json:
        print_json({"library": str(files.library), "header": str(header), "flags": compiler})
    elif flags:
        print(compiler)
    else:
        print(f"library  {files.library}\nheader   {header}")
