"""Records of benchmarks, and how they are shown.

In: what each system reported. Out: tables, a chart, and this engine beside each peer.
Change: tables: `tables.py`; the chart: `chart.py`; ratios and equal tokens: `compare.py`.
"""
