"""A report into a page of the documentation."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.markdown import markdown
from benchmarks.gpu.report import Report
from benchmarks.pages import write_between

__all__ = ["BEGIN", "END", "write_page"]

BEGIN, END = "<!-- what `make gpu` found -->", "<!-- end of what `make gpu` found -->"


def write_page(report: Path, page: Path) -> None:
    """Puts a report between the two comments of a page, in place of what is there, and its pictures beside the others.

    Raises:
        ValueError: the page has no such comments, or the report is that of a dry run.
    """
    found = Report.load(report)
    if found.device != "cuda":
        raise ValueError(f"{report} is of a dry run on {found.device}: a page shows what was measured on a GPU")
    tables = markdown(found, level=3).replace("](", "](images/gpu-")
    write_between(page, BEGIN, END, tables.rstrip())
    images = page.parent / "images"
    for part in found.parts:
        for name in part.files:
            if name.endswith(".png"):
                images.mkdir(exist_ok=True)
                (images / f"gpu-{name}").write_bytes((report.parent / name).read_bytes())
