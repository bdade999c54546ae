"""The report: one self-contained HTML page that shows which kernel ran, why, and what proves it right.

facts.py    plans, gates, routing dumps and benchmarks as plain data
saved.py    such data as a file, so that a page can be made elsewhere, without the GPU
drawing.py  the graph, the workspace map and the bars as SVG
page.py     the page; page.css and page.js are its style and its behaviour
"""

from .page import render
from .saved import Saved, SavedError, load_saved, merge_saved, write_saved

__all__ = ["Saved", "SavedError", "load_saved", "merge_saved", "render", "write_saved"]
