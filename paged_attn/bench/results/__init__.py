"""A record of a benchmark, and how it is shown.

In: what each system said. Out: tables, a chart, and this engine beside each peer.
Change: tables: `tables.py`; the chart: `chart.py`; ratios and equal tokens: `compare.py`.
"""
