"""Prompts in 16 bits on Hopper, in Gluon: `kernel.py` is launched, `producer.py` copies pages, `consumer.py` multiplies and sums."""
