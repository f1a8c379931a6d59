"""Modules and scripts of published packages, trained in one process and under layouts."""
