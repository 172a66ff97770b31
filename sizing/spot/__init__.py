"""The effect of Spot on a run: how often it is interrupted and how long it then takes.

Promises the same answer to the same question: all random numbers have fixed seeds. Everything here
is modelled; docs/spot.md says how far off it is.
Uses sizing/catalogue.
"""
