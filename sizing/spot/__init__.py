"""What being on Spot does to a run: how often it is interrupted, how long it then takes.

Promises the same answer for the same question: every random number has a fixed seed. Everything
here is modelled or replayed on a trace; docs/spot.md says how far off.
Uses sizing/catalogue.
"""
