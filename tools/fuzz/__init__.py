"""Damaged and hostile files against everything that FROST reads from disk: `python -m tools.fuzz`.

`targets.py` has a row for each kind of file, `mutate.py` spoils valid ones, `worker.py` runs a share of the inputs in a
process of its own and watches, `__main__.py` hands out the work and prints the table.
"""
