"""roofline lib: where the C library and its header are."""

from typing import Annotated

from roofline.common.options import Option


def command(flags: Annotated[bool, Option("Print what a C compiler needs to use it.")] = False) -> None:
    """Show libroofline and roofline.h, which let a C program answer from a bundle."""
    from roofline.backends.cpu.library import library_files

    files = library_files()
    if flags:
        folder = files.library.parent
        print(f"-I{files.include} -L{folder} -lroofline -Wl,-rpath,{folder}")
        return
    print(f"library  {files.library}\nheader   {files.include / 'roofline.h'}")
