"""Paceline: train GPT and mixture-of-experts models at the speed the hardware allows."""

__version__ = "0.1.0.dev0"
